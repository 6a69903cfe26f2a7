"""The bookkeeping of AR-guided unmasking on the device: around a draft of the diffusion model and each reading of it by the guide.

    take_draft    the diffusion model's likeliest tokens become the draft of the open block
    plan_reading  the guide's rows: the last committed token and the draft behind it, their places, and the stored keys that they see
    commit_reading  the accepted prefix and the guide's own next token, the stop token, the row's end and the opening of its next block

Rule: ``accept="exact"`` with ``on_reject="ar"`` and temperature 0 (``samplers/guided.py``): what is committed is the guide's own greedy
text, however good the draft. Truth: ``GuideHook`` of ``dllm/hooks.py`` in ``dllm/denoise.py``; a test runs both. One program a row, a few
hundred bytes and (plan_reading) four a column of the canvas; the limit is the launch.

Letters: B rows of the batch, W columns of the canvas, S slots of a block.
"""

# Kernels take pointers and constants that have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.kernels._launch import jit, next_power_of_2, require_launchable, tl
from dllm.kernels.step_state import StepBuffers, StepRule, as_bytes, is_stop, move_on, sizes
from dllm.types import PADDING_GROUP

DONE, WANTS_DRAFT, FAULT, WANTS_READING = 0, 1, 2, 3
"""Values of ``StepBuffers.status``: what the host runs next for a row."""


