"""Commands `dllm eval`, `dllm report` and `dllm lm-eval`. What is heavy is loaded when a command runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dllm.registry import CACHES, SAMPLERS


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("eval")(evaluate)
    app.command()(report)
    app.command(
        "lm-eval",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        help="lm-evaluation-harness with `--model dllm`: the arguments are those of lm_eval.",
    )(lm_eval)


def evaluate(
    task: Annotated[list[str], typer.Argument(help="Task names; `infill` is files_infill over --files DIR.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A shipped name, a folder or a hub id.")] = (
        "smollm2-135m-bd8"
    ),
    kind: Annotated[str, typer.Option(help="auto, diffusion or ar: what kind of model it is.")] = "auto",
    sampler: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(SAMPLERS)} (default: the model's own).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Commit every token at least this sure; above 1: one token a step.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help=f"auto (the model's own), {', '.join(CACHES)}.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter of an AR model: a folder or a hub id.")] = None,
    guide: Annotated[str | None, typer.Option(help="AR guide: `base` (the model's own) or a model's name.")] = None,
    length: Annotated[
        str, typer.Option(help="Infill: oracle, fixed:N or auto; several by commas, a run each.")
    ] = "auto",
    ar_infill: Annotated[str, typer.Option(help="Infill by an AR model: prefix, or prompt (both parts quoted).")] = (
        "prefix"
    ),
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Further NAME=VALUE for generate (JSON values).")] = None,
    task_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the task (JSON values).")] = None,
    data: Annotated[Path | None, typer.Option(help="The task's data as a file (default: the hub's).")] = None,
    files: Annotated[Path | None, typer.Option(help="Folder of text or code for `infill`.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many samples.")] = None,
    samples_per_task: Annotated[
        int, typer.Option(help="Answers to each question, for pass@k; more than one needs a temperature above 0.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the choice of samples and of the noise.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Samples in one call.")] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Replaces the task's own.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="AR model that scores what is written, e.g. smollm2-135m.")] = None,
    reference_likelihood: Annotated[
        bool, typer.Option("--reference-likelihood", help="Infill: also score the true middle under the model.")
    ] = False,
    replays: Annotated[int, typer.Option(help="Record the denoise steps of so many samples.")] = 2,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs; a cut run goes on there.")] = Path(
        "runs"
    ),
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run code that the model wrote, in a sandbox.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="In a copy without its repository: the commit that it was copied from.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
) -> None:
    """Evaluate a model on tasks; every sample is saved with its settings, and a cut run goes on where it stopped."""
    from dllm.cli import _plain_errors

    with _plain_errors():
        from dllm.evals.grouping import repeated
        from dllm.evals.runner import versions
        from dllm.evals.systems import fill_length
        from dllm.evals.tasks.registry import get_task

        versions(commit)  # a commit that is not this one's should be said before a model is loaded
        if samples_per_task > 1 and not temperature:
            raise ValueError(
                f"--samples-per-task {samples_per_task} needs a --temperature above 0: greedy answers are all the same"
            )
        names = ["files_infill" if name == "infill" else name for name in task]
        if files is not None and (names != ["files_infill"] or data is not None):
            raise ValueError("--files goes with the one task `infill` and without --data")
        if data is not None and len(names) > 1:
            raise ValueError(f"--data goes with one task: got {len(names)}")
        lengths = length.split(",")
        for item in lengths:
            try:
                fill_length(item)
            except ValueError as error:
                raise ValueError(f"--length {length!r}: {error}") from error
        rank, world = _place("rank"), _place("world_size")
        optional = {
            "sampler": sampler,
            "threshold": threshold,
            "cache": cache,
            "temperature": temperature,
            "block_length": block_length,
        }
        options = {name: value for name, value in optional.items() if value is not None} | _named("option", option)
        tasks = [get_task(name, **_named("task-option", task_option)) for name in names]
        if any(t.needs_execution for t in tasks) and not allow_code_execution:
            needing = [t.name for t in tasks if t.needs_execution]
            raise ValueError(
                f"{', '.join(needing)} runs code that the model wrote: allow it with --allow-code-execution"
            )
        samples = [repeated(t.samples(files or data, limit, seed), samples_per_task) for t in tasks]
        if INFILL_ONLY & set(options) and any(row.kind != "infill" for rows in samples for row in rows):
            raise ValueError(f"--option: {', '.join(INFILL_ONLY & set(options))} goes with infill tasks only")
        make, chosen = _loader(
            model, kind, options, drafter, guide, ar_infill, max_new_tokens, dtype, _device(device, world)
        )
        extras = _extras(judge, allow_code_execution, reference_likelihood, replays, device, world)
        settings = {
            "model": model,
            "kind": chosen,
            "options": options,
            "drafter": drafter,
            "guide": guide,
            "judge": judge,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "limit": limit,
            "samples_per_task": None if samples_per_task == 1 else samples_per_task,
            "reference_likelihood": reference_likelihood,
            "data": None if files is None and data is None else (files or data or Path()).name,
            "task_options": _named("task-option", task_option),
        }
        console = Console(stderr=True)
        for one, rows in zip(tasks, samples, strict=True):
            for setting in lengths if one.kind == "infill" else [None]:
                folder = output / (one.name if setting is None else f"{one.name}@{setting.replace(':', '')}")
                more = (
                    {} if setting is None else {"length": setting, "ar_infill": ar_infill if chosen == "ar" else None}
                )
                _run(
                    console,
                    one,
                    rows,
                    make("auto" if setting is None else setting),
                    folder,
                    settings | more,
                    batch_size,
                    seed,
                    extras,
                    rank,
                    world,
                    commit,
                )


def _run(
    console: Console,
    task: Any,
    samples: Any,
    system: Any,
    folder: Path,
    settings: dict[str, Any],
    batch_size: int,
    seed: int,
    extras: Any,
    rank: int,
    world: int,
    commit: str | None,
) -> None:
    """One run with its progress bar, and the line that it ends with."""
    from dllm.evals.run_store import RESULT
    from dllm.evals.runner import headline, run_task

    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal or rank > 0) as bar:
        shown = bar.add_task(folder.name, total=None)
        complete = run_task(
            task,
            samples,
            system,
            folder,
            settings,
            batch_size=batch_size,
            seed=seed,
            extras=extras,
            rank=rank,
            world=world,
            progress=lambda done, total: bar.update(shown, completed=done, total=total),
            commit=commit,
        )
    if not complete:
        console.print(f"{folder}: this rank is done; others are still at work", highlight=False)
        return
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    score = headline(result)
    text = "no score" if score is None else f"{task.metric} {score.estimate:.4f} ({score.low:.4f} to {score.high:.4f})"
    rate = result["summary"].get("tokens_per_forward")
    cost = "" if rate is None else f", {rate['estimate']:.2f} tokens per forward"
    rates = [f", pass@{k} {rate['estimate']:.4f}" for k, rate in result["summary"].get("pass_at_k", {}).items()]
    text += "".join(rates)
    console.print(f"{folder}: {len(samples)} samples, {text}{cost}", highlight=False, soft_wrap=True)


def _loader(
    model: str,
    kind: str,
    options: dict[str, Any],
    drafter: str | None,
    guide: str | None,
    ar_infill: str,
    max_new_tokens: int | None,
    dtype: str,
    device: str,
) -> tuple[Callable[[str], Any], str]:
    """(length setting -> system, the kind of the model); the model is loaded once."""
    from dllm.evals.systems import ARSystem, DiffusionSystem
    from dllm.shipped import SHIPPED_TARGETS
    from dllm.target import load_target

    if kind not in ("auto", "diffusion", "ar"):
        raise ValueError(f"--kind must be auto, diffusion or ar: got {kind!r}")
    if kind == "auto":
        kind = "ar" if drafter is not None or model in SHIPPED_TARGETS else "diffusion"
    if kind == "ar":
        if guide is not None:
            raise ValueError("--guide guides a diffusion LM: an AR model takes --drafter")
        target = load_target(model, dtype=dtype, device=device)
        bound = None
        if drafter is not None:
            from dllm.drafters.drafter import Drafter

            bound = Drafter.from_pretrained(drafter, target=target)
        return lambda length: ARSystem(target, bound, options, length, max_new_tokens, ar_infill), kind
    if drafter is not None:
        raise ValueError("--drafter drafts for an AR model: a diffusion LM takes --guide")
    from dllm.pipeline import DiffusionLM

    lm = DiffusionLM.from_pretrained(model, dtype=dtype, device=device)
    more: dict[str, Any] = dict(options)
    common = {name: value for name, value in options.items() if name not in INFILL_ONLY}
    if guide is not None:
        from dllm.guide import ARGuide

        more["guide"] = ARGuide.of_base(lm) if guide == "base" else ARGuide.from_pretrained(guide, device=device)
        common["guide"] = more["guide"]
    # An option that nobody takes should be said now, before a folder is claimed for it.
    lm.generate(input_ids=[[lm.spec.eos_token_ids[0] if lm.spec.eos_token_ids else 0]], max_new_tokens=0, **common)
    return lambda length: DiffusionSystem(lm, more, length, max_new_tokens), kind


def _extras(judge: str | None, allowed: bool, reference_likelihood: bool, replays: int, device: str, world: int) -> Any:
    from dllm.evals.runner import Extras

    execute: Callable[..., Any] | None = None
    scorer = None
    if allowed:
        from dllm.evals import execution

        execute = execution.execute
    if judge is not None:
        from dllm.evals.judge import Judge
        from dllm.target import load_target

        scorer = Judge(load_target(judge, dtype="float32", device=_device(device, world)))
    return Extras(scorer, None if scorer is None else scorer.model.tokenizer, execute, reference_likelihood, replays)


INFILL_ONLY = {"heal_white_space"}
"""Options that `infill` takes and `generate` does not."""

PLACES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Where torchrun, Intel MPI and Open MPI, the launchers behind `accelerate launch`, say which process this is."""


