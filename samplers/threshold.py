"""Confidence-threshold unmasking (Fast-dLLM, Wu et al. 2025, arXiv:2505.22618, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm.samplers.low_confidence import best, least_quota
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Threshold:
    """Commit every masked slot with confidence >= threshold, and always the surest one.

    threshold: probability. Above 1 it commits one token per step; 0 commits the whole block. Under a step limit a step commits at
    least ceil(masks / steps left), so that the limit holds.
    """

    threshold: float = 0.9

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)) or not self.threshold >= 0:
            raise ValueError(f"threshold must be a number >= 0: got {self.threshold!r}")

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        sure = (rows.confidence >= self.threshold) & masked
        return Step(rows.token, sure | best(rows.confidence, masked, least_quota(masked, state)))
