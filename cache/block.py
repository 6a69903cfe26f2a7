"""The exact block cache of block-causal models: finished blocks are stored, only the open block is recomputed.

A finished block's keys must come from its final tokens. Instead of a forward of its own, the finished block rides beside the next
block's first step: one shape of 2S rows (the idea of MultiBD, arXiv:2606.29215, with a buffer of two).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm.canvas import GAP_GROUP
from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class BlockCache:
    """Exact for block-causal (and causal) attention: rows of a finished block see nothing later, so their keys never change.

    Forwards: the given rows once (prefill), then per block 2S valid rows in its first step (S in the first block, which has nothing
    to store), S rows in later steps. Where the family commits a block's first token from the pass that stores the block before
    (Fast-dLLM v2), that pass is one of its own, of S rows, and the prefill is one for the first block. Stored rows stay valid for the
    whole call; no stale row is ever read.
    """

    uses_store = True

    def check(self, spec: DecodeSpec) -> None:
        """Raises ValueError on bidirectional models, whose earlier rows do see later ones."""
        if spec.attention == "bidirectional":
            raise ValueError(
                "cache 'block' is exact for block-causal attention only: got a bidirectional model; use 'dual' or 'free'"
            )

    def plan(self, state: DenoiseState) -> Plan:
        """Prefill in the first forward (if anything was given), afterwards the open block, with its predecessor if not yet stored."""
        given = state.valid & (state.group < GAP_GROUP)
        # Only the host-known first call may hold prefill rows; later calls are ranges of one shape.
        if state.first_forward and bool(given.any()):
            prefill = given & state.active[:, None]
            # A row without given tokens has nothing to prefill and takes its first step at once.
            waits = prefill.any(-1)
            opening = (torch.arange(given.shape[1], device=given.device) >= state.row_lo[:, None]) & (
                torch.arange(given.shape[1], device=given.device) < state.hi[:, None]
            )
            compute = torch.where(waits[:, None], prefill, opening & state.active[:, None])
            return Plan.of_mask(compute, state.active & (~waits | storing(state)), write=prefill)
        start = torch.where(state.step == 0, torch.minimum(state.prev_lo, state.row_lo), state.row_lo)
        # A pass that stores a block and commits the next one's first token from it computes nothing else.
        stop = torch.where(storing(state) & (start < state.row_lo), state.row_lo, state.hi)
        stop = torch.where(state.active, stop, start)
        rows = start[:, None] + torch.arange(state.row_bucket, device=start.device)
        finished = rows < state.row_lo[:, None]
        plan = Plan.of_ranges(start, stop, state.row_bucket, state.active, write=finished)
        # Between two gaps lie given rows that the prefill has stored.
        known = finished & (state.group.gather(1, rows.clamp(max=state.group.shape[1] - 1)) < GAP_GROUP)
        return replace(plan, valid=plan.valid & ~known, write=plan.write & ~known)


def storing(state: DenoiseState) -> Tensor:
    """Rows [B] bool whose open block waits for its first token from the pass that stores what stands before it."""
    if state.spec.first_slot != "commit_store_pass":
        return torch.zeros_like(state.active)
    # A block that opens with given tokens has its first token.
    return (state.step == 0) & (state.lo == state.row_lo) & (state.lo > 0)
