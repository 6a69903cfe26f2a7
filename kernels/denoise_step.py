"""The bookkeeping of one denoising step of the exact block cache, on the device: one launch before the forward, one after the statistics.

    plan_step     rows of the open block (beside them the finished one, until it is stored), their ids, masks, positions and groups, the two
                  attention rules, the store's readable keys and what will be stored; counts forwards and positions
    commit_step   the sampler's rule, the commit, faults, the stop token, the row's end and the opening of its next block

With FreeDave (``samplers/free_dave.py``) the rows that hold the finished block in a block's first step hold branches of the open block in
the later ones, so that two branches' worth of steps costs no row more; the commit goes on through the branches that turn out true, and
drafts the next ones.

Truth: the tensor operations of ``dllm/device_loop.py`` (the sampler's and the cache's own files among them), which run off CUDA; a
test runs both from the same states (with branches, ``dllm/denoise.py`` itself). One program a row; nothing is read back. Bytes moved:
plan_step about 10 a column of the canvas, commit_step a few hundred a row; the limit is the launch, of which the tensor operations need
about 120.

Letters: B rows of the batch, W columns of the canvas, S slots of a block, K draft steps of FreeDave (1: none), Q = max(2, K) S rows of
the forward.
"""

# Kernels take pointers and constants that have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.kernels._launch import ceil_div, jit, next_power_of_2, require_launchable, tl
from dllm.kernels.step_state import StepBuffers, StepRule, as_bytes, is_stop, move_on, sizes
from dllm.types import PADDING_GROUP, Attend

MAX_BLOCK = 128
"""Longest block: the ranking compares all pairs of its slots."""
MAX_BRANCHED = 256
"""Rows of a forward with branches: the plan compares all pairs of them."""


