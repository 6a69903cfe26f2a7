"""SDAR's ``low_confidence_static``: a fixed number of the surest slots per step (Cheng et al. 2025, arXiv:2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import block_quota, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Static:
    """Commit the quota's surest masked slots; ties go to the lowest slot.

    k: quota without a step limit; with T steps the block's length, given tokens included, is spread evenly over them, so that a block
    that opens with a prompt's tail ends early. ``LowConfidence`` spreads the masks alone.
    """

    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        return Step(rows.token, best(rows.confidence, masked, block_quota(state, self.k)))
