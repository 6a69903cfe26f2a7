"""The second table of the demo: an AR model alone, and with each shipped drafter, on the same prompts.

Our loop runs on our decoder, ``generate`` on transformers' model with the same weights.
Metric: useful tokens, the target's forwards, tokens a round, wall seconds after one warm-up, and whether the text is the same.
The ratio is against the faster of two ways to run the AR model alone: our loop without a drafter, and transformers' ``generate``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dllm.drafters.drafter import Drafter
from dllm.prompts import apply_template
from dllm.speculate import speculative_generate
from dllm.target import stop_ids_of

CPU_DRAFTS = 4
"""Drafts a round on a CPU, where every row that is verified costs arithmetic (docs/log.md has other numbers)."""
DRAFTERS = ("smollm2-135m-dflash", "smollm2-135m-dfly")


@dataclass(frozen=True)
class DraftedRun:
    """One way to decode all prompts: token ids of each answer, forwards of target and drafter, seconds, tokens of each round."""

    name: str
    tokens: tuple[tuple[int, ...], ...]
    nfe: int
    draft_nfe: int
    seconds: float
    accept_lengths: tuple[int, ...]

    @property
    def useful_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Useful tokens per wall second, prefill included."""
        return self.useful_tokens / max(self.seconds, 1e-9)


def run_ours(
    name: str,
    target: Any,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
    num_drafts: int | None = None,
) -> DraftedRun:
    """Greedy decoding in our loop up to a stop token, one prompt at a time.

    drafter: None for the target alone. num_drafts: None for as many as it drafts.
    """
    settings: dict[str, Any] = {"eos_token_id": sorted(stops)}
    if drafter is not None and num_drafts is not None:
        settings["num_drafts"] = num_drafts
    _once(target, drafter, prompts[0])
    tokens, accepted, nfe, draft_nfe = [], [], 0, 0
    started = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        out = speculative_generate(target, drafter, ids, max_new_tokens=max_new_tokens, **settings)
        tokens.append(tuple(out.sequences[0, : out.lengths[0]].tolist()))
        accepted += out.stats.accept_lengths
        nfe, draft_nfe = nfe + out.stats.nfe, draft_nfe + out.stats.draft_nfe
    return DraftedRun(name, tuple(tokens), nfe, draft_nfe, time.perf_counter() - started, tuple(accepted))


def run_generate(name: str, target: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> DraftedRun:
    """Greedy decoding by transformers' own ``generate``, one prompt at a time."""
    stops = stop_ids_of(target)
    tokens, nfe = [], 0

    def answer(prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([list(prompt)], device=target.device)
        mask = torch.ones_like(ids)
        out = target.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return [int(t) for t in out[0, len(prompt) :]]

    answer(prompts[0], 2)
    started = time.perf_counter()
    for prompt in prompts:
        ids = answer(prompt, max_new_tokens)
        nfe += len(ids)
        tokens.append(tuple(ids[:-1] if ids and ids[-1] in stops else ids))
    return DraftedRun(name, tuple(tokens), nfe, 0, time.perf_counter() - started, ())


def _once(target: Any, drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """The first forward of a process sets up more than later ones do."""
    speculative_generate(target, drafter, torch.tensor([list(prompt)], device=target.device), max_new_tokens=2)


def drafted_runs(
    plain: Any,
    target: Any,
    drafters: dict[str, Drafter],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_run: Callable[[str], None] = lambda name: None,
    num_drafts: int | None = None,
) -> list[DraftedRun]:
    """transformers' ``generate`` of ``plain``, our loop on ``target`` (the same weights) alone, and with each drafter, in this order."""
    runs = []
    on_run("AR, transformers")
    runs.append(run_generate("AR, transformers", plain, prompts, max_new_tokens))
    for name, drafter in {"AR": None, **drafters}.items():
        label = name if drafter is None else f"AR + {name.rsplit('-', 1)[-1]}"
        on_run(label)
        runs.append(run_ours(label, target, drafter, prompts, max_new_tokens, stop_ids_of(plain), num_drafts))
    return runs


def drafter_table(runs: Sequence[DraftedRun], title: str, num_drafts: int | None = None) -> Table:
    """One row a run; ratios against the faster run without drafts; "same text" against our loop alone.

    num_drafts: most drafts of a round, where that is less than the drafters were trained for.
    """
    alone = [run for run in runs if not run.draft_nfe]
    if not alone:
        raise ValueError("runs must hold one without drafts: got none")
    fastest = max(alone, key=lambda run: run.tokens_per_second)
    reference = alone[-1]
    caption = (
        f"ratio: tokens per second against {fastest.name}; accepted: tokens a round, the target's own included (the prompt's forward "
        f"gives the first token and is no round); same text: as {reference.name}; in float32 all are, in bfloat16 near-ties may round "
        f"differently over more rows, and texts then part"
    )
    if num_drafts is not None:
        caption += f"; at most {num_drafts} drafts a round on a CPU, seven on a GPU: accepted lengths differ from the model cards'"
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("setting", min_width=16)
    for heading in (
        "useful\ntokens",
        "forwards",
        "draft\nforwards",
        "accepted",
        "seconds",
        "ratio",
        "same\ntext",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        same = sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))
        accepted = run.accept_lengths if run.draft_nfe else ()
        table.add_row(
            run.name,
            f"{run.useful_tokens:,}",
            f"{run.nfe:,}",
            f"{run.draft_nfe:,}" if run.draft_nfe else "-",
            f"{sum(accepted) / len(accepted):.2f}" if accepted else "-",
            f"{run.seconds:.1f}",
            f"{run.tokens_per_second / fastest.tokens_per_second:.2f}",
            "-" if run is reference else f"{same}/{len(run.tokens)}",
        )
    return table


def run_drafter_demo(
    console: Console,
    plain: Any,
    target: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    on_run: Callable[[str], None] = lambda name: None,
    names: Sequence[str] = DRAFTERS,
) -> list[DraftedRun]:
    """Load the shipped drafters for ``target``, decode every prompt (a user's turn) each way and print the table."""
    ids = [apply_template(plain.tokenizer, [{"role": "user", "content": p}]) for p in prompts]
    drafters = {name: Drafter.from_pretrained(name, target=target) for name in names}
    num_drafts = CPU_DRAFTS if plain.device.type == "cpu" else None
    runs = drafted_runs(plain, target, drafters, ids, max_new_tokens, on_run, num_drafts)
    title = f"The AR model with diffusion drafters ({len(ids)} prompts, batch 1, {str(plain.dtype).split('.')[-1]})"
    console.print()
    console.print(drafter_table(runs, title, num_drafts))
    return runs
