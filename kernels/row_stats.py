"""Statistics of a row's law in one read: top token, probability, entropy, margin, top-k mass, sampled token.

Formula, for logits l and banned ids excluded from the choice: token = argmax l (ties to the lowest id), confidence =
exp(l[token] - logsumexp(l)) under the raw law (temperature never enters it), entropy = logsumexp(l) - sum p l in nats, margin =
p(first) - p(second), top-k mass = the sum of the k largest p of allowed ids.

Two launches. The first cuts the vocabulary into splits (as many as fill the device) and keeps of each: the running maximum m, sum exp(l
- m), sum exp(l - m)(l - m), the best allowed logit and the 8 ids among which it is, its runner-up. The second, one program a row, adds
the splits up and looks the best id up. A sampled token is found by inversion without a second read: the splits' sums say in which split
the cumulative sum passes the number, and only that split is read again.

Bytes moved: B * S * V * itemsize, plus 24 a split; sampling: one split a row more; ``law`` given: that tensor once more. The limit is
HBM bandwidth, for few rows the latency of two launches.
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm.kernels._launch import (
    begin_dependent,
    ceil_div,
    dependent,
    jit,
    multiprocessors,
    next_power_of_2,
    require_launchable,
    tl,
    use_triton,
)
from dllm.types import RowStats

_WIDTH = 8
"""Neighbouring logits that one thread reduces before anything else: one 16-byte load of bf16."""
_GROUPS = 128
"""Threads of a program; each takes one piece of _WIDTH from every slice of a tile."""


def row_stats_reference(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    law: Tensor | None = None,
    processed_confidence: bool = False,
    previous: Tensor | None = None,
) -> RowStats:
    """Plain PyTorch truth.

    logits [B, S, V] any float dtype; needs: what to compute beside token and confidence ("entropy", "margin", "logits", "previous");
    banned: bool [V] or [B, S, V], ids never proposed (they keep their mass in the law); uniform [B, S] fp32 in (0, 1): with
    temperature > 0 the token is drawn from ``law`` (processed logits [B, S, V], default logits / temperature) by inverting its
    cumulative sum; processed_confidence: take the probability from the processed law instead of the raw one.
    -> RowStats with token [B, S] int64 and fp32 statistics. Accumulates in fp32. log_total is not finite where logits hold NaN or +inf
    or nothing but -inf; single -inf entries are legal (forbidden tokens).
    """
    raw = logits.float()
    log_total = raw.logsumexp(-1)
    allowed = raw if banned is None else raw.masked_fill(banned, float("-inf"))
    if temperature > 0:
        if uniform is None:
            raise ValueError("uniform must be given when temperature > 0: got None")
        drawn = (raw.double() / temperature) if law is None else law.double()
        if banned is not None:
            drawn = drawn.masked_fill(banned, float("-inf"))
        token = sample_by_inversion(drawn, uniform)
    else:
        drawn = allowed
        token = allowed.argmax(-1)
    if processed_confidence and temperature > 0:
        confidence = drawn.softmax(-1).gather(-1, token[..., None])[..., 0].float()
    else:
        confidence = (raw.gather(-1, token[..., None])[..., 0] - log_total).exp()
    entropy = margin = None
    if "entropy" in needs:
        probability = (raw - log_total[..., None]).exp()
        entropy = -(probability * (raw - log_total[..., None]).clamp(min=-1e4)).sum(-1)
    if "margin" in needs:
        top = allowed.topk(2, dim=-1).values
        margin = (top[..., 0] - log_total).exp() - (top[..., 1] - log_total).exp()
    return RowStats(
        token=token,
        confidence=confidence,
        entropy=entropy,
        margin=margin,
        logits=raw if "logits" in needs or "previous" in needs else None,
        previous=previous if "previous" in needs else None,
        log_total=log_total,
    )


def sample_by_inversion(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one id per row of logits [..., V] with the number uniform [...] in (0, 1): the first id whose cumulative mass exceeds it.

    fp64 inside. An id of probability 0 is never drawn.
    """
    mass = logits.double().softmax(-1).cumsum(-1)
    target = uniform.double()[..., None] * mass[..., -1:]
    # Strictly greater: an id without mass does not raise the sum, so it is never the first to exceed the target.
    return (mass <= target).sum(-1).clamp(max=logits.shape[-1] - 1)


