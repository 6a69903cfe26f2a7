"""Linear layers for few rows on a CPU: weights packed once, as oneDNN reads them.

    y = x W^T + b for x [..., I], W [O, I], b [O] or nothing

A decoding step has 1 to 128 rows, so its time is that of reading W. PyTorch's own product arranges W anew in each call, which costs more
than the read; oneDNN's layout, made once and kept beside the weight, takes that away (about half the time on two AVX2 cores for 1 to 128
rows, docs/log.md). It costs a second copy of the weights in memory: no more than ``MAX_BYTES`` of them are kept.

bfloat16 weights on a CPU that has no bfloat16 arithmetic: one row is read fastest as it is; several rows are multiplied in float32 from a
packed float32 copy and rounded once, which is faster and no less exact than bfloat16 products.
"""

from __future__ import annotations

import functools
import platform
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dllm.environment import packed_weights

MAX_ROWS = 128
"""Rows up to which the packed product is the faster one; a prefill of more rows is bound by arithmetic."""
MIN_NUMEL = 2**16
"""Smaller weights stay in the caches anyway."""
MAX_BYTES = 4 * 2**30
"""Bytes of packed copies in all; further weights are read as they are."""


class _Packed(NamedTuple):
    version: int
    weight: Tensor


_kept = WeakTensorKeyDictionary()
"""Weight -> its packed copy; it goes when the weight goes."""


class Linear(nn.Linear):
    """``nn.Linear`` whose products of few rows on a CPU read a packed weight; the parameters are nn.Linear's own."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O] in x's dtype: ``F.linear``, from a packed copy where that is faster.

    A weight that was changed in place is packed again. Changes that autograd does not count (through ``weight.data``) are not seen:
    set DLLM_PACKED=0 to go without copies.
    """
    if not _fits(x, weight):
        return F.linear(x, weight, bias)
    packed = _packed(weight)
    if packed is None:
        return F.linear(x, weight, bias)
    wide = x.contiguous().float()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        wide, packed, None if bias is None else bias.float(), "none", [], ""
    )
    return out.to(x.dtype)


def _fits(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or weight.numel() < MIN_NUMEL or x.dtype != weight.dtype or torch.is_grad_enabled():
        return False
    rows = x.shape[:-1].numel()
    if not 1 <= rows <= MAX_ROWS or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    if torch.compiler.is_compiling() or weight.is_inference() or not packed_weights() or not _packs():
        return False
    return x.dtype == torch.float32 or (rows > 1 and not _multiplies_bfloat16())


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
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(weight: Tensor) -> Tensor | None:
    """The packed copy of a weight, made on first use, or None where there is no room for one."""
    found: _Packed | None = _kept.get(weight)
    if found is not None and found.version == weight._version:
        return found.weight
    # Keys of weights that are gone leave by themselves, so the sum is that of the living.
    if sum(4 * key.numel() for key in _kept) + 4 * weight.numel() > MAX_BYTES and found is None:
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().float().contiguous(), 8)
    _kept[weight] = _Packed(weight._version, packed)
    return packed
