"""``dllm bench``, also ``python -m dllm.evals.bench.run --part kernels,steps --out FOLDER --time-limit 120``.

Parts: tune (measure the products' table of ``kernels/linear_table.py``, once a device; left out by default), kernels, steps, e2e (the
shipped model), 8b (the published rule at LLaDA-8B's shape), profile (GPU time by kernel, of methods and of steps). Each measures its
most important entries first and stops when its share of the time limit is over; every entry is on disk as soon as it is measured.
``--device cpu --shape tiny`` runs everything end to end on tiny sizes, to see that it works: its times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dllm.evals.bench.e2e import bench_ar, bench_decoding, bench_published, gate_fp32
from dllm.evals.bench.kernels import TINY, Sizes, bench_kernels
from dllm.evals.bench.record import Record, environment
from dllm.evals.bench.report import write
from dllm.evals.bench.shapes import SHAPES
from dllm.evals.bench.steps import Point, bench_shape, grid
from dllm.evals.bench.timing import Deadline, Rates, measure_rates
from dllm.evals.bench.warm import warm
from dllm.kernels.linear_table import Kind, LinearShape, current_table

PARTS = ("tune", "kernels", "steps", "e2e", "8b", "profile")
STEP_SHAPES = ("llada-8b", "smollm2-135m", "qwen3-4b", "sdar-4b", "qwen3-8b", "qwen3-8b-drafter", "dream-7b")
PROFILED = ("smollm2-135m", "llada-8b", "qwen3-4b")
TUNE_S = 25.0
"""Seconds that measuring one product's candidates may take, compilation included."""
FULL_GRID = ("llada-8b", "smollm2-135m", "qwen3-4b")
"""Shapes that are measured at all places; the others at the rows of batch 1 and at batch 8."""

