"""Does a task score right? Every sample's known answers, run through its own score.

python -m dllm.evals.tasks.known_answers humaneval --data humaneval.jsonl --allow-code-execution

A task that gives its reference less than everything, or gives anything to an empty or wrong output, exits with 1 and says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from dllm.evals.execution import execute
from dllm.evals.task import Sample, Task
from dllm.evals.tasks.registry import get_task

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Miss:
    """An output that did not get the score that it has to."""

    sample: str
    output: str
    expected: float
    got: float


@dataclass(frozen=True)
class KnownAnswers:
    """num_checked: outputs scored, by the score expected of them. misses: those that got another one."""

    num_checked: dict[float, int]
    misses: tuple[Miss, ...]


def known_answers(task: Task, samples: Iterable[Sample], run: Callable[..., Any] | None = None) -> KnownAnswers:
    """Score the known answers of the samples. run: as ``execute`` of `Task.score`; called once for each distinct program.

    All gaps of one problem are cut from one solution, so that thousands of true middles make the same few programs again.
    """
    run = None if run is None else _once(run)
    counts: dict[float, int] = {}
    misses = []
    for sample in samples:
        for output, expected in task.check(sample):
            counts[expected] = counts.get(expected, 0) + 1
            got = task.score(sample, output, run)[task.metric]
            if got != expected:
                misses.append(Miss(sample.id, output, expected, got))
    return KnownAnswers(counts, tuple(misses))


def _once(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with its results kept by program and tests."""
    found: dict[tuple[str, str], Any] = {}

    def kept(program: str, tests: str) -> Any:
        key = (program, tests)
        if key not in found:
            found[key] = run(program, tests)
        return found[key]

    return kept


@app.command()
def main(
    name: Annotated[str, typer.Argument(help="task")],
    data: Annotated[Path | None, typer.Option(help="JSONL file; without it the hub's copy")] = None,
    limit: Annotated[int | None, typer.Option(help="at most so many samples")] = None,
    seed: Annotated[int, typer.Option(help="draws them")] = 0,
    allow_code_execution: Annotated[bool, typer.Option(help="run the data set's code, shut in")] = False,
) -> None:
    """Check one task on one file."""
    console = Console()
    task = get_task(name)
    samples = task.samples(data, limit, seed)
    shown = track(samples, description=name, console=Console(stderr=True))
    found = known_answers(task, shown, execute if allow_code_execution else None)
    for expected, count in sorted(found.num_checked.items(), reverse=True):
        missed = sum(miss.expected == expected for miss in found.misses)
        console.print(f"{name}: {count - missed} of {count} known answers score {expected:g}", highlight=False)
    for miss in found.misses:
        console.print(f"{miss.sample}: {miss.output[:80]!r} has {miss.got:g}, not {miss.expected:g}", highlight=False)
    if found.misses:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
