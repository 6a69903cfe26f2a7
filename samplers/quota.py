"""The even schedule: how many slots a step takes when a block has a fixed number of steps, and the check of a sampler's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm.samplers.low_confidence import UNLIMITED
from dllm.types import RowState


def even_quota(state: RowState, k: int = 1) -> Tensor:
    """m // T slots, plus one in the first m % T of T steps, for m masks at the block's start; k without a step limit; [B] int64."""
    return _even(state.masks_at_start, state, k)


def block_quota(state: RowState, k: int = 1) -> Tensor:
    """As ``even_quota``, with the length of the whole block, given tokens included, for m (SDAR and LLaDA2 count so); [B] int64."""
    return _even(state.masks_at_start if state.block_length is None else state.block_length, state, k)


def number(name: str, value: object, low: float) -> None:
    """Raise ValueError unless value is a real number >= low."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
        raise ValueError(f"{name} must be a number >= {low:g}: got {value!r}")


def whole(name: str, value: object, low: int) -> None:
    """Raise ValueError unless value is an int >= low."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an int >= {low}: got {value!r}")


def _even(total: Tensor, state: RowState, k: int) -> Tensor:
    scheduled = total // state.steps + (state.step < total % state.steps)
    return torch.where(state.steps >= UNLIMITED, torch.full_like(scheduled, k), scheduled)
