"""One step's decision and commit for every row, on the device: who is committed, where the row stands, whether it stopped.

Formula, for the open block lo .. hi - 1 of a row: offered = masked slots before the first committed stop token; the rule picks among
them (threshold: confidence >= threshold, and always the surest ceil(masks / steps left); low_confidence: the quota of the even
schedule; or a given choice); chosen slots take their token. Then: first masked slot, first stop token, faults. One program a row, no
host synchronisation.

For loops of one's own, whose canvas and block borders are plain tensors. The captured loop (``dllm/device_loop.py``) uses
``denoise_step.commit_step`` instead, which makes the same decision and also ends rows and opens their next blocks in one launch.

Bytes moved: about 45 a slot (token, confidence, canvas, flags, result); latency bound. Ranking compares all pairs of a block: S <= 128.
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.kernels._launch import jit, next_power_of_2, require_launchable, tl, use_triton

MAX_SLOTS = 128
UNLIMITED = 2**30
"""``steps`` of a block without a step limit, as in the samplers."""
_RULES = ("threshold", "low_confidence", "given")


class Commit(NamedTuple):
    """What a step did. transfer [B, S] bool: committed now; tokens [B, S] int64: the block afterwards (0 beyond it).

    [B] int64: num_committed; edge, first slot that is still masked, or hi; stop, first committed stop token, or L. [B] bool:
    finished, a stop token stands before every mask; full, the block has no mask and the row goes on; broken, some law was not finite;
    illegal, a banned token was committed; idle, something was offered, nothing taken and no step limit will end it. log_confidence [B]
    fp32: sum of ln(confidence) of the committed.
    """

    transfer: Tensor
    tokens: Tensor
    num_committed: Tensor
    edge: Tensor
    stop: Tensor
    finished: Tensor
    full: Tensor
    broken: Tensor
    illegal: Tensor
    idle: Tensor
    log_confidence: Tensor


def commit_reference(
    token: Tensor,
    confidence: Tensor,
    canvas: Tensor,
    masked: Tensor,
    lo: Tensor,
    hi: Tensor,
    stop_ids: Tensor,
    rule: str = "threshold",
    *,
    threshold: float = 0.9,
    k: int = 1,
    transfer: Tensor | None = None,
    given: Tensor | None = None,
    decode: Tensor | None = None,
    first_only: Tensor | None = None,
    settled_first: Tensor | None = None,
    step: Tensor | None = None,
    steps: Tensor | None = None,
    log_total: Tensor | None = None,
    banned: Tensor | None = None,
) -> Commit:
    """Plain PyTorch truth. ``canvas`` and ``masked`` are changed in place.

    token [B, S] int64, confidence [B, S] fp32: proposals for the slots lo .. lo + S - 1; canvas [B, L] int64, masked [B, L] bool; lo,
    hi [B] int64, hi - lo <= S; stop_ids [E] int64. rule: "threshold" (threshold), "low_confidence" (k a step, or the schedule of
    ``steps``), "given" (transfer [B, S] bool). given [B, L] bool: tokens of the user's, no stops; decode [B] bool: rows that take part
    (None: all); first_only [B] bool: these commit slot lo and nothing else; settled_first [B] bool: slot lo ranks as sure as the surest
    (its law cannot change any more); step, steps [B] int64: steps done and allowed in the block (None: 0 and unlimited; the last one
    takes all); log_total [B, S] fp32; banned [V] bool.
    """
    batch, slots = token.shape
    width, device = canvas.shape[1], token.device
    on, off = torch.ones(batch, dtype=torch.bool, device=device), torch.zeros(batch, dtype=torch.bool, device=device)
    decode, first_only, settled_first = (
        decode if decode is not None else on,
        _or(first_only, off),
        _or(settled_first, off),
    )
    step = _or(step, torch.zeros_like(lo))
    steps = _or(steps, torch.full_like(lo, UNLIMITED))
    slot = lo[:, None] + torch.arange(slots, device=device)
    inside = slot < hi[:, None]
    place = slot.clamp(max=width - 1)
    now, open_ = canvas.gather(1, place), masked.gather(1, place) & inside
    free = torch.ones_like(inside) if given is None else ~given.gather(1, place)
    offered = open_ & (slot < _first(_is_stop(now, stop_ids) & inside & ~open_ & free, slot, width)[:, None])
    offered = offered & decode[:, None] & ~(first_only[:, None] & (slot != lo[:, None]))
    score = torch.where(settled_first[:, None] & (slot == lo[:, None]), confidence.amax(1, keepdim=True), confidence)
    left = (steps - step).clamp(min=1)
    if rule == "threshold":
        quota = ((offered.sum(1) + left - 1) // left).clamp(min=1)
        taken = (score >= threshold) | (_rank(score, offered) < quota[:, None])
    elif rule == "low_confidence":
        scheduled = (hi - lo) // steps + (step < (hi - lo) % steps)
        quota = torch.where(steps >= UNLIMITED, torch.full_like(scheduled, k), scheduled)
        taken = _rank(score, offered) < quota[:, None]
    else:
        assert transfer is not None, "the rule 'given' has its transfer"
        taken = transfer
    taken = (taken | (step + 1 >= steps)[:, None] | first_only[:, None]) & offered
    tokens = torch.where(taken, token, now)
    # Full-width writes: a clamped slot beyond the canvas would hit its last column twice.
    at = torch.arange(width, device=device) - lo[:, None]
    written = (at >= 0) & (at < slots)
    at = at.clamp(0, slots - 1)
    written = written & taken.gather(1, at)
    canvas.copy_(torch.where(written, tokens.gather(1, at), canvas))
    masked.copy_(masked & ~written)
    still = open_ & ~taken
    edge = torch.minimum(_first(still, slot, width), hi)
    stop = _first(_is_stop(tokens, stop_ids) & inside & ~still & free, slot, width)
    finished = decode & (stop < edge)
    return Commit(
        taken,
        torch.where(inside, tokens, 0),
        taken.sum(1),
        edge,
        stop,
        finished,
        decode & ~finished & (edge == hi),
        off if log_total is None else (~log_total.isfinite() & inside).any(1) & decode,
        off if banned is None else (banned[tokens] & taken).any(1),
        offered.any(1) & ~taken.any(1) & (steps >= UNLIMITED),
        torch.where(taken, confidence.clamp(min=1e-30).log(), 0.0).sum(1),
    )


def _or(value: Tensor | None, default: Tensor) -> Tensor:
    return default if value is None else value


def _is_stop(tokens: Tensor, stop_ids: Tensor) -> Tensor:
    return (tokens[..., None] == stop_ids).any(-1)


def _first(flag: Tensor, slot: Tensor, none: int) -> Tensor:
    return torch.where(flag, slot, none).amin(1)


def _rank(score: Tensor, offered: Tensor) -> Tensor:
    """Place of each offered slot by falling score, ties to the lower slot: int64 [B, S]."""
    order = score.masked_fill(~offered, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )


@jit
def _commit_kernel(
    token,
    confidence,
    canvas,
    masked,
    lo,
    hi,
    stop_ids,
    transfer_in,
    given,
    decode,
    first_only,
    settled_first,
    step,
    steps,
    log_total,
    banned,
    transfer_out,
    tokens_out,
    counts_out,
    flags_out,
    log_out,
    batch,
    slots,
    width,
    num_stops,
    stride_canvas,
    stride_masked,
    stride_given,
    threshold,
    k,
    RULE: tl.constexpr,
    TRANSFER: tl.constexpr,
    GIVEN: tl.constexpr,
    DECODE: tl.constexpr,
    FIRST: tl.constexpr,
    SETTLED: tl.constexpr,
    LIMIT: tl.constexpr,
    FINITE: tl.constexpr,
    BANNED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program: one row. counts_out [3, B] int64: count, edge, stop; flags_out [5, B]: finished, full, broken, illegal, idle."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SLOTS)
    start = tl.load(lo + row)
    end = tl.load(hi + row)
    slot = start + lane
    real = lane < slots
    inside = real & (slot < end) & (slot < width)
    at = row * slots + lane
    proposed = tl.load(token + at, mask=real, other=0)
    sure = tl.load(confidence + at, mask=real, other=float("-inf"))
    now = tl.load(canvas + row * stride_canvas + slot, mask=inside, other=0)
    is_open = (tl.load(masked + row * stride_masked + slot, mask=inside, other=0) != 0) & inside
    own = inside
    if GIVEN:
        own = inside & (tl.load(given + row * stride_given + slot, mask=inside, other=1) == 0)
    stops_now = lane < 0
    for e in range(num_stops):
        stops_now = stops_now | (now == tl.load(stop_ids + e))
    stop_now = tl.min(tl.where(stops_now & own & (is_open == 0), slot, width), axis=0)
    offered = is_open & (slot < stop_now)
    # Flags of the row are integers until they meet a vector: the interpreter cannot spread a single bool.
    takes_part = 1
    if DECODE:
        takes_part = tl.load(decode + row).to(tl.int32)
        offered = offered & (lane * 0 + takes_part != 0)
    alone = lane < 0
    if FIRST:
        alone = lane * 0 + tl.load(first_only + row).to(tl.int32) != 0
        offered = offered & ((alone == 0) | (lane == 0))
    score = sure
    if SETTLED:
        raised = (lane * 0 + tl.load(settled_first + row).to(tl.int32) != 0) & (lane == 0)
        score = tl.where(raised, tl.max(sure, axis=0), sure)
    done = row * 0
    allowed = done + 1073741824
    if LIMIT:
        done = tl.load(step + row)
        allowed = tl.load(steps + row)
    if RULE == 2:
        taken = lane < 0
        if TRANSFER:
            taken = tl.load(transfer_in + at, mask=real, other=0) != 0
    else:
        ranked = tl.where(offered, score, float("-inf"))
        before = (ranked[None, :] > ranked[:, None]) | (
            (ranked[None, :] == ranked[:, None]) & (lane[None, :] < lane[:, None])
        )
        rank = tl.sum(before.to(tl.int32), axis=1)
        if RULE == 0:
            left = tl.maximum(allowed - done, 1)
            count = tl.sum(offered.to(tl.int64), axis=0)
            quota = tl.maximum((count + left - 1) // left, 1)
            taken = (score >= threshold) | (rank < quota)
        else:
            masks = end - start
            quota = masks // allowed + (done < masks % allowed).to(tl.int64)
            quota = tl.where(allowed >= 1073741824, k, quota)
            taken = rank < quota
    last_step = lane * 0 + done + 1 >= allowed
    taken = (taken | last_step | alone) & offered
    tokens = tl.where(taken, proposed, now)
    tl.store(canvas + row * stride_canvas + slot, tokens, mask=taken)
    tl.store(masked + row * stride_masked + slot, tl.zeros_like(lane).to(tl.uint8), mask=taken)
    tl.store(transfer_out + at, taken.to(tl.uint8), mask=real)
    tl.store(tokens_out + at, tokens, mask=real)
    still = is_open & (taken == 0)
    edge = tl.minimum(tl.min(tl.where(still, slot, width), axis=0), end)
    stops = lane < 0
    for e in range(num_stops):
        stops = stops | (tokens == tl.load(stop_ids + e))
    stop = tl.min(tl.where(stops & own & (still == 0), slot, width), axis=0)
    num_taken = tl.sum(taken.to(tl.int64), axis=0)
    tl.store(counts_out + row, num_taken)
    tl.store(counts_out + batch + row, edge)
    tl.store(counts_out + 2 * batch + row, stop)
    finished = (stop < edge).to(tl.int32) * takes_part
    tl.store(flags_out + row, finished.to(tl.uint8))
    tl.store(flags_out + batch + row, ((edge == end).to(tl.int32) * takes_part * (1 - finished)).to(tl.uint8))
    broken = finished * 0
    if FINITE:
        total = tl.load(log_total + at, mask=inside, other=0.0)
        finite = (total == total) & (tl.abs(total) < float("inf"))
        broken = tl.max((inside & (finite == 0)).to(tl.int32), axis=0) * takes_part
    tl.store(flags_out + 2 * batch + row, broken.to(tl.uint8))
    illegal = finished * 0
    if BANNED:
        illegal = tl.max(tl.load(banned + tokens, mask=taken, other=0).to(tl.int32), axis=0)
    tl.store(flags_out + 3 * batch + row, illegal.to(tl.uint8))
    some = tl.max(offered.to(tl.int32), axis=0) > 0
    idle = some & (num_taken == 0) & (allowed >= 1073741824)
    tl.store(flags_out + 4 * batch + row, idle.to(tl.uint8))
    logs = tl.where(taken, tl.log(tl.maximum(sure, 1e-30)), 0.0)
    tl.store(log_out + row, tl.sum(logs, axis=0))


def commit_triton(
    token: Tensor,
    confidence: Tensor,
    canvas: Tensor,
    masked: Tensor,
    lo: Tensor,
    hi: Tensor,
    stop_ids: Tensor,
    rule: str = "threshold",
    *,
    threshold: float = 0.9,
    k: int = 1,
    transfer: Tensor | None = None,
    given: Tensor | None = None,
    decode: Tensor | None = None,
    first_only: Tensor | None = None,
    settled_first: Tensor | None = None,
    step: Tensor | None = None,
    steps: Tensor | None = None,
    log_total: Tensor | None = None,
    banned: Tensor | None = None,
) -> Commit:
    """Launch the kernel; arguments and result as ``commit``."""
    require_launchable(token, "token")
    (batch, slots), device = token.shape, token.device
    taken = torch.empty(batch, slots, dtype=torch.bool, device=device)
    tokens = torch.empty(batch, slots, dtype=torch.int64, device=device)
    counts = torch.empty(3, batch, dtype=torch.int64, device=device)
    flags = torch.empty(5, batch, dtype=torch.bool, device=device)
    logs = torch.empty(batch, dtype=torch.float32, device=device)
    limited = steps is not None
    if limited and step is None:
        step = torch.zeros_like(lo)

    def flag(value: Tensor | None) -> Tensor:
        return flags.view(torch.uint8) if value is None else value.contiguous().view(torch.uint8)

    if batch:
        # Rows may be views of a wider tensor; the kernel steps by one along them.
        own = masked if given is None else given if given.stride(1) == 1 else given.contiguous()
        _commit_kernel[(batch,)](
            token.contiguous(), confidence.contiguous(), canvas, masked.view(torch.uint8),
            lo.contiguous(), hi.contiguous(), stop_ids.contiguous(),
            flag(transfer), own.view(torch.uint8), flag(decode), flag(first_only), flag(settled_first),
            lo if step is None else step.contiguous(), lo if steps is None else steps.contiguous(),
            logs if log_total is None else log_total.contiguous(), flag(banned),
            taken.view(torch.uint8), tokens, counts, flags.view(torch.uint8), logs,
            batch, slots, canvas.shape[1], stop_ids.numel(), canvas.stride(0), masked.stride(0), own.stride(0), float(threshold), k,
            RULE=_RULES.index(rule), TRANSFER=transfer is not None, GIVEN=given is not None, DECODE=decode is not None,
            FIRST=first_only is not None, SETTLED=settled_first is not None, LIMIT=limited, FINITE=log_total is not None,
            BANNED=banned is not None, SLOTS=max(16, next_power_of_2(slots)), num_warps=1 if slots <= 32 else 4,
        )  # fmt: skip
    num_committed, edge, stop = counts.unbind()
    finished, full, broken, illegal, idle = flags.unbind()
    return Commit(taken, tokens, num_committed, edge, stop, finished, full, broken, illegal, idle, logs)


def commit(
    token: Tensor,
    confidence: Tensor,
    canvas: Tensor,
    masked: Tensor,
    lo: Tensor,
    hi: Tensor,
    stop_ids: Tensor,
    rule: str = "threshold",
    *,
    threshold: float = 0.9,
    k: int = 1,
    transfer: Tensor | None = None,
    given: Tensor | None = None,
    decode: Tensor | None = None,
    first_only: Tensor | None = None,
    settled_first: Tensor | None = None,
    step: Tensor | None = None,
    steps: Tensor | None = None,
    log_total: Tensor | None = None,
    banned: Tensor | None = None,
) -> Commit:
    """Decide and commit one step of every row; ``canvas`` and ``masked`` are changed in place, nothing waits for the host.

    Arguments and results: ``commit_reference``, which runs on the CPU. Raises ValueError for shapes, types or a rule that do not fit.
    """
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}: got {rule!r}")
    if (rule == "given") != (transfer is not None):
        raise ValueError(f"transfer must be given with the rule 'given' and with no other: got rule {rule!r}")
    if token.dim() != 2 or token.shape[1] < 1 or confidence.shape != token.shape:
        raise ValueError(
            f"token and confidence must be [B, S], S >= 1: got {tuple(token.shape)}, {tuple(confidence.shape)}"
        )
    batch, slots = token.shape
    if canvas.dim() != 2 or canvas.shape[0] != batch or masked.shape != canvas.shape or masked.dtype != torch.bool:
        raise ValueError(
            f"canvas and masked must be [B = {batch}, L], int64 and bool: got {tuple(canvas.shape)}, {masked.dtype} {tuple(masked.shape)}"
        )
    for name, value in (
        ("token", token),
        ("canvas", canvas),
        ("lo", lo),
        ("hi", hi),
        ("stop_ids", stop_ids),
        ("step", step),
        ("steps", steps),
    ):
        if value is not None and value.dtype != torch.int64:
            raise ValueError(f"{name} must be int64: got {value.dtype}")
    for name, value in (
        ("transfer", transfer),
        ("given", given),
        ("decode", decode),
        ("first_only", first_only),
        ("settled_first", settled_first),
        ("banned", banned),
    ):
        if value is not None and value.dtype != torch.bool:
            raise ValueError(f"{name} must be bool: got {value.dtype}")
    per_row = dict(
        lo=lo, hi=hi, decode=decode, first_only=first_only, settled_first=settled_first, step=step, steps=steps
    )
    for name, value in per_row.items():
        if value is not None and value.shape != (batch,):
            raise ValueError(f"{name} must be [B = {batch}]: got {tuple(value.shape)}")
    # The kernel writes into both, so neither may be copied first.
    fits = slots <= MAX_SLOTS and canvas.stride(1) == 1 and masked.stride(1) == 1 and confidence.dtype == torch.float32
    function = commit_triton if fits and use_triton(token) else commit_reference
    return function(
        token, confidence, canvas, masked, lo, hi, stop_ids, rule,
        threshold=threshold, k=k, transfer=transfer, given=given, decode=decode, first_only=first_only, settled_first=settled_first,
        step=step, steps=steps, log_total=log_total, banned=banned,
    )  # fmt: skip