def _place(kind: str) -> int:
    """This process' rank, local rank or how many there are; of a process that nobody launched, of one."""
    found = next((os.environ[name] for name in PLACES[kind] if os.environ.get(name)), None)
    return int(found) if found is not None else int(kind == "world_size")


def _device(device: str, world: int) -> str:
    """Each process of a data-parallel run takes the GPU of its local rank."""
    import torch

    if device == "auto" and world > 1 and torch.cuda.is_available():
        return f"cuda:{_place('local_rank') % torch.cuda.device_count()}"
    return device


def _named(name: str, items: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE items; a value that is no JSON is a string."""
    found: dict[str, Any] = {}
    for item in items or []:
        key, separator, value = item.partition("=")
        if not key or not separator:
            raise ValueError(f"--{name} must be NAME=VALUE: got {item!r}")
        if key in found:
            raise ValueError(f"--{name} must give each name once: got {key!r} twice")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def report(
    run: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders that hold some; the first is the baseline.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML page; the Markdown goes beside it.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Evaluation",
) -> None:
    """Compare runs on one self-contained HTML page, and in Markdown beside it."""
    from dllm.cli import _plain_errors

    with _plain_errors():
        from dllm.evals.report import write_report

        page, text = write_report(run, out, title)
    typer.echo(f"{page}\n{text}")


def lm_eval(context: typer.Context) -> None:
    from dllm.cli import _plain_errors

    with _plain_errors():
        from dllm.evals.lm_eval_model import main

        main(context.args)
