"""Every way to decode on the same held-out prompts, in one table: cost, quality, and speed against vanilla and against the AR model.

Dataset: the last 500 conversations of an npz, which no shipped model was trained on. Metric: the harness of ``measure.py``: tokens per
second and per forward, forwards of every model that took part, accepted length, log-likelihood under the AR model as the judge, length
and loops, with 95 % bootstrap intervals over prompts. Batch 1 by default, since that is where the methods differ.

    python -m dllm.evals.methods_bench --conversations train.npz --count 200 --out methods

Each setting is saved when it is measured, and a setting whose file is there is not measured again. Seconds on a shared machine or a CPU
say little: compare forwards there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dllm.cache.free import FreeCache
from dllm.drafters.drafter import Drafter
from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.judge import Judge
from dllm.evals.measure import Measurement, compare, measure
from dllm.evals.quality import held_out_prompts
from dllm.evals.statistics import Interval
from dllm.guide import ARGuide
from dllm.pipeline import DiffusionLM
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import SimSD
from dllm.speculate import speculative_generate
from dllm.target import load_target

BLOCK, FULL = "smollm2-135m-bd8", "smollm2-135m-full"


@dataclass(frozen=True)
class Method:
    """A row of the table: its name, the model's group ("bd8", "full", "ar"), the settings of ``generate``."""

    name: str
    group: str
    settings: dict[str, Any]


def block_methods(lm: DiffusionLM) -> list[Method]:
    """Rows of the block-causal model; the block cache, which is exact, everywhere."""
    guide = ARGuide.of_base(lm)

    def row(name: str, **settings: Any) -> Method:
        # A guide decides itself which slots are committed.
        sampler = {} if "guide" in settings else {"sampler": "threshold", "threshold": 0.9}
        return Method(f"bd8 {name}", "bd8", {"cache": "block", **sampler, **settings})

    return [
        Method("bd8 vanilla", "bd8", {"cache": "block", "sampler": "low_confidence"}),
        row("threshold 0.9"),
        row("threshold 0.8", threshold=0.8),
        row("guided, on_reject dlm", guide=guide, on_reject="dlm"),
        row("guided, on_reject ar", guide=guide, on_reject="ar"),
        row("SimSD, paper's layout, 10 layers", verifier=SimSD(draft=10)),
        row("SimSD, exact, 10 layers", verifier=SimSD(draft=10, exact=True)),
        row("S2D2", verifier=S2D2()),
        row("S2D2, always", verifier=S2D2(cost=float("-inf"))),
        row("FreeDave 4", verifier=FreeDave(4)),
        row("FreeDave 8", verifier=FreeDave(8)),
    ]


def full_methods() -> list[Method]:
    """Rows of the bidirectional model."""

    def row(name: str, **settings: Any) -> Method:
        return Method(f"full {name}", "full", {"sampler": "threshold", "threshold": 0.9, **settings})

    return [
        Method("full vanilla", "full", {"cache": "none", "sampler": "low_confidence"}),
        row("threshold 0.9", cache="none"),
        row("prefix", cache="prefix"),
        row("dual", cache="dual"),
        row("FreeCache", cache=FreeCache()),
        row("FreeCache, delay 1", cache=FreeCache(freeze_delay=1)),
        row("FreeCache, aligned", cache=FreeCache(policy="aligned", freeze_block=8)),
        row("FreeCache, aggressive", cache=FreeCache(policy="aggressive")),
        row("FreeCache, prompt", cache=FreeCache(policy="prompt")),
    ]


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded input_ids and attention_mask [B, P] of prompts."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)], mask[b, : len(row)] = torch.tensor(list(row)), 1
    return ids, mask


def runner(lm: DiffusionLM, settings: dict[str, Any], max_new_tokens: int) -> Callable[[Sequence[Any]], Any]:
    """A batch of prompts (ids) -> output, by ``lm.generate``."""

    def run(rows: Sequence[Any]) -> Any:
        ids, mask = padded(rows)
        return lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **settings)

    return run


def ar_runner(target: Any, drafter: Drafter | None, max_new_tokens: int) -> Callable[[Sequence[Any]], Any]:
    """A batch of prompts (ids) -> output of the AR model, with or without a drafter."""

    def run(rows: Sequence[Any]) -> Any:
        ids, mask = padded(rows)
        home = target.device
        return speculative_generate(target, drafter, ids.to(home), mask.to(home), max_new_tokens=max_new_tokens)

    return run