@dataclass(eq=False)
class GuideBuffers:
    """Mutated in place. draft int64 [B, S]: a token of each slot of the open block; reading bool [B]: the row has a draft to be read;
    accepts int32 [B, N]: tokens that each reading committed, 0 where the row took no part; passes int64 [B]: readings so far, of any row;
    broken bool [B]: the guide's law was not finite."""

    draft: Tensor
    reading: Tensor
    accepts: Tensor
    passes: Tensor
    broken: Tensor

    @classmethod
    def idle(cls, batch: int, slots: int, columns: int, device: torch.device) -> GuideBuffers:
        """Buffers of rows without a draft. A call reads at most ``slots`` times a block, and a row of ``columns`` has two cut blocks."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        return cls(
            zeros(slots), zeros(dtype=torch.bool), zeros(columns + 2 * slots, dtype=torch.int32), zeros(), zeros(dtype=torch.bool)
        )  # fmt: skip

    def reset(self) -> None:
        """Forget the call before."""
        for value in (self.draft, self.reading, self.accepts, self.passes, self.broken):
            value.zero_()


@dataclass(frozen=True, eq=False)
class PlannedReading:
    """ids, place int64 [B, S]: tokens and columns of the guide's rows; write bool [B, S]: which count; key_group int32 [B, W]: 0 for
    stored keys before them."""

    ids: Tensor
    place: Tensor
    write: Tensor
    key_group: Tensor


@jit
def _draft_kernel(
    token_ptr,
    log_total_ptr,
    lo_ptr,
    hi_ptr,
    decode_steps_ptr,
    active_ptr,
    fault_ptr,
    status_ptr,
    draft_ptr,
    reading_ptr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    lo = tl.load(lo_ptr + b)
    hi = tl.load(hi_ptr + b)
    active = (tl.load(active_ptr + b) != 0).to(tl.int32)
    i = tl.arange(0, BLOCK_S)
    real = i < SLOTS
    total = tl.load(log_total_ptr + b * SLOTS + i, mask=real, other=0.0)
    tl.store(draft_ptr + b * SLOTS + i, tl.load(token_ptr + b * SLOTS + i, mask=real, other=0), mask=real)
    # A NaN compares false, so it is not finite either.
    finite = (total < float("inf")) & (total > float("-inf"))
    broken = tl.max(tl.where(finite, 0, (real & (lo + i < hi)).to(tl.int32)), axis=0) * active
    tl.store(fault_ptr + b, ((tl.load(fault_ptr + b) != 0) | (broken != 0)).to(tl.uint8))
    goes_on = active * (1 - broken)
    tl.store(reading_ptr + b, goes_on.to(tl.uint8))
    tl.store(active_ptr + b, goes_on.to(tl.uint8))
    # A step at fault counts as the loop counts it.
    tl.store(decode_steps_ptr + b, tl.load(decode_steps_ptr + b) + broken.to(tl.int64))
    status = tl.load(status_ptr + b)
    tl.store(status_ptr + b, tl.where((broken != 0) | (status == 2), 2, 3 * goes_on))


@jit
def _open_part(b, wide, i, real, masked_ptr, lo_ptr, hi_ptr, active_ptr, reading_ptr, SLOTS: tl.constexpr):
    """(first masked slot of the open block, how many are left of it, whether the row has a draft to be read)."""
    lo = tl.load(lo_ptr + b)
    hi = tl.load(hi_ptr + b)
    slot = lo + i
    inside = (slot < hi) & real
    masked = tl.load(masked_ptr + wide + slot, mask=inside, other=0) != 0
    first = tl.min(tl.where(masked & inside, slot, hi), axis=0)
    reads = (tl.load(active_ptr + b) != 0) & (tl.load(reading_ptr + b) != 0)
    return first, (hi - first) * reads.to(tl.int64), reads


@jit
def _plan_kernel(
    canvas_ptr,
    masked_ptr,
    lo_ptr,
    hi_ptr,
    active_ptr,
    draft_ptr,
    reading_ptr,
    ids_ptr,
    place_ptr,
    write_ptr,
    key_group_ptr,
    width,
    PADDING: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    wide = b * (width + 1)
    i = tl.arange(0, BLOCK_S)
    real = i < SLOTS
    first, count, _ = _open_part(b, wide, i, real, masked_ptr, lo_ptr, hi_ptr, active_ptr, reading_ptr, SLOTS)
    lo = tl.load(lo_ptr + b)
    # Row i stands at slot first - 1 + i and is read for the one behind it.
    column = tl.maximum(first - 1 + i, 0)
    drafted = real & (i > 0) & (i < count)
    draft = tl.load(draft_ptr + b * SLOTS + column - lo, mask=drafted, other=0)
    last = tl.load(canvas_ptr + wide + column, mask=i < 1, other=0)
    at = b * SLOTS + i
    tl.store(ids_ptr + at, tl.where(i > 0, draft, last), mask=real)
    tl.store(place_ptr + at, tl.minimum(column, width - 1), mask=real)
    tl.store(write_ptr + at, (i < count).to(tl.uint8), mask=real)
    for start in range(0, width, BLOCK_W):
        key = start + tl.arange(0, BLOCK_W)
        tl.store(key_group_ptr + b * width + key, tl.where(key < first - 1, 0, PADDING), mask=key < width)


@jit
def _commit_kernel(
    own_ptr,
    confidence_ptr,
    log_total_ptr,
    canvas_ptr,
    masked_ptr,
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
    log_confidence_ptr,
    active_ptr,
    stopped_ptr,
    status_ptr,
    eos_ptr,
    draft_ptr,
    reading_ptr,
    accepts_ptr,
    passes_ptr,
    broken_ptr,
    width,
    most,
    first_group,
    GROUPED: tl.constexpr,
    ONE_READING: tl.constexpr,
    NUM_EOS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    wide = b * (width + 1)
    i = tl.arange(0, BLOCK_S)
    real = i < SLOTS
    first, count, reads = _open_part(b, wide, i, real, masked_ptr, lo_ptr, hi_ptr, active_ptr, reading_ptr, SLOTS)
    lo = tl.load(lo_ptr + b)
    hi = tl.load(hi_ptr + b)
    row_lo = tl.load(row_lo_ptr + b)
    step = tl.load(step_ptr + b)
    within = real & (i < count)
    own = tl.load(own_ptr + b * SLOTS + i, mask=real, other=0)
    confidence = tl.load(confidence_ptr + b * SLOTS + i, mask=real, other=1.0)
    total = tl.load(log_total_ptr + b * SLOTS + i, mask=real, other=0.0)
    draft = tl.load(draft_ptr + b * SLOTS + (first - lo) + i, mask=within, other=-1)
    kept = tl.min(tl.where((own == draft) & within, BLOCK_S, i), axis=0).to(tl.int64)
    committed = tl.minimum(kept + 1, count)
    stop = tl.min(tl.where(is_stop(own, eos_ptr, NUM_EOS) & (i < committed), i, BLOCK_S), axis=0).to(tl.int64)
    committed = tl.minimum(committed, stop + 1)
    new = real & (i < committed)
    tl.store(canvas_ptr + wide + first + i, own, mask=new)
    tl.store(masked_ptr + wide + first + i, tl.zeros([BLOCK_S], tl.uint8), mask=new)
    sure = tl.sum(tl.where(new, tl.log(tl.maximum(confidence, 1e-30)), 0.0), axis=0)
    tl.store(log_confidence_ptr + b, tl.load(log_confidence_ptr + b) + sure)
    passes = tl.load(passes_ptr + b)
    # Readings after a row's end commit nothing; a scalar condition enters as a bound.
    log = passes + tl.zeros([BLOCK_S], tl.int64) + i
    tl.store(accepts_ptr + b * most + log, committed.to(tl.int32) + i * 0, mask=i < tl.minimum(committed, 1))
    tl.store(passes_ptr + b, passes + 1)

    finite = (total < float("inf")) & (total > float("-inf"))
    broken = tl.max(tl.where(finite, 0, within.to(tl.int32)), axis=0)
    tl.store(broken_ptr + b, ((tl.load(broken_ptr + b) != 0) | (broken != 0)).to(tl.uint8))
    edge = first + committed
    stops = reads & (stop < BLOCK_S)
    full = reads & (stop >= BLOCK_S) & (edge == hi)
    over = (stops | full).to(tl.int64)
    if ONE_READING:
        over = reads.to(tl.int64)
    running = move_on(
        b, wide, i, real, lo, hi, row_lo, first + stop, stops, full, step, over, group_ptr, lo_ptr, hi_ptr, row_lo_ptr, prev_lo_ptr,
        begin_ptr, end_ptr, step_ptr, block_ptr, decode_steps_ptr, useful_ptr, stopped_ptr, first_group, GROUPED, SLOTS, BLOCK_S,
    )  # fmt: skip
    # A row that takes no part stays as it is: over, or waiting for the others with its next draft.
    active = tl.load(active_ptr + b).to(tl.int32) * (1 - reads.to(tl.int32) * (1 - running * (1 - broken)))
    again = active * reads.to(tl.int32) * (1 - over.to(tl.int32))
    tl.store(active_ptr + b, active.to(tl.uint8))
    tl.store(reading_ptr + b, again.to(tl.uint8))
    status = tl.where(again != 0, 3, active)
    tl.store(status_ptr + b, tl.where((broken != 0) | (tl.load(status_ptr + b) == 2), 2, status))


def take_draft(buffers: StepBuffers, guide: GuideBuffers, token: Tensor, log_total: Tensor) -> None:
    """token int64, log_total fp32 [B, S]: the diffusion model's laws of the open block's slots. Mutates guide.draft and reading, and
    buffers' fault, active and status. CUDA or the interpreter only, as all three."""
    require_launchable(buffers.canvas, "canvas")
    (batch, _), slots = sizes(buffers), guide.draft.shape[1]
    _check(batch, slots, token=token, log_total=log_total)
    _draft_kernel[(batch,)](
        token.contiguous(), log_total.contiguous(), buffers.lo, buffers.hi, buffers.decode_steps, as_bytes(buffers.active),
        as_bytes(buffers.fault), buffers.status, guide.draft, as_bytes(guide.reading),
        SLOTS=slots, BLOCK_S=max(2, next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip


def plan_reading(buffers: StepBuffers, guide: GuideBuffers) -> PlannedReading:
    """The guide's next rows; mutates nothing. Rows that count nothing are padding: their results are not read."""
    require_launchable(buffers.canvas, "canvas")
    (batch, width), slots, device = sizes(buffers), guide.draft.shape[1], buffers.canvas.device
    ids, place = torch.empty(2, batch, slots, dtype=torch.int64, device=device)
    write = torch.empty(batch, slots, dtype=torch.bool, device=device)
    key_group = torch.empty(batch, width, dtype=torch.int32, device=device)
    _plan_kernel[(batch,)](
        buffers.canvas, as_bytes(buffers.masked), buffers.lo, buffers.hi, as_bytes(buffers.active), guide.draft, as_bytes(guide.reading),
        ids, place, as_bytes(write), key_group, width,
        PADDING=PADDING_GROUP, SLOTS=slots, BLOCK_S=max(2, next_power_of_2(slots)), BLOCK_W=1024, num_warps=4,
    )  # fmt: skip
    return PlannedReading(ids, place, write, key_group)


def commit_reading(
    buffers: StepBuffers,
    guide: GuideBuffers,
    rule: StepRule,
    own: Tensor,
    confidence: Tensor,
    log_total: Tensor,
    one_reading: bool,
) -> None:
    """own int64, confidence, log_total fp32 [B, S]: the guide's own tokens behind its rows, and their laws. Mutates both buffers.

    one_reading: a draft is read once; else until its block is full."""
    require_launchable(buffers.canvas, "canvas")
    state, (batch, width), slots = buffers, sizes(buffers), rule.block_length
    _check(batch, slots, own=own, confidence=confidence, log_total=log_total)
    _commit_kernel[(batch,)](
        own.contiguous(), confidence.contiguous(), log_total.contiguous(),
        state.canvas, as_bytes(state.masked), state.group, state.lo, state.hi, state.row_lo, state.prev_lo, state.begin, state.end,
        state.step, state.block, state.decode_steps, state.useful, state.log_confidence, as_bytes(state.active),
        as_bytes(state.stopped), state.status, state.eos, guide.draft, as_bytes(guide.reading), guide.accepts, guide.passes,
        as_bytes(guide.broken), width, guide.accepts.shape[1], rule.first_group,
        GROUPED=rule.grouped, ONE_READING=one_reading, NUM_EOS=state.eos.numel(), SLOTS=slots,
        BLOCK_S=max(2, next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip


def _check(batch: int, slots: int, **values: Tensor) -> None:
    for name, value in values.items():
        if value.shape != (batch, slots):
            raise ValueError(f"{name} must be [{batch}, {slots}]: got {list(value.shape)}")
