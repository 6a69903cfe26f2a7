"""Attention of new rows over the stored keys and themselves, with the two rules of ``Attend`` as data.

Letters: B batch, Q new rows, N stored keys, H query heads, K key heads, G = H / K, D head width, M = Q * G rows of a tile, T key tiles.

    o[q] = sum_n p[q, n] v[n],  p = softmax over the visible n of scale * q . k[n]
    visible: stored n with low[q] <= key_group[n] <= group[q], key_group[n] < PADDING_GROUP and, with a window, position[q] -
    key_position[n] < window;
             new n whose bit is set in bits[q]

Bytes moved: each visible K and V row once, 2 * B * K * n * D * itemsize; the limit is HBM bandwidth up to about M = 128 rows a key head,
matrix units above. All G * Q rows of a key head share one tile, so grouped heads read their keys once. The running softmax is that of
FlashAttention (Dao et al. 2022), the split over keys with a second pass that joins the parts that of Flash-Decoding (Dao et al. 2023).

The masks of all layers are one: ``plan_tiles`` reads key_group once a forward and lists, per sequence, the key tiles that somebody sees,
those that everybody sees first. A tile that nobody sees is never read, a tile that everybody sees is computed without a mask. Lengths
therefore need no argument: rows past a sequence's end are padding for the rules. The list and its length stay on the device, so a
captured graph serves every length up to its N.

fp32 accumulation; p is rounded to the dtype of v before the second product; fp32 inputs are multiplied in three tf32 parts (about
2^-21). A row that sees nothing gives zeros. Stored rows under unseen keys must be finite where their tile is read (a new store holds
zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dllm.kernels._launch import (
    begin_dependent,
    ceil_div,
    dependent,
    interpreted,
    jit,
    multiprocessors,
    next_power_of_2,
    require_launchable,
    tl,
    use_triton,
)
from dllm.types import PADDING_GROUP, Attend

TILE = 64
"""Keys in one tile: as many as a word of ``Attend.bits`` holds."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Which tiles of ``tile`` stored keys each sequence reads; good for every layer of one forward.

    index [B, T] int32: tile numbers, those that every row sees entirely first, then those that need the mask; count [B, 2] int32:
    tiles of the first kind, tiles of both kinds. What stands in ``index`` beyond is undefined.
    """

    index: Tensor
    count: Tensor
    tile: int


def plan_tiles_reference(attend: Attend, tile: int = TILE) -> TilePlan:
    """Truth of ``plan_tiles``: by the rules' extremes over the rows, not by the full mask (a tile may be read for nothing)."""
    batch, keys = attend.key_group.shape
    tiles = ceil_div(keys, tile)
    padded = F.pad(attend.key_group, (0, tiles * tile - keys), value=PADDING_GROUP)
    real = padded < PADDING_GROUP
    some = real & (padded >= attend.low.amin(1, keepdim=True)) & (padded <= attend.group.amax(1, keepdim=True))
    every = real & (padded >= attend.low.amax(1, keepdim=True)) & (padded <= attend.group.amin(1, keepdim=True))
    if attend.window is not None:
        assert attend.position is not None and attend.key_position is not None, "a window needs positions"
        place = F.pad(attend.key_position, (0, tiles * tile - keys))
        some = some & (attend.position.amin(1, keepdim=True) - place < attend.window)
        every = every & (attend.position.amax(1, keepdim=True) - place < attend.window)
    read = some.view(batch, tiles, tile).any(-1)
    full = every.view(batch, tiles, tile).all(-1)
    order = torch.where(full, 0, torch.where(read, 1, 2)).sort(dim=1, stable=True).indices
    count = torch.stack([full.sum(1), (read | full).sum(1)], dim=1)
    return TilePlan(order.to(torch.int32), count.to(torch.int32), tile)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Truth of ``attention``: the dense mask and PyTorch's own attention."""
    mask = attend.mask()
    if keys is not None and values is not None:
        k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
    groups = q.shape[1] // k.shape[1]
    grouped = rearrange(q, "b (k g) q d -> b k (g q) d", g=groups)
    mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask.repeat(1, groups, 1)[:, None], scale=scale)
    return rearrange(mixed, "b k (g q) d -> b q (k g d)", g=groups)


