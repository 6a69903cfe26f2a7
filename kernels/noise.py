"""The numbers of ``dllm.noise`` inside a Triton kernel, bit for bit.

Formula: Philox4x32-10 (Salmon et al. 2011) with the row's 64-bit seed as key and the counter (position, step, stream, lane); the first
of its four words, its upper 23 bits and a half, times 2**-23. Every operation is exact in integers or in fp32, so the CPU, torch on
CUDA and Triton give the same number. Bytes moved: 4 a number written; the limit is integer arithmetic (about 100 operations each).
"""

# The arguments of kernels are Triton values, which no annotation describes.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from dllm.kernels._launch import ceil_div, jit, require_launchable, tl, use_triton
from dllm.noise import CounterNoise


def counter_uniform_reference(
    seeds: Tensor, positions: Tensor, step: Tensor, stream: int = 0, lanes: int = 0
) -> Tensor:
    """Plain PyTorch truth: ``CounterNoise(seeds).uniform`` (lanes = 0) or ``uniform_lanes``.

    seeds, step [B] int64; positions [B, S] int64 -> fp32 [B, S], or [B, S, lanes], in (0, 1).
    """
    noise = CounterNoise(seeds)
    return noise.uniform_lanes(positions, step, lanes, stream) if lanes else noise.uniform(positions, step, stream)


@jit
def philox_uniform(seed, position, step, stream, lane):
    """Uniform numbers in (0, 1), fp32, in the shape of ``position`` and ``lane`` broadcast; for use inside other kernels.

    seed: int64 scalar or tensor; position, step, stream, lane: integers, taken modulo 2**32; position and lane are tensors of one shape.
    """
    c0 = position.to(tl.uint32)
    c1 = tl.zeros_like(c0) + step.to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream
    c3 = lane.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, c0, c1, c2.to(tl.uint32), c3)
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@jit
def _uniform_kernel(
    seeds,
    positions,
    step,
    out,
    num_slots,
    numel,
    stream,
    stride_batch,
    stride_slot,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    if LANES > 0:
        row = index // LANES
        # Lane 0 is the number without lanes, so that the two never share one.
        lane = index % LANES + 1
    else:
        row = index
        lane = tl.zeros_like(index)
    batch = row // num_slots
    slot = row % num_slots
    seed = tl.load(seeds + batch, mask=inside, other=0)
    position = tl.load(positions + batch * stride_batch + slot * stride_slot, mask=inside, other=0)
    number = philox_uniform(seed, position, tl.load(step + batch, mask=inside, other=0), stream, lane)
    tl.store(out + index, number, mask=inside)


def counter_uniform_triton(seeds: Tensor, positions: Tensor, step: Tensor, stream: int = 0, lanes: int = 0) -> Tensor:
    """Launch the kernel; arguments and result as ``counter_uniform_reference``."""
    require_launchable(positions, "positions")
    batch, slots = positions.shape
    shape = (batch, slots, lanes) if lanes else (batch, slots)
    out = torch.empty(shape, dtype=torch.float32, device=positions.device)
    numel = out.numel()
    if numel:
        block = 256
        _uniform_kernel[(ceil_div(numel, block),)](
            seeds.contiguous(),
            positions,
            step.contiguous(),
            out,
            slots,
            numel,
            stream,
            *positions.stride(),
            LANES=lanes,
            BLOCK=block,
        )
    return out


def counter_uniform(seeds: Tensor, positions: Tensor, step: Tensor, stream: int = 0, lanes: int = 0) -> Tensor:
    """Uniform numbers keyed (seed, position, step, stream, lane): seeds, step [B] int64, positions [B, S] int64 -> fp32 [B, S].

    lanes > 0: one number per lane, [B, S, lanes] (a Gumbel number per vocabulary entry, say). Bit-equal to ``dllm.noise.CounterNoise``.
    Raises ValueError for shapes or types that do not fit.
    """
    if positions.dim() != 2 or seeds.shape != positions.shape[:1] or step.shape != positions.shape[:1]:
        raise ValueError(
            "positions must be [B, S], seeds and step [B]: got "
            f"{tuple(positions.shape)}, {tuple(seeds.shape)} and {tuple(step.shape)}"
        )
    for name, value in (("seeds", seeds), ("positions", positions), ("step", step)):
        if value.dtype != torch.int64:
            raise ValueError(f"{name} must be int64: got {value.dtype}")
    if lanes < 0:
        raise ValueError(f"lanes must be >= 0: got {lanes}")
    function = counter_uniform_triton if use_triton(positions) else counter_uniform_reference
    return function(seeds, positions, step, stream, lanes)
