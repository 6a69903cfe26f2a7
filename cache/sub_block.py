"""Sub-block cache inside the open block of a block-causal model (Fast-dLLM v2, Wu et al. 2025, arXiv:2509.26328, ``use_block_cache``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dllm.cache.block import BlockCache
from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class SubBlockCache:
    """Finished blocks as ``BlockCache`` (exact); inside the open block only the current sub-block, once its first token is known.

    sub_block_length: tokens, counted from the block's start; take the sampler's. A pass over the whole block stores its rows, as often
    as the current sub-block (the one of the first mask) still opens with a mask, and in each step of a block without masks, which a
    reviser has yet to settle; otherwise only that sub-block is run and its rows are replaced. Approximates: rows of the block outside
    the current sub-block are stale. A sub-block as long as the block is exact.
    """

    sub_block_length: int = 8

    uses_store = True

    def __post_init__(self) -> None:
        if (
            isinstance(self.sub_block_length, bool)
            or not isinstance(self.sub_block_length, int)
            or self.sub_block_length < 1
        ):
            raise ValueError(f"sub_block_length must be an int >= 1: got {self.sub_block_length!r}")

    def check(self, spec: DecodeSpec) -> None:
        """Raises ValueError on bidirectional models, as ``BlockCache``."""
        if spec.attention == "bidirectional":
            raise ValueError(
                "cache 'sub_block' is for block-causal attention only: got a bidirectional model; use 'dual' or 'free'"
            )

    def plan(self, state: DenoiseState) -> Plan:
        """As ``BlockCache``, with the open block's rows written, and cut down to the current sub-block where that is allowed."""
        plan = BlockCache().plan(state)
        if state.first_forward:
            return plan
        width = state.valid.shape[1]
        columns = torch.arange(width, device=state.lo.device)
        inside = (columns >= state.row_lo[:, None]) & (columns < state.hi[:, None])
        masks = inside & state.masked
        first = torch.where(masks, columns, width).amin(-1)
        # A block without masks has no current sub-block.
        first = torch.where(masks.any(-1), first, state.row_lo)
        begin = state.row_lo + (first - state.row_lo).clamp(min=0) // self.sub_block_length * self.sub_block_length
        opened = masks.any(-1) & ~state.masked.gather(1, begin[:, None])[:, 0] & (state.stored | ~inside).all(-1)
        small = opened & (state.step > 0) & state.active
        current = (plan.rows >= begin[:, None]) & (plan.rows < (begin + self.sub_block_length)[:, None])
        valid = plan.valid & (current | ~small[:, None])
        return replace(plan, valid=valid, write=valid)
