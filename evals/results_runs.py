"""The runs that docs/results.md is made from, within a time limit.

    python -m dllm.evals.results_runs --out runs --data DIR [--device cuda] [--limit 64] [--time-limit 200] [--pack runs.tar.gz]
    python -m dllm.evals.results_score runs --data DIR --allow-code-execution      where runs were made with --no-scores
    python -m dllm.evals.results_page runs --out docs/results.md

Which runs: `results_plan.py`, most valuable first. Each is a folder as `dllm eval` writes it. What is there is not run again; a run
that fails is written down in failed.json (failed-I.json of a share) and the next one starts; no run starts for which the time may
not suffice.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import signal
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.results_plan import BASE, FILES, Entry, plan
from dllm.evals.run_store import RESULT
from dllm.evals.runner import Extras, headline, run_task, versions
from dllm.evals.systems import ARSystem, DiffusionSystem, System
from dllm.evals.tasks.registry import get_task

FIRST_GUESS_S = 15.0
PACK_EVERY_S = 20.0


@dataclass
class Models:
    """Models, guides and drafters, each loaded when it is first asked for. places: shipped name -> the folder to take instead."""

    device: str
    dtype: str
    places: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return self.places.get(name, name)

    @cached_property
    def base(self) -> Any:
        from dllm.target import load_target

        return load_target(self.place(BASE), dtype=self.dtype, device=self.device)

    @cached_property
    def judge(self) -> Any:
        from dllm.evals.judge import Judge
        from dllm.target import load_target

        return Judge(load_target(self.place(BASE), dtype="float32", device=self.device))

    def diffusion(self, name: str) -> Any:
        if name not in self.loaded:
            from dllm.pipeline import DiffusionLM

            self.loaded[name] = DiffusionLM.from_pretrained(self.place(name), dtype=self.dtype, device=self.device)
        return self.loaded[name]

    def drafter(self, name: str) -> Any:
        if name not in self.loaded:
            from dllm.drafters.drafter import Drafter

            self.loaded[name] = Drafter.from_pretrained(self.place(name), target=self.base)
        return self.loaded[name]

    def system(self, entry: Entry, max_new_tokens: int) -> System:
        """What the entry decodes with."""
        method, length = entry.method, entry.length or "auto"
        if method.autoregressive:
            drafter = None if method.drafter is None else self.drafter(method.drafter)
            return ARSystem(self.base, drafter, dict(method.options), length, max_new_tokens, method.ar_infill)
        lm = self.diffusion(method.model)
        options = dict(method.options)
        if method.guide is not None:
            from dllm.guide import ARGuide

            name = f"guide of {method.model}"
            if name not in self.loaded:
                self.loaded[name] = ARGuide.of_base(lm)
            options["guide"] = self.loaded[name].with_rule(**method.guide)
        return DiffusionSystem(lm, options, length, max_new_tokens)

    def weights(self, name: str) -> str | None:
        """12 hex digits of the sha256 of a folder's weights; None for a name that is no folder of its own."""
        import dllm

        folders = [Path(self.place(name)), Path(dllm.__file__).parent / "assets" / name]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        files = sorted(folder.glob("*.safetensors")) if folder is not None else []
        if not files:
            return None
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Choice:
    """What all runs share. tokens, fill_tokens: most new tokens of an answer, and of a fill whose length is not given."""

    data: Path
    limit: int | None
    batch_size: int
    tokens: int
    fill_tokens: int
    seed: int
    note: str | None
    scores: bool
    execute: bool
    judge: bool
    commit: str | None


def settings_of(entry: Entry, choice: Choice, models: Models) -> dict[str, Any]:
    """What the run's folder is known by, beside task, samples and versions."""
    method = entry.method
    infill = entry.length is not None
    names = {method.model, method.drafter} - {None, BASE}
    return {
        **method.settings(infill),
        "weights": {name: models.weights(str(name)) for name in sorted(map(str, names))} or None,
        "judge": BASE if choice.judge else None,
        "max_new_tokens": choice.fill_tokens if infill else choice.tokens,
        "batch_size": choice.batch_size,
        "limit": choice.limit,
        "data": FILES[entry.task],
        "note": choice.note,
        **({"length": entry.length} if infill else {}),
    }


def run_entry(entry: Entry, choice: Choice, models: Models, out: Path) -> bool:
    """Make the run unless it is there; True if it was made. Raises what the run raises."""
    folder = out / entry.folder
    settings = settings_of(entry, choice, models)
    if (folder / RESULT).is_file():
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))["settings"]
        if found == json.loads(json.dumps({**settings, "seed": choice.seed})):
            return False
    task = get_task(entry.task)
    samples = task.samples(choice.data / FILES[entry.task], choice.limit, choice.seed)
    execute: Callable[..., Any] | None = None
    if choice.execute:
        from dllm.evals import execution

        execute = execution.execute
    extras = Extras(
        judge=models.judge if choice.judge else None,
        judge_tokenizer=models.judge.model.tokenizer if choice.judge else None,
        execute=execute,
        # The same whatever length is chosen, and a forward a token: once, for the stories.
        reference_likelihood=entry.task == "aesop_infill" and entry.length == "oracle",
        deferred=not choice.scores,
    )
    system = models.system(entry, settings["max_new_tokens"])
    run_task(
        task,
        samples,
        system,
        folder,
        settings,
        batch_size=choice.batch_size,
        seed=choice.seed,
        extras=extras,
        commit=choice.commit,
    )
    return True


