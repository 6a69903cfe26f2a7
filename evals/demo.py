"""The first thing a newcomer runs: the shipped diffusion LMs write and infill text, with an honest cost table and a replay page.

Dataset: the first three MT-Bench questions (FastChat, Apache-2.0), first turn. Metric: the harness of ``measure.py``: useful tokens,
forwards, tokens per forward, rows computed, seconds, log-likelihood under SmolLM2, loops.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dllm.evals.demo_drafters import run_drafter_demo
from dllm.evals.judge import Judge
from dllm.evals.measure import Measurement, measure, render_table
from dllm.evals.replay import ReplayRun, replay_run, write_replay
from dllm.model.packed import Linear
from dllm.pipeline import DiffusionLM
from dllm.prompts import apply_template
from dllm.target import load_target
from dllm.training.base import load_base

DATA = Path(__file__).parent / "demo_data"

BLOCK_CAUSAL = "smollm2-135m-bd8"
BIDIRECTIONAL = "smollm2-135m-full"

SETTINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bd8 vanilla", BLOCK_CAUSAL, {"sampler": "low_confidence", "cache": "none"}),
    ("bd8 threshold", BLOCK_CAUSAL, {"threshold": 0.9, "cache": "none"}),
    ("bd8 threshold + block cache", BLOCK_CAUSAL, {"threshold": 0.9, "cache": "block"}),
    ("full vanilla", BIDIRECTIONAL, {"sampler": "low_confidence", "cache": "none"}),
    ("full threshold + FreeCache", BIDIRECTIONAL, {"threshold": 0.9, "cache": "free"}),
    ("full threshold + dual cache", BIDIRECTIONAL, {"threshold": 0.9, "cache": "dual"}),
)
"""(name, model, settings) of the table's rows; vanilla = no cache, one token per forward."""

INFILL_TEMPLATE = "Dear Anna,\n\nThank you for{{first}}. I would be happy to{{second}} next week.\n\nBest regards,\nTom"
"""No blank stands before a gap: a word's token begins with its blank."""

GAPS = {"first": 4, "second": 6}
"""Tokens of each gap; a fill has neither more nor fewer."""

TAKES = "This takes a few minutes on two CPU cores; the first run also converts SmolLM2, about half a minute."

TIMED_ROWS = (8, 100)
"""Rows of a forward in the first table: of a block behind a cache, and about those of a whole canvas without one."""


