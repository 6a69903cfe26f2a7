"""docs/results.md, made from saved runs: `python -m dllm.evals.results_page RUN... [--out docs/results.md]`.

Runs are folders that `dllm eval` or `python -m dllm.evals.results_runs` wrote, or folders that hold some. Only runs of one setting (device,
versions, samples, limit of tokens) stand in one table: the first run of a task in it is what the others are compared with, among
infills the first one of the same length setting. There is no clock on the page: its runs may be made side by side on one device. The same
runs give the same page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.report_data import RunView, Versus, by_task, flat_settings, load_views, versus_first
from dllm.evals.report_markdown import LENGTH_ROWS, ROWS, VERSUS_ROWS, Cell
from dllm.evals.results_plan import Entry, plan
from dllm.evals.statistics import bootstrap_mean
from dllm.evals.tasks.registry import TASKS

HOW = """\
Estimates stand with their 95 % interval over samples: Wilson's for passes and fails, else a bootstrap; differences are paired by
sample, and "no difference seen" says that their interval holds 0, not that there is none. Runs of other settings (A, B, ... below)
or of another limit of new tokens are not compared. `limit` samples of a task are drawn by `seed`, the same ones for every run. No
speeds stand here: runs may share their device, and docs/log.md has those that were measured alone.

- Score: the task's own headline score over the samples that the run answered: accuracy (gsm8k, math500), pass@1 of the first answer
  (code, run in a sandbox), ROUGE-L (stories). Other scores: the task's stricter ones.
- Tokens: of an answer, up to its stop. At the limit: answers that were cut by the limit of new tokens, or filled it.
- Tokens per forward: of the model that writes, one sequence alone; forwards of a guide or a drafter stand in columns of their own.
- Positions per sample: rows of tokens that the writing model computed, the prompt's included; what a cache saves is seen here.
- Loops: answers in which some eight tokens stand three times.
- Judge: mean log-likelihood of what was written under SmolLM2-135M in fp32, nats per token. It also likes repetition, and the base
  of all models here is this very model: what the base writes greedily is favoured. Of an infill the text behind the gap is scored
  with the fill, so that leaving things out wins nothing.
- Length: `oracle` is the true number of tokens of the gap, `fixed:N` always N, `auto` leaves it to the model, up to the limit. A fill
  from the prefix alone does not know where the gap ends, and with `auto` goes on until the model ends its text.
- True middle: log-likelihood of what stood in the gap, nats per token: by the base after the prefix, by a diffusion model after the
  prefix and before the suffix, one token at a time from the left."""

CLOCK = ("tokens per second", "seconds: p50 (p90 / p95 / p99)", "tokens per wall second")
METHOD_KEYS = ("model", "weights", "kind", "options", "drafter", "guide", "ar_infill", "length")
"""Settings that say how a run decodes; the others, but for the data and the limit of tokens, are shared with the runs beside it."""

Column = tuple[str, Callable[[Any], Cell | None]]


class Group(NamedTuple):
    """Runs of one task that may be compared. place: letter of their setting. tokens: limit of new tokens."""

    task: str
    place: str
    tokens: int | None
    rows: list[RunView]

    def named(self, name: str) -> str:
        """A method's name with the setting."""
        return f"{name} ({_setting(self.place, self.tokens)})"


def render_results(views: Sequence[RunView]) -> str:
    """The page as a string. views: of `load_views`."""
    places = _places(views)
    groups = _groups(views, places)
    lines = ["# Results", "", "Made by `python -m dllm.evals.results_page RUN...` from saved runs; do not edit.", ""]
    lines += [HOW, "", "Settings:", "", *(f"- {letter}: {text}" for text, letter in places.items()), ""]
    plain = [group for group in groups if all(v.settings.get("length") is None for v in group.rows)]
    fills = [group for group in groups if group not in plain]
    lines += _overview("Scores, %", plain, _score)
    lines += _overview("Tokens per forward", plain, lambda v: Cell.of(v.measurement.tokens_per_forward, 2))
    lines += _overview("Judge, nats per token", plain, _judge)
    lines += _lengths("Infill: score, %, by what decides the length", fills, _score)
    lines += _lengths("Infill: judge, nats per token, by what decides the length", fills, _judge)
    for name in dict.fromkeys(group.task for group in groups):
        lines += _task([group for group in groups if group.task == name])
    lines += _not_made(views)
    return "\n".join(lines).rstrip() + "\n"


