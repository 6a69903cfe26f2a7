"""Linear layers for few rows on a CPU: weights packed once, as the library that multiplies them reads them.

    y = x W^T + b for x [..., I], W [O, I], b [O] or nothing

A decoding step has 1 to 128 rows, so its time is that of reading W. PyTorch's own product arranges W anew in each call, which costs more
than the read; a layout made once and kept beside the weight takes that away (docs/log.md has the times on two AVX2 cores):

- float32 weights: oneDNN's layout, for up to ``MAX_ROWS`` rows (about half the time of the plain product);
- bfloat16 weights on a CPU without bfloat16 arithmetic: FBGEMM's layout, which holds W in float16 and multiplies in float32, for any
  number of rows. Every bfloat16 number within a factor of 2^32 of the largest weight is a float16 number once the weight is multiplied
  by a power of two, so nothing is lost: x W^T is summed in float32 and rounded once. A verification of eight rows then costs about as
  much as a step of one, where the emulated product costs six times as much.

The copies cost memory: no more than ``MAX_BYTES`` of them are kept.
"""

from __future__ import annotations

import functools
import math
import platform
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dllm.environment import packed_weights

MAX_ROWS = 128
"""Rows up to which a packed float32 product is the faster one; a prefill of more rows is bound by arithmetic."""
MIN_NUMEL = 2**16
"""Smaller weights stay in the caches anyway."""
MAX_BYTES = 4 * 2**30
"""Bytes of packed copies in all; further weights are read as they are."""


class _Packed(NamedTuple):
    """A packed copy. state: of the weight that was packed, see ``_state``. weight: oneDNN's tensor, or FBGEMM's object for float16.
    factor: what float16 products are multiplied by."""

    state: tuple[int, int, torch.dtype]
    weight: Any
    num_bytes: int
    factor: float | None = None


_kept = WeakTensorKeyDictionary()
"""Weight -> its packed copy; it goes when the weight goes."""


class Linear(nn.Linear):
    """``nn.Linear`` whose products of few rows on a CPU read a packed weight; the parameters are nn.Linear's own."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Let every plain ``nn.Linear`` of a model read packed weights; parameters and their names stay. Mutates the model."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O] in x's dtype: ``F.linear``, from a packed copy where that is faster.

    A weight that was changed in place is packed again. Changes in place that autograd does not count (through
    ``weight.data``) are not seen: set DLLM_PACKED=0 to go without copies.
    """
    if not _fits(x, weight):
        return F.linear(x, weight, bias)
    packed = _packed(weight)
    if packed is None:
        return F.linear(x, weight, bias)
    wide = x.contiguous().float()
    if packed.factor is None:
        wide_bias = None if bias is None else bias.float()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(wide, packed.weight, wide_bias, "none", [], "")
        return out.to(x.dtype)
    out = torch.ops.quantized.linear_dynamic_fp16(wide, packed.weight)
    if packed.factor != 1:
        out.mul_(packed.factor)
    if bias is not None:
        out.add_(bias.float())
    return out.to(x.dtype)


def _fits(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or weight.numel() < MIN_NUMEL or x.dtype != weight.dtype or torch.is_grad_enabled():
        return False
    rows = x.shape[:-1].numel()
    if rows < 1 or torch.compiler.is_compiling() or weight.is_inference() or not packed_weights() or not _packs():
        return False
    if x.dtype == torch.float32:
        return rows <= MAX_ROWS
    return x.dtype == torch.bfloat16 and not _multiplies_bfloat16()


@functools.cache
def _packs() -> bool:
    """Whether this PyTorch has oneDNN's linear operators for this processor."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it. oneDNN's own answer is no help: it also says yes where it emulates them."""
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(supported()) for supported in asked if supported is not None)


def _holds_float16() -> bool:
    """Whether FBGEMM's products with float16 weights are there; a program may choose another engine at any time."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch.ops.quantized, "linear_dynamic_fp16")


def _packed(weight: Tensor) -> _Packed | None:
    """The packed copy of a weight, made on first use, or None where there is no room for one."""
    found: _Packed | None = _kept.get(weight)
    if found is not None and found.state == _state(weight):
        return found
    # Keys of weights that are gone leave by themselves, so the sum is that of the living.
    others = sum(copy.num_bytes for copy in _kept.values()) - (0 if found is None else found.num_bytes)
    scale = _float16_scale(weight) if weight.dtype == torch.bfloat16 and _holds_float16() else None
    num_bytes = weight.numel() * (4 if scale is None else 2)
    if others + num_bytes > MAX_BYTES:
        return None
    wide = weight.detach().float().contiguous()
    if scale is None:
        packed = _Packed(_state(weight), torch.ops.mkldnn._reorder_linear_weight(wide, 8), num_bytes)
    else:
        held = torch.ops.quantized.linear_prepack_fp16(wide * scale, None)
        packed = _Packed(_state(weight), held, num_bytes, 1 / scale)
    _kept[weight] = packed
    return packed


def _state(weight: Tensor) -> tuple[int, int, torch.dtype]:
    """What changes with the numbers of a weight: ``module.to(dtype)`` puts other memory under the same parameter."""
    return weight._version, weight.data_ptr(), weight.dtype


def _float16_scale(weight: Tensor) -> float | None:
    """The power of two by which a bfloat16 weight becomes float16 numbers; None for a weight that has infinities or NaN.

    1 where that loses nothing, else the largest one below float16's limit: what then still falls below its range is less than
    2^-38 of the largest weight, far below one rounding of a float32 sum.
    """
    wide = weight.detach().float()
    if not torch.isfinite(wide).all():
        return None
    if torch.equal(wide.half().float(), wide):
        return 1.0
    _, exponent = math.frexp(float(wide.abs().max()))
    return math.ldexp(1.0, 15 - exponent)
