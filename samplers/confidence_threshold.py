"""Threshold with a cap (Fast-dLLM's ``confidence_threshold`` algorithm for Dream, Wu et al. 2025, arXiv:2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Of the ``cap`` surest masked slots commit those with confidence >= threshold, and always the surest one.

    threshold: probability. cap: most tokens per step, None for no cap; the published code takes masks // steps and goes on after the
    last step until no mask is left. Unlike ``Threshold`` it looks at no step limit.
    """

    threshold: float = 0.9
    cap: int | None = None

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        if self.cap is not None:
            whole("cap", self.cap, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        surest = best(rows.confidence, masked, torch.ones_like(state.step))
        sure = masked & (rows.confidence >= self.threshold)
        if self.cap is not None:
            sure = sure & best(rows.confidence, masked, torch.full_like(state.step, self.cap))
        return Step(rows.token, sure | surest)
