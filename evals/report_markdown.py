"""The tables of a report: their columns, which the page shares, and the Markdown of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dllm.evals.report_data import PERCENTILES, RunView, Versus, by_task, verdict, versus_first
from dllm.evals.statistics import Interval


@dataclass(frozen=True)
class Cell:
    """A number as text, the range of its interval, and, of a difference, what the interval says."""

    text: str
    range: str = ""
    verdict: str = ""

    @classmethod
    def of(cls, interval: Interval | None, digits: int, scale: float = 1.0, difference: bool = False) -> Cell | None:
        """An interval in `digits` decimals; with `difference`, signed and with its verdict."""
        if interval is None:
            return None
        sign = "+" if difference else ""
        value, low, high = (scale * x for x in (interval.estimate, interval.low, interval.high))
        bounds = f"{low:{sign}.{digits}f} to {high:{sign}.{digits}f}" if interval.n > 1 else ""
        return cls(f"{value:{sign}.{digits}f}", bounds, verdict(interval) if difference else "")

    @classmethod
    def ratio(cls, interval: Interval | None) -> Cell | None:
        """A ratio, whose neutral value is 1."""
        if interval is None:
            return None
        return cls(f"{interval.estimate:.2f} x", f"{interval.low:.2f} to {interval.high:.2f}" if interval.n > 1 else "")


def _score(view: RunView) -> Cell | None:
    return Cell.of(view.score, 1, 100.0)


def _pass_rates(view: RunView) -> Cell | None:
    if not view.pass_rates:
        return None
    cells = {k: Cell.of(rate, 1, 100.0) for k, rate in view.pass_rates.items()}
    return Cell("; ".join(f"@{k} {cell.text} ({cell.range})" for k, cell in cells.items() if cell is not None))


def _other_scores(view: RunView) -> Cell | None:
    others = {name: value for name, value in view.scores.items() if name != view.task["metric"]}
    return Cell(", ".join(f"{name} {100 * value.estimate:.1f}" for name, value in others.items())) if others else None


def _latency(view: RunView) -> Cell:
    values = [view.latency[p] for p in PERCENTILES]
    return Cell(f"{values[0]:.2f}", " / ".join(f"{value:.2f}" for value in values[1:]))


ROWS: list[tuple[str, Callable[[RunView], Cell | None]]] = [
    ("score, %", _score),
    ("pass@k, %", _pass_rates),
    ("other scores, %", _other_scores),
    ("samples", lambda v: Cell(str(len(v.records)))),
    ("tokens per forward", lambda v: Cell.of(v.measurement.tokens_per_forward, 2)),
    ("tokens per second", lambda v: Cell.of(v.measurement.tokens_per_second, 1)),
    ("positions per sample", lambda v: Cell.of(v.measurement.positions, 0)),
    ("seconds: p50 (p90 / p95 / p99)", _latency),
    ("tokens", lambda v: Cell.of(v.measurement.length, 1)),
    ("loops, %", lambda v: Cell.of(v.measurement.loop_rate, 0, 100.0)),
    ("judge, nats per token", lambda v: Cell.of(v.measurement.log_likelihood, 2)),
    ("tokens per verify pass", lambda v: Cell.of(v.measurement.accept_length if v.acceptance else None, 2)),
]
"""Columns of the main table: name, and what a run says there (None: nothing)."""

VERSUS_ROWS: list[tuple[str, Callable[[Versus], Cell | None]]] = [
    ("samples", lambda p: Cell(str(p.n))),
    ("score, points", lambda p: Cell.of(p.score, 1, 100.0, difference=True)),
    ("judge, nats per token", lambda p: Cell.of(p.comparison.log_likelihood_difference, 3, difference=True)),
    ("loops, points", lambda p: Cell.of(p.comparison.loop_rate_points, 1, difference=True)),
    ("tokens per forward", lambda p: Cell.ratio(p.comparison.tokens_per_forward_ratio)),
    ("tokens per wall second", lambda p: Cell.ratio(p.comparison.speed_ratio)),
    ("forwards", lambda p: Cell.ratio(p.comparison.nfe_ratio)),
    ("length", lambda p: Cell.ratio(p.comparison.length_ratio)),
    ("same outputs", lambda p: Cell(f"{p.comparison.num_identical} of {p.n}")),
]
"""Columns of the differences from another run."""


def versus_rows(pairs: Sequence[Versus]) -> list[tuple[str, Callable[[Versus], Cell | None]]]:
    """`VERSUS_ROWS`, with the run that each is compared with where that is not the same for all."""
    several = len({pair.b.number for pair in pairs}) > 1
    return [*([("against run", _against)] if several else []), *VERSUS_ROWS]


def versus_title(pairs: Sequence[Versus]) -> str:
    """What the differences of these pairs are differences from."""
    first = pairs[0].b
    if len({pair.b.number for pair in pairs}) == 1:
        return f"Differences from run {first.number} ({first.label}), on the same samples"
    return "Differences from the first run of the same length setting, on the same samples"


def _against(pair: Versus) -> Cell:
    return Cell(str(pair.b.number))


def length_rows(rows: Sequence[RunView]) -> list[RunView]:
    """Infill runs, grouped by everything but their length setting, in the order oracle, fixed, auto."""
    found = [v for v in rows if v.settings.get("length") is not None]

    def key(view: RunView) -> tuple[str, int, str]:
        others = {name: value for name, value in view.settings.items() if name != "length"}
        length, kinds = view.settings["length"], ("oracle", "fixed", "auto")
        kind = str(length).partition(":")[0]
        if kind not in kinds:
            raise ValueError(f"{view.folder}: length must be 'oracle', 'fixed:N' or 'auto': got {length!r}")
        return repr(sorted(others.items())), kinds.index(kind), length

    return sorted(found, key=key)


def render_markdown(views: Sequence[RunView], title: str, pairs: Sequence[Versus] | None = None) -> str:
    """The report's tables as Markdown. pairs: of `versus_first`, where the caller has them."""
    lines = [f"# {title}", "", *notes(views), ""]
    for name, rows in by_task(views).items():
        lines += [*task_markdown(name, rows, pairs), ""]
    return "\n".join(lines).rstrip() + "\n"


