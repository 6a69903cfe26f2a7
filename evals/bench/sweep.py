"""Times of the configurations around the fixed rules of the kernels: ``python -m dllm.evals.bench.sweep --part attention --time-limit 60``.

Parts: attention (rows of a tile, warps, stages, shares of the keys), row_stats (tile, splits), head (tiles of ``lm_head_stats``). For each
shape the rule's own configuration comes first; every other one must give its numbers (the gate) before it is timed. All are compiled
in ``--jobs`` processes beforehand, since a sweep is otherwise mostly compilation. Each entry is on disk as soon as it is measured
(``entries.jsonl``), and the fastest of each shape is printed at the end. It changes no rule: whoever reads it does.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.evals.bench.record import Record, environment
from dllm.evals.bench.timing import Deadline, in_graph, timed
from dllm.kernels._launch import HAS_TRITON, ceil_div, triton
from dllm.kernels.attention import AttentionConfig, attention_triton, choose_config, plan_tiles_triton
from dllm.kernels.lm_head_stats import HeadTiles, lm_head_stats_triton, tiles_of
from dllm.kernels.row_stats import Split, row_numbers_triton
from dllm.types import Attend

PARTS = ("attention", "row_stats", "head")
TOP1 = frozenset({"top1"})
CACHE_BYTES = 500 * 2**20
"""Inputs of one graph together: ten times the second-level cache, so that what one run reads is gone when it is read again."""
MIN_RUNS = 4
"""Runs of one graph at least, so that the launch of the graph does not count."""
ATTENTION = (
    (32, 8, 128, 32, 16384),
    (9, 3, 64, 32, 1024),
    (32, 8, 128, 32, 1024),
    (32, 32, 128, 32, 16384),
    (9, 3, 64, 32, 16384),
    (32, 32, 128, 32, 1024),
)
"""(query heads, key heads, head width, new rows, stored keys)."""
ROW_STATS = ((32, 126464), (8, 49152), (4096, 126464))
HEAD = ((32, 49152, 576), (32, 126464, 4096), (256, 126464, 4096), (32, 151936, 2560))
"""(rows, vocabulary, width)."""
TINY = {"attention": ((2, 1, 16, 2, 70),), "row_stats": ((1, 40),), "head": ((2, 40, 16),)}


@dataclass(frozen=True)
class Trial:
    """One configuration at one shape; config None: the fixed rule's."""

    part: str
    shape: tuple[int, ...]
    config: Any = None

    @property
    def name(self) -> str:
        return f"{self.part} {'x'.join(str(n) for n in self.shape)}"


def trials(part: str, shapes: Iterable[tuple[int, ...]], processors: int = 132) -> list[Trial]:
    """The rule and the configurations around it, for each shape. Raises ValueError for an unknown part."""
    if part not in PARTS:
        raise ValueError(f"part must be among {', '.join(PARTS)}: got {part}")
    found = []
    for shape in shapes:
        if part == "attention":
            around: list[Any] = _attention_configs(shape, processors)
        elif part == "row_stats":
            around = _row_splits(shape, processors)
        else:
            around = _head_tiles(shape)
        found += [Trial(part, shape, config) for config in (None, *around)]
    return found


