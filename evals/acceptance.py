"""Mean accepted length of drafters by domain and way of drafting: prompts answered by an AR model, every draft verified by it.

Dataset: files of prompts, one a domain (.npz: the held-out conversations at its end; JSONL: messages, question, prompt or MT-Bench
turns). Metric: tokens a verify pass commits, the target's own included: sum of tokens / sum of passes, with a 95 % bootstrap interval
over prompts; over all answers, and over those that do not loop (loops are accepted almost whole). Acceptance by position beside it.

    python -m dllm.evals.acceptance --drafter smollm2-135m-dfly --prompts chat=train.npz --prompts maths=gsm8k_test.jsonl --out result.json
"""

from __future__ import annotations

import json
import logging
import time
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
from dllm.evals.methods_rows import plain_kernels
from dllm.evals.quality import held_out_prompts
from dllm.evals.statistics import Interval, acceptance_by_position, bootstrap_ratio
from dllm.prompts import apply_template
from dllm.speculate import speculative_generate
from dllm.training.base import load_base, load_tokenizer

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


def load_results(out: Path, settings: dict[str, Any]) -> list[DomainAcceptance]:
    """What an earlier run left in ``out`` under the same settings; nothing where there is no file. Raises ValueError for other settings."""
    if not out.is_file():
        return []
    data = json.loads(out.read_text(encoding="utf-8"))
    if data["settings"] != settings:
        raise ValueError(f"{out} must hold results of these settings: got {data['settings']}, wanted {settings}")
    results = []
    for entry in data["results"]:
        spans = {
            name: None if entry[name] is None else Interval(**entry[name]) for name in ("accept_length", "no_loops")
        }
        results.append(DomainAcceptance(**{**entry, **spans, "by_position": tuple(entry["by_position"])}))
    return results


def command(
    drafter: Annotated[list[str], typer.Option(help="Shipped name or folder; may be given several times.")],
    prompts: Annotated[list[str], typer.Option(help="DOMAIN=FILE; may be given several times.")],
    out: Annotated[Path, typer.Option(help="JSON file to write; entries that it holds are not measured again.")],
    target: Annotated[
        str, typer.Option(help="Shipped name, folder or hub id of a Llama- or Qwen-type AR model.")
    ] = "smollm2-135m",
    count: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 200,
    mode: Annotated[list[str] | None, typer.Option(help=f"Of: {', '.join(MODES)}; all if not given.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 256,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds in which entries are begun.")] = 1e9,
) -> None:
    """Measure how many tokens a verify pass commits.

    Large batches on plain PyTorch: an accepted length does not depend on what runs beside it, and no kernel has to be compiled.
    """
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = [item.partition("=") for item in prompts]
    if any(not separator for _, separator, _ in files):
        raise typer.BadParameter(f"prompts must be DOMAIN=FILE: got {', '.join(prompts)}")
    modes = mode or list(MODES)
    if not set(modes) <= set(MODES):
        raise typer.BadParameter(f"mode must be among {', '.join(MODES)}: got {', '.join(modes)}")
    base, tokenizer = load_base(target, device), load_tokenizer(target)
    model, eos = base.decoder, list(base.spec.eos_token_ids)
    settings: dict[str, Any] = {
        "target": target,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
    }
    settings |= {"count": count, "torch": torch.__version__, "dtype": str(model.dtype), "device": str(model.device)}
    results, failed = load_results(out, settings), {}
    done = {(r.drafter, r.domain, r.mode) for r in results}
    rows = {domain: read_prompts(Path(file), tokenizer, count) for domain, _, file in files}
    # The modes outside: a run that is cut has the greedy figures of all.
    for way, name, domain in ((w, n, d) for w in modes for n in drafter for d in rows):
        short = Path(name).name
        if (short, domain, way) in done:
            continue
        if time.monotonic() - began > time_limit:
            failed[f"{short}, {domain}, {way}"] = "no time left"
            continue
        started = time.monotonic()
        try:
            loaded = Drafter.from_pretrained(name, target=model)
            with plain_kernels():
                found = measure_acceptance(
                    model,
                    loaded,
                    rows[domain],
                    max_new_tokens,
                    batch_size,
                    seed,
                    eos_token_id=eos,
                    tokenizer=tokenizer,
                    **MODES[way],
                )
            results.append(summarise(short, domain, way, found, loaded.config.block_length - 1))
            length = results[-1].accept_length.estimate
            logger.info("%s, %s, %s: %.3f in %.1f s", short, domain, way, length, time.monotonic() - started)
        except Exception as problem:
            # One entry's fault must not cost the others their time on the device.
            failed[f"{short}, {domain}, {way}"] = f"{type(problem).__name__}: {problem}"
            logger.exception("%s, %s, %s failed", short, domain, way)
        # Saved after each part: a run that is cut keeps what it has.
        report = {"settings": settings, "results": [asdict(r) for r in results], "failed": failed}
        write_text_atomic(out, json.dumps(report, indent=1))
    Console(width=150).print(acceptance_table(results))
    for entry, why in failed.items():
        Console(width=150).print(f"not measured: {entry}: {why}", markup=False)


if __name__ == "__main__":
    typer.run(command)
