"""What every kernel file shares: Triton or a stand-in, which path a call takes, and checks of arguments.

Where Triton is not installed (it has no wheels for some systems) the files still import, and every public function runs its reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dllm.environment import dependent_launch, kernels_mode

HAS_TRITON = find_spec("triton") is not None

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = None

F = TypeVar("F", bound=Callable[..., Any])

EARLY_SIZE = 2**16
"""Numbers in the tensor given to ``dependent`` up to which a kernel is launched early. Measured on an H200: with every kernel launched
early, the step of a model of width 576 with 32 rows (18 thousand numbers) takes 0.77 of its time, one of width 4096 with as many rows
0.99, one of width 2560 with 256 rows 1.18, because what stands ready takes room from what still computes."""


def jit(function: F) -> Any:
    """``triton.jit``; without Triton the plain function, which is never called then."""
    return triton.jit(function) if HAS_TRITON else function


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, so that CPU tensors may be given to them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_triton(tensor: Tensor) -> bool:
    """Whether a call with ``tensor`` runs the kernel: on CUDA, unless DLLM_KERNELS=reference. On the CPU: the reference.

    Tests reach the kernel on the CPU by the launching functions (``*_triton``), which need TRITON_INTERPRET=1 there.
    """
    return HAS_TRITON and tensor.is_cuda and kernels_mode() == "auto"


def require_launchable(tensor: Tensor, name: str) -> None:
    """Raise RuntimeError if a kernel cannot take ``tensor``: it is on the CPU and the interpreter is off, or there is no Triton."""
    if not HAS_TRITON:
        raise RuntimeError(f"{name} needs Triton for its kernel: it is not installed")
    if not tensor.is_cuda and not interpreted():
        raise RuntimeError(f"{name} must be on CUDA for the kernel (or TRITON_INTERPRET=1): got device {tensor.device}")


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; the number of an H200 elsewhere, so that the interpreter sees the same splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def dependent(tensor: Tensor) -> dict[str, bool]:
    """Launch arguments of a kernel that calls ``begin_dependent`` before it touches memory; tensor: its activations, whose size decides.

    Such a kernel is set up on the multiprocessors that become free while the kernel before it still runs (programmatic dependent launch,
    compute capability 9.0 and later), which hides its launch; a graph keeps it. ``DLLM_DEPENDENT_LAUNCH``: 0 for none, 1 for all.
    """
    if not tensor.is_cuda:
        return {"DEPENDENT": False}
    asked = dependent_launch()
    on = (asked == "1" or (asked == "auto" and tensor.numel() <= EARLY_SIZE)) and _capability(tensor.device) >= 9
    return {"DEPENDENT": True, "launch_pdl": True} if on else {"DEPENDENT": False}


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> int:
    # AMD devices count their generations otherwise, and have no such launch.
    return 0 if torch.version.cuda is None else torch.cuda.get_device_capability(device)[0]


@jit
def begin_dependent(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before has ended and its results can be read, then let the next kernel be set up.

    Every program must pass here before it reads or writes: a kernel's end then implies the end of all before it, which makes it safe to
    write to memory that an earlier one has read. The order matters. Were the next kernel let in before the wait, it could come to stand
    beside the last but one, and whatever that one reads enters the first-level cache after the next one began with an empty cache. The
    kernel between the two may write to the same memory (the allocator gives freed buffers out at once), and the next one would find the
    old lines. With the wait first, only neighbours ever stand side by side, and no kernel reads what it writes.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch_lines(pointers):  # type: ignore[no-untyped-def]
    """Ask for the cache lines under a tensor of pointers, for use after the wait of ``begin_dependent``.

    Into the L2 cache, where an older write would be seen too; so it may stand before the wait. The pointers must be readable.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
