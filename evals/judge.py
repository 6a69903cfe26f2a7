"""Log-likelihood of a continuation under a causal LM: the judge of generated answers and of true infill spans.

Sum over the continuation of log p(token | context, tokens before it), natural log, fp32 log-softmax. One forward
scores a batch of ragged
samples: rows are padded on the right, where a causal model cannot see them from any scored position, so a sample's
    score does not depend
on what it is batched with (up to the rounding of the judge's own dtype; use fp32 where 1e-4 matters).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogLikelihood:
    """`total`: nats, summed over `num_tokens` scored tokens."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float | None:
        """Nats per token; None where there was no token to score."""
        return self.total / self.num_tokens if self.num_tokens else None


class Judge:
    """A Hugging Face causal LM that scores continuations.

    model: called as `model(input_ids=, attention_mask=)` with a result that has `.logits` [B, L, V]; in eval mode. It
        is not changed.
    batch_size: samples in one forward.
    """

    def __init__(self, model: Any, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1: got {batch_size}")
        if model.training:
            raise ValueError("model must be in eval mode: got a model in training mode (call model.eval())")
        self.model = model
        self.batch_size = batch_size
        embeddings = model.get_input_embeddings().weight
        self.vocab_size, self.device = embeddings.shape[0], embeddings.device
        self.max_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        # Skipping the head on the context's rows saves most of the memory; not every model can.
        self.selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def score(
        self, contexts: Sequence[Sequence[SupportsIndex]], continuations: Sequence[Sequence[SupportsIndex]]
    ) -> list[LogLikelihood]:
        """Scores sample i = continuations[i] after contexts[i], both token ids; results in the given order.

        A context holds at least one token (the BOS, if nothing else), since the first token of a text has no law of
        its own. An empty continuation scores 0 nats over 0 tokens. Raises ValueError for unequal counts, an empty
        context, ids outside of the judge's vocabulary, samples longer than the judge's positions, and non-finite
        logits; each names the sample.
        """
        if len(contexts) != len(continuations):
            raise ValueError(f"contexts and continuations must pair up: got {len(contexts)} and {len(continuations)}")
        samples = [self._checked(i, *pair) for i, pair in enumerate(zip(contexts, continuations, strict=True))]
        scores = [LogLikelihood(0.0, 0)] * len(samples)
        # Samples of like length share a forward: less padding, and more rows that the head can skip.
        order = [i for i, (_, continuation) in enumerate(samples) if continuation]
        order.sort(key=lambda i: (len(samples[i][0]) + len(samples[i][1]), i))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            for i, total in zip(chosen, self._forward([samples[i] for i in chosen]), strict=True):
                if not math.isfinite(total):
                    raise ValueError(f"logits of the judge must be finite: sample {i} has log-likelihood {total}")
                scores[i] = LogLikelihood(total, len(samples[i][1]))
        return scores

    def _checked(
        self, i: int, context: Sequence[SupportsIndex], continuation: Sequence[SupportsIndex]
    ) -> tuple[list[int], list[int]]:
        ids = [operator.index(token) for token in context], [operator.index(token) for token in continuation]
        if not ids[0]:
            raise ValueError(f"contexts must hold at least one token each: sample {i} has none")
        for token in ids[0] + ids[1]:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token ids must be in [0, {self.vocab_size}): sample {i} holds {token}")
        length = len(ids[0]) + len(ids[1])
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"context and continuation must fit the judge's {self.max_positions} positions: sample {i} has {length}"
            )
        return ids

    @torch.inference_mode()
    def _forward(self, samples: list[tuple[list[int], list[int]]]) -> list[float]:
        """Samples with non-empty continuations -> nats of each."""
        lengths = [len(context) + len(continuation) for context, continuation in samples]
        input_ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, (context, continuation) in enumerate(samples):
            input_ids[row, : lengths[row]] = torch.tensor(context + continuation)
            attention_mask[row, : lengths[row]] = 1
        # Row t predicts token t + 1: no row before `first` holds a law that is needed.
        first = min(len(context) for context, _ in samples) - 1
        arguments: dict[str, Any] = {}
        if self.selects_rows:
            arguments["logits_to_keep"] = input_ids.shape[1] - first
        input_ids = input_ids.to(self.device)
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask.to(self.device), use_cache=False, **arguments
        ).logits
        if not self.selects_rows:
            logits = logits[:, first:]
        totals = []
        for row, (context, _) in enumerate(samples):
            begin, end = len(context), lengths[row]
            # [T, V] of one sample at a time: an fp32 copy of the whole batch would be the largest tensor by far.
            laws = logits[row, begin - 1 - first : end - 1 - first].float().log_softmax(-1)
            totals.append(laws.gather(-1, input_ids[row, begin:end, None]).double().sum())
        return torch.stack(totals).tolist()
