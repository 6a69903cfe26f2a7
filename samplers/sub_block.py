"""Sub-blocks from left to right, a threshold inside each (Fast-dLLM v2, Wu et al. 2025, arXiv:2509.26328)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class SubBlock:
    """Commit, in the leftmost sub-block with a mask, every masked slot with confidence > threshold, and the surest one.

    threshold: probability, compared with > (0.9 published; 1 commits one a step). sub_block_length: tokens, counted from the start of
    the open block. As long as the block it is ``Threshold`` with a strict >.
    """

    threshold: float = 0.9
    sub_block_length: int = 8

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        whole("sub_block_length", self.sub_block_length, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        start = state.slots[:, :1] if state.block_start is None else state.block_start[:, None]
        number_of = (state.slots - start) // self.sub_block_length
        # Masks elsewhere count as the last sub-block of all.
        current = number_of.masked_fill(~masked, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
        open_ = masked & (number_of == current)
        sure = open_ & (rows.confidence > self.threshold)
        return Step(rows.token, sure | best(rows.confidence, open_, torch.ones_like(state.step)))
