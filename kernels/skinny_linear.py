"""Products of a few rows with a large weight: y = x W^T, read at the speed of memory.

Letters: R rows (1..64), I inputs, O outputs, F feed-forward width, S parts of a split product.

    skinny_linear    y = x W^T (+ bias) (+ residual)
    skinny_swiglu    y = silu(x Wg^T) * (x Wu^T)

Bytes moved: W once, O * I * itemsize; x is read again by every program, R / BLOCK_O as many bytes as W, from the L2 cache. With at
most 64 rows a weight takes part in 64 products, far below what the matrix units need to be busy, so the limit is HBM bandwidth, and
what counts is that every multiprocessor has enough loads under way. A program owns BLOCK_O outputs of all rows (the weight is the tall
operand of the matrix units, the rows are the short one). Where O / BLOCK_O programs are too few, the inputs are split in S parts: each
program writes an fp32 partial sum, and a second launch adds them in the order of S, so that a result never depends on which program
was first. ``skinny_linear_partial`` leaves that sum to the next kernel (``norm_rope_kv``).

A fused weight (QKV, gate and up) is one matrix of more outputs; gate and up may also be two pointers. fp32 accumulation (fp32 inputs
are multiplied in three tf32 parts, about 2^-21), one rounding at the end, after bias and residual; ``dllm/model/decoder.py`` rounds
before the residual is added as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.kernels._launch import (
    begin_dependent,
    ceil_div,
    dependent,
    interpreted,
    jit,
    multiprocessors,
    next_power_of_2,
    prefetch_lines,
    require_launchable,
    tl,
    use_triton,
)

MAX_ROWS = 64
"""More rows go to cuBLAS, which is made for them."""
SMALL_BYTES = 2**23
"""Weights up to this size cost little more than their launches."""
_HALF_SHARED = 112 * 1024
"""Bytes of shared memory that a program may take if a second one is to stand beside it (an H200 has 227 KiB a multiprocessor)."""
PREFETCHED = 512
"""Inputs of its weight rows that a program asks for before the kernel ahead of it has ended: 64 KiB of bf16 for 64 outputs."""


@dataclass(frozen=True)
class LinearConfig:
    """Outputs of a program, inputs of one step, parts of the inputs, warps and pipeline stages."""

    block_o: int
    block_i: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_o", "block_i"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two >= 16: got {size}")
        if self.splits < 1:
            raise ValueError(f"splits must be >= 1: got {self.splits}")


def skinny_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Truth of ``skinny_linear``; on a GPU the product is cuBLAS's."""
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def skinny_swiglu_reference(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """Truth of ``skinny_swiglu``."""
    return F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)


