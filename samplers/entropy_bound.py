"""Entropy-bounded unmasking (Ben-Hamu et al. 2025, arXiv:2505.24857)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best, least_quota
from dllm.samplers.quota import number
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class EntropyBound:
    """Commit the k surest masked slots for the largest k with sum_{j<=k} H_j - max_{j<=k} H_j <= bound.

    bound: nats. 0 commits one a step (and slots without entropy); larger commits more; 0.1 is DiffusionGemma's. by_confidence: sort by
    confidence instead of entropy (the paper allows any order; this one makes bound 0 the vanilla greedy order). Ties go to the lowest
    slot. Under a step limit a step commits at least ceil(masks / steps left).
    """

    bound: float = 0.1
    by_confidence: bool = False

    needs = frozenset({"top1", "entropy"})

    def __post_init__(self) -> None:
        number("bound", self.bound, 0)
        if not isinstance(self.by_confidence, bool):
            raise ValueError(f"by_confidence must be a bool: got {self.by_confidence!r}")

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence, rows.entropy [B, S]; masked [B, S] bool -> Step(tokens, transfer_index [B, S])."""
        assert rows.entropy is not None, "row_stats must give what needs names"
        score = rows.confidence if self.by_confidence else -rows.entropy
        quota = bounded_count(rows.entropy, score, masked, self.bound)
        return Step(rows.token, best(score, masked, torch.maximum(quota, least_quota(masked, state))))


def bounded_count(entropy: Tensor, score: Tensor, masked: Tensor, bound: float) -> Tensor:
    """Slots [B] int64 that may be taken in order of score [B, S] while the sum of entropies less the largest stays <= bound."""
    order = score.masked_fill(~masked, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    # Rounding can leave a certain slot a trace below zero.
    ranked = entropy.clamp(min=0).gather(1, order).double()
    spent = ranked.cumsum(-1) - ranked.cummax(-1).values
    return ((spent <= bound) & masked.gather(1, order)).long().cumprod(-1).sum(-1)
