"""Random-order unmasking: positions in an order that the law has no say in (LLaDA, Nie et al. 2025, arXiv:2502.09992, algorithm 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.noise import STREAM_POSITION
from dllm.samplers.low_confidence import best
from dllm.samplers.quota import even_quota, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class RandomOrder:
    """Commit k masked slots in the order of one uniform number a slot, the same in every step of the call.

    k: tokens per step without a step limit; with one, the even schedule of ``LowConfidence``. A row's order depends on its seed and
    its slots only, so that k = 2 fills them in the order of k = 1.
    """

    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        order = noise.uniform(state.slots, torch.zeros_like(state.step), STREAM_POSITION)
        return Step(rows.token, best(order, masked, even_quota(state, self.k)))
