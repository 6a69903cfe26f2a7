"""Uniform corruption (DiffusionGemma): open slots hold random tokens instead of a mask, and each step is conditioned on the one before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm.noise import STREAM_CANVAS
from dllm.types import DecodeSpec, Step
from dllm.walk import BlockWalk


class UniformCorruption:
    """Random tokens and conditioning signals of one call. ``model`` has soft_embed, and takes canvas and soft in its forward.

    soft [B, L + 1, E]: the signal of each slot, zero in a block's first step, with a bin column; seeded [B]: number of the block whose
    slots have got their first random tokens.
    """

    def __init__(self, model: Any, spec: DecodeSpec, batch: int, width: int, device: torch.device) -> None:
        self.model, self.vocab_size = model, spec.vocab_size
        signal = model.soft_embed(torch.zeros(1, 1, spec.vocab_size, device=device))
        self.soft = signal.new_zeros(batch, width + 1, signal.shape[-1])
        self.seeded = torch.full((batch,), -1, dtype=torch.int64, device=device)

    def select(self, keep: Tensor) -> None:
        """Let only the rows keep [B'] stay."""
        self.soft, self.seeded = self.soft[keep], self.seeded[keep]

    def seed(self, walk: BlockWalk, noise: Any) -> None:
        """Random tokens for the open slots of blocks that have not been run yet; mutates the canvas. Their step counts as -1."""
        state = walk.state
        columns = torch.arange(state.canvas.shape[1], device=state.canvas.device)
        fresh = state.masked & (columns >= state.lo[:, None]) & (columns < state.hi[:, None])
        fresh = fresh & (self.seeded != state.block)[:, None] & state.active[:, None]
        if not bool(fresh.any()):
            return
        self.seeded = state.block.clone()
        uniform = noise.uniform(columns.expand_as(fresh), torch.full_like(state.step, -1), STREAM_CANVAS)
        state.canvas[fresh] = (uniform * self.vocab_size).long()[fresh]

    def extra(self, target: Tensor, masked: Tensor) -> dict[str, Tensor]:
        """What the forward takes beside other models': target [B, Q] rows (the bin column for padding), masked [B, Q] bool."""
        return {"soft": self.soft.gather(1, spread(target, self.soft)), "canvas": masked}

    def renoise(self, walk: BlockWalk, choice: Step, open_: Tensor, slots: Tensor) -> None:
        """What the sampler leaves in the slots open_ [B, S], and the laws that the next step is conditioned on."""
        if choice.canvas is not None:
            target = torch.where(open_, slots, walk.state.canvas.shape[1])
            walk.wide["canvas"].scatter_(1, target, choice.canvas)
            if choice.conditioning is not None:
                soft = self.model.soft_embed(choice.conditioning).to(self.soft.dtype)
                self.soft.scatter_(1, spread(target, soft), soft)


def spread(index: Tensor, like: Tensor) -> Tensor:
    """index [B, Q] over the last dimension of like [B, N, E]."""
    return index[..., None].expand(-1, -1, like.shape[-1])
