"""Static low-confidence remasking: the k surest masked slots per step (LLaDA, Nie et al. 2025, arXiv:2502.09992, algorithm 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.types import Noise, RowState, RowStats, Step

UNLIMITED = 2**30
"""``RowState.steps`` of a block without a step limit."""


@dataclass(frozen=True)
class LowConfidence:
    """Commit the k most confident masked slots; with a step limit T the quota is the published even schedule over T steps.

    k: tokens per step without a limit. With T steps and m masks at the block's start a step commits m // T, plus one in the first
    m % T steps. Ties go to the lowest slot.
    """

    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an int >= 1: got {self.k!r}")

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        base = state.masks_at_start // state.steps
        scheduled = base + (state.step < state.masks_at_start % state.steps)
        quota = torch.where(state.steps >= UNLIMITED, torch.full_like(scheduled, self.k), scheduled)
        return Step(rows.token, best(rows.confidence, masked, quota))


def best(score: Tensor, masked: Tensor, quota: Tensor) -> Tensor:
    """The quota [B] masked slots of highest score [B, S] in each row, bool [B, S]; ties to the lowest slot."""
    ranked = score.masked_fill(~masked, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(ranked).scatter_(
        1, ranked, torch.arange(ranked.shape[1], device=ranked.device).expand_as(ranked)
    )
    return (rank < quota[:, None]) & masked


def least_quota(masked: Tensor, state: RowState) -> Tensor:
    """Fewest slots [B] int64 that a step must commit: one, or ceil(masks / steps left) under a step limit."""
    count = masked.sum(-1)
    left = (state.steps - state.step).clamp(min=1)
    return torch.div(count + left - 1, left, rounding_mode="floor").clamp(min=1)
