"""Where the GPU's time goes in a call: kernels by share, ours against cuBLAS and the rest, and what makes the host wait.

``torch.profiler`` sees the kernels inside replayed graphs. Calls of the host are counted twice: in the whole call, and between the first
and the last graph launch, which is the captured decoding without prefill, capture and the reading of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

CUBLAS = ("nvjet", "gemm", "gemv", "cublas", "cutlass", "splitKreduce")
"""Parts of the names of the library's products."""
ATTENTION = ("flash_fwd", "fmha", "cudnn")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
TOP = 12
"""Kernels that are listed by name."""


class Event(NamedTuple):
    """One kernel or copy of the device, or one runtime call of the host; start and spent in microseconds."""

    name: str
    on_device: bool
    start: float
    spent: float


def group_of(name: str) -> str:
    """ours (a Triton kernel of this package), cublas, attention (the library's), memory (copies, fills) or other."""
    if name.startswith("_") and name.endswith("_kernel"):
        return "ours"
    if name.startswith(("Memcpy", "Memset")):
        return "memory"
    if any(part in name for part in ATTENTION):
        return "attention"
    return "cublas" if any(part in name for part in CUBLAS) else "other"


def summarise(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """gpu_ms, our_share, shares by group, the largest kernels, and the host's calls; steps: forwards that the call counted.

    kernels: [name, share of the GPU time, us a run, runs a step]. host: calls by name in the whole call; decoding: those between the first
    and the last graph launch, or None without graphs. Raises ValueError if steps < 1 or the device has no events.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1: got {steps}")
    events = list(events)
    spent: dict[str, float] = {}
    runs: Counter[str] = Counter()
    for event in events:
        if event.on_device:
            spent[event.name] = spent.get(event.name, 0.0) + event.spent
            runs[event.name] += 1
    total = sum(spent.values())
    if not total > 0:
        raise ValueError("events must hold kernels of the device: got none (the profiler may not be allowed here)")
    shares: dict[str, float] = {}
    for name, us in spent.items():
        shares[group_of(name)] = shares.get(group_of(name), 0.0) + us / total
    largest = sorted(spent.items(), key=lambda item: -item[1])[:TOP]
    calls = [e for e in events if not e.on_device and _counted(e.name)]
    launches = [e.start for e in calls if "GraphLaunch" in e.name]
    inside = [e for e in calls if launches and launches[0] < e.start < launches[-1]]
    return {
        "gpu_ms": total / 1e3,
        "steps": steps,
        "gpu_us_a_step": total / steps,
        "our_share": shares.get("ours", 0.0),
        "shares": shares,
        "kernels": [[name[:70], us / total, us / runs[name], runs[name] / steps] for name, us in largest],
        "graph_launches": len(launches),
        "host": dict(Counter(e.name for e in calls)),
        "decoding": dict(Counter(e.name for e in inside)) if launches else None,
    }


def _counted(name: str) -> bool:
    return name in LAUNCHES or any(word in name for word in ("Synchronize", "GraphLaunch", "Memcpy", "Memset"))


def trace(run: Callable[[], Any], device: torch.device) -> tuple[Any, list[Event]]:
    """(what ``run`` gave, its events in the order of their starts), after one run that is not traced."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = device.type == "cuda"
    run()
    if on_cuda:
        torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        result = run()
        if on_cuda:
            torch.cuda.synchronize(device)
    found = [
        Event(
            event.name,
            event.device_type == torch.autograd.DeviceType.CUDA,
            event.time_range.start,
            event.device_time_total if event.device_type == torch.autograd.DeviceType.CUDA else event.cpu_time_total,
        )
        for event in seen.events()
    ]
    return result, sorted(found, key=lambda event: event.start)