def method_name(settings: Mapping[str, Any]) -> str:
    """A run's model and how it decodes, in a few words; the same for the same method on another task or at another length."""
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


def is_run(view: RunView, entry: Entry) -> bool:
    """Whether a run is the one that the plan means, on however many samples and wherever it was made."""
    wanted = {**entry.method.settings(entry.length is not None), "length": entry.length}
    return view.task["name"] == entry.task and all(view.settings.get(k) == value for k, value in wanted.items())


def _places(views: Sequence[RunView]) -> dict[str, str]:
    """What is shared by the runs of a setting, as text -> its letter, in order of appearance."""
    texts = list(dict.fromkeys(map(_place, views)))
    return {text: chr(ord("A") + i) if i < 26 else f"Z{i - 25}" for i, text in enumerate(texts)}


def _place(view: RunView) -> str:
    shown = flat_settings(replace(view, settings={k: v for k, v in view.settings.items() if k not in METHOD_KEYS}))
    first = ("device", "dtype", "note")
    others = sorted(name for name in shown if name not in (*first, "data", "max_new_tokens"))
    return ", ".join([*(shown[k] for k in first if k in shown), *(f"{k} {shown[k]}" for k in others)])


def _groups(views: Sequence[RunView], places: Mapping[str, str]) -> list[Group]:
    groups = []
    for task, rows in by_task(views).items():
        parts: dict[tuple[str, int | None], list[RunView]] = {}
        for view in rows:
            parts.setdefault((places[_place(view)], view.settings.get("max_new_tokens")), []).append(view)
        for (place, tokens), part in sorted(parts.items(), key=lambda item: (item[0][0], -(item[0][1] or 0))):
            numbered = [replace(v, number=i, label=_label(v)) for i, v in enumerate(part, 1)]
            groups.append(Group(task, place, tokens, numbered))
    return groups


def _setting(place: str, tokens: int | None) -> str:
    return place if tokens is None else f"{place}, {tokens} tokens"


def _label(view: RunView) -> str:
    length = view.settings.get("length")
    return method_name(view.settings) + ("" if length is None else f", length {length}")


def _score(view: RunView) -> Cell | None:
    return Cell.of(view.score, 1, 100.0)


def _judge(view: RunView) -> Cell | None:
    return Cell.of(view.measurement.log_likelihood, 2)


def _at_limit(view: RunView) -> Cell | None:
    """Share of the answers that are as long as allowed; nothing where the length was given."""
    limit = view.settings.get("max_new_tokens")
    if limit is None or view.settings.get("length") not in (None, "auto"):
        return None
    full = [float(len(record["token_ids"]) >= limit) for record in view.records]
    return Cell(f"{100 * sum(full) / len(full):.0f}")


def _helper(name: str) -> Callable[[RunView], Cell | None]:
    """Mean forwards of a guide or a drafter; nothing for a run without one."""

    def cell(view: RunView) -> Cell | None:
        counts = [float(record[name]) for record in view.records]
        return Cell.of(bootstrap_mean(counts), 1) if any(counts) else None

    return cell


COLUMNS: list[Column] = [
    *(column for column in ROWS if column[0] not in CLOCK),
    ("at the limit, %", _at_limit),
    ("guide forwards", _helper("guide_nfe")),
    ("draft forwards", _helper("draft_nfe")),
    *(column for column in LENGTH_ROWS if column[0] != "length setting"),
]


def _overview(title: str, groups: Sequence[Group], show: Callable[[RunView], Cell | None]) -> list[str]:
    """One row a method and setting, one column a task."""
    cells: dict[str, dict[str, str]] = {}
    for group in groups:
        for view in group.rows:
            text = _text(show(view))
            if text:
                cells.setdefault(group.named(method_name(view.settings)), {}).setdefault(group.task, text)
    tasks = list(dict.fromkeys(group.task for group in groups if any(group.task in row for row in cells.values())))
    return _grid(title, "method (setting)", tasks, cells)