TINY_POINTS = [Point(1, 4, 32), Point(2, 4, 32), Point(1, 4, 64), Point(1, 8, 32)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0, or 1 if a gate was red."""
    options = _parser().parse_args(arguments)
    parts = [part.strip() for part in options.part.split(",") if part.strip()]
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise SystemExit(f"--part must be among {', '.join(PARTS)}: got {', '.join(unknown)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device must exist: got cuda, and CUDA is not available")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    record = Record(options.out)
    began = time.monotonic()
    with torch.no_grad():
        rates = measure_rates(device)
        record.add("rates", "device", copy=rates.copy, matmul=rates.matmul, **environment(device))
        for index, part in enumerate(parts):
            limit = None
            if options.time_limit is not None:
                # What an earlier part left over goes to the later ones.
                limit = (options.time_limit - (time.monotonic() - began)) / (len(parts) - index)
            begin = time.monotonic()
            run_part(part, options, device, rates, record, Deadline(limit))
            record.add(part, "part", seconds=time.monotonic() - begin)
            write(options.out, record.entries, environment(device), asdict(rates), picture=False)
    write(options.out, record.entries, environment(device), asdict(rates), picture=not options.no_picture)
    return int(any(entry.get("red_gate") for entry in record.entries))


def run_part(part: str, options: Any, device: torch.device, rates: Rates, record: Record, deadline: Deadline) -> None:
    """Measure one part into the record."""
    tiny = options.shape == "tiny"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if part == "tune":
        tune(STEP_SHAPES if options.shape is None else tuple(options.shape.split(",")), device, record, deadline, dtype)
    elif part == "kernels":
        bench_kernels(TINY if tiny else Sizes(), device, rates, record, deadline, dtype)
    elif part == "steps":
        names = STEP_SHAPES if options.shape is None else tuple(options.shape.split(","))
        places = {name: TINY_POINTS if tiny else grid(name in FULL_GRID and not options.quick) for name in names}
        if options.jobs:
            begin = time.monotonic()
            ran = warm([(name, point) for name in names for point in places[name]], device, dtype, options.jobs)
            record.add("steps", "kernels compiled", points=len(ran), seconds=time.monotonic() - begin)
        for name, points in places.items():
            if deadline.left() < 2:
                break
            bench_shape(SHAPES[name], points, device, rates, record, deadline, options.compile, dtype)
    elif part == "e2e":
        _bench_e2e(options, device, record, deadline, dtype, tiny)
    elif part == "profile":
        _profile(options, device, record, deadline, dtype, tiny)
    else:
        sizes = dict(shape=SHAPES["tiny"], prompt=8, new_tokens=8, block=4) if tiny else {}
        bench_published(device, record, deadline, dtype=dtype, **sizes)  # type: ignore[arg-type]


def tune(
    names: Sequence[str], device: torch.device, record: Record, deadline: Deadline, dtype: torch.dtype, rows: int = 32
) -> None:
    """Measure the products of the shapes' layers at ``rows`` rows and keep the fastest of each on disk."""
    table = current_table(device)
    for name in names:
        shape = SHAPES[name]
        heads = shape.heads * shape.head_dim
        products: list[tuple[Kind, int, int]] = [
            ("swiglu", shape.ffn, shape.width),
            ("linear", shape.width, shape.ffn),
            ("linear", heads + 2 * shape.kv_heads * shape.head_dim, shape.width),
            ("linear", shape.width, heads),
        ]
        for kind, outputs, inputs in products:
            if deadline.left() < TUNE_S:
                return
            product = LinearShape(kind, rows, outputs, inputs, dtype)
            table.fill([product], device)
            choice = table.choose(product)
            chosen = "cuBLAS" if choice.config is None else str(choice.config)
            record.add("tune", product.key, choice=chosen, us=choice.time_us)
            table.save()


def _bench_e2e(
    options: Any, device: torch.device, record: Record, deadline: Deadline, dtype: torch.dtype, tiny: bool
) -> None:
    from dllm.pipeline import DiffusionLM

    lm = DiffusionLM.from_pretrained(options.model, dtype=dtype, device=device)
    fp32 = DiffusionLM.from_pretrained(options.model, dtype=torch.float32, device="cpu")
    tokens, runs = (8, 1) if tiny else (128, 5)
    batches = (1,) if tiny else (1, 8)
    bench_decoding(lm, record, deadline, lambda: gate_fp32(lm, fp32, min(tokens, 48)), tokens, batches, runs)
    if options.ar:
        bench_ar(record, deadline, device, tokens)


def _profile(
    options: Any, device: torch.device, record: Record, deadline: Deadline, dtype: torch.dtype, tiny: bool
) -> None:
    from dllm.evals.bench.profile import profile_methods, profile_steps
    from dllm.pipeline import DiffusionLM

    names = PROFILED if options.shape is None else tuple(options.shape.split(","))
    places = {"points": tuple(TINY_POINTS[:1])} if tiny else {}
    # Methods first: they are the smaller half, and no shape's weights are in the way.
    if options.methods:
        lm = DiffusionLM.from_pretrained(options.model, dtype=dtype, device=device)
        profile_methods(lm, record, deadline, 8 if tiny else 128)
        del lm
    profile_steps([SHAPES[name] for name in names], record, deadline, device, dtype, **places)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dllm bench", description=__doc__)
    parser.add_argument("--part", default=",".join(PARTS[1:]), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default=None, help="comma-separated shapes of the steps, or tiny for everything")
    parser.add_argument("--model", default="smollm2-135m-bd8", help="diffusion model of the e2e part")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for all parts together")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile the steps' kernels first (0: none)")
    parser.add_argument("--quick", action="store_true", help="five places a shape instead of ten")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave the compiled twin out")
    parser.add_argument("--no-ar", dest="ar", action="store_false", help="leave the AR model out")
    parser.add_argument("--no-methods", dest="methods", action="store_false", help="profile the steps only")
    parser.add_argument("--no-picture", action="store_true", help="leave the picture out")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
