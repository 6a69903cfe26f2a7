"""The small operations between the products of a layer: RMSNorm, residual + RMSNorm, QK-norm + rotation + KV write, SwiGLU.

Letters: B batch, Q new rows, R = B * Q, H query heads, K key heads, D head width, E model width, F feed-forward width, S partial sums.

    rms_norm        y = x / sqrt(mean(x^2) + eps) * w                          (Zhang and Sennrich 2019)
    add_rms_norm    s = x + residual;  y = rms_norm(s)                         s and y are both returned
    rope_write      q, k <- rotate(norm(q)), rotate(norm(k)) with [a, b] -> [a cos - b sin, b cos + a sin] (halves convention,
                    Su et al. 2021); k and v also go to their rows of the store
    context_write   the same without q: a drafter's context projection into its store
    swiglu          silu(gate) * up                                            (Shazeer 2020)

Bytes moved: each operand once (R rows of its width), so the limit is HBM bandwidth for many rows and the launch for few (1..64 rows
are under 1 MB). Everything is fp32 inside and rounded once, when it is stored. ``dllm/model/decoder.py`` rounds to the model's dtype
more often: after the norm, after each of the two rotation products, after silu and after the product that is added to the residual. In
fp32 the two agree to rounding; in bf16 these kernels are the more accurate.

``partial=True``: the input is fp32 ``[S, R, width]``, the unsummed parts of a split product (``skinny_linear_partial``); they are
summed in the order of S while they are read, which saves the launch that would sum them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.kernels._launch import (
    begin_dependent,
    ceil_div,
    dependent,
    jit,
    next_power_of_2,
    prefetch_lines,
    require_launchable,
    tl,
    use_triton,
)

HEADS_PER_PROGRAM = 4


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Truth of ``rms_norm``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, partial: bool = False
) -> tuple[Tensor, Tensor]:
    """Truth of ``add_rms_norm``. The norm reads the sum as it is stored, rounded to the residual's dtype."""
    wide = x.sum(0).view(residual.shape) if partial else x.float()
    total = (wide + residual.float()).to(residual.dtype)
    return total, rms_norm_reference(total, weight, eps)


def swiglu_reference(gate_up: Tensor, partial: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Truth of ``swiglu``."""
    gate, up = (gate_up.sum(0) if partial else gate_up.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(dtype or gate_up.dtype)


def rope_write_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    rows: Tensor | None = None,
    valid: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Truth of ``rope_write``."""
    batch, queries, half = cos.shape
    wide = (qkv.sum(0) if partial else qkv.float()).view(batch, queries, num_heads + 2 * num_kv_heads, -1)
    q, k, v = wide.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    out = dtype or qkv.dtype

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = rms_norm_reference(x, weight, eps)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        c, s = cos[:, :, None].float(), sin[:, :, None].float()
        return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1).to(out).transpose(1, 2)

    q, k, v = turned(q, q_weight), turned(k, k_weight), v.to(out).transpose(1, 2)
    if keys is not None and values is not None and rows is not None and valid is not None:
        sequence, slot = valid.nonzero(as_tuple=True)
        target = rows[sequence, slot]
        keys[sequence, :, target] = k[sequence, :, slot].to(keys.dtype)
        values[sequence, :, target] = v[sequence, :, slot].to(values.dtype)
    return q, k, v