def _lengths(title: str, groups: Sequence[Group], show: Callable[[RunView], Cell | None]) -> list[str]:
    """One row a task, method and setting, the length settings side by side."""
    found = {str(v.settings["length"]) for group in groups for v in group.rows if v.settings.get("length")}
    lengths = sorted(found, key=lambda name: (("oracle", "fixed", "auto").index(name.partition(":")[0]), name))
    cells: dict[str, dict[str, str]] = {}
    for group in groups:
        for view in group.rows:
            text = _text(show(view))
            if view.settings.get("length") and text:
                row = cells.setdefault(group.named(f"{group.task}: {method_name(view.settings)}"), {})
                row.setdefault(str(view.settings["length"]), text)
    return _grid(title, "task: method (setting)", lengths, cells)


def _task(groups: Sequence[Group]) -> list[str]:
    """The section of one task: for each setting its runs and their differences."""
    run = groups[0].rows[0]
    data = ", ".join(str(v) for v in (run.task.get("dataset"), run.task.get("split"), run.settings.get("data")) if v)
    said = [_about(groups[0].task), f"Data: {data}." if data else "", f"Score: {run.task['metric'] or 'none'}."]
    lines = [f"## {groups[0].task}", "", " ".join(filter(None, said)), ""]
    for group in groups:
        lines += [f"Setting {_setting(group.place, group.tokens)}:", ""]
        lines += [f"Run {v.number} lacks {v.missing} samples.\n" for v in group.rows if v.missing]
        lines += _table([(_name(view), view) for view in group.rows], COLUMNS)
        pairs = [p for p in versus_first(group.rows) if p.a.settings.get("length") == p.b.settings.get("length")]
        if pairs:
            first = "the first run" + (" of the same length" if pairs[0].a.settings.get("length") else "")
            columns: list[Column] = [("against run", _against), *(c for c in VERSUS_ROWS if c[0] not in CLOCK)]
            lines += [f"Differences from {first}, on the same samples (x: ratios):", ""]
            lines += _table([(_name(pair.a), pair) for pair in pairs], columns)
        weights = sorted({f"{k} {w}" for v in group.rows for k, w in (v.settings.get("weights") or {}).items()})
        if weights:
            lines += [f"Weights, first digits of their sha256: {', '.join(weights)}.", ""]
    return lines


def _about(task: str) -> str:
    """What a task is, by the first line of its file; nothing of a task that is not ours."""
    if task not in TASKS:
        return ""
    return (inspect.getdoc(inspect.getmodule(type(TASKS[task]()))) or "").partition("\n")[0]


def _against(pair: Versus) -> Cell:
    return Cell(str(pair.b.number))


def _not_made(views: Sequence[RunView]) -> list[str]:
    """What the plan names and no run is of, a line a method."""
    missing: dict[str, dict[str, list[str]]] = {}
    for entry in plan():
        if not any(is_run(view, entry) for view in views):
            name = method_name(entry.method.settings(entry.length is not None))
            missing.setdefault(name, {}).setdefault(entry.task, []).extend([entry.length] if entry.length else [])
    if not missing:
        return []
    lines = ["## Not run", "", "Runs that `dllm.evals.results_plan` names and that are not among the above:", ""]
    for name, tasks in missing.items():
        parts = (task + (f" ({', '.join(lengths)})" if lengths else "") for task, lengths in tasks.items())
        lines.append(f"- {name}: {'; '.join(parts)}")
    return lines


def _table(rows: Iterable[tuple[str, Any]], columns: Sequence[Column]) -> list[str]:
    """One row a run or pair; columns that say nothing of any of them are left out."""
    cells = {name: {title: _text(make(row)) for title, make in columns} for name, row in rows}
    used = [title for title, _ in columns if any(row[title] for row in cells.values())]
    return _grid(None, "run", used, cells)


def _grid(title: str | None, corner: str, columns: Sequence[str], cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    if not columns or not cells:
        return []
    rows = ["| " + " | ".join([name, *(row.get(c, "") for c in columns)]) + " |" for name, row in cells.items()]
    head = [] if title is None else [f"## {title}", ""]
    return [*head, f"| {corner} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns), *rows, ""]


def _name(view: RunView) -> str:
    return f"{view.number}. {view.label}"


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell.text + (f" ({cell.range})" if cell.range else "") + (f", {cell.verdict}" if cell.verdict else "")


def command(
    run: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("docs/results.md"),
) -> None:
    """Write the page of results from saved runs."""
    path = write_text_atomic(out, render_results(load_views(run)))
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(command)
