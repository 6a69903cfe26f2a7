"""Medians and spread of repeated runs, and what the device can do at most: copy rate and matrix rate, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dllm.evals.bench.plain import captured


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: median, 10th and 90th percentile of ``runs`` runs after a warm-up."""

    ms: float
    p10: float
    p90: float
    runs: int


@dataclass(frozen=True)
class Rates:
    """What the device reaches: copy in bytes/s (read + write), matmul in FLOP/s (bf16, or fp32 on a CPU)."""

    copy: float
    matmul: float


class Deadline:
    """Seconds that a part may take; entries are skipped, never cut in the middle."""

    def __init__(self, limit_s: float | None) -> None:
        self.end = None if limit_s is None else time.monotonic() + limit_s

    def left(self) -> float:
        """Seconds left, or infinity."""
        return float("inf") if self.end is None else self.end - time.monotonic()


def summary(values: list[float]) -> Timing:
    """Median and percentiles of milliseconds."""
    if not values:
        raise ValueError("values must hold at least one run: got none")
    low, middle, high = np.percentile(values, [10, 50, 90])
    return Timing(float(middle), float(low), float(high), len(values))


def timed(
    run: Callable[[], Any], device: torch.device, runs: int = 20, warmup: int = 3, budget_s: float = 0.5
) -> Timing:
    """Time ``run`` ``runs`` times, each by its own pair of CUDA events (a clock on the CPU), without waiting in between.

    A run that is so slow that ``runs`` of it exceed ``budget_s`` is repeated fewer times, at least 5.
    """
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        values: list[float] = []
        started = time.perf_counter()
        while len(values) < runs and (len(values) < 5 or time.perf_counter() - started < budget_s):
            begin = time.perf_counter()
            run()
            values.append(1e3 * (time.perf_counter() - begin))
        return summary(values)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    one = max(time.perf_counter() - begin, 1e-6)
    runs = max(5, min(runs, int(budget_s / one)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return summary([a.elapsed_time(b) for a, b in pairwise(marks)])


def in_graph(run: Callable[[], Any], device: torch.device, repeat: int = 1) -> Callable[[], Any]:
    """``repeat`` runs as one CUDA graph; off CUDA the same runs eagerly."""

    def many() -> Any:
        outputs = [run() for _ in range(repeat)]
        return outputs[-1]

    if device.type != "cuda":
        return many
    with torch.no_grad():
        replay, outputs = captured(many, warmup=1)

    # A graph holds addresses: without ``kept``, what ``run`` reads is free for others once the caller drops it, and a replay goes astray.
    def call(kept: Any = run) -> Any:
        replay()
        return outputs

    return call


def measure_rates(device: torch.device) -> Rates:
    """Copy rate over 2 GiB (16 MiB on a CPU) and matrix rate of a square bf16 product."""
    on_cuda = device.type == "cuda"
    size, side = (2**30, 8192) if on_cuda else (2**24, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), device)
    return Rates(2 * size / (copy.ms / 1e3), matrix_rate(device, side, 20))


def matrix_rate(device: torch.device, side: int, runs: int) -> float:
    """FLOP/s of a square product of random numbers, bf16 (fp32 on a CPU), by the median of ``runs`` in a row.

    A device at its power limit lowers its clock: what 20 products reach after a pause, 200 do not.
    """
    a = torch.randn(side, side, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    product = timed(lambda: a @ a, device, runs=runs, budget_s=1.0)
    return 2 * side**3 / (product.ms / 1e3)