@jit
def _load_sum(pointer, offsets, mask, split_stride, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 sum over the parts, in their order."""
    total = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointer + split * split_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    width,
    x_stride,
    residual_stride,
    split_stride,
    eps,
    DEPENDENT: tl.constexpr,
    LINES: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        prefetch_lines(weight_ptr + tl.minimum(tl.arange(0, LINES) * (BLOCK // LINES), width - 1))
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = _load_sum(x_ptr, row * x_stride + column, inside, split_stride, SPLITS)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    width,
    x_stride,
    split_stride,
    DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    base = x_ptr + row * x_stride
    gate = _load_sum(base, column, inside, split_stride, SPLITS)
    up = _load_sum(base + width, column, inside, split_stride, SPLITS)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    rows_ptr,
    valid_ptr,
    keys_ptr,
    values_ptr,
    queries,
    heads,
    kv_heads,
    head_dim,
    half,
    x_stride,
    split_stride,
    rows_stride,
    valid_stride,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    eps,
    DEPENDENT: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_H neighbouring heads (query, key and value heads in one numbering) of one row."""
    if DEPENDENT and NORM:
        line = tl.minimum(tl.arange(0, 4) * 64, head_dim - 1)
        prefetch_lines(q_weight_ptr + line)
        prefetch_lines(k_weight_ptr + line)
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    feature = tl.arange(0, BLOCK_D)
    all_heads = heads + 2 * kv_heads
    real = (head < all_heads)[:, None] & (feature < head_dim)[None, :]
    is_query = (head < heads)[:, None]
    is_value = (head >= heads + kv_heads)[:, None]

    # The feature that the rotation mixes this one with; itself where nothing is rotated.
    partner = tl.where(feature < half, feature + half, tl.where(feature < 2 * half, feature - half, feature))
    base = row * x_stride + head[:, None] * head_dim
    x = _load_sum(x_ptr, base + feature[None, :], real, split_stride, SPLITS)
    other = _load_sum(x_ptr, base + partner[None, :], real, split_stride, SPLITS)
    value = x
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)[:, None]
        wide = feature[None, :] + tl.zeros([BLOCK_H, BLOCK_D], tl.int32)
        wide_partner = partner[None, :] + tl.zeros([BLOCK_H, BLOCK_D], tl.int32)
        q_real = real & is_query
        k_real = real & (is_query == 0)
        weight = tl.load(q_weight_ptr + wide, mask=q_real, other=0.0).to(tl.float32)
        weight += tl.load(k_weight_ptr + wide, mask=k_real, other=0.0).to(tl.float32)
        other_weight = tl.load(q_weight_ptr + wide_partner, mask=q_real, other=0.0).to(tl.float32)
        other_weight += tl.load(k_weight_ptr + wide_partner, mask=k_real, other=0.0).to(tl.float32)
        x = x * scale * weight
        other = other * scale * other_weight
    turned = feature < 2 * half
    angle = row * half + tl.where(feature < half, feature, feature - half)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    sin = tl.where(feature < half, -sin, sin)
    result = tl.where(is_value, value, x * cos[None, :] + other * sin[None, :]).to(out_ptr.dtype.element_ty)
    out = (row * all_heads + head[:, None]) * head_dim + feature[None, :]
    tl.store(out_ptr + out, result, mask=real)

    if WRITE:
        sequence = row // queries
        slot = row % queries
        write = (
            tl.load(valid_ptr + sequence * valid_stride + slot).to(tl.int32) + tl.zeros([BLOCK_H, 1], tl.int32)
        ) != 0
        target = tl.load(rows_ptr + sequence * rows_stride + slot).to(tl.int64)
        k_head = (head - heads).to(tl.int64)[:, None]
        v_head = k_head - kv_heads
        to_key = real & (is_query == 0) & (is_value == 0) & write
        to_value = real & is_value & write
        key = keys_ptr + sequence * keys_stride_b + target * keys_stride_n + k_head * keys_stride_h + feature[None, :]
        tl.store(key, result.to(keys_ptr.dtype.element_ty), mask=to_key)
        place = values_ptr + sequence * values_stride_b + target * values_stride_n + v_head * values_stride_h
        tl.store(place + feature[None, :], result.to(values_ptr.dtype.element_ty), mask=to_value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., E] -> x / rms(x) * weight, same shape and dtype; weight [E]. Raises ValueError if the widths differ."""
    return rms_norm_triton(x, weight, eps) if use_triton(x) else rms_norm_reference(_checked(x, weight), weight, eps)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The kernel of ``rms_norm``; out: a contiguous tensor of x's shape to write to."""
    require_launchable(x, "x")
    flat = _rows(_checked(x, weight))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch_norm(flat, flat, weight, out, out, eps, add=False, splits=1, split_stride=0)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, partial: bool = False
) -> tuple[Tensor, Tensor]:
    """x, residual [..., E], weight [E] -> (x + residual, its RMSNorm), both in the residual's shape and dtype.

    partial: x is fp32 [S, R, E], summed over S first. Raises ValueError if the shapes do not fit.
    """
    if use_triton(residual):
        return add_rms_norm_triton(x, residual, weight, eps, partial)
    _check_sum(x, residual, weight, partial)
    return add_rms_norm_reference(x, residual, weight, eps, partial)


def add_rms_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    partial: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel of ``add_rms_norm``; out: two contiguous tensors of the residual's shape to write to."""
    require_launchable(residual, "residual")
    _check_sum(x, residual, weight, partial)
    flat, splits, split_stride = _parts(x, partial)
    if out is None:
        out = (
            torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
            torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
        )
    total, normed = out
    _launch_norm(flat, _rows(residual), weight, total, normed, eps, True, splits, split_stride)
    return total, normed


