"""Margin unmasking: the slots whose best token leads by most (Kim et al. 2025, arXiv:2502.06768, top-k probability margin)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import even_quota, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Margin:
    """Commit the k masked slots of largest p(first) - p(second); ties go to the lowest slot.

    k: tokens per step without a step limit; with one, the even schedule of ``LowConfidence``.
    """

    k: int = 1

    needs = frozenset({"top1", "margin"})

    def __post_init__(self) -> None:
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.margin [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        assert rows.margin is not None, "row_stats must give what needs names"
        return Step(rows.token, best(rows.margin, masked, even_quota(state, self.k)))
