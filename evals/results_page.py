"""docs/results.md, made from saved runs: `python -m dllm.evals.results_page RUN... [--out docs/results.md]`.

Runs are folders that `dllm eval` wrote, or folders that hold some; the first run of a task is what the others are compared with.
The same runs give the same page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.report_data import RunView, by_task, flat_settings, load_views
from dllm.evals.report_markdown import notes, task_markdown


def render_results(views: list[RunView]) -> str:
    """The page as a string."""
    lines = [
        "# Results",
        "",
        "Made by `python -m dllm.evals.results_page RUN...` from runs of `dllm eval`; do not edit.",
        "",
    ]
    lines += [*notes(views), ""]
    for name, rows in by_task(views).items():
        lines += [*task_markdown(name, rows), "", "Settings:", ""]
        for view in rows:
            settings = flat_settings(view)
            shown = [f"{key} {value}" for key, value in settings.items() if key not in view.versions]
            lines.append(f"- {view.number}. " + ", ".join(shown))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def command(
    run: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("docs/results.md"),
) -> None:
    """Write the page of results from saved runs."""
    path = write_text_atomic(out, render_results(load_views(run)))
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(command)