@jit
def _plan_kernel(  # type: ignore[no-untyped-def]
    key_group_ptr,
    key_position_ptr,
    low_ptr,
    group_ptr,
    position_ptr,
    index_ptr,
    count_ptr,
    queries,
    num_keys,
    num_tiles,
    window,
    DEPENDENT: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """One program a sequence. The full tiles are written from the front in a first pass, the partly seen ones behind them in a second."""
    begin_dependent(DEPENDENT)
    batch = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    lowest = tl.full([BLOCK_Q], 2147483647, tl.int32)
    highest_low = tl.full([BLOCK_Q], -2147483647, tl.int32)
    lowest_group = tl.full([BLOCK_Q], 2147483647, tl.int32)
    highest = tl.full([BLOCK_Q], -2147483647, tl.int32)
    first = tl.full([BLOCK_Q], 2147483647, tl.int32)
    last = tl.full([BLOCK_Q], -2147483647, tl.int32)
    for start in range(0, queries, BLOCK_Q):
        real = start + row < queries
        at = batch * queries + start + row
        low = tl.load(low_ptr + at, mask=real, other=0)
        group = tl.load(group_ptr + at, mask=real, other=0)
        lowest = tl.where(real, tl.minimum(lowest, low), lowest)
        highest_low = tl.where(real, tl.maximum(highest_low, low), highest_low)
        lowest_group = tl.where(real, tl.minimum(lowest_group, group), lowest_group)
        highest = tl.where(real, tl.maximum(highest, group), highest)
        if WINDOW:
            place = tl.load(position_ptr + at, mask=real, other=0).to(tl.int32)
            first = tl.where(real, tl.minimum(first, place), first)
            last = tl.where(real, tl.maximum(last, place), last)
    min_low = tl.min(lowest, axis=0)
    max_low = tl.max(highest_low, axis=0)
    min_group = tl.min(lowest_group, axis=0)
    max_group = tl.max(highest, axis=0)
    first_place = tl.min(first, axis=0)
    last_place = tl.max(last, axis=0)

    done = 0
    for only_partial in tl.static_range(0, 2):
        for start in range(0, num_tiles, BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            column = tile[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
            inside = column < num_keys
            group = tl.load(key_group_ptr + batch * num_keys + column, mask=inside, other=PADDING)
            real = group < PADDING
            some = real & (group >= min_low) & (group <= max_group)
            every = real & (group >= max_low) & (group <= min_group)
            if WINDOW:
                place = tl.load(key_position_ptr + batch * num_keys + column, mask=inside, other=0).to(tl.int32)
                some = some & (first_place - place < window)
                every = every & (last_place - place < window)
            full = tl.min(every.to(tl.int32), axis=1)
            if only_partial == 0:
                chosen = full
            else:
                chosen = tl.max(some.to(tl.int32), axis=1) * (1 - full)
            place_of = done + tl.cumsum(chosen, axis=0) - chosen
            tl.store(index_ptr + batch * num_tiles + place_of, tile, mask=chosen != 0)
            done += tl.sum(chosen, axis=0)
        tl.store(count_ptr + batch * 2 + only_partial, done)


@jit
def _dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a @ b in fp32; WIDEN for the interpreter, whose product cannot read bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def _update(  # type: ignore[no-untyped-def]
    q,
    acc,
    top,
    total,
    key_ptrs,
    value_ptrs,
    load_mask,
    visible,
    scale,
    MASKED: tl.constexpr,
    LOAD_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Join one tile of keys with the running (acc, top, total); scale holds a factor log2(e), so that exp is exp2."""
    if LOAD_MASKED:
        k = tl.load(key_ptrs, mask=load_mask, other=0.0)
    else:
        k = tl.load(key_ptrs)
    score = tl.zeros([q.shape[0], key_ptrs.shape[0]], tl.float32)
    score = _dot(q, tl.trans(k), score, PRECISION, WIDEN)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
        # A row that has seen nothing yet has top -inf: subtract 0 instead, so that no -inf - -inf arises.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
        base = new_top
    p = tl.exp2(score * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    if LOAD_MASKED:
        v = tl.load(value_ptrs, mask=load_mask, other=0.0)
    else:
        v = tl.load(value_ptrs)
    acc = _dot(p.to(v.dtype), v, acc, PRECISION, WIDEN)
    return acc, new_top, total


@jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    low_ptr,
    group_ptr,
    position_ptr,
    key_group_ptr,
    key_position_ptr,
    bits_ptr,
    index_ptr,
    count_ptr,
    out_ptr,
    part_ptr,
    top_ptr,
    total_ptr,
    queries,
    num_keys,
    num_tiles,
    words,
    head_dim,
    kv_heads,
    window,
    scale,
    q_stride_b,
    q_stride_h,
    q_stride_n,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    all_rows,
    DEPENDENT: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDING: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_M rows (row = query * GROUPS + head of the group) of one key head, over one share of the key tiles."""
    begin_dependent(DEPENDENT)
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    head = (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUPS
    q_head = head * GROUPS + row % GROUPS
    feature = tl.arange(0, BLOCK_D)
    key = tl.arange(0, BLOCK_N)
    real = query < queries
    inside = feature < head_dim

    q_ptrs = q_ptr + batch * q_stride_b + q_head[:, None] * q_stride_h + query[:, None].to(tl.int64) * q_stride_n
    q = tl.load(q_ptrs + feature[None, :], mask=real[:, None] & inside[None, :], other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    num_full = tl.load(count_ptr + batch * 2)
    num_read = tl.load(count_ptr + batch * 2 + 1)
    num_all = num_read + (queries + BLOCK_N - 1) // BLOCK_N
    share = (num_all + SPLITS - 1) // SPLITS
    begin = split * share
    end = tl.minimum(begin + share, num_all)

    key_base = keys_ptr + batch * keys_stride_b + head * keys_stride_h + feature[None, :]
    value_base = values_ptr + batch * values_stride_b + head * values_stride_h + feature[None, :]
    index_base = index_ptr + batch * num_tiles
    anything = real[:, None] & inside[None, :]

    # Tiles that every row sees.
    # The number of the next tile is read one turn ahead: a load that waits for another load would halve the depth of the pipeline.
    last = num_read - 1
    tile = tl.load(index_base + begin, mask=begin <= last, other=0)
    for i in range(begin, tl.minimum(end, num_full)):
        at = tile.to(tl.int64) * BLOCK_N + key[:, None]
        tile = tl.load(index_base + i + 1, mask=i < last, other=0)
        acc, top, total = _update(
            q,
            acc,
            top,
            total,
            key_base + at * keys_stride_n,
            value_base + at * values_stride_n,
            inside[None, :],
            anything,
            scale,
            False,
            not EVEN_D,
            PRECISION,
            WIDEN,
        )

    low = tl.load(low_ptr + batch * queries + query, mask=real, other=0)
    group = tl.load(group_ptr + batch * queries + query, mask=real, other=0)
    position = query
    if WINDOW:
        position = tl.load(position_ptr + batch * queries + query, mask=real, other=0).to(tl.int32)

    # Tiles that some row sees in part.
    middle = tl.maximum(begin, num_full)
    tile = tl.load(index_base + middle, mask=middle <= last, other=0)
    for i in range(middle, tl.minimum(end, num_read)):
        column = tile * BLOCK_N + key
        tile = tl.load(index_base + i + 1, mask=i < last, other=0)
        stored = column < num_keys
        key_group = tl.load(key_group_ptr + batch * num_keys + column, mask=stored, other=PADDING)
        visible = (key_group[None, :] >= low[:, None]) & (key_group[None, :] <= group[:, None])
        visible = visible & (key_group < PADDING)[None, :]
        if WINDOW:
            place = tl.load(key_position_ptr + batch * num_keys + column, mask=stored, other=0).to(tl.int32)
            visible = visible & (position[:, None] - place[None, :] < window)
        at = column.to(tl.int64)[:, None]
        acc, top, total = _update(
            q,
            acc,
            top,
            total,
            key_base + at * keys_stride_n,
            value_base + at * values_stride_n,
            stored[:, None] & inside[None, :],
            visible,
            scale,
            True,
            True,
            PRECISION,
            WIDEN,
        )

    # The new rows themselves.
    new_key = k_ptr + batch * k_stride_b + head * k_stride_h + feature[None, :]
    new_value = v_ptr + batch * v_stride_b + head * v_stride_h + feature[None, :]
    for i in tl.range(tl.maximum(begin, num_read), end, num_stages=1):
        first = (i - num_read) * BLOCK_N
        column = first + key
        fresh = column < queries
        # A tile is 64 keys or a part of them, so one word holds its bits.
        word = tl.load(bits_ptr + (batch * queries + query) * words + first // 64, mask=real, other=0)
        visible = ((word[:, None] >> (first % 64 + key).to(tl.int64)[None, :]) & 1) != 0
        visible = visible & fresh[None, :]
        at = column.to(tl.int64)[:, None]
        acc, top, total = _update(
            q,
            acc,
            top,
            total,
            new_key + at * k_stride_n,
            new_value + at * v_stride_n,
            fresh[:, None] & inside[None, :],
            visible,
            scale,
            True,
            True,
            PRECISION,
            WIDEN,
        )

    out_row = (batch * queries + query) * (kv_heads * GROUPS) + q_head
    place = out_row[:, None] * head_dim + feature[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=anything)
    else:
        part = split.to(tl.int64) * all_rows
        tl.store(part_ptr + part * head_dim + place, acc, mask=anything)
        tl.store(top_ptr + part + out_row, top, mask=real)
        tl.store(total_ptr + part + out_row, total, mask=real)


@jit
def _join_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    all_rows,
    head_dim,
    DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a row: the weighted sum of its parts."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    feature = tl.arange(0, BLOCK_D)
    real = split < SPLITS
    inside = feature < head_dim
    top = tl.load(top_ptr + split.to(tl.int64) * all_rows + row, mask=real, other=float("-inf"))
    total = tl.load(total_ptr + split.to(tl.int64) * all_rows + row, mask=real, other=0.0)
    part_ptrs = part_ptr + (split.to(tl.int64)[:, None] * all_rows + row) * head_dim + feature[None, :]
    part = tl.load(part_ptrs, mask=real[:, None] & inside[None, :], other=0.0)
    best = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    denominator = tl.sum(weight * total, axis=0)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(out_ptr + row * head_dim + feature, mixed.to(out_ptr.dtype.element_ty), mask=inside)


def plan_tiles(attend: Attend, tile: int = TILE) -> TilePlan:
    """The key tiles that the rows of ``attend`` read: one launch, to be made once a forward and given to every layer's ``attention``."""
    return plan_tiles_triton(attend, tile) if use_triton(attend.key_group) else plan_tiles_reference(attend, tile)


def plan_tiles_triton(attend: Attend, tile: int = TILE) -> TilePlan:
    """The kernel of ``plan_tiles``. Raises ValueError if tile is neither 16, 32 nor 64."""
    if tile not in (16, 32, 64):
        raise ValueError(f"tile must be 16, 32 or 64: got {tile}")
    group = attend.key_group.contiguous()
    require_launchable(group, "attend")
    batch, num_keys = group.shape
    num_tiles = ceil_div(num_keys, tile)
    index = torch.empty(batch, num_tiles, dtype=torch.int32, device=group.device)
    count = torch.empty(batch, 2, dtype=torch.int32, device=group.device)
    position, key_position = _positions(attend)
    _plan_kernel[(batch,)](
        group,
        key_position,
        attend.low.contiguous(),
        attend.group.contiguous(),
        position,
        index,
        count,
        attend.num_queries,
        num_keys,
        num_tiles,
        attend.window or 0,
        WINDOW=attend.window is not None,
        PADDING=PADDING_GROUP,
        TILE_N=tile,
        BLOCK_T=64,
        BLOCK_Q=64,
        num_warps=8,
        **dependent(group),
    )
    return TilePlan(index, count, tile)


@dataclass(frozen=True)
class AttentionConfig:
    """Rows of a tile, shares of the keys, warps and pipeline stages; see ``choose_config``."""

    block_m: int
    splits: int
    num_warps: int
    num_stages: int


def choose_config(
    batch: int, kv_heads: int, tile_rows: int, num_tiles: int, head_dim: int, itemsize: int, processors: int
) -> AttentionConfig:
    """A fixed rule instead of a search, which a captured graph could not run; it names the fastest measured on an H200, or one within 6 %.

    tile_rows: Q * G; num_tiles: key tiles, new rows included. Tiles of 64 rows even where there are fewer: that is the least height of the
    wide matrix instruction, and two such programs share a multiprocessor, so that one computes its softmax while the other multiplies.
    Enough shares of the keys for two programs on every multiprocessor where a share still holds 8 tiles; else for one, since joining
    more parts costs more than it saves, and no share below two tiles.
    """
    if itemsize == 4 or head_dim > 128:
        # fp32 or wider rows: larger tiles would fit neither the registers nor the shared memory.
        block_m, stages = 16, 2
    else:
        block_m, stages = 64, 3
    programs = batch * kv_heads * ceil_div(tile_rows, block_m)
    full = max(1, 2 * processors // programs)
    splits = full if num_tiles // full >= 8 else max(1, processors // programs)
    return AttentionConfig(block_m, max(1, min(splits, num_tiles // 2, 64)), 4, stages)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    scale: float | None = None,
    plan: TilePlan | None = None,
) -> Tensor:
    """Attention of the new rows q [B, H, Q, D] over keys, values [B, K, N, D] (rule 1 of ``attend``) and k, v [B, K, Q, D] (rule 2).

    Any strides with a contiguous last dim (views of the store and of a fused product); q, k, v bf16, fp16 or fp32, keys and values of the
    same dtype; scale: of the scores, default D ** -0.5; plan: ``plan_tiles(attend)`` where many layers share it. -> [B, Q, H * D], the
    layout that the output projection reads. Accumulates in fp32. Raises ValueError if shapes do not fit.
    """
    _check(q, k, v, attend, keys, values, scale)
    if use_triton(q):
        return attention_triton(q, k, v, attend, keys, values, scale, plan)
    return attention_reference(q, k, v, attend, keys, values, scale)


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    scale: float | None = None,
    plan: TilePlan | None = None,
    config: AttentionConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel of ``attention``; out: a contiguous tensor [B, Q, H * D] to write to."""
    require_launchable(q, "q")
    _check(q, k, v, attend, keys, values, scale)
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    q, k, v = _inner(q), _inner(k), _inner(v)
    if keys is None or values is None:
        keys, values = k[:, :, :0], v[:, :, :0]
    num_keys = attend.key_group.shape[1]
    if plan is None:
        plan = plan_tiles_triton(attend)
    num_tiles = plan.index.shape[1]
    if plan.index.shape[0] != batch or num_tiles != ceil_div(num_keys, plan.tile):
        raise ValueError(
            f"plan must be plan_tiles of this attend, [{batch}, {ceil_div(num_keys, plan.tile)}] tiles: got "
            f"{list(plan.index.shape)}"
        )
    if config is None:
        all_tiles = num_tiles + ceil_div(queries, plan.tile)
        config = choose_config(
            batch, kv_heads, queries * groups, all_tiles, head_dim, q.element_size(), multiprocessors(q.device)
        )
    all_rows = batch * queries * heads
    out = torch.empty(batch, queries, heads * head_dim, dtype=q.dtype, device=q.device) if out is None else out
    if config.splits > 1:
        part = torch.empty(config.splits, all_rows, head_dim, dtype=torch.float32, device=q.device)
        top = torch.empty(2, config.splits, all_rows, dtype=torch.float32, device=q.device)
    else:
        part = top = out
    position, key_position = _positions(attend)
    grid = (ceil_div(queries * groups, config.block_m), config.splits, batch * kv_heads)
    _attention_kernel[grid](
        q,
        k,
        v,
        keys,
        values,
        attend.low.contiguous(),
        attend.group.contiguous(),
        position,
        attend.key_group.contiguous(),
        key_position,
        attend.bits.contiguous(),
        plan.index,
        plan.count,
        out,
        part,
        top[0],
        top[-1],
        queries,
        num_keys,
        num_tiles,
        attend.bits.shape[2],
        head_dim,
        kv_heads,
        attend.window or 0,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        all_rows,
        WINDOW=attend.window is not None,
        GROUPS=groups,
        SPLITS=config.splits,
        PADDING=PADDING_GROUP,
        WIDEN=interpreted() and q.dtype == torch.bfloat16,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        EVEN_D=next_power_of_2(head_dim) == head_dim and head_dim >= 16,
        BLOCK_M=config.block_m,
        BLOCK_N=plan.tile,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent(q),
    )
    if config.splits > 1:
        _join_kernel[(all_rows,)](
            part,
            top[0],
            top[1],
            out,
            all_rows,
            head_dim,
            SPLITS=config.splits,
            BLOCK_S=next_power_of_2(config.splits),
            BLOCK_D=max(16, next_power_of_2(head_dim)),
            num_warps=1 if config.splits <= 8 else 4,
            **dependent(q),
        )
    return out


def _positions(attend: Attend) -> tuple[Tensor, Tensor]:
    """position [B, Q] and key_position [B, N] for the window; without one, tensors that the kernel does not read."""
    if attend.window is None:
        return attend.group, attend.key_group
    if attend.position is None or attend.key_position is None:
        raise ValueError("attend must have position and key_position with its window: got None")
    return attend.position.contiguous(), attend.key_position.contiguous()


def _inner(x: Tensor) -> Tensor:
    """x with a contiguous last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend,
    keys: Tensor | None,
    values: Tensor | None,
    scale: float | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, heads, Q, D]: got {list(q.shape)} and {list(k.shape)}")
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be > 0: got {scale}")
    if heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads: got {heads}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}: got {x.dtype}")
        if x.shape != (batch, kv_heads, queries, head_dim):
            raise ValueError(f"{name} must be {[batch, kv_heads, queries, head_dim]}: got {list(x.shape)}")
    if attend.group.shape != (batch, queries):
        raise ValueError(f"attend must have {[batch, queries]} rows: got {list(attend.group.shape)}")
    if (keys is None) != (values is None):
        raise ValueError("keys and values must be given together")
    num_keys = attend.key_group.shape[1]
    if keys is None and num_keys:
        raise ValueError(f"keys must hold the {num_keys} stored keys of attend: got None")
    for name, stored in (("keys", keys), ("values", values)):
        if stored is not None:
            if stored.dtype != q.dtype:
                raise ValueError(f"{name} must have q's dtype {q.dtype}: got {stored.dtype}")
            if stored.shape != (batch, kv_heads, num_keys, head_dim):
                raise ValueError(f"{name} must be {[batch, kv_heads, num_keys, head_dim]}: got {list(stored.shape)}")
            if stored.stride(-1) != 1:
                raise ValueError(f"{name} must have a contiguous last dim: got strides {stored.stride()}")