def demo_prompts() -> list[str]:
    """First turns of the first three MT-Bench questions."""
    lines = (DATA / "mtbench_first3.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


@torch.no_grad()
def faster_dtype(rows: Sequence[int] = TIMED_ROWS, width: int = 576, outputs: int = 16384) -> torch.dtype:
    """float32 or bfloat16, whichever multiplies faster on this machine (``dllm/model/packed.py``): the sum over rows of its fastest call.

    Both take turns, so that a burst of load meets both, and gradients are off as in decoding: with them no packed weight is read.
    """
    if torch.cuda.is_available():
        return torch.bfloat16
    dtypes = (torch.bfloat16, torch.float32)
    layers = {dtype: Linear(width, outputs, bias=False, dtype=dtype).requires_grad_(False) for dtype in dtypes}
    inputs = {(dtype, n): torch.ones(n, width, dtype=dtype) for n in rows for dtype in dtypes}
    fastest = dict.fromkeys(inputs, float("inf"))
    for turn in range(8):
        for dtype, n in inputs:
            started = time.perf_counter()
            layers[dtype](inputs[dtype, n])
            seconds = time.perf_counter() - started
            if turn:  # the first one packs the weight
                fastest[dtype, n] = min(fastest[dtype, n], seconds)
    return min(dtypes, key=lambda dtype: sum(fastest[dtype, n] for n in rows))


def run_demo(out: Path, max_new_tokens: int, console: Console) -> list[Measurement]:
    """Run every setting on every prompt, print answers, fills and the table, write the replay page; returns the measurements."""
    started = time.perf_counter()
    prompts = demo_prompts()
    console.print(TAKES, style="dim", highlight=False)
    with console.status("loading models"):
        dtype = faster_dtype()
        models = {name: DiffusionLM.from_pretrained(name, dtype=dtype) for name in (BLOCK_CAUSAL, BIDIRECTIONAL)}
        plain, base = load_target("smollm2-135m", dtype=dtype), load_base("smollm2-135m", dtype=dtype)
        judge = Judge(plain if plain.device.type == "cuda" else load_target("smollm2-135m", dtype=torch.float32))
    ids = [apply_template(models[BLOCK_CAUSAL].tokenizer, [{"role": "user", "content": p}]) for p in prompts]
    measurements: list[Measurement] = []
    replays: list[ReplayRun] = []
    with _bar(console) as bar:
        task = bar.add_task("", total=len(SETTINGS) * len(prompts))
        for i, (name, model, options) in enumerate(SETTINGS, start=1):
            bar.update(task, description=name)
            _say(console, f"{i}/{len(SETTINGS)} {name}")
            lm = models[model]
            outputs: list[Any] = []

            def answer(
                batch: Sequence[str], lm: DiffusionLM = lm, options: dict[str, Any] = options, kept: list[Any] = outputs
            ) -> Any:
                kept.append(lm.generate(list(batch), max_new_tokens=max_new_tokens, output_history=True, **options))
                return kept[-1]

            measurements.append(
                measure(
                    answer,
                    prompts,
                    judge,
                    name=name,
                    settings={"model": model, **options},
                    prompt_ids=ids,
                    progress=lambda *_: bar.advance(task),
                )
            )
            for prompt, output in zip(prompts, outputs, strict=True):
                decode = _decoder(lm.tokenizer)
                stats = output.row_stats[0]
                replays.append(
                    replay_run(
                        name,
                        prompt,
                        output.history[0],
                        decode,
                        length=output.lengths[0],
                        settings=options,
                        stats={
                            "forwards": stats.nfe,
                            "tokens per forward": round(stats.tokens_per_forward, 2),
                            "rows": stats.positions,
                        },
                    )
                )
            if name == "bd8 threshold + block cache":
                for prompt, output in zip(prompts, outputs, strict=True):
                    _show(console, prompt, output.texts[0], output.stats)
    for model in (BLOCK_CAUSAL, BIDIRECTIONAL):
        replays.append(_infill(console, model, models[model]))
    console.print()
    console.print(
        render_table(
            measurements,
            baseline="bd8 vanilla",
            intervals=False,
            title=f"What it cost (three prompts, batch 1, {str(dtype).split('.')[-1]})",
        )
    )
    with console.status("the AR model with drafters") as status:

        def decoding(name: str) -> None:
            status.update(name)
            _say(console, name)

        run_drafter_demo(console, plain, base.decoder, prompts, max_new_tokens, decoding)
    page = write_replay(out, replays, "dllm: diffusion language models at work")
    console.print(f"Replay of every step: [bold]{page}[/] (open it in a browser)", soft_wrap=True, highlight=False)
    console.print(f"{time.perf_counter() - started:.0f} s in all", style="dim")
    return measurements


def _infill(console: Console, name: str, lm: DiffusionLM) -> ReplayRun:
    """Two gaps filled at once, given text untouched."""
    fill = lm.infill(template=INFILL_TEMPLATE, gaps=GAPS, output_history=True)
    text = Text()
    parts = INFILL_TEMPLATE.replace("{{second}}", "{{first}}").split("{{first}}")
    for part, span in zip(parts, [*fill.fills[0], ""], strict=True):
        text.append(part, style="dim").append(span, style="bold green")
    cost = f"{fill.stats.useful_tokens} tokens in {fill.stats.nfe} forwards"
    console.print(
        Panel(text, title=f"two gaps filled by {name}", subtitle=cost, title_align="left", subtitle_align="right")
    )
    assert fill.history is not None
    return replay_run(
        f"infill, {name}", INFILL_TEMPLATE, fill.history[0], _decoder(lm.tokenizer), stats={"forwards": fill.stats.nfe}
    )


def _show(console: Console, prompt: str, text: str, stats: Any) -> None:
    cost = f"{stats.useful_tokens} tokens in {stats.nfe} forwards: {stats.tokens_per_forward:.2f} per forward"
    title = textwrap.shorten(prompt, max(console.width - 8, 20), placeholder=" …")
    console.print(
        Panel(Text(text.strip()), title=Text(title), subtitle=cost, title_align="left", subtitle_align="right")
    )


def _decoder(tokenizer: Any) -> Any:
    return lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _say(console: Console, what: str) -> None:
    """What is decoded now, where no bar shows it."""
    if not console.is_terminal:
        console.print(f"decoding: {what}", style="dim", highlight=False)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