class TopK(NamedTuple):
    """The k best allowed ids of each row, best first, ties by the lower id.

    ids [B, S, k] int64; values [B, S, k] fp32 logits (-inf: fewer than k ids are allowed); mass [B, S] fp32: their probability in sum.
    """

    ids: Tensor
    values: Tensor
    mass: Tensor


def top_k_reference(logits: Tensor, k: int, banned: Tensor | None = None) -> TopK:
    """Plain PyTorch truth of ``top_k``."""
    raw = logits.float()
    allowed = raw if banned is None else raw.masked_fill(banned, float("-inf"))
    values, ids = allowed.sort(dim=-1, descending=True, stable=True)
    values, ids = values[..., :k], ids[..., :k]
    return TopK(ids, values, (values - raw.logsumexp(-1)[..., None]).exp().sum(-1))


@jit
def _absorb(
    x,
    allowed,
    first_ids,
    m,
    s,
    t,
    drawn,
    best,
    second,
    index,
    inverse_temperature,
    BANNED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Join a tile x [groups, slices, width] with the running numbers: m, s, t, drawn of each group, best, second, index of each piece.

    Instructions of this loop limit the kernel before the memory does, so that whatever can be found once per piece of 8 (best) or per
    group of a tile (the shift of the sums) is not found per logit; the best id itself is looked up at the end, in its piece.
    """
    piece = tl.max(x, axis=2)
    top = tl.maximum(m, tl.max(piece, axis=1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    # Where nothing was seen yet the old maximum is -inf: its shift would be -inf times a sum of 0.
    shift = tl.where(m == float("-inf"), 0.0, m - safe)
    scale = tl.exp(shift)
    # One multiply-add a logit before the power of two.
    e = tl.exp2(x * 1.4426950408889634 - (safe * 1.4426950408889634)[:, None, None])
    if ENTROPY:
        finite = tl.where(x == float("-inf"), 0.0, x - safe[:, None, None])
        t = (t + s * shift) * scale + tl.sum(tl.sum(e * finite, axis=2), axis=1)
    s = s * scale + tl.sum(tl.sum(e, axis=2), axis=1)
    if BANNED:
        piece = tl.max(allowed, axis=2)
    if MARGIN:
        equal = allowed == piece[:, :, None]
        rest = tl.max(tl.where(equal, float("-inf"), allowed), axis=2)
        rest = tl.where(tl.sum(equal.to(tl.int32), axis=2) > 1, piece, rest)
        second = tl.maximum(tl.minimum(best, piece), tl.maximum(second, rest))
    if SAMPLE:
        old = tl.max(best, axis=1)
        peak = tl.maximum(old, tl.max(piece, axis=1))
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.exp((allowed - peak[:, None, None]) * inverse_temperature)
        drawn = drawn * tl.exp((old - peak) * inverse_temperature) + tl.sum(tl.sum(mass, axis=2), axis=1)
    # Strictly better: ids grow from tile to tile, so a tie stays with the lower one.
    index = tl.where(piece > best, first_ids, index)
    best = tl.maximum(best, piece)
    return top, s, t, drawn, best, second, index


@jit
def _partials_kernel(
    logits,
    banned,
    partials,
    indices,
    top_values,
    top_ids,
    num_slots,
    vocab,
    splits,
    split_length,
    tiles,
    total,
    stride_batch,
    stride_slot,
    stride_vocab,
    ban_batch,
    ban_slot,
    ban_vocab,
    inverse_temperature,
    DEPENDENT: tl.constexpr,
    BANNED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    SAMPLE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: one row, one split. partials [6, rows * splits]: m, s, t, best, second, drawn sum; indices: where the best id's
    piece of WIDTH begins."""
    begin_dependent(DEPENDENT)
    pid = tl.program_id(0)
    row = pid // splits
    split = pid % splits
    batch = (row // num_slots).to(tl.int64)
    slot = (row % num_slots).to(tl.int64)
    base = logits + batch * stride_batch + slot * stride_slot
    ban_base = banned + batch * ban_batch + slot * ban_slot
    begin = split * split_length
    end = tl.minimum(begin + split_length, vocab)
    TILE: tl.constexpr = SLICES * GROUPS * WIDTH
    # In this order of axes a thread owns one group in all slices, so that no sum of the loop crosses threads.
    piece = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, SLICES)[None, :] * (GROUPS * WIDTH)
    offset = piece[:, :, None] + tl.arange(0, WIDTH)[None, None, :]
    m = tl.full([GROUPS], float("-inf"), tl.float32)
    s = tl.zeros([GROUPS], tl.float32)
    t = tl.zeros([GROUPS], tl.float32)
    drawn = tl.zeros([GROUPS], tl.float32)
    best = tl.full([GROUPS, SLICES], float("-inf"), tl.float32)
    second = tl.full([GROUPS, SLICES], float("-inf"), tl.float32)
    # No piece begins there, and neither does one of its ids overflow.
    index = tl.full([GROUPS, SLICES], 2147483647 - WIDTH, tl.int32)
    # Whole tiles need no mask; what is left of the split comes after them.
    whole = begin + (end - begin) // TILE * TILE
    for start in range(begin, whole, TILE):
        ids = start + offset
        x = tl.load(base + ids.to(tl.int64) * stride_vocab).to(tl.float32)
        allowed = x
        if BANNED:
            ban = tl.load(ban_base + ids.to(tl.int64) * ban_vocab)
            allowed = tl.where(ban != 0, float("-inf"), x)
        m, s, t, drawn, best, second, index = _absorb(
            x, allowed, start + piece, m, s, t, drawn, best, second, index, inverse_temperature,
            BANNED, ENTROPY, MARGIN, SAMPLE,
        )  # fmt: skip
        if TOP_K > 0:
            _keep_top(allowed, ids, top_values, top_ids, row.to(tl.int64) * tiles + start // TILE, vocab, TOP_K)
    for start in range(whole, end, TILE):
        ids = start + offset
        inside = ids < end
        x = tl.load(base + ids.to(tl.int64) * stride_vocab, mask=inside, other=float("-inf")).to(tl.float32)
        allowed = x
        if BANNED:
            ban = tl.load(ban_base + ids.to(tl.int64) * ban_vocab, mask=inside, other=1)
            allowed = tl.where(ban != 0, float("-inf"), x)
        m, s, t, drawn, best, second, index = _absorb(
            x, allowed, start + piece, m, s, t, drawn, best, second, index, inverse_temperature,
            BANNED, ENTROPY, MARGIN, SAMPLE,
        )  # fmt: skip
        if TOP_K > 0:
            _keep_top(allowed, ids, top_values, top_ids, row.to(tl.int64) * tiles + start // TILE, vocab, TOP_K)
    row_m = tl.max(m, axis=0)
    safe_m = tl.where(row_m == float("-inf"), 0.0, row_m)
    shift = tl.where(m == float("-inf"), 0.0, m - safe_m)
    scale = tl.exp(shift)
    peak = tl.max(best, axis=1)
    row_best = tl.max(peak, axis=0)
    row_index = tl.min(tl.min(tl.where(best == row_best, index, 2147483647 - WIDTH), axis=0), axis=0)
    out = partials + pid
    tl.store(out, row_m)
    tl.store(out + total, tl.sum(s * scale, axis=0))
    tl.store(out + 3 * total, row_best)
    tl.store(indices + pid, row_index)
    if ENTROPY:
        tl.store(out + 2 * total, tl.sum((t + s * shift) * scale, axis=0))
    if MARGIN:
        tl.store(out + 4 * total, tl.max(tl.max(tl.where(index == row_index, second, best), axis=0), axis=0))
    if SAMPLE:
        safe_best = tl.where(row_best == float("-inf"), 0.0, row_best)
        tl.store(out + 5 * total, tl.sum(drawn * tl.exp((peak - safe_best) * inverse_temperature), axis=0))


@jit
def _keep_top(allowed, ids, top_values, top_ids, tile, vocab, TOP_K: tl.constexpr):
    """Write the TOP_K best of a tile, best first."""
    for k in range(TOP_K):
        value = tl.max(tl.max(tl.max(allowed, axis=2), axis=1), axis=0)
        chosen = tl.where(allowed == value, ids, 2147483647)
        chosen_id = tl.min(tl.min(tl.min(chosen, axis=2), axis=1), axis=0)
        tl.store(top_values + tile * TOP_K + k, value)
        tl.store(top_ids + tile * TOP_K + k, tl.minimum(chosen_id, vocab - 1))
        allowed = tl.where(ids == chosen_id, float("-inf"), allowed)


@jit
def _combine_kernel(
    logits,
    banned,
    partials,
    indices,
    uniform,
    given,
    token_out,
    confidence_out,
    log_total_out,
    entropy_out,
    margin_out,
    num_slots,
    vocab,
    splits,
    split_length,
    total,
    stride_batch,
    stride_slot,
    stride_vocab,
    ban_batch,
    ban_slot,
    ban_vocab,
    inverse_temperature,
    DEPENDENT: tl.constexpr,
    BANNED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    SAMPLE: tl.constexpr,
    GIVEN: tl.constexpr,
    PROCESSED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: one row. Adds its splits up; draws the token (SAMPLE) or takes the one that was drawn elsewhere (GIVEN)."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0)
    batch = (row // num_slots).to(tl.int64)
    slot = (row % num_slots).to(tl.int64)
    base = logits + batch * stride_batch + slot * stride_slot
    lane = tl.arange(0, SPLITS)
    here = lane < splits
    part = partials + row * splits + lane
    m = tl.load(part, mask=here, other=float("-inf"))
    s = tl.load(part + total, mask=here, other=0.0)
    best = tl.load(part + 3 * total, mask=here, other=float("-inf"))
    index = tl.load(indices + row * splits + lane, mask=here, other=2147483647)
    row_m = tl.max(m, axis=0)
    safe_m = tl.where(row_m == float("-inf"), 0.0, row_m)
    shift = tl.where(m == float("-inf"), 0.0, m - safe_m)
    scale = tl.exp(shift)
    row_s = tl.sum(s * scale, axis=0)
    log_total = row_m + tl.log(row_s)
    row_best = tl.max(best, axis=0)
    row_index = tl.min(tl.where(best == row_best, index, 2147483647), axis=0)
    ban_base = banned + batch * ban_batch + slot * ban_slot
    # Nothing allowed, or no law at all: id 0 stands in, as arg-max has it.
    token = tl.where(row_best == float("-inf"), 0, tl.minimum(row_index, vocab - 1))
    if not SAMPLE and not GIVEN:
        ids = row_index + tl.arange(0, WIDTH)
        inside = ids < vocab
        x = tl.load(base + ids.to(tl.int64) * stride_vocab, mask=inside, other=float("-inf")).to(tl.float32)
        if BANNED:
            ban = tl.load(ban_base + ids.to(tl.int64) * ban_vocab, mask=inside, other=1)
            x = tl.where(ban != 0, float("-inf"), x)
        token = tl.where(
            row_best == float("-inf"), 0, tl.minimum(tl.min(tl.where(x == row_best, ids, vocab), axis=0), vocab - 1)
        )
    tl.store(log_total_out + row, log_total)
    if ENTROPY:
        t = tl.load(part + 2 * total, mask=here, other=0.0)
        tl.store(entropy_out + row, tl.log(row_s) - tl.sum((t + s * shift) * scale, axis=0) / row_s)
    if MARGIN:
        second = tl.load(part + 4 * total, mask=here, other=float("-inf"))
        runner_up = tl.max(tl.where(index == row_index, second, best), axis=0)
        tl.store(margin_out + row, (tl.exp(row_best - safe_m) - tl.exp(runner_up - safe_m)) / row_s)
    if GIVEN:
        token = tl.load(given + row).to(tl.int32)
    if SAMPLE:
        safe_best = tl.where(row_best == float("-inf"), 0.0, row_best)
        drawn = tl.load(part + 5 * total, mask=here, other=0.0)
        drawn = drawn * tl.exp((best - safe_best) * inverse_temperature)
        mass = tl.sum(drawn, axis=0)
        target = tl.load(uniform + row) * mass
        cumulative = tl.cumsum(drawn, axis=0)
        # Sums of a scan need not be monotone to the last bit: the first split with mass that passes the target.
        passing = (cumulative > target) & (drawn > 0)
        last = tl.max(tl.where(drawn > 0, lane, 0), axis=0)
        chosen = tl.minimum(tl.min(tl.where(passing, lane, SPLITS), axis=0), last)
        carry = tl.sum(tl.where(lane < chosen, drawn, 0.0), axis=0)
        begin = chosen * split_length
        end = tl.minimum(begin + split_length, vocab)
        # Sums with the program's number, so that both are tensors from the start.
        last_id = row * 0
        first_id = last_id + vocab
        for start in range(begin, end, TILE):
            ids = start + tl.arange(0, TILE)
            inside = ids < end
            x = tl.load(base + ids.to(tl.int64) * stride_vocab, mask=inside, other=float("-inf")).to(tl.float32)
            if BANNED:
                ban = tl.load(ban_base + ids.to(tl.int64) * ban_vocab, mask=inside, other=1)
                x = tl.where(ban != 0, float("-inf"), x)
            e = tl.exp((x - safe_best) * inverse_temperature)
            passed = (tl.cumsum(e, axis=0) + carry > target) & (e > 0)
            first_id = tl.minimum(first_id, tl.min(tl.where(passed, ids, vocab), axis=0))
            last_id = tl.maximum(last_id, tl.max(tl.where(e > 0, ids, 0), axis=0))
            carry += tl.sum(e, axis=0)
        # Rounding may leave the split's sum short of the target: then its last id with mass.
        token = tl.where(first_id == vocab, last_id, first_id)
    confidence = tl.exp(row_best - safe_m) / row_s
    if SAMPLE or GIVEN:
        x = tl.load(base + token.to(tl.int64) * stride_vocab).to(tl.float32)
        confidence = tl.exp(x - safe_m) / row_s
        if PROCESSED:
            confidence = tl.exp((x - safe_best) * inverse_temperature) / mass
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(confidence_out + row, confidence)


class Split(NamedTuple):
    """How the vocabulary is cut: ids of a tile, splits, ids of a split (a multiple of the tile), tiles of a row."""

    tile: int
    splits: int
    split_length: int
    tiles: int


def split_of(rows: int, vocab: int, sample: bool, device: torch.device) -> Split:
    """Enough programs for 8 on every multiprocessor; under sampling at least 16 splits, since one of them is read again."""
    wanted = 8 * multiprocessors(device)
    tile = 4096 if rows * ceil_div(vocab, 4096) * 4 >= wanted else 2048
    tiles = ceil_div(vocab, tile)
    splits = min(max(ceil_div(wanted, rows), 16 if sample else 1), tiles)
    length = ceil_div(tiles, splits) * tile
    return Split(tile, ceil_div(vocab, length), length, tiles)


class RowNumbers(NamedTuple):
    """Raw results of the two launches: token [B, S] int64, the rest fp32 [B, S] or None; top: see ``TopK``."""

    token: Tensor
    confidence: Tensor
    log_total: Tensor
    entropy: Tensor | None
    margin: Tensor | None
    top: TopK | None


def row_numbers_triton(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    processed_confidence: bool = False,
    given: Tensor | None = None,
    top_k: int = 0,
    split: Split | None = None,
) -> RowNumbers:
    """Launch the kernels on one tensor of logits. given [B, S] int64: take these tokens instead of choosing; split: override."""
    require_launchable(logits, "logits")
    batch, slots, vocab = logits.shape
    rows, device = batch * slots, logits.device
    sample = temperature > 0 and given is None
    entropy, margin = "entropy" in needs, "margin" in needs
    cut = split or split_of(max(rows, 1), vocab, sample, device)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    token = torch.empty(batch, slots, dtype=torch.int64, device=device)
    confidence, log_total = numbers(batch, slots), numbers(batch, slots)
    entropy_out = numbers(batch, slots) if entropy else log_total
    margin_out = numbers(batch, slots) if margin else log_total
    top_values = numbers(rows, cut.tiles, top_k) if top_k else log_total
    top_ids = torch.empty(rows, cut.tiles, top_k, dtype=torch.int32, device=device) if top_k else token
    if rows:
        total = rows * cut.splits
        partials = numbers(6, total)
        indices = torch.empty(total, dtype=torch.int32, device=device)
        ban = logits if banned is None else banned.expand(batch, slots, vocab).view(torch.uint8)
        strides = (*logits.stride(), *((0, 0, 0) if banned is None else ban.stride()))
        inverse = 1.0 / temperature if temperature > 0 else 1.0
        # Eight programs of 128 threads fill a multiprocessor at 64 registers, which the shortest variant needs a few more than.
        limit = {} if entropy or margin or sample or top_k or not logits.is_cuda else {"maxnreg": 64}
        groups = min(_GROUPS, cut.tile // _WIDTH)
        # A few numbers a row come out, however wide the rows are: an early launch takes room from nothing.
        common = dict(BANNED=banned is not None, ENTROPY=entropy, MARGIN=margin, SAMPLE=sample, **dependent(confidence))
        _partials_kernel[(total,)](
            logits, ban, partials, indices, top_values, top_ids,
            slots, vocab, cut.splits, cut.split_length, cut.tiles, total, *strides, inverse,
            **common, TOP_K=top_k, SLICES=cut.tile // (groups * _WIDTH), GROUPS=groups, WIDTH=_WIDTH, num_warps=4,
            **limit,
        )  # fmt: skip
        _combine_kernel[(rows,)](
            logits, ban, partials, indices,
            uniform.contiguous() if sample and uniform is not None else log_total,
            token if given is None else given.contiguous(),
            token, confidence, log_total, entropy_out, margin_out,
            slots, vocab, cut.splits, cut.split_length, total, *strides, inverse,
            **common, GIVEN=given is not None, PROCESSED=processed_confidence and sample,
            SPLITS=next_power_of_2(cut.splits), TILE=2048, WIDTH=_WIDTH, num_warps=4 if sample else 1,
        )  # fmt: skip
    top = None
    if top_k:
        # Tiles are in the order of ids, and a stable sort keeps it among equals.
        ranked, order = top_values.flatten(1).sort(dim=-1, descending=True, stable=True)
        ids = top_ids.flatten(1).gather(1, order[:, :top_k]).long().view(batch, slots, top_k)
        values = ranked[:, :top_k].reshape(batch, slots, top_k)
        top = TopK(ids, values, (values - log_total[..., None]).exp().sum(-1))
    return RowNumbers(
        token, confidence, log_total, entropy_out if entropy else None, margin_out if margin else None, top
    )


def row_stats_triton(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    law: Tensor | None = None,
    processed_confidence: bool = False,
    previous: Tensor | None = None,
) -> RowStats:
    """Launch the kernels; arguments and result as ``row_stats``."""
    given = confidence = None
    if temperature > 0 and law is not None:
        # The law that is drawn from is another tensor: it is read once for the token, the logits once for their statistics.
        drawn = row_numbers_triton(law, frozenset(), banned, uniform, 1.0, processed_confidence)
        given, confidence = drawn.token, drawn.confidence
    out = row_numbers_triton(logits, needs, banned, uniform, temperature, processed_confidence and law is None, given)
    return RowStats(
        token=out.token,
        confidence=confidence if processed_confidence and confidence is not None else out.confidence,
        entropy=out.entropy,
        margin=out.margin,
        logits=logits.float() if "logits" in needs or "previous" in needs else None,
        previous=previous if "previous" in needs else None,
        log_total=out.log_total,
    )


def row_stats(
    logits: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    law: Tensor | None = None,
    processed_confidence: bool = False,
    previous: Tensor | None = None,
) -> RowStats:
    """Top token, its probability, entropy and margin of each row, or a token drawn with ``uniform``, in one read.

    Arguments, results and errors: ``row_stats_reference``, which runs on the CPU and for fp64. The kernel sums in fp32 where the
    reference inverts in fp64, so a drawn token is the same unless ``uniform`` lies within 1e-5 of a border of the cumulative law.
    """
    if logits.dim() != 3 or logits.shape[-1] < 1:
        raise ValueError(f"logits must be [B, S, V] with V >= 1: got shape {tuple(logits.shape)}")
    if temperature > 0 and uniform is None:
        raise ValueError("uniform must be given when temperature > 0: got None")
    fits = logits.dtype != torch.float64 and (law is None or law.dtype != torch.float64)
    function = row_stats_triton if fits and use_triton(logits) else row_stats_reference
    return function(logits, needs, banned, uniform, temperature, law, processed_confidence, previous)


def top_k(logits: Tensor, k: int, banned: Tensor | None = None) -> TopK:
    """The k best allowed ids of logits [B, S, V] and their mass, in one read. Raises ValueError unless 1 <= k <= min(32, V)."""
    if not 1 <= k <= min(32, logits.shape[-1]):
        raise ValueError(f"k must be in 1..min(32, V = {logits.shape[-1]}): got {k}")
    if logits.dtype == torch.float64 or not use_triton(logits):
        return top_k_reference(logits, k, banned)
    result = row_numbers_triton(logits, banned=banned, top_k=k).top
    assert result is not None, "top_k > 0 gives the best ids"
    return result
