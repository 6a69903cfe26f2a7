"""Where the rows of a captured step stand, and how a row moves on: what ``denoise_step.py`` and ``guide_step.py`` share.

Letters: B rows of the batch, W columns of the canvas, S slots of a block, E stop tokens, V vocabulary.
"""

# Kernels take pointers and constants that have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.kernels._launch import jit, tl

FAULTS = 3
"""Rows of ``StepBuffers.fault``: logits that are not finite, a banned token, nothing committed."""


@dataclass(eq=False)
class StepBuffers:
    """Where every row stands; mutated in place, so that a captured step finds the same addresses.

    canvas int64, masked, stored bool, group int32: [B, W + 1], the last column a bin; low int32, position int64: [B, W].
    columns int64 [B]: lo, hi, row_lo, prev_lo, begin, end, step, block, decode_steps, limit, nfe, positions, useful; log_confidence
    fp32 [B]; active, stopped bool [B]; fault bool [3, B]; status int32 [B] (0 done, 1 active, 2 at fault, 3 with a draft that a
    guide is to read); eos int64 [E]; banned bool [V].
    """

    canvas: Tensor
    masked: Tensor
    stored: Tensor
    group: Tensor
    low: Tensor
    position: Tensor
    lo: Tensor
    hi: Tensor
    row_lo: Tensor
    prev_lo: Tensor
    begin: Tensor
    end: Tensor
    step: Tensor
    block: Tensor
    decode_steps: Tensor
    limit: Tensor
    nfe: Tensor
    positions: Tensor
    useful: Tensor
    log_confidence: Tensor
    active: Tensor
    stopped: Tensor
    fault: Tensor
    status: Tensor
    eos: Tensor
    banned: Tensor


@dataclass(frozen=True)
class StepRule:
    """What does not change in a call. block_length S; store_pass: a block's first token comes from the pass that stores the block before;
    commit_first: a first slot whose law is settled goes first; grouped: blocks have attention groups of their own, from first_group on.
    threshold: commit from this probability on, and at least the quota; None: the quota alone, k without a step limit. shift: slot i is
    predicted by row i - shift. draft_steps K and tokens_per_step of FreeDave."""

    block_length: int
    store_pass: bool
    commit_first: bool
    grouped: bool
    first_group: int
    threshold: float | None
    k: int
    unlimited: int
    shift: int = 0
    draft_steps: int = 1
    tokens_per_step: int = 1

    @property
    def queries(self) -> int:
        """Rows of a forward."""
        return max(2, self.draft_steps) * self.block_length


@jit
def is_stop(tokens, eos_ptr, NUM_EOS: tl.constexpr):
    """Which tokens end a text."""
    found = tokens < -1
    for e in tl.static_range(0, NUM_EOS):
        found = found | (tokens == tl.load(eos_ptr + e))
    return found


@jit
def move_on(
    b,
    wide,
    i,
    real,
    lo,
    hi,
    row_lo,
    stopped,
    stops,
    full,
    step,
    steps,
    group_ptr,
    lo_ptr,
    hi_ptr,
    row_lo_ptr,
    prev_lo_ptr,
    begin_ptr,
    end_ptr,
    step_ptr,
    block_ptr,
    decode_steps_ptr,
    useful_ptr,
    stopped_ptr,
    first_group,
    GROUPED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """End a row that stops (at slot ``stopped``) or whose last block is full; open the next block of another full one; 1 if it goes on.

    steps: denoise steps that this was; 0 changes nothing."""
    begin = tl.load(begin_ptr + b)
    end = tl.load(end_ptr + b)
    ends = full & (hi == end)
    opens = full & (hi != end)
    useful = tl.load(useful_ptr + b)
    useful = tl.where(stops, stopped - begin, tl.where(ends, end - begin, useful))
    tl.store(useful_ptr + b, useful)
    tl.store(stopped_ptr + b, ((tl.load(stopped_ptr + b) != 0) | stops).to(tl.uint8))
    tl.store(decode_steps_ptr + b, tl.load(decode_steps_ptr + b) + steps)
    tl.store(prev_lo_ptr + b, tl.where(steps > 0, row_lo, tl.load(prev_lo_ptr + b)))

    # A new block starts where the last one ended, so its first row is its first slot.
    block = tl.load(block_ptr + b) + opens.to(tl.int64)
    new_lo = tl.where(opens, hi, lo)
    new_hi = tl.where(opens, tl.minimum(hi + SLOTS, end), hi)
    tl.store(lo_ptr + b, new_lo)
    tl.store(row_lo_ptr + b, tl.where(opens, hi, row_lo))
    tl.store(hi_ptr + b, new_hi)
    tl.store(block_ptr + b, block)
    tl.store(step_ptr + b, tl.where(opens, 0, step + steps))
    if GROUPED:
        fresh = new_lo + i
        number = (first_group + block).to(tl.int32)
        new = real & (fresh < tl.where(opens, new_hi, 0))
        tl.store(group_ptr + wide + fresh, tl.zeros([BLOCK_S], tl.int32) + number, mask=new)
    return 1 - (stops | ends).to(tl.int32)


def sizes(state: StepBuffers) -> tuple[int, int]:
    """(B, W)."""
    return state.canvas.shape[0], state.canvas.shape[1] - 1


def as_bytes(flags: Tensor) -> Tensor:
    """Flags as a kernel takes them, in the same memory."""
    return flags.view(torch.uint8)