def run_all(
    entries: list[Entry],
    choice: Choice,
    models: Models,
    out: Path,
    deadline: float = math.inf,
    pack: Path | None = None,
    failures: str = "failed.json",
) -> int:
    """Make the runs until the deadline (of `time.monotonic`); returns how many failed. Says a line a run.

    failures: name of the file in ``out`` that their tracebacks are written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    taken: dict[tuple[bool, bool], float] = {}
    packed = time.monotonic()
    for entry in entries:
        # Runs of one kind take about as long as the last one; the first one also loads and warms up.
        kind = (entry.length is None, entry.method.autoregressive)
        guess = taken.get(kind, FIRST_GUESS_S)
        if time.monotonic() + guess > deadline:
            continue
        started = time.monotonic()
        try:
            made = run_entry(entry, choice, models, out)
        except Exception as error:  # noqa: BLE001 - whatever one run dies of, the others are worth having
            failed[entry.folder] = traceback.format_exc()
            write_text_atomic(out / failures, json.dumps(failed, indent=1) + "\n")
            typer.echo(f"{entry.folder}: FAILED: {type(error).__name__}: {str(error)[:300]}")
            continue
        seconds = time.monotonic() - started
        if not made:
            continue
        taken[kind] = seconds
        typer.echo(f"{entry.folder}: {seconds:.1f} s{_said(out / entry.folder)}")
        if pack is not None and time.monotonic() - packed > PACK_EVERY_S:
            pack_runs(out, pack)
            packed = time.monotonic()
    if not failed:
        (out / failures).unlink(missing_ok=True)
    return len(failed)


def _said(folder: Path) -> str:
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    score, rate = headline(result), result["summary"].get("tokens_per_forward")
    parts = [] if score is None else [f"{result['task']['metric']} {score.estimate:.3f}"]
    parts += [] if rate is None else [f"{rate['estimate']:.2f} tokens per forward"]
    return "".join(f", {part}" for part in parts)


def pack_runs(out: Path, target: Path) -> Path:
    """All runs in one .tar.gz, replaced whole. Shards stay behind where a run is complete: samples.jsonl holds the same."""
    temporary = target.with_name(f".{target.name}.tmp")
    with tarfile.open(temporary, "w:gz", compresslevel=6) as archive:
        for path in sorted(p for p in out.rglob("*") if p.is_file()):
            whole = (path.parent / RESULT).is_file()
            if path.suffix == ".lock" or path.name.startswith(".") or (whole and path.name.startswith("shard-")):
                continue
            archive.add(path, arcname=str(Path(out.name) / path.relative_to(out)))
    temporary.replace(target)
    return target


def command(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")],
    data: Annotated[Path, typer.Option(help="Folder of the data files; see results_plan.FILES.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    limit: Annotated[int, typer.Option(help="Samples a run, at most.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Samples in one call.")] = 64,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Of an answer.")] = 256,
    fill_tokens: Annotated[int, typer.Option(help="Of a fill whose length is not given.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the choice of samples and of the noise.")] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds; no run starts that may not end in time.")] = 1e9,
    share: Annotated[str, typer.Option(help="I/N: every N-th run, from the I-th; N processes make them all.")] = "1/1",
    only: Annotated[str, typer.Option(help="Runs to make, as a pattern of TASK/NAME.")] = "*",
    place: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: take a shipped model from there.")] = None,
    scores: Annotated[bool, typer.Option(help="Without: results_score scores later, elsewhere.")] = True,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run code that the model wrote, in a sandbox.")
    ] = False,
    judge: Annotated[bool, typer.Option(help="Score what is written by SmolLM2 in fp32.")] = True,
    commit: Annotated[str | None, typer.Option(help="In a copy without its repository: where it came from.")] = None,
    note: Annotated[
        str | None, typer.Option(help="Kept with every run, for instance what else the device did.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="A .tar.gz of all runs, renewed while they are made.")] = None,
) -> None:
    """Make the runs that docs/results.md is made from."""
    deadline = time.monotonic() + time_limit
    versions(commit)
    places = dict(item.split("=", 1) for item in place or [])
    first, _, step = share.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise typer.BadParameter(f"--share must be I/N with 1 <= I <= N: got {share!r}")
    entries = [e for e in plan() if fnmatch.fnmatchcase(e.folder, only)][int(first) - 1 :: int(step)]
    if not entries:
        raise typer.BadParameter(f"--only {only!r} names none of the runs, for instance {plan()[0].folder}")
    choice = Choice(
        data, limit, batch_size, max_new_tokens, fill_tokens, seed, note, scores, allow_code_execution, judge, commit
    )
    # A `timeout` ends it by SIGTERM: what is there should still be packed.
    before = signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(SystemExit(143)))
    try:
        name = "failed.json" if step == "1" else f"failed-{first}.json"
        failures = run_all(entries, choice, Models(device, dtype, places), out, deadline, pack, name)
    finally:
        if pack is not None:
            typer.echo(f"{pack_runs(out, pack)}: {pack.stat().st_size / 2**20:.1f} MiB")
        signal.signal(signal.SIGTERM, before)
    missing = [e.folder for e in entries if not (out / e.folder / RESULT).is_file()]
    typer.echo(f"{len(entries) - len(missing)} of {len(entries)} runs are there, {failures} failed")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