def notes(views: Sequence[RunView]) -> list[str]:
    """Where it was measured and how to read the intervals."""
    keys = ("device", "dtype", "torch", "transformers", "commit")
    places = sorted({", ".join(f"{k} {v.versions[k]}" for k in keys if v.versions.get(k)) for v in views})
    return [
        "Estimates stand with their 95 % interval over samples: Wilson's for passes and fails, else a bootstrap; differences are "
        "paired by sample. Seconds of a sample are its call's wall time divided by the rows of the call.",
        "",
        *(f"- {place}" for place in places),
    ]


def task_markdown(name: str, rows: Sequence[RunView], pairs: Sequence[Versus] | None = None) -> list[str]:
    """The tables of one task."""
    pairs = versus_first(rows) if pairs is None else [p for p in pairs if p.a.task["name"] == name]
    task = rows[0].task
    lines = [f"## {name}", "", f"Headline score: {task['metric'] or 'none'}.", ""]
    lines += [f"Run {v.number} is not complete: {v.missing} samples are missing.\n" for v in rows if v.missing]
    lines += _table(rows, ROWS, lambda v: v)
    lengths = length_rows(rows)
    if lengths:
        lines += ["", "Gap lengths side by side:", "", *_table(lengths, [ROWS[0], *LENGTH_ROWS], lambda v: v)]
    drafted = [v for v in rows if v.acceptance is not None]
    if drafted:
        most = max(len(v.acceptance.rate) for v in drafted if v.acceptance is not None)
        head = ["run", *(str(j + 1) for j in range(most))]
        lines += [
            "",
            "Share of verify passes that accepted the draft at each position:",
            "",
            _row(head),
            _rule(len(head)),
        ]
        for v in drafted:
            assert v.acceptance is not None, "drafted runs have an acceptance"
            rates = [f"{rate:.2f}" for rate in v.acceptance.rate]
            lines.append(_row([_name(v), *rates, *[""] * (most - len(rates))]))
    if pairs:
        lines += ["", f"{versus_title(pairs)}:", "", *_table(pairs, versus_rows(pairs), lambda p: p.a)]
    return lines


LENGTH_ROWS: list[tuple[str, Callable[[RunView], Cell | None]]] = [
    ("length setting", lambda v: Cell(str(v.settings.get("length")))),
    ("chosen minus true length, tokens", lambda v: Cell.of(v.length_error, 1)),
    ("true middle, nats per token", lambda v: Cell.of(v.reference_log_likelihood, 2)),
]
"""Columns of the table of length settings, behind the score."""


def _table(rows: Sequence[Any], columns: Sequence[tuple[str, Any]], view_of: Callable[[Any], RunView]) -> list[str]:
    cells = [[make(row) for _, make in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] is not None for line in cells)]
    head = ["run", *(columns[i][0] for i in used)]
    lines = [_row(head), _rule(len(head))]
    for row, line in zip(rows, cells, strict=True):
        lines.append(_row([_name(view_of(row)), *(_cell_text(line[i]) for i in used)]))
    return lines


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    bounds = f" ({cell.range})" if cell.range else ""
    return f"{cell.text}{bounds}" + (f", {cell.verdict}" if cell.verdict else "")


def _name(view: RunView) -> str:
    return f"{view.number}. {view.label}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _rule(count: int) -> str:
    return "|" + "---|" + "---:|" * (count - 1)
