"""Factor-based parallel unmasking (Fast-dLLM, Wu et al. 2025, arXiv:2505.22618, theorem 1 and section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best, least_quota
from dllm.samplers.quota import number
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Factor:
    """Commit the n surest masked slots for the largest n with (n + 1) (1 - c_n) < factor, c sorted downwards, and at least one.

    factor: 0 commits one a step; larger commits more. compat: the published code instead of the published formula: equality passes,
    and where all but the last masked slot pass, that one goes along (so the last two always go together). Under a step limit a step
    commits at least ceil(masks / steps left).
    """

    factor: float = 1.0
    compat: bool = False

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("factor", self.factor, 0)
        if not isinstance(self.compat, bool):
            raise ValueError(f"compat must be a bool: got {self.compat!r}")

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        count = masked.sum(-1)
        ranked = rows.confidence.masked_fill(~masked, -1.0).sort(dim=-1, descending=True).values.double()
        rank = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
        if self.compat:
            passes = ranked >= 1 - self.factor / (rank + 1)
        else:
            passes = (rank + 1) * (1 - ranked) < self.factor
        quota = (passes & (rank <= count[:, None])).long().cumprod(-1).sum(-1).clamp(min=1)
        if self.compat:
            quota = torch.where((quota == count - 1), count, quota)
        return Step(rows.token, best(rows.confidence, masked, torch.maximum(quota, least_quota(masked, state))))