def swiglu(gate_up: Tensor, partial: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """gate_up [..., 2F] (gate, then up) -> silu(gate) * up [..., F] in ``dtype`` (default: the input's).

    partial: gate_up is fp32 [S, R, 2F], summed over S first; the result is [R, F]. Raises ValueError for an odd width.
    """
    if use_triton(gate_up):
        return swiglu_triton(gate_up, partial, dtype)
    _check_gate(gate_up, partial)
    return swiglu_reference(gate_up, partial, dtype)


def swiglu_triton(
    gate_up: Tensor, partial: bool = False, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """The kernel of ``swiglu``; out: a contiguous tensor of the result's shape to write to."""
    require_launchable(gate_up, "gate_up")
    _check_gate(gate_up, partial)
    flat, splits, split_stride = _parts(gate_up, partial)
    width = gate_up.shape[-1] // 2
    if out is None:
        shape = (*(gate_up.shape[1:-1] if partial else gate_up.shape[:-1]), width)
        out = torch.empty(shape, dtype=dtype or gate_up.dtype, device=gate_up.device)
    if out.numel():
        # Few rows: small blocks, so that the work spreads over all multiprocessors.
        block = 256 if out.numel() <= 2**18 else 1024
        _swiglu_kernel[(out.numel() // width, ceil_div(width, block))](
            flat,
            out,
            width,
            flat.stride(-2),
            split_stride,
            SPLITS=splits,
            BLOCK=block,
            num_warps=block // 128,
            **dependent(out),
        )
    return out


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    rows: Tensor | None = None,
    valid: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused QKV product, norm and rotate q and k, and write k and v into their rows of the store.

    qkv [B, Q, (H + 2K) * D], last dim contiguous (partial: fp32 [S, B * Q, (H + 2K) * D]); cos, sin [B, Q, rotary_dim / 2] in any
    float dtype (``decoder.rotary`` gives each angle twice, [B, 1, Q, rotary_dim]: pass its first half); q_weight, k_weight [D]:
    QK-norm, both or neither; keys, values [B, K, N, D]: views of one layer of the store, mutated at rows [B, Q] int64 where valid [B,
    Q] bool; None: nothing is written. -> q [B, H, Q, D], k, v [B, K, Q, D] in ``dtype`` (default: the input's), views of one buffer
    [B, Q, H + 2K, D]. Rows must be distinct where valid and lie in [0, N). Raises ValueError if shapes do not fit.
    """
    _check_rope(qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, rows, valid, keys, values, partial)
    call = rope_write_triton if use_triton(qkv) else rope_write_reference
    return call(
        qkv,
        cos,
        sin,
        num_heads,
        num_kv_heads,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        rows=rows,
        valid=valid,
        keys=keys,
        values=values,
        partial=partial,
        dtype=dtype,
    )


def rope_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    rows: Tensor | None = None,
    valid: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    partial: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of ``rope_write``; out: a contiguous buffer [B, Q, H + 2K, D] to write to."""
    require_launchable(qkv, "qkv")
    head_dim = _check_rope(
        qkv, cos, sin, num_heads, num_kv_heads, q_weight, k_weight, rows, valid, keys, values, partial
    )
    batch, queries, half = cos.shape
    all_heads = num_heads + 2 * num_kv_heads
    flat, splits, split_stride = _parts(qkv, partial)
    if out is None:
        out = torch.empty(batch, queries, all_heads, head_dim, dtype=dtype or qkv.dtype, device=qkv.device)
    write = keys is not None
    block = next_power_of_2(head_dim)
    unused = out
    rows_, valid_ = (_inner(rows), _inner(valid)) if rows is not None and valid is not None else (unused, unused)
    keys_, values_ = (keys, values) if keys is not None and values is not None else (unused, unused)
    if batch * queries:
        _rope_kernel[(batch * queries, ceil_div(all_heads, HEADS_PER_PROGRAM))](
            flat,
            cos.contiguous(),
            sin.contiguous(),
            unused if q_weight is None else q_weight.contiguous(),
            unused if k_weight is None else k_weight.contiguous(),
            out,
            rows_,
            valid_.view(torch.uint8) if valid_.dtype == torch.bool else valid_,
            keys_,
            values_,
            queries,
            num_heads,
            num_kv_heads,
            head_dim,
            half,
            flat.stride(-2),
            split_stride,
            rows_.stride(0),
            valid_.stride(0),
            *keys_.stride()[:3],
            *values_.stride()[:3],
            eps,
            NORM=q_weight is not None,
            WRITE=write,
            SPLITS=splits,
            BLOCK_H=HEADS_PER_PROGRAM,
            BLOCK_D=block,
            # A second warp without heads of its own would repeat the first one's sums, and write them to the same place.
            num_warps=2 if HEADS_PER_PROGRAM * block >= 256 else 1,
            **dependent(out),
        )
    views = out.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return views[0], views[1], views[2]


def context_write(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_kv_heads: int,
    rows: Tensor,
    valid: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """``rope_write`` without queries, for a drafter's context projection kv [B, Q, 2K * D]; -> k, v [B, K, Q, D]."""
    _, k, v = rope_write(
        kv,
        cos,
        sin,
        0,
        num_kv_heads,
        q_weight=k_weight,
        k_weight=k_weight,
        eps=eps,
        rows=rows,
        valid=valid,
        keys=keys,
        values=values,
    )
    return k, v


def _launch_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    total: Tensor,
    out: Tensor,
    eps: float,
    add: bool,
    splits: int,
    split_stride: int,
) -> None:
    width = x.shape[-1]
    block = next_power_of_2(width)
    num_rows = out.numel() // width
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            residual,
            weight.contiguous(),
            total,
            out,
            width,
            x.stride(-2),
            residual.stride(-2),
            split_stride,
            eps,
            LINES=max(1, block * weight.element_size() // 128),
            ADD=add,
            SPLITS=splits,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
            **dependent(out),
        )


def _rows(x: Tensor) -> Tensor:
    """x [..., E] as [R, E] with a contiguous last dim; a copy only where no view exists."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _parts(x: Tensor, partial: bool) -> tuple[Tensor, int, int]:
    """(rows [R, E] or parts [S, R, E], number of parts, elements from one part to the next)."""
    if not partial:
        return _rows(x), 1, 0
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.shape[0], x.stride(0)


def _inner(x: Tensor) -> Tensor:
    """x [B, Q] with a contiguous last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _checked(x: Tensor, weight: Tensor) -> Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], the width of x: got {list(weight.shape)}")
    return x


def _check_partial(x: Tensor, name: str) -> None:
    if x.ndim != 3 or x.dtype != torch.float32 or x.shape[0] < 1:
        raise ValueError(f"{name} with partial=True must be fp32 [S, R, width], S >= 1: got {x.dtype} {list(x.shape)}")


def _check_sum(x: Tensor, residual: Tensor, weight: Tensor, partial: bool) -> None:
    _checked(residual, weight)
    if partial:
        _check_partial(x, "x")
        if x[0].numel() != residual.numel() or x.shape[-1] != residual.shape[-1]:
            raise ValueError(f"x must hold the residual's {list(residual.shape)} in each part: got {list(x.shape)}")
    elif x.shape != residual.shape:
        raise ValueError(f"x must have the residual's shape {list(residual.shape)}: got {list(x.shape)}")


def _check_gate(gate_up: Tensor, partial: bool) -> None:
    if partial:
        _check_partial(gate_up, "gate_up")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even width (gate, then up): got {gate_up.shape[-1]}")


def _check_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rows: Tensor | None,
    valid: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    partial: bool,
) -> int:
    """The head width. Raises ValueError if shapes do not fit."""
    if cos.ndim != 3 or cos.shape != sin.shape:
        raise ValueError(f"cos and sin must both be [B, Q, half]: got {list(cos.shape)} and {list(sin.shape)}")
    batch, queries, half = cos.shape
    if partial:
        _check_partial(qkv, "qkv")
    if qkv.shape[:-1].numel() != batch * queries * (qkv.shape[0] if partial else 1):
        raise ValueError(f"qkv must have the rows of cos, {batch} x {queries}: got {list(qkv.shape)}")
    all_heads = num_heads + 2 * num_kv_heads
    head_dim, left = divmod(qkv.shape[-1], all_heads)
    if left or 2 * half > head_dim:
        raise ValueError(
            f"qkv must be {all_heads} heads of at least {2 * half} features wide: got width {qkv.shape[-1]}"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"{name} must be [{head_dim}]: got {list(weight.shape)}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must be given together")
    given = [x is not None for x in (rows, valid, keys, values)]
    if any(given) and not all(given):
        raise ValueError("rows, valid, keys and values must be given together, or none of them")
    if rows is not None and valid is not None and keys is not None and values is not None:
        for name, index in (("rows", rows), ("valid", valid)):
            if index.shape != (batch, queries):
                raise ValueError(f"{name} must be [{batch}, {queries}]: got {list(index.shape)}")
        for name, store in (("keys", keys), ("values", values)):
            if store.ndim != 4 or store.shape[:2] != (batch, num_kv_heads) or store.shape[3] != head_dim:
                raise ValueError(f"{name} must be [{batch}, {num_kv_heads}, N, {head_dim}]: got {list(store.shape)}")
            if store.stride(3) != 1:
                raise ValueError(f"{name} must have a contiguous last dim: got strides {store.stride()}")
    return head_dim
