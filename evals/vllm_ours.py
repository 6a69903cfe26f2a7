"""Our side of ``vllm_check``: what our loop answers and accepts, counted as vLLM counts, and how two answers are compared.

vLLM counts every draft that a verify pass accepted, also behind a stop or the last token that was asked for: it cuts the
answer afterwards. Our ``Stats`` count what was committed. So our loop runs past both here, and the passes that vLLM would
have run are taken: those that begin before the answer is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dllm.drafters.drafter import Drafter
from dllm.evals.acceptance import measure_acceptance
from dllm.evals.divergence import Divergence

TIE_MARGIN = 1e-4
"""Logits of two tokens that are closer than this in fp32 may be ranked either way by another order of summation."""


@dataclass(frozen=True)
class Accepted:
    """Drafting of one answer or of many. passes: verify passes; drafts: accepted drafts, the target's own token apart."""

    passes: int
    drafts: int

    @property
    def length(self) -> float:
        """Mean tokens of a pass, the target's own included (1.0 where nothing ran)."""
        return 1 + self.drafts / self.passes if self.passes else 1.0

    def __add__(self, other: Accepted) -> Accepted:
        return Accepted(self.passes + other.passes, self.drafts + other.drafts)


def is_tie(one: Divergence) -> bool:
    """Whether the two tokens are as good as equal for our target."""
    return one.gap is not None and abs(one.gap) < TIE_MARGIN


def cut_answer(ids: Sequence[int], stop_ids: Collection[int], max_new_tokens: int) -> list[int]:
    """The answer as a server gives it: up to and with the first stop token, at most ``max_new_tokens``."""
    for index, token in enumerate(ids[:max_new_tokens]):
        if token in stop_ids:
            return list(ids[: index + 1])
    return list(ids[:max_new_tokens])


def passes_until(accept_lengths: Sequence[int], answer_length: int) -> Accepted:
    """Passes that begin before ``answer_length`` tokens are there; the prefill gave the first one.

    accept_lengths: tokens of each pass of a run that did not stop there, the target's own included.
    """
    have, passes, drafts = 1, 0, 0
    for count in accept_lengths:
        if have >= answer_length:
            break
        have, passes, drafts = have + count, passes + 1, drafts + count - 1
    if have < answer_length:
        raise ValueError(f"accept_lengths must reach {answer_length} tokens: got {have}")
    return Accepted(passes, drafts)


def our_answers(
    target: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    num_drafts: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_size: int = 4,
) -> list[tuple[list[int], Accepted]]:
    """(answer ids with their stop token, drafting) of each prompt, greedy; batch_size: prompts decoded together."""
    # The last pass of an answer starts at most one token before its end.
    limit = max_new_tokens + num_drafts + 1
    runs = measure_acceptance(target, drafter, prompts, limit, batch_size, num_drafts=num_drafts, eos_token_id=())
    answers = [cut_answer(ids, stop_ids, max_new_tokens) for ids, _ in runs]
    return [(answer, passes_until(lengths, len(answer))) for answer, (_, lengths) in zip(answers, runs, strict=True)]
