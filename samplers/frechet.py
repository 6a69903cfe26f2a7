"""Frechet-bound unmasking (Fast-dLLM++, 2026, arXiv:2606.02955)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best, least_quota
from dllm.samplers.quota import number
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Frechet:
    """Commit the n surest masked slots for the largest n with L_n - U_n > delta, and at least one.

    With c sorted downwards L_n = max(0, sum_{j<=n} c_j - (n - 1)) bounds the joint probability of the n top tokens from below, and
    U_n = 1 - c_n that of any other choice at the weakest slot from above. delta: 1 commits one a step; smaller commits more (0.25
    published). A superset of ``Factor(1 - delta)``. Under a step limit a step commits at least ceil(masks / steps left).
    """

    delta: float = 0.25

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("delta", self.delta, 0)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        ranked = rows.confidence.masked_fill(~masked, 0.0).sort(dim=-1, descending=True).values.double()
        rank = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
        lower = (ranked.cumsum(-1) - (rank - 1)).clamp(min=0)
        passes = (lower - (1 - ranked) > self.delta) & (rank <= masked.sum(-1)[:, None])
        quota = passes.long().cumprod(-1).sum(-1)
        return Step(rows.token, best(rows.confidence, masked, torch.maximum(quota, least_quota(masked, state))))
