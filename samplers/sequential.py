"""Left-to-right unmasking inside a block (SDAR's ``sequential``, Cheng et al. 2025, arXiv:2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import block_quota, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Sequential:
    """Commit the quota's leftmost masked slots.

    k: quota without a step limit; with T steps the block's length, given tokens included, is spread evenly over them.
    """

    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        leftness = -torch.arange(masked.shape[1], device=masked.device, dtype=torch.float32).expand_as(masked)
        return Step(rows.token, best(leftness, masked, block_quota(state, self.k)))
