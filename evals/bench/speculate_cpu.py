"""AR decoding against AR with a drafter on a CPU, batch 1: transformers' ``generate``, our loop alone, our loop with each drafter.

Dataset: the first prompts of ``--prompts`` (an archive's held-out conversations, or JSON lines), greedy, stop tokens honoured. Metric:
useful tokens / wall seconds of all prompts, prefill included; every way once in each of ``--runs`` rounds, after a warm-up, medians
with the least and the most. ratio: of tokens per second against the faster way without drafts, in the same round. differ: prompts
whose text is not that of our loop alone (bfloat16 rounds otherwise over more rows).

A gate comes first: in float32 every drafter must give the text of our loop alone on all prompts; no figure on a red gate.

    python -m dllm.evals.bench.speculate_cpu --prompts train.npz --drafter smollm2-135m-dfly:4 --drafter smollm2-135m-dflash:7 --out runs
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dllm.drafters.drafter import Drafter
from dllm.evals.acceptance import read_prompts
from dllm.evals.bench.record import Record, environment
from dllm.evals.demo_drafters import DraftedRun, run_generate, run_ours
from dllm.families.placement import resolve_dtype
from dllm.target import load_target, stop_ids_of
from dllm.training.base import load_base

Way = tuple[str, str | None, int | None]
"""Name, drafter and drafts a round of one way to decode; the two without a drafter come first."""
ALONE: tuple[Way, ...] = (("transformers", None, None), ("ours", None, None))


def read_ways(drafters: Sequence[str]) -> tuple[Way, ...]:
    """What to compare, from NAME or NAME:DRAFTS. Raises ValueError for a number of drafts that is none."""
    ways = []
    for given in drafters:
        name, _, count = given.partition(":")
        if count and not (count.isdigit() and int(count) > 0):
            raise ValueError(f"drafter must be NAME or NAME:DRAFTS with DRAFTS >= 1: got {given!r}")
        ways.append((given.rsplit("/", 1)[-1], name, int(count) if count else None))
    return (*ALONE, *ways)


def differing(runs: Sequence[DraftedRun], reference: DraftedRun) -> list[int]:
    """For each run, how many answers are not the reference's."""
    return [sum(a != b for a, b in zip(run.tokens, reference.tokens, strict=True)) for run in runs]


def summarise(way: Way, rounds: Sequence[Sequence[DraftedRun]], index: int) -> dict[str, Any]:
    """What one way did over the rounds: rounds[i] holds a run of every way, the two without drafts first."""
    runs = [of_round[index] for of_round in rounds]
    best = [max(run.tokens_per_second for run in of_round[: len(ALONE)]) for of_round in rounds]
    speeds = [run.tokens_per_second for run in runs]
    ratios = [speed / alone for speed, alone in zip(speeds, best, strict=True)]
    accepted = runs[0].accept_lengths if runs[0].draft_nfe else ()
    return {
        "drafts": way[2],
        "tokens": runs[0].useful_tokens,
        "nfe": runs[0].nfe,
        "draft_nfe": runs[0].draft_nfe,
        "accept_length": sum(accepted) / len(accepted) if accepted else None,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_range": [min(speeds), max(speeds)],
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "differ": differing(runs[:1], rounds[0][1])[0],
        "runs": len(runs),
    }


def _decode(way: Way, plain: Any, decoder: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> DraftedRun:
    """One way over all prompts; plain: transformers' model, decoder: ours."""
    name, drafter, count = way
    if way == ALONE[0]:
        return run_generate(name, plain, prompts, max_new_tokens)
    bound = None if drafter is None else Drafter.from_pretrained(drafter, target=decoder)
    return run_ours(name, decoder, bound, prompts, max_new_tokens, stop_ids_of(plain), count)


def command(
    prompts: Annotated[Path, typer.Option(help="Archive of conversations (npz: its held-out ones) or JSON lines.")],
    drafter: Annotated[list[str], typer.Option(help="NAME or NAME:DRAFTS; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for entries.jsonl.")],
    target: Annotated[
        str, typer.Option(help="Shipped name or folder of a Llama- or Qwen-type model.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Of an answer.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Rounds over all ways.")] = 3,
    gate: Annotated[bool, typer.Option(help="Compare the texts in float32 first.")] = True,
) -> None:
    """Measure drafters on this CPU against the target alone."""
    console, ways, kind = Console(), read_ways(drafter), resolve_dtype(dtype)
    record = Record(out, echo=False)
    told = load_target(target, dtype=kind, device="cpu")
    ids = read_prompts(prompts, told.tokenizer, count)
    setting = {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "prompts": len(ids),
        "max_new_tokens": max_new_tokens,
    }
    record.add("setting", "cpu", **environment(torch.device("cpu")), **setting)
    if gate:
        wide = load_base(target, "cpu", torch.float32).decoder
        with console.status("gate: texts in float32"):
            texts = [_decode(way, told, wide, ids, max_new_tokens) for way in ways[1:]]
        wrong = differing(texts, texts[0])
        record.add("gate", "float32", differ=wrong[1:])
        if any(wrong):
            raise RuntimeError(f"in float32 drafts must not change the text: {wrong[1:]} of {len(ids)} answers differ")
    decoder = load_base(target, "cpu", kind).decoder
    rounds: list[list[DraftedRun]] = []
    with console.status("") as status:
        for number in range(runs):
            rounds.append([])
            for way in ways:
                status.update(f"round {number + 1} of {runs}: {way[0]}")
                rounds[-1].append(_decode(way, told, decoder, ids, max_new_tokens))
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, caption=f"{setting}; medians of {runs} rounds, the least and the most"
    )
    table.add_column("way", overflow="fold")
    for heading in ("tokens", "forwards", "drafts", "accepted", "tokens/s", "ratio", "differ"):
        table.add_column(heading)
    for index, way in enumerate(ways):
        entry = record.add("way", way[0], **summarise(way, rounds, index))
        low, high = entry["tokens_per_second_range"]
        ratio_low, ratio_high = entry["ratio_range"]
        accepted = entry["accept_length"]
        table.add_row(
            way[0],
            str(entry["tokens"]),
            str(entry["nfe"]),
            str(entry["draft_nfe"] or "-"),
            "-" if accepted is None else f"{accepted:.2f}",
            f"{entry['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
            f"{entry['ratio']:.2f} ({ratio_low:.2f} to {ratio_high:.2f})",
            f"{entry['differ']}/{len(ids)}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(command)
