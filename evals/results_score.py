"""Score runs that were made without scores: `python -m dllm.evals.results_score RUN... --data DIR [--allow-code-execution]`.

Where a model decodes fast there may be no sandbox for its code, no math-verify, or no time: outputs are saved there (`Extras.deferred`)
and scored here. A run's samples are made again from the data and must be those of the run, by their digest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from dllm.evals.report_data import find_runs
from dllm.evals.results_plan import FILES
from dllm.evals.run_fields import LINE_FIELDS, read_run
from dllm.evals.run_store import RUN, Line, RunStore, load_run
from dllm.evals.runner import DEFERRED, REPLAYS, checked_scores, samples_digest, summary
from dllm.evals.task import Sample, Task
from dllm.evals.tasks.registry import get_task


def score_run(
    folder: Path,
    task: Task,
    samples: Sequence[Sample],
    execute: Callable[..., Any] | None = None,
    workers: int = 1,
) -> bool:
    """Give each record of a complete run its scores, in place; False where it has them already.

    samples: all of the run, in its order. workers: programs that run at once. The folder is replaced when everything is scored.
    Raises ValueError for other samples, a run that is not complete, workers below 1, and a task whose code may not be run.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1: got {workers}")
    saved = load_run(folder, LINE_FIELDS)
    if saved.run.get("scores") != DEFERRED:
        return False
    if saved.run["num_samples"] != len(saved.records):
        raise ValueError(
            f"{folder} must be complete: {saved.run['num_samples'] - len(saved.records)} samples are missing"
        )
    if samples_digest(samples) != saved.run["samples_digest"]:
        raise ValueError(
            f"{folder} was made from other samples of {task.name}: the data, the limit or the seed differ from the run's"
        )
    if task.needs_execution and execute is None:
        raise ValueError(f"task {task.name} runs the code that the model wrote: allow it with --allow-code-execution")

    def score(record: Mapping[str, Any]) -> dict[str, float]:
        return checked_scores(task, samples[record["index"]], record["output"], execute)

    if task.needs_execution:
        with ThreadPoolExecutor(workers) as pool:
            scores = list(pool.map(score, saved.records))
    else:
        # math-verify's time limits work in the main thread only.
        scores = [score(record) for record in saved.records]
    times = {time["index"]: time for time in saved.times}
    run = {name: value for name, value in saved.run.items() if name not in ("format", "num_samples", "scores")}
    fresh, old = folder.with_name(f".{folder.name}.scored"), folder.with_name(f".{folder.name}.unscored")
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    with RunStore(fresh, run, len(saved.records)) as store:
        for record, found in zip(saved.records, scores, strict=True):
            time = {name: value for name, value in times[record["index"]].items() if name != "index"}
            body = {name: value for name, value in record.items() if name != "index"}
            store.append(Line(record["index"], body | {"scores": found}, time))
        store.finish(lambda records: summary(records, task.metric))
    if (folder / REPLAYS).is_file():
        shutil.copy(folder / REPLAYS, fresh / REPLAYS)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)
    return True


def command(
    run: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    data: Annotated[Path, typer.Option(help="Folder of the data files; see results_plan.FILES.")],
    workers: Annotated[int, typer.Option(help="Programs that run at once.")] = 2,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run code that the model wrote, in a sandbox.")
    ] = False,
) -> None:
    """Score runs that were made with --no-scores."""
    execute: Callable[..., Any] | None = None
    if allow_code_execution:
        from dllm.evals import execution

        execute = execution.execute
    failures = 0
    for folder in find_runs(run):
        try:
            asked = read_run(folder / RUN)
            settings = asked["settings"]
            task = get_task(asked["task"]["name"])
            samples = task.samples(data / FILES[task.name], settings["limit"], settings["seed"])
            done = score_run(folder, task, samples, execute, workers)
        except (ValueError, OSError) as error:
            failures += 1
            typer.echo(f"{folder}: {error}")
            continue
        typer.echo(f"{folder}: {'scored' if done else 'has its scores'}")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
