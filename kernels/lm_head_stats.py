"""Statistics of the LM head's rows without the logits: product, statistics and choice in one read of the weight.

Formula: l = hidden weight^T in fp32, then ``row_stats`` on l: top token, probability, log-sum-exp, entropy, margin, a token drawn by
inversion; also log-probabilities of given ids and the k best candidates. The logits of a tile of BLOCK_V ids live in registers and
leave as a few numbers a row.

Launches: (1) one program a tile of the vocabulary (and 64 rows): product and partial statistics; (2) one program a row adds the tiles
up. Drawing needs no second read: the tiles' sums say in which tile the cumulative sum passes the number, and the logits of that one
tile are computed again (3) and scanned (4).

Bytes moved: V * D * itemsize (the weight, once for every 64 rows), R * D * itemsize from the cache for every tile, 24 a row and tile;
drawing: BLOCK_V * D * itemsize a row more; given ids: D * itemsize each. The limit is HBM bandwidth up to 64 rows.
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from dllm.kernels._launch import (
    begin_dependent,
    ceil_div,
    dependent,
    interpreted,
    jit,
    next_power_of_2,
    prefetch_lines,
    require_launchable,
    tl,
    use_triton,
)
from dllm.kernels.row_stats import row_stats_reference, top_k_reference
from dllm.types import RowStats

MAX_CANDIDATES = 32


class HeadStats(NamedTuple):
    """Leading shape as ``hidden`` [..., D]; what was not asked for is None.

    token [...] int64; confidence, log_total, entropy (nats), margin [...] fp32; log_probs [..., n] fp32 of the given ids; top_ids [...,
    k] int64 and top_values [..., k] fp32: the best allowed ids and their logits, best first, ties by the lower id.
    """

    token: Tensor
    confidence: Tensor
    log_total: Tensor
    entropy: Tensor | None = None
    margin: Tensor | None = None
    log_probs: Tensor | None = None
    top_ids: Tensor | None = None
    top_values: Tensor | None = None

    def row_stats(self) -> RowStats:
        """The same numbers as the samplers read them."""
        return RowStats(self.token, self.confidence, self.entropy, self.margin, log_total=self.log_total)


class HeadTiles(NamedTuple):
    """block_rows, block_vocab, block_width: the tile of one program; powers of two, at least 16. num_stages: loads in flight."""

    block_rows: int
    block_vocab: int
    block_width: int
    num_warps: int
    num_stages: int


def lm_head_stats_reference(
    hidden: Tensor,
    weight: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    ids: Tensor | None = None,
    candidates: int = 0,
    round_logits: bool = False,
    processed_confidence: bool = False,
    drop_banned: bool = False,
) -> HeadStats:
    """Plain PyTorch truth.

    hidden [..., D], weight [V, D] of one float dtype; needs: "entropy", "margin" beside token and confidence; banned [V] bool: ids
    never chosen nor candidates (they keep their mass); uniform [...] fp32 in (0, 1): with temperature > 0 the token is drawn from
    softmax(l / temperature) by inverting its cumulative sum; ids [..., n] int64: whose log-probabilities are wanted; candidates: how
    many best ids (<= 32); round_logits: round each logit to ``hidden``'s dtype first, as a head that writes its logits does (more ties,
    then); processed_confidence: the drawn token's probability under the law that it was drawn from;
    drop_banned: banned ids have no mass either, so that all numbers are of the law over the others.
    """
    logits = linear(hidden.float(), weight.float())
    if round_logits:
        logits = logits.to(hidden.dtype).float()
    if drop_banned and banned is not None:
        # A NaN is a fault wherever it stands, and stays.
        logits = logits.masked_fill(banned & ~logits.isnan(), -torch.inf)
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(1, -1, vocab)
    number = None if uniform is None else uniform.reshape(1, -1)
    stats = row_stats_reference(
        flat, needs & {"entropy", "margin"}, banned, number, temperature, None, processed_confidence
    )
    assert stats.log_total is not None, "the reference gives log_total"
    log_probs = None if ids is None else logits.gather(-1, ids) - stats.log_total.reshape(*lead, 1)
    top = top_k_reference(logits, candidates, banned) if candidates else None
    return HeadStats(
        stats.token.reshape(lead),
        stats.confidence.reshape(lead),
        stats.log_total.reshape(lead),
        None if stats.entropy is None else stats.entropy.reshape(lead),
        None if stats.margin is None else stats.margin.reshape(lead),
        log_probs,
        None if top is None else top.ids,
        None if top is None else top.values,
    )


@jit
def _partials_kernel(
    hidden,
    weight,
    banned,
    partials,
    indices,
    top_values,
    top_ids,
    rows,
    vocab,
    width,
    row_tiles,
    tiles,
    total,
    stride_hidden,
    stride_weight,
    inverse_temperature,
    DEPENDENT: tl.constexpr,
    BANNED: tl.constexpr,
    DROP: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    SAMPLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ROUND: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_V ids of BLOCK_R rows. partials [6, rows, tiles]: m, s, t, best, second, drawn sum; indices: the best id."""
    pid = tl.program_id(0)
    # Programs of one tile of the vocabulary are neighbours, so that further rows find its weights in the cache.
    tile = pid // row_tiles
    row = (pid % row_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    # What overruns reads the last row again (no mask in the loop) and is taken out after the product.
    id_read = tl.minimum(ids, vocab - 1).to(tl.int64)
    row_read = tl.minimum(row, rows - 1).to(tl.int64)
    weight_at = weight + id_read[:, None] * stride_weight + column[None, :]
    hidden_at = hidden + row_read[None, :] * stride_hidden + column[:, None]
    if DEPENDENT:
        # The weight depends on nobody: its first lines are on their way while the kernel before still computes hidden.
        line = tl.arange(0, 4) * (128 // (weight.dtype.element_ty.primitive_bitwidth // 8))
        prefetch_lines(weight + id_read[:, None] * stride_weight + tl.minimum(line, width - 1)[None, :])
    begin_dependent(DEPENDENT)
    x = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    for start in range(0, width, BLOCK_D):
        if EVEN:
            w = tl.load(weight_at, eviction_policy="evict_first")
            h = tl.load(hidden_at, eviction_policy="evict_last")
        else:
            left = width - start
            w = tl.load(weight_at, mask=column[None, :] < left, other=0.0)
            h = tl.load(hidden_at, mask=column[:, None] < left, other=0.0)
        if UPCAST:
            # The interpreter multiplies the bits of bf16 as integers.
            w = w.to(tl.float32)
            h = h.to(tl.float32)
        x = tl.dot(w, h, x, input_precision="ieee")
        weight_at += BLOCK_D
        hidden_at += BLOCK_D
    if ROUND:
        x = x.to(hidden.dtype.element_ty).to(tl.float32)
    x = tl.where(ids[:, None] < vocab, x, float("-inf"))
    if DROP:
        dropped = tl.load(banned + ids, mask=ids < vocab, other=1)[:, None] != 0
        # A NaN is a fault wherever it stands, and stays.
        x = tl.where(dropped & (x == x), float("-inf"), x)
    out = partials + row.to(tl.int64) * tiles + tile
    there = row < rows
    m = tl.max(x, axis=0)
    safe = tl.where(m == float("-inf"), 0.0, m)
    e = tl.exp(x - safe[None, :])
    tl.store(out, m, mask=there)
    tl.store(out + total, tl.sum(e, axis=0), mask=there)
    if ENTROPY:
        t = tl.sum(e * tl.where(x == float("-inf"), 0.0, x - safe[None, :]), axis=0)
        tl.store(out + 2 * total, t, mask=there)
    best = m
    if BANNED:
        ban = tl.load(banned + ids, mask=ids < vocab, other=1)
        x = tl.where(ban[:, None] != 0, float("-inf"), x)
        best = tl.max(x, axis=0)
    index = tl.min(tl.where(x == best[None, :], ids[:, None], 2147483647), axis=0)
    tl.store(out + 3 * total, best, mask=there)
    tl.store(indices + row.to(tl.int64) * tiles + tile, index, mask=there)
    if MARGIN:
        rest = tl.where(ids[:, None] == index[None, :], float("-inf"), x)
        tl.store(out + 4 * total, tl.max(rest, axis=0), mask=there)
    if SAMPLE:
        top = tl.where(best == float("-inf"), 0.0, best)
        drawn = tl.sum(tl.exp((x - top[None, :]) * inverse_temperature), axis=0)
        tl.store(out + 5 * total, drawn, mask=there)
    if CANDIDATES > 0:
        at = (row.to(tl.int64) * tiles + tile) * CANDIDATES
        for k in range(CANDIDATES):
            value = tl.max(x, axis=0)
            chosen = tl.min(tl.where(x == value[None, :], ids[:, None], 2147483647), axis=0)
            tl.store(top_values + at + k, value, mask=there)
            tl.store(top_ids + at + k, tl.minimum(chosen, vocab - 1), mask=there)
            x = tl.where(ids[:, None] == chosen[None, :], float("-inf"), x)


@jit
def _combine_kernel(
    partials,
    indices,
    uniform,
    token_out,
    confidence_out,
    log_total_out,
    entropy_out,
    margin_out,
    chosen_out,
    numbers_out,
    rows,
    vocab,
    tiles,
    total,
    inverse_temperature,
    DEPENDENT: tl.constexpr,
    ENTROPY: tl.constexpr,
    MARGIN: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: one row. Adds its tiles up; under SAMPLE writes the ids of the tile to draw from, and what the scan needs."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0)
    lane = tl.arange(0, TILES)
    here = lane < tiles
    place = row.to(tl.int64) * tiles + lane
    part = partials + place
    m = tl.load(part, mask=here, other=float("-inf"))
    s = tl.load(part + total, mask=here, other=0.0)
    best = tl.load(part + 3 * total, mask=here, other=float("-inf"))
    index = tl.load(indices + place, mask=here, other=2147483647)
    row_m = tl.max(m, axis=0)
    safe_m = tl.where(row_m == float("-inf"), 0.0, row_m)
    shift = tl.where(m == float("-inf"), 0.0, m - safe_m)
    scale = tl.exp(shift)
    row_s = tl.sum(s * scale, axis=0)
    row_best = tl.max(best, axis=0)
    row_index = tl.min(tl.where(best == row_best, index, 2147483647), axis=0)
    token = tl.where(row_best == float("-inf"), 0, tl.minimum(row_index, vocab - 1))
    log_total = row_m + tl.log(row_s)
    tl.store(log_total_out + row, log_total)
    if ENTROPY:
        t = tl.load(part + 2 * total, mask=here, other=0.0)
        tl.store(entropy_out + row, tl.log(row_s) - tl.sum((t + s * shift) * scale, axis=0) / row_s)
    if MARGIN:
        second = tl.load(part + 4 * total, mask=here, other=float("-inf"))
        runner_up = tl.max(tl.where(index == row_index, second, best), axis=0)
        tl.store(margin_out + row, (tl.exp(row_best - safe_m) - tl.exp(runner_up - safe_m)) / row_s)
    if SAMPLE:
        safe_best = tl.where(row_best == float("-inf"), 0.0, row_best)
        drawn = tl.load(part + 5 * total, mask=here, other=0.0)
        drawn = drawn * tl.exp((best - safe_best) * inverse_temperature)
        mass = tl.sum(drawn, axis=0)
        target = tl.load(uniform + row) * mass
        # Sums of a scan need not be monotone to the last bit: the first tile with mass that passes the target.
        passing = (tl.cumsum(drawn, axis=0) > target) & (drawn > 0)
        last = tl.max(tl.where(drawn > 0, lane, 0), axis=0)
        chosen = tl.minimum(tl.min(tl.where(passing, lane, TILES), axis=0), last)
        before = tl.sum(tl.where(lane < chosen, drawn, 0.0), axis=0)
        ids = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
        tl.store(chosen_out + row.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V), ids.to(tl.int64))
        tl.store(numbers_out + row, target - before)
        tl.store(numbers_out + rows + row, safe_best)
        tl.store(numbers_out + 2 * rows + row, mass)
    else:
        tl.store(token_out + row, token.to(tl.int64))
        tl.store(confidence_out + row, tl.exp(row_best - safe_m) / row_s)


@jit
def _logits_of_ids_kernel(
    hidden,
    weight,
    ids,
    out,
    log_total,
    vocab,
    width,
    count,
    stride_hidden,
    stride_weight,
    DEPENDENT: tl.constexpr,
    LOG: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_K of a row's ids [rows, count]: logits, or under LOG log-probabilities; -inf outside the vocabulary."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = slot < count
    wanted = tl.load(ids + row * count + slot, mask=there, other=0)
    known = (wanted >= 0) & (wanted < vocab)
    place = tl.where(known, wanted, 0)
    x = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < width
        h = tl.load(hidden + row * stride_hidden + column, mask=inside, other=0.0).to(tl.float32)
        at = weight + place[:, None] * stride_weight + column[None, :]
        w = tl.load(at, mask=inside[None, :] & there[:, None], other=0.0).to(tl.float32)
        x += tl.sum(w * h[None, :], axis=1)
    if ROUND:
        x = x.to(hidden.dtype.element_ty).to(tl.float32)
    if LOG:
        x = x - tl.load(log_total + row)
    tl.store(out + row * count + slot, tl.where(known, x, float("-inf")), mask=there)


@jit
def _pick_kernel(
    logits,
    chosen,
    banned,
    numbers,
    log_total,
    token_out,
    confidence_out,
    rows,
    vocab,
    inverse_temperature,
    DEPENDENT: tl.constexpr,
    BANNED: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: one row. The first id of its tile whose cumulative mass passes the target."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK_V)
    x = tl.load(logits + row.to(tl.int64) * BLOCK_V + lane)
    first = tl.load(chosen + row.to(tl.int64) * BLOCK_V).to(tl.int32)
    ids = first + lane
    allowed = x
    if BANNED:
        ban = tl.load(banned + ids, mask=ids < vocab, other=1)
        allowed = tl.where(ban != 0, float("-inf"), x)
    target = tl.load(numbers + row)
    best = tl.load(numbers + rows + row)
    e = tl.exp((allowed - best) * inverse_temperature)
    passed = (tl.cumsum(e, axis=0) > target) & (e > 0)
    last = tl.max(tl.where(e > 0, lane, 0), axis=0)
    # Rounding may leave the tile's sum short of the target: then its last id with mass.
    place = tl.minimum(tl.min(tl.where(passed, lane, BLOCK_V), axis=0), last)
    value = tl.sum(tl.where(lane == place, x, 0.0), axis=0)
    tl.store(token_out + row, (first + place).to(tl.int64))
    if PROCESSED:
        confidence = tl.exp((value - best) * inverse_temperature) / tl.load(numbers + 2 * rows + row)
    else:
        confidence = tl.exp(value - tl.load(log_total + row))
    tl.store(confidence_out + row, confidence)


def tiles_of(rows: int, vocab: int, width: int) -> HeadTiles:
    """The tile by shape: 128 ids; where the vocabulary or the width is small, with one load fewer in flight, so that more programs share
    a multiprocessor and a head of 50,000 ids is one wave of them (19.8 us on an H200, with 64 ids 21.1)."""
    if rows > 64 and width >= 64:
        # Bound by arithmetic: square tiles, which need the fewest reads of both operands.
        return HeadTiles(128, 128, 64, num_warps=8, num_stages=3)
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_width = 64 if width >= 64 else max(16, next_power_of_2(width))
    return HeadTiles(block_rows, 128, block_width, num_warps=4, num_stages=4 if vocab * width >= 2**27 else 3)


def lm_head_stats_triton(
    hidden: Tensor,
    weight: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    ids: Tensor | None = None,
    candidates: int = 0,
    round_logits: bool = False,
    processed_confidence: bool = False,
    drop_banned: bool = False,
    tiles: HeadTiles | None = None,
) -> HeadStats:
    """Launch the kernels; arguments and result as ``lm_head_stats``. tiles: override of ``tiles_of``."""
    require_launchable(hidden, "hidden")
    lead, width, vocab, device = hidden.shape[:-1], hidden.shape[-1], weight.shape[0], hidden.device
    flat = hidden.reshape(-1, width)
    # The kernels step by one along the width.
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    rows, sample = flat.shape[0], temperature > 0
    entropy, margin = "entropy" in needs, "margin" in needs
    tile = tiles or tiles_of(rows, vocab, width)
    num_tiles = ceil_div(vocab, tile.block_vocab)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    token = torch.empty(rows, dtype=torch.int64, device=device)
    confidence, log_total = numbers(rows), numbers(rows)
    entropy_out = numbers(rows) if entropy else log_total
    margin_out = numbers(rows) if margin else log_total
    top_values = numbers(rows, num_tiles, candidates) if candidates else log_total
    top_ids = torch.empty(rows, num_tiles, candidates, dtype=torch.int32, device=device) if candidates else token
    log_probs = None
    if rows:
        total, row_tiles = rows * num_tiles, ceil_div(rows, tile.block_rows)
        partials = numbers(6, total)
        indices = torch.empty(total, dtype=torch.int32, device=device)
        ban = token if banned is None else banned.contiguous().view(torch.uint8)
        inverse = 1.0 / temperature if sample else 1.0
        # Programs that fill the device with reads of the weight gain nothing by standing ready; the short ones after them do.
        _partials_kernel[(num_tiles * row_tiles,)](
            flat, weight, ban, partials, indices, top_values, top_ids,
            rows, vocab, width, row_tiles, num_tiles, total, flat.stride(0), weight.stride(0), inverse,
            BANNED=banned is not None, DROP=drop_banned and banned is not None, ENTROPY=entropy, MARGIN=margin, SAMPLE=sample,
            CANDIDATES=candidates, ROUND=round_logits,
            EVEN=width % tile.block_width == 0, UPCAST=interpreted(),
            BLOCK_R=tile.block_rows, BLOCK_V=tile.block_vocab, BLOCK_D=tile.block_width,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(weight),
        )  # fmt: skip
        chosen = torch.empty(rows, tile.block_vocab, dtype=torch.int64, device=device) if sample else token
        remainder = numbers(3, rows) if sample else log_total
        number = uniform.reshape(-1).contiguous() if sample and uniform is not None else log_total
        _combine_kernel[(rows,)](
            partials, indices, number, token, confidence, log_total, entropy_out, margin_out, chosen, remainder,
            rows, vocab, num_tiles, total, inverse,
            ENTROPY=entropy, MARGIN=margin, SAMPLE=sample, TILES=next_power_of_2(num_tiles), BLOCK_V=tile.block_vocab,
            num_warps=4, **dependent(confidence),
        )  # fmt: skip
        if sample:
            logits = _logits_of_ids(flat, weight, chosen, None, round_logits)
            _pick_kernel[(rows,)](
                logits, chosen, ban, remainder, log_total, token, confidence, rows, vocab, inverse,
                BANNED=banned is not None, PROCESSED=processed_confidence, BLOCK_V=tile.block_vocab, num_warps=1, **dependent(confidence),
            )  # fmt: skip
    if ids is not None:
        log_probs = _logits_of_ids(
            flat, weight, ids.reshape(rows, ids.shape[-1]).contiguous(), log_total, round_logits
        ).reshape(ids.shape)
        if drop_banned and banned is not None:
            log_probs = log_probs.masked_fill(banned[ids.clamp(0, vocab - 1)], -torch.inf)
    best_ids = best_values = None
    if candidates:
        # Tiles are in the order of ids, and a stable sort keeps it among equals.
        ranked, order = top_values.flatten(1).sort(dim=-1, descending=True, stable=True)
        best_ids = top_ids.flatten(1).gather(1, order[:, :candidates]).long().view(*lead, candidates)
        best_values = ranked[:, :candidates].reshape(*lead, candidates)
    return HeadStats(
        token.view(lead),
        confidence.view(lead),
        log_total.view(lead),
        entropy_out.view(lead) if entropy else None,
        margin_out.view(lead) if margin else None,
        log_probs,
        best_ids,
        best_values,
    )


def _logits_of_ids(flat: Tensor, weight: Tensor, ids: Tensor, log_total: Tensor | None, round_logits: bool) -> Tensor:
    """flat [R, D], ids [R, n] contiguous -> fp32 [R, n]: logits, or log-probabilities where log_total [R] is given."""
    rows, count = ids.shape
    out = torch.empty(rows, count, dtype=torch.float32, device=flat.device)
    if rows and count:
        block = min(16, next_power_of_2(count))
        _logits_of_ids_kernel[(rows, ceil_div(count, block))](
            flat, weight, ids, out, out if log_total is None else log_total,
            weight.shape[0], flat.shape[1], count, flat.stride(0), weight.stride(0),
            LOG=log_total is not None, ROUND=round_logits, BLOCK_K=block, BLOCK_D=min(512, next_power_of_2(flat.shape[1])), num_warps=4,
            **dependent(flat),
        )  # fmt: skip
    return out


def lm_head_stats(
    hidden: Tensor,
    weight: Tensor,
    needs: frozenset[str] = frozenset({"top1"}),
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 0.0,
    ids: Tensor | None = None,
    candidates: int = 0,
    round_logits: bool = False,
    processed_confidence: bool = False,
    drop_banned: bool = False,
) -> HeadStats:
    """Head product and row statistics in one read of the weight; the logits are never written.

    Arguments and results: ``lm_head_stats_reference``, which runs on the CPU. Products are summed in fp32 (fp32 inputs without TF32),
    so tokens differ from the reference only where two logits lie within rounding; a drawn token is the same unless ``uniform`` lies
    within 1e-5 (fp32) of a border of the cumulative law. Raises ValueError for shapes, types or numbers that do not fit.
    """
    if hidden.shape[-1] != weight.shape[-1] or weight.dim() != 2 or hidden.dim() < 1:
        raise ValueError(
            f"weight must be [V, D] for hidden [..., D]: got {tuple(weight.shape)} and {tuple(hidden.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden and weight must be of one float dtype: got {hidden.dtype} and {weight.dtype}")
    unknown = needs - {"top1", "entropy", "margin"}
    if unknown:
        raise ValueError(f"needs must be among top1, entropy, margin (no logits are kept): got {sorted(unknown)}")
    vocab = weight.shape[0]
    if banned is not None and (banned.shape != (vocab,) or banned.dtype != torch.bool):
        raise ValueError(f"banned must be bool [V = {vocab}]: got {banned.dtype} {tuple(banned.shape)}")
    if temperature > 0 and (uniform is None or uniform.shape != hidden.shape[:-1]):
        got = None if uniform is None else tuple(uniform.shape)
        raise ValueError(f"uniform must be {tuple(hidden.shape[:-1])} when temperature > 0: got {got}")
    if not 0 <= candidates <= min(MAX_CANDIDATES, vocab):
        raise ValueError(f"candidates must be in 0..min({MAX_CANDIDATES}, V = {vocab}): got {candidates}")
    if ids is not None and (ids.dtype != torch.int64 or ids.shape[:-1] != hidden.shape[:-1]):
        raise ValueError(f"ids must be int64 {(*hidden.shape[:-1], 'n')}: got {ids.dtype} {tuple(ids.shape)}")
    fits = hidden.dtype != torch.float64 and use_triton(hidden)
    function = lm_head_stats_triton if fits else lm_head_stats_reference
    return function(
        hidden,
        weight,
        needs,
        banned,
        uniform,
        temperature,
        ids,
        candidates,
        round_logits,
        processed_confidence,
        drop_banned,
    )
