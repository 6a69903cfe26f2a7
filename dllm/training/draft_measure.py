"""Accepted length while training: the rounds that greedy speculative decoding would take along answers of the target.

The drafts behind every token of an answer are made at once; a round starts at the first answer token, and the next one where the accepted
drafts and the target's own token end. As the text is the target's greedy one, these are the rounds of real decoding, up to the
numerical differences between one long forward and many short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.evals.loops import loops
from dllm.model.decoder import Decoder
from dllm.training.answers import answer_prompts
from dllm.training.data import Documents
from dllm.training.draft_batches import DraftBatch, EveryAnchor, every_anchor
from dllm.training.draft_forward import DraftForward, TargetReader


def greedy_answers(
    decoder: Decoder,
    documents: Documents,
    count: int,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    max_length: int,
) -> Documents:
    """The target's greedy answers to the prompts of the first ``count`` documents whose prompt leaves room in ``max_length`` tokens.

    Answers that loop or never end are kept. A document without a prompt is continued from its first quarter. Raises ValueError if no prompt
    is short enough.
    """
    prompts = []
    for i in range(len(documents)):
        tokens, prompt = documents[i]
        start = tokens[: prompt or max(1, len(tokens) // 4)].tolist()
        if len(start) + max_new_tokens <= max_length:
            prompts.append(start)
    if not prompts:
        raise ValueError(
            f"length must hold a held-out prompt and {max_new_tokens} new tokens: got {max_length}, and all prompts are longer"
        )
    prompts = prompts[:count]
    answers = answer_prompts(decoder, prompts, stop_token_ids, max_new_tokens)
    return Documents.of(([*p, *a], len(p)) for p, a in zip(prompts, answers, strict=True))


class Acceptance:
    """Held-out answers with the target's features, computed once, to measure drafters on; ``groups``: "all" and "no_loops"."""

    def __init__(
        self, documents: Documents, reader: TargetReader, batch: int, length: int, anchors: int, block_length: int
    ) -> None:
        device = reader.decoder.device
        self.loops = [
            loops(tokens[prompt:].tolist()) for tokens, prompt in (documents[i] for i in range(len(documents)))
        ]
        self.texts = [t.to(device) for t in every_anchor(documents, batch, length, anchors, block_length)]
        self.features = [reader.read(text.parts[0])[0] for text in self.texts]

    @torch.no_grad()
    def measure(self, forward: DraftForward) -> dict[str, dict[str, Any]]:
        """{group: {accept_length: tokens a round, the target's own included; rounds; tokens; slots: share of rounds in which the first k
        drafts were accepted, of those that had k left to draft}}; a group without answers is left out.
        """
        rounds: dict[str, list[tuple[int, int, int]]] = {"all": [], "no_loops": []}
        for text, features in zip(self.texts, self.features, strict=True):
            accepted = self._accepted(forward, text, features)
            most = text.parts[0].num_slots - 1
            for b, number, found in walk(accepted, text.placed, most):
                del b
                rounds["all"] += found
                if not self.loops[number]:
                    rounds["no_loops"] += found
        return {group: summary(found) for group, found in rounds.items() if found}

    def _accepted(self, forward: DraftForward, text: EveryAnchor, features: Tensor) -> np.ndarray:
        """Accepted drafts behind each token, int64 [B, L] (0 where nothing was drafted)."""
        accepted = torch.zeros_like(text.parts[0].ids)
        for batch in text.parts:
            counts = matching(draft_tokens(forward, batch, features), batch)
            # Padding anchors point at index 0, which is never an anchor, with a count of 0.
            accepted.scatter_add_(1, batch.anchor, counts)
        return accepted.cpu().numpy()


@torch.no_grad()
def draft_tokens(forward: DraftForward, batch: DraftBatch, features: Tensor, chunk: int = 512) -> Tensor:
    """What the drafter itself would draft behind every anchor, greedily: int64 [B, A, S - 1]."""
    hidden = forward.hidden(batch, features).flatten(0, 1)
    anchor = batch.ids.gather(1, batch.anchor).flatten()
    pieces = [
        forward.drafter.choose(h, a, 0.0, None).tokens
        for h, a in zip(hidden.split(chunk), anchor.split(chunk), strict=True)
    ]
    return torch.cat(pieces).view(batch.labelled.shape)


def matching(tokens: Tensor, batch: DraftBatch) -> Tensor:
    """Leading drafts that equal the text, int64 [B, A]."""
    text = batch.ids.gather(1, batch.slots().flatten(1)).view(tokens.shape)
    return ((tokens == text) & batch.labelled).cumprod(dim=-1).sum(dim=-1)


def walk(
    accepted: np.ndarray, placed: list[list[tuple[int, int, int, int]]], most: int
) -> Iterable[tuple[int, int, list[tuple[int, int, int]]]]:
    """Rounds along each document: accepted [B, L] -> (sequence, document, [(accepted, committed, drafts that could count)])."""
    for b, documents in enumerate(placed):
        for number, at, prompt, count in documents:
            here, last = at + max(prompt, 1), at + count - 1
            found = []
            while here < last:
                kept = int(accepted[b, here])
                # The drafts may end with the text's last token, behind which the target adds nothing.
                committed = min(kept + 1, last - here)
                found.append((kept, committed, min(most, last - here)))
                here += committed
            yield b, number, found


def summary(rounds: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Figures of ``Acceptance.measure`` for rounds (accepted, committed, drafts that could count)."""
    kept, committed, possible = (np.array(column) for column in zip(*rounds, strict=True))
    slots = [
        round(float((kept[possible >= k] >= k).mean()), 4)
        for k in range(1, int(possible.max()) + 1)
        if (possible >= k).any()
    ]
    return {
        "accept_length": round(float(committed.mean()), 4),
        "rounds": len(kept),
        "tokens": int(committed.sum()),
        "slots": slots,
    }