def _attention_configs(shape: tuple[int, ...], processors: int) -> list[AttentionConfig]:
    heads, kv_heads, head_dim, queries, keys = shape
    tiles, rows = ceil_div(keys, 64) + ceil_div(queries, 64), queries * heads // kv_heads
    rule = choose_config(1, kv_heads, rows, tiles, head_dim, 2, processors)
    found = []
    for block_m, warps, stages in (
        (64, 4, 3),
        (64, 4, 4),
        (64, 4, 5),
        (64, 4, 2),
        (128, 8, 2),
        (128, 8, 3),
        (128, 8, 4),
        (32, 4, 3),
    ):
        programs = kv_heads * ceil_div(rows, block_m)
        for splits in {rule.splits, rule.splits // 2, processors // programs, 2 * processors // programs}:
            config = AttentionConfig(block_m, splits, warps, stages)
            if 1 <= splits <= tiles // 2 and block_m < 2 * max(rows, 64) and config != rule:
                found.append(config)
    return found


def _row_splits(shape: tuple[int, ...], processors: int) -> list[Split]:
    rows, vocab = shape
    found = []
    for tile in (1024, 2048, 4096, 8192):
        tiles = ceil_div(vocab, tile)
        for a_processor in (2, 4, 8):
            length = ceil_div(tiles, min(max(a_processor * processors // rows, 1), tiles)) * tile
            found.append(Split(tile, ceil_div(vocab, length), length, tiles))
    return list(dict.fromkeys(found))


def _head_tiles(shape: tuple[int, ...]) -> list[HeadTiles]:
    rows, vocab, width = shape
    rule = tiles_of(rows, vocab, width)
    heights = (64, 128, 256) if rows > 64 else (rule.block_rows,)
    found = [
        HeadTiles(height, block_vocab, block_width, warps, stages)
        for height in heights
        for block_vocab, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
        if height * block_vocab <= 256 * 128
        for block_width, stages in ((64, 3), (64, 4), (64, 6), (128, 3))
        if block_width <= max(width, 16) and (height + block_vocab) * block_width * 2 * stages <= 220 * 1024
    ]
    return [tiles for tiles in found if tiles != rule]


def prepare(trial: Trial, device: torch.device, copies: int | None = None) -> list[Callable[[], Tensor]]:
    """Runs of the trial over ``copies`` equal inputs (default: more than the caches hold); each gives the numbers of the gate."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, config = trial.shape, trial.config
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(0, scale, generator=generator)

    if trial.part == "attention":
        heads, kv_heads, head_dim, queries, keys = shape
        held = 2 * kv_heads * keys * head_dim * dtype.itemsize
    else:
        held = shape[-2] * shape[-1] * dtype.itemsize
    if copies is None:
        copies = max(1, min(24, ceil_div(CACHE_BYTES, held))) if device.type == "cuda" else 1
    if trial.part == "attention":
        q, k, v = (random(1, n, queries, head_dim) for n in (heads, kv_heads, kv_heads))
        group = torch.zeros(1, keys, dtype=torch.int32, device=device)
        attend = Attend.bidirectional(torch.ones(1, queries, dtype=torch.bool, device=device), group)
        plan = plan_tiles_triton(attend)
        stores = [random(2, 1, kv_heads, keys, head_dim) for _ in range(copies)]
        return [lambda s=s: attention_triton(q, k, v, attend, s[0], s[1], plan=plan, config=config) for s in stores]  # type: ignore[misc]
    if trial.part == "row_stats":
        rows = [random(1, *shape, scale=3.0) for _ in range(copies)]
        return [lambda x=x: row_numbers_triton(x, TOP1, split=config).log_total for x in rows]  # type: ignore[misc]
    hidden = random(shape[0], shape[2])
    weights = [random(shape[1], shape[2], scale=shape[2] ** -0.5) for _ in range(copies)]
    return [lambda w=w: lm_head_stats_triton(hidden, w, TOP1, tiles=config).log_total for w in weights]  # type: ignore[misc]


def compile_one(trial: Trial, device: str) -> str | None:
    """Run the trial once, which leaves its kernels in Triton's cache; None, or why the device cannot run it."""
    try:
        prepare(trial, torch.device(device), 1)[0]()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as error:
        return str(error)
    return None


def compile_all(given: Sequence[Trial], device: torch.device, jobs: int) -> dict[Trial, str | None]:
    """``compile_one`` of each trial in ``jobs`` processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        return dict(zip(given, pool.map(compile_one, given, [str(device)] * len(given)), strict=True))


def sweep(
    given: Sequence[Trial],
    device: torch.device,
    record: Record,
    deadline: Deadline,
    refused: Mapping[Trial, str | None] | None = None,
) -> None:
    """Gate and time the trials in their order; adds one entry each. refused: what ``compile_all`` gave; others are compiled here."""
    refused = refused or {}
    truth: dict[str, Tensor] = {}
    for trial in given:
        if deadline.left() < 1.0:
            break
        config = "rule" if trial.config is None else str(tuple(_fields(trial.config).values()))
        reason = refused[trial] if trial in refused else compile_one(trial, str(device))
        if reason is not None:
            record.add("sweep", trial.name, config=config, refused=reason)
            continue
        runs = prepare(trial, device)
        numbers = runs[0]().float()
        wanted = truth.setdefault(trial.name, numbers)
        gap = ((numbers - wanted).abs().max() / wanted.abs().max()).item()
        if not gap <= 2e-2:
            record.add("sweep", trial.name, config=config, red_gate=f"differs from the rule's by {gap:.3g}")
            continue
        repeat = ceil_div(MIN_RUNS, len(runs)) if device.type == "cuda" else 1
        whole = timed(in_graph(lambda runs=runs: [run() for run in runs], device, repeat), device, budget_s=0.06)  # type: ignore[misc]
        count = len(runs) * repeat
        record.add("sweep", trial.name, config=config, us=1e3 * whole.ms / count, p10=1e3 * whole.p10 / count)
        del runs


def _fields(config: Any) -> dict[str, Any]:
    return config._asdict() if hasattr(config, "_asdict") else asdict(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0, or 1 if a gate was red."""
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.bench.sweep", description=__doc__)
    parser.add_argument("--part", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds of timing for each part")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first (0: compile as it goes)")
    options = parser.parse_args(arguments)
    if not HAS_TRITON:
        raise SystemExit("the sweep needs Triton: it is not installed")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    record = Record(options.out)
    record.add("sweep", "device", **environment(device))
    shapes = TINY if options.tiny else {"attention": ATTENTION, "row_stats": ROW_STATS, "head": HEAD}
    with torch.no_grad():
        given = {part: trials(part, shapes.get(part, ())) for part in options.part.split(",")}
        everything = [trial for of_part in given.values() for trial in of_part]
        refused = compile_all(everything, device, options.jobs) if options.jobs else {}
        for of_part in given.values():
            sweep(of_part, device, record, Deadline(options.time_limit), refused)
    best: dict[str, dict[str, Any]] = {}
    for entry in record.entries:
        if "us" in entry and entry["us"] < best.get(entry["name"], entry | {"us": float("inf")})["us"]:
            best[entry["name"]] = entry
    for name, entry in best.items():
        rule = next(
            (e["us"] for e in record.entries if e["name"] == name and e["config"] == "rule" and "us" in e), None
        )
        beside = "" if rule is None else f" (rule {rule:.1f} us)"
        print(f"fastest {name}: {entry['config']} {entry['us']:.1f} us{beside}")
    return int(any(entry.get("red_gate") for entry in record.entries))


if __name__ == "__main__":
    raise SystemExit(main())