@jit
def _product(w, x, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + w x^T in fp32; WIDEN for the interpreter, whose product cannot read bf16."""
    if WIDEN:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)


@jit
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    up_ptr,
    bias_ptr,
    up_bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    num_rows,
    outputs,
    inputs,
    splits,
    x_stride,
    weight_stride,
    up_stride,
    residual_stride,
    part_stride,
    DEPENDENT: tl.constexpr,
    LINES: tl.constexpr,
    PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program: BLOCK_O outputs of all rows over one part of the inputs. PAIR: a second weight, and silu(first) * second."""
    output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_I)
    # Outputs past the end read the last weight row again instead of a mask in the loop; they are never stored.
    safe = tl.minimum(output, outputs - 1).to(tl.int64)
    safe_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    steps = (inputs + BLOCK_I - 1) // BLOCK_I
    share = (steps + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, steps)
    x_base = x_ptr + safe_row[:, None] * x_stride + column[None, :]
    weight_base = weight_ptr + safe[:, None] * weight_stride + column[None, :]
    up_base = up_ptr + safe[:, None] * up_stride + column[None, :]
    if DEPENDENT:
        # The weight depends on nobody: its first lines are on their way while the kernel before still computes x.
        line = begin * BLOCK_I + tl.arange(0, LINES) * (128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8))
        line = tl.minimum(line, inputs - 1)[None, :]
        prefetch_lines(weight_ptr + safe[:, None] * weight_stride + line)
        if PAIR:
            prefetch_lines(up_ptr + safe[:, None] * up_stride + line)
    begin_dependent(DEPENDENT)
    acc = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    second = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    for step in range(begin, end):
        start = step * BLOCK_I
        if EVEN:
            w = tl.load(weight_base + start, eviction_policy="evict_first")
            x = tl.load(x_base + start)
        else:
            inside = (start + column < inputs)[None, :]
            w = tl.load(weight_base + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_base + start, mask=inside, other=0.0)
        acc = _product(w, x, acc, PRECISION, WIDEN)
        if PAIR:
            if EVEN:
                u = tl.load(up_base + start, eviction_policy="evict_first")
            else:
                u = tl.load(up_base + start, mask=inside, other=0.0, eviction_policy="evict_first")
            second = _product(u, x, second, PRECISION, WIDEN)

    real = (output < outputs)[:, None] & (row < num_rows)[None, :]
    if PARTIAL:
        # fp32 [S, R, width]; with PAIR the second half of the width holds the second product.
        width = outputs * 2 if PAIR else outputs
        place = part_ptr + split.to(tl.int64) * part_stride + row[None, :].to(tl.int64) * width + output[:, None]
        tl.store(place, acc, mask=real)
        if PAIR:
            tl.store(place + outputs, second, mask=real)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + safe).to(tl.float32)[:, None]
            if PAIR:
                second += tl.load(up_bias_ptr + safe).to(tl.float32)[:, None]
        if PAIR:
            acc = acc / (1.0 + tl.exp(-acc)) * second
        if RESIDUAL:
            beside = residual_ptr + row[None, :].to(tl.int64) * residual_stride + output[:, None]
            acc += tl.load(beside, mask=real, other=0.0).to(tl.float32)
        place = out_ptr + row[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=real)


@jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    bias_ptr,
    up_bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    residual_stride,
    part_stride,
    DEPENDENT: tl.constexpr,
    PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts added in their order, then what ``_linear_kernel`` does at its end."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    width = outputs * 2 if PAIR else outputs
    place = part_ptr + row * width + output
    acc = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(0, SPLITS):
        acc += tl.load(place + split * part_stride, mask=inside, other=0.0)
        if PAIR:
            second += tl.load(place + split * part_stride + outputs, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
        if PAIR:
            second += tl.load(up_bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if PAIR:
        acc = acc / (1.0 + tl.exp(-acc)) * second
    if RESIDUAL:
        acc += tl.load(residual_ptr + row * residual_stride + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + output, acc.to(out_ptr.dtype.element_ty), mask=inside)


def choose_config(
    num_rows: int,
    outputs: int,
    inputs: int,
    itemsize: int = 2,
    pair: bool = False,
    processors: int = 132,
    summed_later: bool = False,
) -> LinearConfig:
    """A fixed rule, used where ``linear_table`` has measured nothing. pair: two weights of ``outputs`` rows each; summed_later: the next
    kernel adds the parts (``skinny_linear_partial``), so that they cost no launch.

    Weights up to 8 MB finish in the time of a few launches: narrow tiles, and no split where one launch can then do. Larger ones: tiles
    of 64 outputs, and parts until about two programs stand on every multiprocessor, none below 512 inputs; loads in flight as many as
    let two programs share the memory of one, since 150 programs that need a multiprocessor each would take two turns.
    """
    step = min(128 * 2 // itemsize, max(16, next_power_of_2(inputs)))
    if itemsize == 4:
        return LinearConfig(16, min(step, 64), _parts(ceil_div(outputs, 16), inputs, processors), 4, 2)
    if inputs % step and inputs % 64 == 0:
        # Whole steps need no mask.
        step = 64
    weights = 2 if pair else 1
    if outputs * inputs * itemsize * weights <= SMALL_BYTES:
        block_o = 16 if ceil_div(outputs, 32) < processors else 32
        tiles = ceil_div(outputs, block_o)
        splits = max(1, min(processors // tiles, inputs // 256)) if summed_later else 1
        return LinearConfig(block_o, step, splits, 4, 6 if step <= 64 else 4)
    height = 64 * weights + max(16, next_power_of_2(num_rows))
    if _HALF_SHARED // (height * step * itemsize) < 3:
        step = min(step, 64)
    stages = max(2, min(5, _HALF_SHARED // (height * step * itemsize)))
    return LinearConfig(64, step, _parts(ceil_div(outputs, 64), inputs, processors), 4, stages)


def _parts(tiles: int, inputs: int, processors: int) -> int:
    """Parts of the inputs so that tiles * parts is at most about two programs a multiprocessor."""
    return max(1, min(2 * processors // tiles, inputs // 512, 16))


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [..., I] with weight [O, I] (last dims contiguous, one dtype), bias [O], residual [..., O] -> x W^T + bias + residual, [..., O].

    Up to 64 rows run the kernel; more, and everything off CUDA, PyTorch's product. config: overrides ``choose_config``. Deterministic:
    equal inputs and config give equal bits. Raises ValueError if shapes or dtypes do not fit.
    """
    if use_triton(x) and x.shape[:-1].numel() <= MAX_ROWS:
        return skinny_linear_triton(x, weight, bias, residual, config)
    _check(x, weight, bias, residual)
    return skinny_linear_reference(x, weight, bias, residual)


def skinny_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel of ``skinny_linear``; out: a contiguous tensor [..., O] to write to."""
    require_launchable(x, "x")
    _check(x, weight, bias, residual)
    return _run(x, weight, None, bias, None, residual, config, out)


def skinny_linear_partial(x: Tensor, weight: Tensor, config: LinearConfig | None = None) -> Tensor:
    """The unsummed parts of x W^T, fp32 [S, R, O] with R = the rows of x flattened; S = 1 off CUDA and for more than 64 rows.

    For a next kernel that reads the parts (``add_rms_norm``, ``swiglu``, ``rope_write`` with partial=True). Raises ValueError as
    ``skinny_linear``.
    """
    _check(x, weight, None, None)
    if use_triton(x) and x.shape[:-1].numel() <= MAX_ROWS:
        return skinny_linear_partial_triton(x, weight, config)
    return F.linear(x, weight).float().reshape(1, -1, weight.shape[0])


def skinny_linear_partial_triton(x: Tensor, weight: Tensor, config: LinearConfig | None = None) -> Tensor:
    """The kernel of ``skinny_linear_partial``."""
    require_launchable(x, "x")
    _check(x, weight, None, None)
    flat = _flat(x)
    config = config or _default(flat, weight, False, summed_later=True)
    part = torch.empty(config.splits, flat.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(flat, weight, None, None, None, None, config, part, part)
    return part


def skinny_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [..., I] with gate, up [F, I] (two halves of a fused weight, or two weights) -> silu(x gate^T) * (x up^T), [..., F].

    The two products never reach memory (with a split: their fp32 parts do). Biases [F]: both or neither. Rows, device, config and errors
    as in ``skinny_linear``.
    """
    if use_triton(x) and x.shape[:-1].numel() <= MAX_ROWS:
        return skinny_swiglu_triton(x, gate, up, gate_bias, up_bias, config)
    _check_pair(x, gate, up, gate_bias, up_bias)
    return skinny_swiglu_reference(x, gate, up, gate_bias, up_bias)


def skinny_swiglu_triton(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel of ``skinny_swiglu``; out: a contiguous tensor [..., F] to write to."""
    require_launchable(x, "x")
    _check_pair(x, gate, up, gate_bias, up_bias)
    return _run(x, gate, up, gate_bias, up_bias, None, config, out)


def _run(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    up_bias: Tensor | None,
    residual: Tensor | None,
    config: LinearConfig | None,
    out: Tensor | None,
) -> Tensor:
    """Allocate, launch, and sum the parts where the product is split."""
    flat = _flat(x)
    config = config or _default(flat, weight, up is not None)
    outputs = weight.shape[0]
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device) if out is None else out
    beside = None if residual is None else _flat(residual)
    if not out.numel():
        return out
    if config.splits == 1:
        _launch(flat, weight, up, bias, up_bias, beside, config, out, None)
        return out
    width = outputs * (1 if up is None else 2)
    part = torch.empty(config.splits, flat.shape[0], width, dtype=torch.float32, device=x.device)
    _launch(flat, weight, up, bias, up_bias, None, config, out, part)
    block = 256
    _sum_kernel[(flat.shape[0], ceil_div(outputs, block))](
        part,
        weight if bias is None else bias,
        weight if up_bias is None else up_bias,
        out if beside is None else beside,
        out,
        outputs,
        0 if beside is None else beside.stride(0),
        part.stride(0),
        PAIR=up is not None,
        BIAS=bias is not None,
        RESIDUAL=beside is not None,
        SPLITS=config.splits,
        BLOCK=block,
        num_warps=2,
        **dependent(out),
    )
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    up_bias: Tensor | None,
    residual: Tensor | None,
    config: LinearConfig,
    out: Tensor,
    part: Tensor | None,
) -> None:
    num_rows, inputs = x.shape
    outputs = weight.shape[0]
    if num_rows > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows for the kernel: got {num_rows}")
    second = weight if up is None else up
    _linear_kernel[(ceil_div(outputs, config.block_o), config.splits)](
        x,
        weight,
        second,
        weight if bias is None else bias,
        weight if up_bias is None else up_bias,
        out if residual is None else residual,
        out,
        out if part is None else part,
        num_rows,
        outputs,
        inputs,
        config.splits,
        x.stride(0),
        weight.stride(0),
        second.stride(0),
        0 if residual is None else residual.stride(0),
        0 if part is None else part.stride(0),
        LINES=next_power_of_2(min(ceil_div(inputs, config.splits), PREFETCHED) * x.element_size() // 128 or 1),
        PAIR=up is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PARTIAL=part is not None,
        EVEN=inputs % config.block_i == 0,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        WIDEN=interpreted() and x.dtype == torch.bfloat16,
        BLOCK_R=max(16, next_power_of_2(num_rows)),
        BLOCK_O=config.block_o,
        BLOCK_I=config.block_i,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent(x),
    )


def _default(x: Tensor, weight: Tensor, pair: bool, summed_later: bool = False) -> LinearConfig:
    return choose_config(
        x.shape[0], weight.shape[0], weight.shape[1], x.element_size(), pair, multiprocessors(x.device), summed_later
    )


def _flat(x: Tensor) -> Tensor:
    """x [..., I] as [R, I] with a contiguous last dim; a copy only where no view exists."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, name: str = "weight") -> None:
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{name} must be [O, {x.shape[-1]}], as wide as x: got {list(weight.shape)}")
    if weight.stride(1) != 1:
        raise ValueError(f"{name} must have a contiguous last dim: got strides {weight.stride()}")
    if weight.dtype != x.dtype:
        raise ValueError(f"{name} must have x's dtype {x.dtype}: got {weight.dtype}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias of {name} must be [{weight.shape[0]}]: got {list(bias.shape)}")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(
            f"residual must be {[*x.shape[:-1], weight.shape[0]]}, as the result: got {list(residual.shape)}"
        )


def _check_pair(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> None:
    _check(x, gate, gate_bias, None, "gate")
    _check(x, up, up_bias, None, "up")
    if gate.shape != up.shape:
        raise ValueError(f"up must have gate's shape {list(gate.shape)}: got {list(up.shape)}")
    if (gate_bias is None) != (up_bias is None):
        raise ValueError("gate_bias and up_bias must be given together")