@dataclass(eq=False)
class DraftBuffers:
    """What FreeDave knows of the next step; mutated in place.

    reveal int32 [B, S]: the first branch that reveals a slot, K where none does; guess int64 [B, S]: with what; branches int32 [B]: how
    many there are; accepts int32 [B, W + 1]: tokens that each step committed, of which there were ``verified`` int64 [B].
    """

    reveal: Tensor
    guess: Tensor
    branches: Tensor
    accepts: Tensor
    verified: Tensor

    @classmethod
    def idle(cls, batch: int, slots: int, width: int, draft_steps: int, device: torch.device) -> DraftBuffers:
        """Buffers without a branch."""
        return cls(
            reveal=torch.full((batch, slots), draft_steps, dtype=torch.int32, device=device),
            guess=torch.zeros(batch, slots, dtype=torch.int64, device=device),
            branches=torch.zeros(batch, dtype=torch.int32, device=device),
            accepts=torch.zeros(batch, width + 1, dtype=torch.int32, device=device),
            verified=torch.zeros(batch, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """rows (clamped to the canvas), target (W where not valid, W + 1 on for branches), ids, position, source [B, Q] int64; masked, valid,
    write [B, Q] bool; attend. source: columns, counted as target, of the laws' rows, S for the open block and S for each branch."""

    rows: Tensor
    target: Tensor
    ids: Tensor
    position: Tensor
    source: Tensor
    masked: Tensor
    valid: Tensor
    write: Tensor
    attend: Attend


@jit
def _plan_kernel(
    canvas_ptr,
    masked_ptr,
    stored_ptr,
    group_ptr,
    low_ptr,
    position_ptr,
    lo_ptr,
    hi_ptr,
    row_lo_ptr,
    prev_lo_ptr,
    step_ptr,
    active_ptr,
    nfe_ptr,
    positions_ptr,
    reveal_ptr,
    guess_ptr,
    branches_ptr,
    long_ptr,
    flag_ptr,
    query_ptr,
    bits_ptr,
    key_group_ptr,
    width,
    numel,
    STORE_PASS: tl.constexpr,
    PADDING: tl.constexpr,
    SLOTS: tl.constexpr,
    BRANCHES: tl.constexpr,
    SHIFT: tl.constexpr,
    QUERIES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """long_ptr int64 [5, B, Q]: rows, target, ids, position, source; flag_ptr uint8 [3, B, Q]: masked, valid, write; query_ptr int32
    [2, B, Q]: group, low; numel = B * Q."""
    b = tl.program_id(0).to(tl.int64)
    wide = b * (width + 1)
    lo = tl.load(lo_ptr + b)
    hi = tl.load(hi_ptr + b)
    row_lo = tl.load(row_lo_ptr + b)
    prev_lo = tl.load(prev_lo_ptr + b)
    step = tl.load(step_ptr + b)
    active = tl.load(active_ptr + b) != 0
    start = tl.where(step == 0, tl.minimum(prev_lo, row_lo), row_lo)
    stop = hi
    if STORE_PASS:
        storing = (step == 0) & (lo == row_lo) & (lo > 0)
        stop = tl.where(storing & (start < row_lo), row_lo, hi)
    stop = tl.where(active, stop, start)

    query = tl.arange(0, BLOCK_Q)
    inside = query < QUERIES
    # In a block's first step the rows are those of two blocks; afterwards of the open one, and of it again in each branch.
    drafting = (step != 0).to(tl.int32)
    branch = query // SLOTS * drafting if BRANCHES > 0 else query * 0
    held = tl.load(branches_ptr + b) if BRANCHES > 0 else 0
    offset = query - branch * SLOTS
    row = start + offset
    valid = (row < stop) & (branch <= held) & inside
    write = valid & (row < row_lo)
    place = tl.minimum(row, width - 1)
    group = tl.load(group_ptr + wide + place, mask=inside, other=0)
    low = tl.load(low_ptr + b * width + place, mask=inside, other=0)
    ids = tl.load(canvas_ptr + wide + place, mask=inside, other=0)
    masked = tl.load(masked_ptr + wide + place, mask=inside, other=0)
    target = tl.where(valid, row, width)
    at = b * QUERIES + query
    if BRANCHES > 0:
        slot = row - lo
        known = valid & (slot >= 0) & (slot < SLOTS) & (branch > 0)
        shown = tl.load(reveal_ptr + b * SLOTS + slot, mask=known, other=BRANCHES + 1) <= branch
        ids = tl.where(shown, tl.load(guess_ptr + b * SLOTS + slot, mask=known & shown, other=0), ids)
        masked = tl.where(shown, 0, masked)
        target = tl.where(valid & (branch > 0), width + 1 + (branch - 1) * SLOTS + offset, target)
        # A row before the block is the same in every branch.
        read = tl.maximum(tl.minimum(lo + query % SLOTS, width - 1) - SHIFT, 0)
        own = width + 1 + (query // SLOTS - 1) * SLOTS + tl.minimum(read - row_lo, SLOTS - 1)
        tl.store(long_ptr + 4 * numel + at, tl.where((query >= SLOTS) & (read >= row_lo), own, read), mask=inside)
    tl.store(long_ptr + at, place, mask=inside)
    tl.store(long_ptr + numel + at, target, mask=inside)
    tl.store(long_ptr + 2 * numel + at, ids, mask=inside)
    tl.store(long_ptr + 3 * numel + at, tl.load(position_ptr + b * width + place, mask=inside, other=0), mask=inside)
    tl.store(flag_ptr + at, masked, mask=inside)
    tl.store(flag_ptr + numel + at, valid.to(tl.uint8), mask=inside)
    tl.store(flag_ptr + 2 * numel + at, write.to(tl.uint8), mask=inside)
    tl.store(query_ptr + at, group, mask=inside)
    tl.store(query_ptr + numel + at, low, mask=inside)

    # Rule 2: bit j of word w says whether a row sees new row 64 w + j. A padded row sees itself, so that its softmax stays finite.
    for word in tl.static_range(0, WORDS):
        other = word * 64 + tl.arange(0, 64)
        other_branch = other // SLOTS * drafting if BRANCHES > 0 else other * 0
        other_row = start + other - other_branch * SLOTS
        other_valid = (other_row < stop) & (other_branch <= held) & (other < QUERIES)
        key = tl.load(group_ptr + wide + tl.minimum(other_row, width - 1), mask=other_valid, other=PADDING)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] <= group[:, None]) & (key < PADDING)[None, :]
        seen = seen & (branch[:, None] == other_branch[None, :])
        seen = seen | (query[:, None] == other[None, :])
        bit = seen.to(tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :]
        tl.store(bits_ptr + at * WORDS + word, tl.sum(bit, axis=1), mask=inside)

    # Rule 1: rows that are stored and not computed again; and the marks of those that this forward will store.
    kept = tl.minimum(stop, row_lo)
    for column_start in range(0, width, BLOCK_W):
        column = column_start + tl.arange(0, BLOCK_W)
        real = column < width
        stored = tl.load(stored_ptr + wide + column, mask=real, other=0) != 0
        again = (column >= start) & (column < stop)
        stored_group = tl.load(group_ptr + wide + column, mask=real, other=0)
        visible = tl.where(stored, tl.where(again, PADDING, stored_group), PADDING)
        tl.store(key_group_ptr + b * width + column, visible, mask=real)
        new = (column >= start) & (column < kept)
        tl.store(stored_ptr + wide + column, (stored | new).to(tl.uint8), mask=real)

    computed = tl.maximum(stop - start, 0)
    if BRANCHES > 0:
        computed = computed * (1 + held * drafting)
    tl.store(nfe_ptr + b, tl.load(nfe_ptr + b) + (computed > 0).to(tl.int64))
    tl.store(positions_ptr + b, tl.load(positions_ptr + b) + computed)


@jit
def _settled_first(confidence, real, slot, lo, row_lo, COMMIT_FIRST: tl.constexpr):
    """What slots are ranked by: a first slot whose law cannot change any more goes first."""
    rank_by = confidence
    if COMMIT_FIRST:
        surest = tl.max(tl.where(real, confidence, float("-inf")), axis=0)
        rank_by = tl.where(slot == tl.where(row_lo == lo, lo, -1), surest, confidence)
    return rank_by


@jit
def _rank(score, i, BLOCK_S: tl.constexpr):
    """The number of slots that go before each; ties to the lowest slot."""
    # Pairs [other, this].
    this = tl.zeros([BLOCK_S, BLOCK_S], tl.float32) + score[None, :]
    other = tl.zeros([BLOCK_S, BLOCK_S], tl.float32) + score[:, None]
    before = (other > this) | ((other == this) & (i[:, None] < i[None, :]))
    return tl.sum(before.to(tl.int32), axis=0)


@jit
def _commit_kernel(
    token_ptr,
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
    limit_ptr,
    useful_ptr,
    log_confidence_ptr,
    active_ptr,
    stopped_ptr,
    fault_ptr,
    status_ptr,
    eos_ptr,
    banned_ptr,
    reveal_ptr,
    guess_ptr,
    branches_ptr,
    accepts_ptr,
    verified_ptr,
    width,
    batch,
    threshold,
    k,
    unlimited,
    first_group,
    STORE_PASS: tl.constexpr,
    COMMIT_FIRST: tl.constexpr,
    GROUPED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    NUM_EOS: tl.constexpr,
    SLOTS: tl.constexpr,
    BRANCHES: tl.constexpr,
    TOKENS_PER_STEP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    wide = b * (width + 1)
    lo = tl.load(lo_ptr + b)
    hi = tl.load(hi_ptr + b)
    row_lo = tl.load(row_lo_ptr + b)
    step = tl.load(step_ptr + b)
    limit = tl.load(limit_ptr + b)
    decode = tl.load(active_ptr + b) != 0
    i = tl.arange(0, BLOCK_S)
    real = i < SLOTS
    slot = lo + i
    inside = (slot < hi) & real
    law = b * (BRANCHES + 1) * SLOTS + i
    token = tl.load(token_ptr + law, mask=real, other=0)
    confidence = tl.load(confidence_ptr + law, mask=real, other=0.0)
    log_total = tl.load(log_total_ptr + law, mask=real, other=0.0)
    canvas = tl.load(canvas_ptr + wide + slot, mask=inside, other=0)
    masked = (tl.load(masked_ptr + wide + slot, mask=inside, other=0) != 0) & inside

    stop = tl.min(tl.where(is_stop(canvas, eos_ptr, NUM_EOS) & inside, tl.where(masked, width, slot), width), axis=0)
    # Scalar conditions enter as bounds: the interpreter's masks must not come from a broadcast scalar.
    offered = masked & (slot < tl.where(decode, stop, 0))
    storing = (step == 0) & (lo == row_lo) & (lo > 0)
    if STORE_PASS:
        offered = offered & (slot < tl.where(storing, lo + 1, hi))
    rank_by = _settled_first(confidence, real, slot, lo, row_lo, COMMIT_FIRST)
    rank = _rank(tl.where(offered, rank_by, float("-inf")), i, BLOCK_S)
    count = tl.sum(offered.to(tl.int32), axis=0).to(tl.int64)
    if THRESHOLD:
        left = tl.maximum(limit - step, 1)
        quota = tl.maximum((count + left - 1) // left, 1)
        transfer = offered & ((rank_by >= threshold) | (rank < quota))
    else:
        masks = hi - lo
        scheduled = masks // limit + (step < masks % limit).to(tl.int64)
        quota = tl.where(limit >= unlimited, k, scheduled)
        transfer = offered & (rank < quota)
    # The last step that the limit allows takes whatever is left.
    everything = step + 1 >= limit
    if STORE_PASS:
        everything = everything | storing
    transfer = transfer | (offered & (i < tl.where(everything, BLOCK_S, 0)))
    tokens = tl.where(transfer, token, canvas)
    sure = tl.sum(tl.where(transfer, tl.log(tl.maximum(confidence, 1e-30)), 0.0), axis=0)
    steps = decode.to(tl.int64)
    if BRANCHES > 0:
        # The state after a step is a branch, or it is not; if it is, its laws are known and it takes the next step.
        held = tl.load(branches_ptr + b) * (step != 0).to(tl.int32) * decode.to(tl.int32)
        reveal = tl.load(reveal_ptr + b * SLOTS + i, mask=real, other=BRANCHES + 1)
        guess = tl.load(guess_ptr + b * SLOTS + i, mask=real, other=0)
        still_open = (masked & (tl.where(transfer, 0, 1) != 0)).to(tl.int32)
        was_open = masked.to(tl.int32)
        going = held * 0 + 1
        for _ in range(BRANCHES):
            done = tl.sum(was_open - still_open, axis=0)
            number = done // TOKENS_PER_STEP
            shown = tl.where(reveal <= number, was_open, 0)
            differs = (shown != was_open - still_open) | ((shown != 0) & (guess != tokens))
            differs = tl.max(tl.where(differs, was_open, 0), axis=0)
            ended = is_stop(tokens, eos_ptr, NUM_EOS) & inside
            stop = tl.min(tl.where(ended, tl.where(still_open != 0, width, slot), width), axis=0)
            rest = (still_open != 0) & (slot < stop)
            more = tl.max(rest.to(tl.int32), axis=0)
            exact = (number * TOKENS_PER_STEP == done) & (number >= 1) & (number <= held)
            going = going * (1 - differs) * more * exact.to(tl.int32)
            here = law + going * number * SLOTS
            branch_token = tl.load(token_ptr + here, mask=real, other=0)
            branch_confidence = tl.load(confidence_ptr + here, mask=real, other=0.0)
            token = tl.where(going != 0, branch_token, token)
            confidence = tl.where(going != 0, branch_confidence, confidence)
            rank_by = _settled_first(confidence, real, slot, lo, row_lo, COMMIT_FIRST)
            rank = _rank(tl.where(rest, rank_by, float("-inf")), i, BLOCK_S)
            chosen = rank < (1 if THRESHOLD else k)
            if THRESHOLD:
                chosen = chosen | (rank_by >= threshold)
            chosen = chosen & (slot < tl.where(going != 0, stop, 0)) & (still_open != 0)
            tokens = tl.where(chosen, token, tokens)
            sure += tl.sum(tl.where(chosen, tl.log(tl.maximum(confidence, 1e-30)), 0.0), axis=0)
            still_open = tl.where(chosen, 0, still_open)
            steps += going.to(tl.int64)
        transfer = masked & (still_open == 0)
        ended = is_stop(tokens, eos_ptr, NUM_EOS) & inside
        stop = tl.min(tl.where(ended, tl.where(still_open != 0, width, slot), width), axis=0)
        rest = (still_open != 0) & (slot < tl.where(decode, stop, 0))
        rank_by = _settled_first(confidence, real, slot, lo, row_lo, COMMIT_FIRST)
        rank = _rank(tl.where(rest, rank_by, float("-inf")), i, BLOCK_S)
        left = tl.sum(rest.to(tl.int32), axis=0)
        reveal = tl.minimum(tl.where(rest, rank // TOKENS_PER_STEP + 1, BRANCHES + 1), BRANCHES + 1)
        tl.store(reveal_ptr + b * SLOTS + i, reveal, mask=real)
        tl.store(guess_ptr + b * SLOTS + i, token, mask=real)
        # A branch that would reveal everything is none.
        tl.store(branches_ptr + b, tl.minimum(tl.maximum(left - 1, 0) // TOKENS_PER_STEP, BRANCHES))
        verified = tl.load(verified_ptr + b)
        committed = tl.sum(was_open - still_open, axis=0)
        place = tl.where(decode, verified, width)
        tl.store(accepts_ptr + wide + place, committed)
        tl.store(verified_ptr + b, verified + decode.to(tl.int64))
    tl.store(log_confidence_ptr + b, tl.load(log_confidence_ptr + b) + sure)
    tl.store(canvas_ptr + wide + slot, tokens, mask=transfer)
    tl.store(masked_ptr + wide + slot, tl.zeros([BLOCK_S], tl.uint8), mask=transfer)

    # A NaN compares false, so it is not finite either.
    finite = (log_total < float("inf")) & (log_total > float("-inf"))
    broken = (tl.max(tl.where(finite, 0, inside.to(tl.int32)), axis=0) != 0) & decode
    banned = tl.load(banned_ptr + tokens, mask=transfer, other=0) != 0
    illegal = tl.max((banned & transfer).to(tl.int32), axis=0) != 0
    given = tl.max(transfer.to(tl.int32), axis=0)
    idle = (count > 0) & (given == 0) & (limit >= unlimited)
    for which in tl.static_range(0, 3):
        wrong = broken if which == 0 else (illegal if which == 1 else idle)
        old = tl.load(fault_ptr + which * batch + b) != 0
        tl.store(fault_ptr + which * batch + b, (old | wrong).to(tl.uint8))
    fault = broken | illegal | idle

    still = masked & (tl.where(transfer, 0, 1) != 0)
    edge = tl.minimum(tl.min(tl.where(still, slot, width), axis=0), hi)
    stopped = tl.where(is_stop(tokens, eos_ptr, NUM_EOS) & inside, tl.where(still, width, slot), width)
    stopped = tl.min(stopped, axis=0)
    stops = decode & (stopped < edge)
    full = decode & (stopped >= edge) & (edge == hi)
    running = move_on(
        b, wide, i, real, lo, hi, row_lo, stopped, stops, full, step, steps, group_ptr, lo_ptr, hi_ptr, row_lo_ptr, prev_lo_ptr,
        begin_ptr, end_ptr, step_ptr, block_ptr, decode_steps_ptr, useful_ptr, stopped_ptr, first_group, GROUPED, SLOTS, BLOCK_S,
    )  # fmt: skip
    active = decode.to(tl.int32) * running * (1 - fault.to(tl.int32))
    tl.store(active_ptr + b, active.to(tl.uint8))
    at_fault = fault | (tl.load(status_ptr + b) == 2)
    tl.store(status_ptr + b, tl.where(at_fault, 2, active))


def plan_step(buffers: StepBuffers, rule: StepRule, draft: DraftBuffers | None = None) -> PlannedStep:
    """Launch the plan: mutates buffers.stored, nfe and positions; the rest of the result is new. CUDA or the interpreter only.

    draft: what the last commit drafted, where rule.draft_steps > 1; without it source has no meaning.
    """
    state, (reveal, guess, branches) = buffers, _branched(rule, draft)
    require_launchable(state.canvas, "canvas")
    batch, width, queries, device = *sizes(state), rule.queries, state.canvas.device
    words = ceil_div(queries, 64)
    long = torch.empty(5, batch, queries, dtype=torch.int64, device=device)
    flag = torch.empty(3, batch, queries, dtype=torch.bool, device=device)
    query = torch.empty(2, batch, queries, dtype=torch.int32, device=device)
    bits = torch.empty(batch, queries, words, dtype=torch.int64, device=device)
    key_group = torch.empty(batch, width, dtype=torch.int32, device=device)
    _plan_kernel[(batch,)](
        state.canvas, as_bytes(state.masked), as_bytes(state.stored), state.group, state.low, state.position,
        state.lo, state.hi, state.row_lo, state.prev_lo, state.step, as_bytes(state.active), state.nfe, state.positions,
        reveal, guess, branches, long, as_bytes(flag), query, bits, key_group, width, batch * queries,
        STORE_PASS=rule.store_pass, PADDING=PADDING_GROUP, SLOTS=rule.block_length, BRANCHES=rule.draft_steps - 1,
        SHIFT=rule.shift, QUERIES=queries, WORDS=words,
        BLOCK_Q=next_power_of_2(queries), BLOCK_W=1024, num_warps=4 if queries <= 64 else 8,
    )  # fmt: skip
    attend = Attend(key_group, query[1], query[0], bits)
    return PlannedStep(long[0], long[1], long[2], long[3], long[4], flag[0], flag[1], flag[2], attend)


def commit_step(
    buffers: StepBuffers,
    rule: StepRule,
    token: Tensor,
    confidence: Tensor,
    log_total: Tensor,
    draft: DraftBuffers | None = None,
) -> None:
    """Launch the decision for the laws of the open blocks' S slots: token int64, confidence, log_total fp32 [B, K S], K of them a branch
    each. Mutates buffers and draft. With branches there is no step limit, and no pass that only stores."""
    state, (reveal, guess, branches) = buffers, _branched(rule, draft)
    accepts, verified = (state.canvas, state.lo) if draft is None else (draft.accepts, draft.verified)
    require_launchable(state.canvas, "canvas")
    (batch, width), slots = sizes(state), rule.block_length
    if not 1 <= slots <= MAX_BLOCK:
        raise ValueError(f"block_length must be in 1..{MAX_BLOCK}: got {slots}")
    for name, value in (("token", token), ("confidence", confidence), ("log_total", log_total)):
        if value.shape != (batch, rule.draft_steps * slots):
            raise ValueError(f"{name} must be [{batch}, {rule.draft_steps * slots}]: got {list(value.shape)}")
    _commit_kernel[(batch,)](
        token.contiguous(), confidence.contiguous(), log_total.contiguous(),
        state.canvas, as_bytes(state.masked), state.group, state.lo, state.hi, state.row_lo, state.prev_lo, state.begin, state.end,
        state.step, state.block, state.decode_steps, state.limit, state.useful, state.log_confidence, as_bytes(state.active),
        as_bytes(state.stopped), as_bytes(state.fault), state.status, state.eos, as_bytes(state.banned),
        reveal, guess, branches, accepts, verified,
        width, batch, 0.0 if rule.threshold is None else float(rule.threshold), rule.k, rule.unlimited, rule.first_group,
        STORE_PASS=rule.store_pass, COMMIT_FIRST=rule.commit_first, GROUPED=rule.grouped, THRESHOLD=rule.threshold is not None,
        NUM_EOS=state.eos.numel(), SLOTS=slots, BRANCHES=rule.draft_steps - 1, TOKENS_PER_STEP=rule.tokens_per_step,
        BLOCK_S=max(2, next_power_of_2(slots)), num_warps=4 if slots > 32 else 1,
    )  # fmt: skip


def _branched(rule: StepRule, draft: DraftBuffers | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if (draft is None) != (rule.draft_steps == 1):
        raise ValueError(
            f"draft must be given if and only if draft_steps is above 1: got draft_steps {rule.draft_steps}"
        )
    if rule.draft_steps > 1 and (rule.store_pass or rule.queries > MAX_BRANCHED):
        raise ValueError(
            f"draft_steps must need no store pass and at most {MAX_BRANCHED} rows: got {rule.queries} rows"
        )
    return (None, None, None) if draft is None else (draft.reveal, draft.guess, draft.branches)
