"""docs/results.md, made from saved runs: `python -m dllm.evals.results_page RUN... [--out docs/results.md]`.

Runs are folders that `dllm eval` or `python -m dllm.evals.results_runs` wrote, or folders that hold some; the first run of a task is
what the others are compared with, among infills the first one of the same length setting. The same runs give the same page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.report_data import RunView, by_task, flat_settings, load_views
from dllm.evals.report_markdown import Cell, notes, task_markdown

HOW = """\
Score: the task's own (accuracy, pass@1 of the first answer, exact match) over the samples that the run answered. Tokens per
forward count the forwards of the model itself, not a guide's or a drafter's. Tokens per second are those of the whole batch while
it decodes. Loops: answers in which some eight tokens stand three times. Judge: mean log-likelihood of what was written under
SmolLM2-135M in fp32, which also likes repetition; of an infill with the text behind it, so that leaving things out wins nothing."""


def render_results(views: list[RunView]) -> str:
    """The page as a string."""
    lines = [
        "# Results",
        "",
        "Made by `python -m dllm.evals.results_page RUN...` from saved runs; do not edit.",
        "",
        *notes(views),
        "",
        HOW,
        "",
    ]
    groups = by_task(views)
    plain = {name: rows for name, rows in groups.items() if all(v.settings.get("length") is None for v in rows)}
    lines += _overview("Scores, %", plain, scored=True)
    lines += _overview("Tokens per forward", plain, scored=False)
    lines += _lengths({name: rows for name, rows in groups.items() if name not in plain})
    for name, rows in groups.items():
        lines += [*task_markdown(name, rows), "", *_settings(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def method_name(view: RunView) -> str:
    """A run's model and how it decodes, in a few words; the same for the same method on another task or at another length."""
    settings = view.settings
    options = dict(settings.get("options", {}))
    parts = [Path(str(settings.get("model", "model"))).name]
    sampler = options.pop("sampler", None)
    if sampler is not None and not (sampler == "threshold" and "threshold" in options):
        parts.append(str(sampler))
    parts += [f"{name} {value}" for name, value in options.items()]
    for name, form in (("drafter", "drafter {}"), ("guide", "guide {}"), ("ar_infill", "by {}")):
        if settings.get(name) is not None:
            parts.append(form.format(Path(str(settings[name])).name))
    return ", ".join(parts)


def _overview(title: str, groups: dict[str, list[RunView]], scored: bool) -> list[str]:
    """One row a method, one column a task."""

    def cell(view: RunView) -> str:
        made = Cell.of(view.score, 1, 100.0) if scored else Cell.of(view.measurement.tokens_per_forward, 2)
        return _text(made)

    tasks = [name for name, rows in groups.items() if not scored or any(v.score is not None for v in rows)]
    cells: dict[str, dict[str, str]] = {}
    for task in tasks:
        for view in groups[task]:
            cells.setdefault(method_name(view), {}).setdefault(task, cell(view))
    return _grid(title, "method", tasks, cells)


def _lengths(groups: dict[str, list[RunView]]) -> list[str]:
    """One row a task and method, the length settings side by side."""
    found = {str(v.settings["length"]) for rows in groups.values() for v in rows if v.settings.get("length")}
    lengths = sorted(found, key=lambda name: (("oracle", "fixed", "auto").index(name.partition(":")[0]), name))
    cells: dict[str, dict[str, str]] = {}
    for task, rows in groups.items():
        for view in rows:
            if view.settings.get("length"):
                row = cells.setdefault(f"{task}: {method_name(view)}", {})
                row.setdefault(str(view.settings["length"]), _text(Cell.of(view.score, 1, 100.0)))
    return _grid("Infill: score, %, by what decides the length", "task and method", lengths, cells)


def _grid(title: str, corner: str, columns: Sequence[str], cells: dict[str, dict[str, str]]) -> list[str]:
    if not columns or not cells:
        return []
    rows = [
        f"| {name} | " + " | ".join(row.get(column, "") for column in columns) + " |" for name, row in cells.items()
    ]
    return [f"## {title}", "", f"| {corner} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns), *rows, ""]


def _text(cell: Cell | None) -> str:
    return "" if cell is None else cell.text + (f" ({cell.range})" if cell.range else "")


def _settings(rows: Sequence[RunView]) -> list[str]:
    """Settings that all runs of a task share, once, and those of each."""
    shown = [{k: v for k, v in flat_settings(view).items() if k not in view.versions} for view in rows]
    shared = {k: v for k, v in shown[0].items() if all(other.get(k) == v for other in shown)} if len(rows) > 1 else {}
    lines = ["Settings:", ""]
    if shared:
        lines.append("- all: " + ", ".join(f"{key} {value}" for key, value in shared.items()))
    for view, settings in zip(rows, shown, strict=True):
        own = [f"{key} {value}" for key, value in settings.items() if key not in shared]
        lines.append(f"- {view.number}. " + ", ".join(own))
    return lines


def command(
    run: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("docs/results.md"),
) -> None:
    """Write the page of results from saved runs."""
    path = write_text_atomic(out, render_results(load_views(run)))
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(command)
