"""Compile the kernels of the steps in several processes before anything is timed; each leaves its results in Triton's cache on disk.

A kernel is compiled anew for each tile, split and alignment of its numbers, one after another in one process. A shape of a single layer
needs the same kernels as the whole, so each process runs one step of one at its point.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from dllm.evals.bench.plain import PlainStep
from dllm.evals.bench.shapes import SHAPES
from dllm.evals.bench.steps import FastStep, Point, fused_decoder
from dllm.model.fast_decoder import FastDecoder


def run_once(name: str, point: Point, device: str, dtype: torch.dtype) -> str:
    """One step of the shape's first layer at ``point``; the name of what ran."""
    plain = PlainStep(replace(SHAPES[name], layers=1), device, dtype)
    plain.prepare(point.batch, point.rows, point.keys)
    step = FastStep(FastDecoder(fused_decoder(plain.shape, plain)), point, plain.kv, plain.ids)
    step.step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return f"{name} b{point.batch} r{point.rows} n{point.keys}"


def warm(points: Sequence[tuple[str, Point]], device: torch.device, dtype: torch.dtype, jobs: int) -> list[str]:
    """Run each (shape, point) once in one of ``jobs`` processes; the names of what ran. Raises what a process raised."""
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1: got {jobs}")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(jobs, max(len(points), 1)), mp_context=context) as pool:
        tasks = [pool.submit(run_once, name, point, str(device), dtype) for name, point in points]
        return [task.result() for task in tasks]
