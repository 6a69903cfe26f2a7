"""Threshold with a top-k fallback (SDAR's ``low_confidence_dynamic``, arXiv:2510.06303; LLaDA2.0, arXiv:2512.15745)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import block_quota, number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Dynamic:
    """Commit every masked slot with confidence > threshold if those are at least the step's quota, else the quota's surest.

    threshold: probability, compared with > (0.85 SDAR, 0.95 LLaDA2.0). k: quota without a step limit; with T steps the block's length,
    given tokens included, is spread evenly over them. Above 1 with quota 1 it is vanilla.
    """

    threshold: float = 0.85
    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        sure = masked & (rows.confidence > self.threshold)
        quota = block_quota(state, self.k)
        enough = sure.sum(-1) >= quota
        return Step(rows.token, torch.where(enough[:, None], sure, best(rows.confidence, masked, quota)))
