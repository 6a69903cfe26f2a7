"""Mean accepted length of drafters by domain and way of drafting: prompts answered by an AR model, every draft verified by it.

Dataset: files of prompts, one a domain (.npz: the held-out conversations at its end; JSONL: messages, question, prompt or MT-Bench
turns). Metric: tokens a verify pass commits, the target's own included: sum of tokens / sum of passes, with a 95 % bootstrap interval
over prompts; over all answers, and over those that do not loop (loops are accepted almost whole). Acceptance by position beside it.

    python -m dllm.evals.acceptance --drafter smollm2-135m-dfly --prompts chat=train.npz --prompts maths=gsm8k_test.jsonl --out result.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dllm.drafters.drafter import Drafter
from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.loops import loops
from dllm.evals.quality import held_out_prompts
from dllm.evals.statistics import Interval, acceptance_by_position, bootstrap_ratio
from dllm.prompts import apply_template
from dllm.speculate import speculative_generate
from dllm.target import load_target

logger = logging.getLogger(__name__)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled, argmax drafts": {"temperature": 1.0, "verifier": "rejection"},
    "sampled, sampled drafts": {"temperature": 1.0, "draft_temperature": 1.0, "verifier": "rejection"},
}
"""Ways to decode: at temperature 0, and at 1 with the law kept by rejection sampling."""


@dataclass(frozen=True)
class DomainAcceptance:
    """One drafter on one domain in one mode; no_loops is None where every answer loops."""

    drafter: str
    domain: str
    mode: str
    accept_length: Interval
    no_loops: Interval | None
    by_position: tuple[float, ...]
    prompts: int
    loops: int
    tokens: int
    passes: int


def read_prompts(path: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first ``count`` prompts of a file, up to where the answer begins.

    Raises ValueError for a line without a prompt, naming it.
    """
    if path.suffix == ".npz":
        return [prompt for prompt, _ in held_out_prompts(path, tokenizer, count)]
    prompts = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines()[:count], start=1):
        line = json.loads(text)
        turns = line.get("turns")
        said = line.get("question") or line.get("prompt") or line.get("text") or (turns[0] if turns else None)
        if not said:
            raise ValueError(f"{path}, line {number}: expected question, prompt, text or turns: got {sorted(line)}")
        prompts.append(apply_template(tokenizer, [{"role": "user", "content": said}]))
    return prompts


def measure_acceptance(
    target: Any,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    seed: int = 0,
    **settings: Any,
) -> list[tuple[list[int], list[int]]]:
    """(answer ids, tokens of each verify pass) of each prompt, in their order; row i is seeded with seed + i."""
    found = []
    for at in range(0, len(prompts), batch_size):
        batch = prompts[at : at + batch_size]
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for b, prompt in enumerate(batch):
            ids[b, width - len(prompt) :], mask[b, width - len(prompt) :] = torch.tensor(list(prompt)), 1
        out = speculative_generate(
            target,
            drafter,
            ids.to(target.device),
            mask.to(target.device),
            max_new_tokens=max_new_tokens,
            seed=seed + at,
            **settings,
        )
        for b in range(len(batch)):
            found.append((out.sequences[b, : out.lengths[b]].tolist(), list(out.row_stats[b].accept_lengths)))
    return found


def summarise(
    drafter: str, domain: str, mode: str, found: Sequence[tuple[list[int], list[int]]], num_drafts: int
) -> DomainAcceptance:
    """Figures of ``measure_acceptance``; prompts without a pass (a stop at once) count as answers, not as passes."""
    rows = [(sum(passes), len(passes), loops(answer)) for answer, passes in found if passes]
    if not rows:
        raise ValueError(f"no verify pass on {domain}: max_new_tokens must be >= 2")
    tokens, passes, looping = (np.array(column) for column in zip(*rows, strict=True))
    sound = ~looping.astype(bool)
    flat = [count for _, counts in found for count in counts]
    return DomainAcceptance(
        drafter=drafter,
        domain=domain,
        mode=mode,
        accept_length=bootstrap_ratio(tokens, passes),
        no_loops=bootstrap_ratio(tokens[sound], passes[sound]) if sound.any() else None,
        by_position=tuple(round(x, 4) for x in acceptance_by_position(flat, num_drafts).rate),
        prompts=len(found),
        loops=int(looping.sum()),
        tokens=int(tokens.sum()),
        passes=int(passes.sum()),
    )


def acceptance_table(results: Sequence[DomainAcceptance]) -> Table:
    """One row a result, with intervals."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, caption="tokens a verify pass, the target's own included; 95 % bootstrap"
    )
    for heading in ("drafter", "domain", "mode", "all", "no loops", "loops", "by position"):
        table.add_column(heading)

    def cell(interval: Interval | None) -> str:
        return "-" if interval is None else f"{interval.estimate:.2f} ({interval.low:.2f}..{interval.high:.2f})"

    for r in results:
        rates = " ".join(f"{rate:.2f}"[1:] if rate < 1 else "1.0" for rate in r.by_position)
        share = f"{r.loops}/{r.prompts}"
        table.add_row(r.drafter, r.domain, r.mode, cell(r.accept_length), cell(r.no_loops), share, rates)
    return table


def command(
    drafter: Annotated[list[str], typer.Option(help="Shipped name or folder; may be given several times.")],
    prompts: Annotated[list[str], typer.Option(help="DOMAIN=FILE; may be given several times.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    target: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = "smollm2-135m",
    count: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 200,
    mode: Annotated[list[str] | None, typer.Option(help=f"Of: {', '.join(MODES)}; all if not given.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 64,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
) -> None:
    """Measure how many tokens a verify pass commits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = [item.partition("=") for item in prompts]
    if any(not separator for _, separator, _ in files):
        raise typer.BadParameter(f"prompts must be DOMAIN=FILE: got {', '.join(prompts)}")
    modes = mode or list(MODES)
    if not set(modes) <= set(MODES):
        raise typer.BadParameter(f"mode must be among {', '.join(MODES)}: got {', '.join(modes)}")
    model = load_target(target, dtype=dtype, device=device)
    results: list[DomainAcceptance] = []
    for name in drafter:
        loaded = Drafter.from_pretrained(name, target=model)
        for domain, _, file in files:
            rows = read_prompts(Path(file), model.tokenizer, count)
            for way in modes:
                found = measure_acceptance(model, loaded, rows, max_new_tokens, batch_size, seed, **MODES[way])
                results.append(summarise(Path(name).name, domain, way, found, loaded.config.block_length - 1))
                last = results[-1]
                logger.info("%s, %s, %s: %.3f", last.drafter, domain, way, last.accept_length.estimate)
                settings = {"target": target, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
                settings |= {"torch": torch.__version__, "dtype": str(model.dtype), "device": str(model.device)}
                # Saved after each part: a run that is cut keeps what it has.
                write_text_atomic(
                    out, json.dumps({"settings": settings, "results": [asdict(r) for r in results]}, indent=1)
                )
    Console(width=150).print(acceptance_table(results))


if __name__ == "__main__":
    typer.run(command)