def table(measurements: Sequence[Measurement], vanilla: dict[str, str], ar: str | None) -> str:
    """Markdown, one row a measurement. vanilla: name of the baseline of each row's first word; ar: name of the AR row, if measured."""
    by_name = {m.name: m for m in measurements}

    def cell(value: Interval | None, digits: int = 2, scale: float = 1.0, interval: bool = True) -> str:
        if value is None:
            return "-"
        text = f"{scale * value.estimate:.{digits}f}"
        return text + (f" ({scale * value.low:.{digits}f} to {scale * value.high:.{digits}f})" if interval else "")

    def ratio(m: Measurement, name: str | None) -> str:
        other = by_name.get(name) if name else None
        if other is None or other is m:
            return "-" if other is None else "1.00"
        return cell(compare(m, other).speed_ratio, interval=False)

    heads = (
        "setting",
        "tokens/s",
        "against vanilla",
        "against AR",
        "forwards",
        "of guide or drafter",
        "tokens per forward (no loops)",
        "accepted",
        "log-likelihood",
        "length",
        "loops %",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for m in measurements:
        helpers = m.total("guide_nfe") + m.total("draft_nfe")
        cells = (
            m.name,
            cell(m.tokens_per_second, 1, interval=False),
            ratio(m, vanilla.get(m.name.split(" ", 1)[0])),
            ratio(m, ar),
            f"{m.total('nfe'):,.0f}",
            f"{helpers:,.0f}" if helpers else "-",
            f"{cell(m.tokens_per_forward, interval=False)} ({cell(m.tokens_per_forward_no_loops, interval=False)})",
            cell(m.accept_length, interval=False),
            cell(m.log_likelihood),
            cell(m.length, 0, interval=False),
            cell(m.loop_rate, 0, 100.0, interval=False),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def command(
    conversations: Annotated[Path, typer.Option(help="npz whose last 500 conversations are held out.")],
    out: Annotated[Path, typer.Option(help="Folder for the measurements and table.md.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    groups: Annotated[str, typer.Option(help="Comma-separated: ar, bd8, full.")] = "ar,bd8,full",
    block_model: Annotated[str, typer.Option(help="Shipped name or folder of the block-causal model.")] = BLOCK,
    full_model: Annotated[str, typer.Option(help="Shipped name or folder of the bidirectional model.")] = FULL,
    drafter: Annotated[str, typer.Option(help="Drafter of the AR model.")] = "smollm2-135m-dfly",
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    warmup: Annotated[int, typer.Option(min=0, help="Batches before the clock starts.")] = 1,
) -> None:
    """Measure the methods and write their table."""
    wanted = [name.strip() for name in groups.split(",")]
    if not set(wanted) <= {"ar", "bd8", "full"}:
        raise typer.BadParameter(f"groups must be among ar, bd8, full: got {groups}")
    out.mkdir(parents=True, exist_ok=True)
    target = load_target("smollm2-135m", device=device)
    judge = Judge(target)
    prompts = [prompt for prompt, _ in held_out_prompts(conversations, target.tokenizer, count)]
    jobs: list[tuple[str, Callable[[Sequence[Any]], Any]]] = []
    if "ar" in wanted:
        bound = Drafter.from_pretrained(drafter, target=target)
        jobs += [("AR", ar_runner(target, None, max_new_tokens))]
        jobs += [(f"AR + {bound.config.kind}", ar_runner(target, bound, max_new_tokens))]
    for group, name in (("bd8", block_model), ("full", full_model)):
        if group in wanted:
            lm = DiffusionLM.from_pretrained(name, device=device)
            rows = block_methods(lm) if group == "bd8" else full_methods()
            jobs += [(row.name, runner(lm, row.settings, max_new_tokens)) for row in rows]
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    measurements: list[Measurement] = []
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(jobs) * len(prompts))
        for number, (name, run) in enumerate(jobs):
            file = out / f"{name.replace(' ', '_').replace(',', '').replace(chr(39), '')}.json"
            bar.update(task, description=name)
            if file.is_file():
                measurements.append(Measurement.load(file))
            else:
                settings = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "device": device}
                measurements.append(
                    measure(
                        run,
                        prompts,
                        judge,
                        name=name,
                        settings=settings,
                        prompt_ids=prompts,
                        batch_size=batch_size,
                        warmup=warmup,
                        progress=lambda done, total, number=number: bar.update(  # type: ignore[misc]
                            task, completed=number * len(prompts) + done
                        ),
                    )
                )
                measurements[-1].save(file)
            bar.update(task, completed=(number + 1) * len(prompts))
            text = table(measurements, {"bd8": "bd8 vanilla", "full": "full vanilla"}, "AR")
            write_text_atomic(out / "table.md", text)
    Console(width=200).print(text, markup=False)


if __name__ == "__main__":
    typer.run(command)
