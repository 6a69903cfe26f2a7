"""Every way to decode on the same held-out prompts, in one table: cost, quality, and speed against vanilla and against the AR model.

Dataset: the last 500 conversations of an npz, which no shipped model was trained on. Metric: two passes a row. Quality, on ``--count``
prompts in large batches on plain PyTorch (harness of ``measure.py``): forwards of every model that took part, tokens per forward,
accepted length, log-likelihood under the AR model as the judge in fp32, length and loops, with 95 % bootstrap intervals over prompts.
Speed, on the first ``--speed-count`` prompts that fit one bucket of columns: useful tokens / seconds of decoding (prefill apart, where
there is one), batch 1, the median of ``--repeats`` passes after one that is not counted. Column "graphs" says how those ran: "step", a
whole step is one CUDA graph; "forward", the forwards are (``graphed.py``), the host decides between them; "no".

    python -m dllm.evals.methods_bench --conversations train.npz --out methods --part quality,speed --suite main

Suites: "main", all methods; "long", caches behind chained turns of about 512 tokens, at batch 1 and 16; "answers", answers of 16, 128 and
512 tokens of the bidirectional model, naive and stopping, with FreeCache, with a guide.

A row is saved when it is measured, and not measured again where its file is there; one that fails leaves its error in the table.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.bench.record import environment
from dllm.evals.bench.timing import Deadline
from dllm.evals.judge import Judge
from dllm.evals.measure import Measurement, compare, measure
from dllm.evals.methods_rows import Row, Systems, answer_rows, chained, long_rows, main_rows
from dllm.evals.quality import held_out_prompts
from dllm.evals.statistics import Interval
from dllm.graphs import key_bucket
from dllm.target import load_target

logger = logging.getLogger(__name__)

PARTS, SUITES = ("quality", "speed", "table"), ("main", "long", "answers")
LONG = 512
"""Tokens of a long prompt."""
LONG_BATCH = 16


@dataclass(frozen=True)
class Speed:
    """tokens_per_s: useful tokens / decode_s of each pass; wall: the same over wall seconds, prefill included; tokens, nfe, helpers (guide
    and drafter): of one pass; graphs: see the module."""

    name: str
    batch: int
    graphs: str
    tokens_per_s: tuple[float, ...]
    wall: tuple[float, ...]
    prompts: int
    tokens: int
    nfe: int
    helpers: int

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)

    def save(self, path: Path) -> None:
        write_text_atomic(path, json.dumps({**asdict(self), **environment(_device())}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Speed:
        """Inverse of ``save``."""
        data = json.loads(path.read_text(encoding="utf-8"))
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "tokens_per_s": tuple(fields["tokens_per_s"]), "wall": tuple(fields["wall"])})


@dataclass(frozen=True)
class Suite:
    """One table: its rows, prompts, longest answers, and the batch sizes of the speed pass (above 1: fixed length, no stop)."""

    name: str
    rows: list[Row]
    prompts: list[list[int]]
    new_tokens: int
    batches: tuple[int, ...] = (1,)

    @property
    def short(self) -> list[list[int]]:
        """The prompts that fit the bucket of columns of most of them."""
        buckets = [key_bucket(len(p) + self.new_tokens) for p in self.prompts]
        common = statistics.mode(buckets)
        return [p for p, b in zip(self.prompts, buckets, strict=True) if b == common]


def quality_row(systems: Systems, judge: Judge, row: Row, suite: Suite, batch_size: int) -> Measurement:
    """The row on all prompts of the suite, at most ``batch_size`` together."""
    size = min(batch_size, len(suite.prompts))
    return measure(
        systems.quality(row, suite.new_tokens), suite.prompts, judge, name=row.name,
        settings={"max_new_tokens": suite.new_tokens, "batch_size": size}, prompt_ids=suite.prompts, batch_size=size,
    )  # fmt: skip


def time_row(systems: Systems, row: Row, suite: Suite, batch: int, count: int, repeats: int, limit_s: float) -> Speed:
    """Passes over the first ``count`` prompts (``batch`` prompts at a batch above 1); at least one is timed, none begins after limit_s."""
    prompts = suite.short[: count if batch == 1 else batch]
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    calls = [systems.speed(row, group, suite.new_tokens, fixed=batch > 1) for group in groups]
    rates: list[float] = []
    wall: list[float] = []
    # Kernels are compiled and graphs captured in a pass that does not count.
    found: list[Any] = [call() for call, _ in calls]
    deadline = Deadline(limit_s)
    while len(rates) < repeats and (not rates or deadline.left() > 0):
        began = time.perf_counter()
        found = [call() for call, _ in calls]
        seconds = time.perf_counter() - began
        tokens = sum(stats.useful_tokens for stats in found)
        rates.append(tokens / max(sum(stats.decode_s for stats in found), 1e-9))
        wall.append(tokens / max(seconds, 1e-9))
    tokens, nfe = sum(s.useful_tokens for s in found), sum(s.nfe for s in found)
    helpers = sum(s.guide_nfe + s.draft_nfe for s in found)
    return Speed(row.name, batch, calls[0][1](), tuple(rates), tuple(wall), len(prompts), tokens, nfe, helpers)


def table(rows: Sequence[tuple[str, str, Measurement | None, Speed | None, str]], batch: int = 1) -> str:
    """Markdown; rows: (name, group, quality, speed at ``batch``, error). Vanilla is the group's first row, AR the first of group "ar"."""
    first: dict[str, Speed | None] = {}
    for _, group, _, speed, _ in rows:
        first.setdefault(group, speed)

    def cell(value: Interval | None, digits: int = 2, scale: float = 1.0, interval: bool = False) -> str:
        if value is None:
            return "-"
        text = f"{scale * value.estimate:.{digits}f}"
        return text + (f" ({scale * value.low:.{digits}f} to {scale * value.high:.{digits}f})" if interval else "")

    def ratio(speed: Speed | None, base: Speed | None) -> str:
        return "-" if speed is None or base is None else f"{speed.median / base.median:.2f}"

    heads = [
        "setting", "graphs", "tokens/s", "against vanilla", "against AR", "forwards", "of guide or drafter",
        "tokens per forward (no loops)",
        "accepted", "log-likelihood", "length", "loops %",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, group, m, speed, error in rows:
        cells = [name, "-", "-", "-", "-"]
        if speed is not None:
            low, high = min(speed.tokens_per_s), max(speed.tokens_per_s)
            rate = f"{speed.median:.0f} ({low:.0f} to {high:.0f})"
            cells = [name, speed.graphs, rate, ratio(speed, first[group]), ratio(speed, first.get("ar"))]
        if m is None:
            cells += ["-"] * 7
        else:
            helpers = m.total("guide_nfe") + m.total("draft_nfe")
            cells += [
                f"{m.total('nfe'):,.0f}", f"{helpers:,.0f}" if helpers else "-",
                f"{cell(m.tokens_per_forward)} ({cell(m.tokens_per_forward_no_loops)})", cell(m.accept_length),
                cell(m.log_likelihood, interval=True), cell(m.length, 0), cell(m.loop_rate, 0, 100.0),
            ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |" + (f" failed: {error}" if error else ""))
    return f"Speed at batch {batch}.\n\n" + "\n".join(lines) + "\n"


def write_table(suite: Suite, folder: Path) -> str:
    """The suite's tables from what is saved, and each row's paired likelihood against its vanilla."""
    texts = []
    for batch in suite.batches:
        rows = []
        for row in suite.rows:
            quality, speed = folder / "quality" / f"{row.slug}.json", folder / f"speed{batch}" / f"{row.slug}.json"
            errors = [
                f for kind in ("quality", f"speed{batch}") if (f := folder / kind / f"{row.slug}.error").is_file()
            ]
            m, s = (
                (Measurement.load(quality) if quality.is_file() else None),
                (Speed.load(speed) if speed.is_file() else None),
            )
            error = errors[0].read_text(encoding="utf-8").strip().splitlines()[-1] if errors else ""
            if m is not None or s is not None or error:
                rows.append((row.name, row.group, m, s, error))
        texts.append(table(rows, batch))
    by_group: dict[str, Measurement] = {}
    lines = ["", "Log-likelihood against the group's first row, nats per token, paired:", ""]
    for name, group, m, _, _ in rows:
        if m is not None and by_group.setdefault(group, m) is not m:
            c = compare(m, by_group[group])
            d = c.log_likelihood_difference
            said = "-" if d is None else f"{d.estimate:+.3f} ({d.low:+.3f} to {d.high:+.3f})"
            lines.append(f"- {name}: {said}; the same text for {c.num_identical} of {c.n}")
    text = "\n".join(texts) + "\n".join(lines) + "\n"
    write_text_atomic(folder / "table.md", text)
    return text


def attempt(file: Path, work: Callable[[], Any], name: str) -> None:
    """Run ``work``, which returns something that saves itself to ``file``; what it raises goes into a file beside it."""
    if file.is_file():
        return
    error, began = file.with_suffix(".error"), time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        work().save(file)
        error.unlink(missing_ok=True)
        print(f"{file.parent.name} {name}: {time.monotonic() - began:.1f} s", flush=True)
    except Exception as problem:
        # One row's fault must not cost the others their time on the device.
        write_text_atomic(
            error, f"{traceback.format_exc()}{type(problem).__name__}: {' '.join(str(problem).split())}\n"
        )
        logger.exception("%s %s: failed", file.parent.name, name)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def suites(names: Sequence[str], systems: Systems, archive: Path, count: int, new_tokens: int) -> list[Suite]:
    """The suites by name."""
    pairs = held_out_prompts(archive, systems.tokenizer, 500)
    prompts = [list(prompt) for prompt, _ in pairs[:count]]
    found = []
    for name in names:
        if name == "main":
            found.append(Suite("main", main_rows(), prompts, new_tokens))
        elif name == "long":
            eos, newline = systems.base.spec.eos_token_ids[0], systems.tokenizer.encode("\n", add_special_tokens=False)
            long = chained(pairs, eos, newline, LONG)[:count]
            found.append(Suite("long", long_rows(), long, new_tokens, (1, LONG_BATCH)))
        else:
            found += [Suite(f"answers{n}", answer_rows(), prompts[:64], n) for n in (16, 128, 512)]
    return found


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def command(
    conversations: Annotated[Path, typer.Option(help="npz whose last 500 conversations are held out.")],
    out: Annotated[Path, typer.Option(help="Folder; a folder a suite, and table.md in each.")],
    part: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PARTS)}.")] = "quality,speed",
    suite: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(SUITES)}.")] = "main",
    groups: Annotated[str, typer.Option(help="Comma-separated: ar, bd8, full.")] = "ar,bd8,full",
    count: Annotated[int, typer.Option(min=1, help="Prompts of the quality pass.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together in the quality pass.")] = 200,
    speed_count: Annotated[int, typer.Option(min=1, help="Prompts of the speed pass at batch 1.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes; the median counts.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    row_limit: Annotated[float, typer.Option(help="Seconds of a row's timed passes; one is always made.")] = 8.0,
    time_limit: Annotated[float, typer.Option(help="Seconds in which rows are begun.")] = 1e9,
    rows: Annotated[int, typer.Option(min=1, help="Only the first rows of each suite and group.")] = 99,
    only: Annotated[
        str, typer.Option(help="Rows to measure, as a pattern of their names; the table has all that are saved.")
    ] = "*",
    drafter: Annotated[str, typer.Option(help="Drafter of the AR model.")] = "smollm2-135m-dfly",
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
) -> None:
    """Measure the methods and write their tables."""
    parts, wanted, kinds = ([x.strip() for x in text.split(",")] for text in (part, suite, groups))
    for given, known, name in (
        (parts, PARTS, "part"),
        (wanted, SUITES, "suite"),
        (kinds, ("ar", "bd8", "full"), "groups"),
    ):
        if not set(given) <= set(known):
            raise typer.BadParameter(f"{name} must be among {', '.join(known)}: got {', '.join(given)}")
    deadline = Deadline(time_limit)
    systems = Systems(device, drafter)
    judge: Judge | None = None
    chosen = suites(wanted, systems, conversations, count, max_new_tokens)
    names = [row.name for one in chosen for row in one.rows]
    if not fnmatch.filter(names, only):
        raise typer.BadParameter(f"only must name some of the rows ({', '.join(names[:3])}, ...): got {only!r}")
    for one in chosen:
        folder, seen = out / one.name, dict.fromkeys(kinds, 0)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in parts:
            for row in one.rows:
                seen[row.group] = seen.get(row.group, 99) + 1
                if row.group not in kinds or seen[row.group] > rows or kind == "table":
                    continue
                if not fnmatch.fnmatchcase(row.name, only):
                    continue
                if deadline.left() <= 0:
                    print(f"{kind} {row.name}: no time left", flush=True)
                    continue
                if kind == "quality":
                    judge = judge or Judge(load_target("smollm2-135m", dtype="float32", device=device), batch_size=32)
                    work = partial(quality_row, systems, judge, row, one, batch_size)
                    attempt(folder / "quality" / f"{row.slug}.json", work, row.name)
                    continue
                for batch in one.batches:
                    timed = partial(time_row, systems, row, one, batch, speed_count, repeats, row_limit)
                    attempt(folder / f"speed{batch}" / f"{row.slug}.json", timed, row.name)
            seen = dict.fromkeys(kinds, 0)
        text = write_table(one, folder)
        Console(width=220).print(text, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(command)
