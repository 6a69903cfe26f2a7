"""One self-contained HTML page over runs, and the same in Markdown: scores and costs with intervals, charts, diffs, replays.

The page (`report.html`, filled here) asks nothing of the network, works from a file, on a phone, in light and dark. Every text of a
model or a data set is escaped.
"""

from __future__ import annotations

import difflib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.replay import ReplayRun, render_replay, replay_run
from dllm.evals.report_charts import Curve, Point, lines, scatter
from dllm.evals.report_data import RunView, Versus, by_task, flat_settings, load_views, versus_first
from dllm.evals.report_markdown import (
    LENGTH_ROWS,
    ROWS,
    Cell,
    length_rows,
    render_markdown,
    versus_rows,
    versus_title,
)

MAX_DIFFS = 8
"""Samples shown side by side for a pair of runs."""


def write_report(paths: Iterable[Path], out: Path, title: str = "Evaluation") -> tuple[Path, Path]:
    """Write the page of the runs to `out` and the Markdown beside it, in a folder that is made if need be; returns both paths.

    Raises ValueError for a path without runs, a damaged run, and an `out` that does not end in .html.
    """
    out = Path(out)
    if out.suffix != ".html":
        raise ValueError(f"out must end in .html: got {out}")
    views = load_views(paths)
    pairs = versus_first(views)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = write_text_atomic(out.with_suffix(".md"), render_markdown(views, title, pairs))
    return write_text_atomic(out, render_html(views, title, pairs)), text


def render_html(views: Sequence[RunView], title: str, pairs: Sequence[Versus] | None = None) -> str:
    """The page as a string. pairs: of `versus_first`, where the caller has them."""
    pairs = versus_first(views) if pairs is None else pairs
    replays: list[str] = []
    body = []
    for name, rows in by_task(views).items():
        body.append(_task(name, rows, [p for p in pairs if p.a.task["name"] == name], replays))
    body.append(_all_settings(views))
    payload = json.dumps(replays)
    for character in "<>&":
        payload = payload.replace(character, f"\\u{ord(character):04x}")
    parts = {"TITLE": _e(title), "HEADER": _header(views), "BODY": "\n".join(body), "REPLAYS": payload}
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return re.sub("{{(TITLE|HEADER|BODY|REPLAYS)}}", lambda match: parts[match[1]], page)


def _e(text: Any) -> str:
    # A lone half of a surrogate pair, which a model can write, has no UTF-8.
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def _header(views: Sequence[RunView]) -> str:
    devices = sorted({f"{v.versions.get('device')}, {v.versions.get('dtype')}" for v in views})
    samples = sum(len(v.records) for v in views)
    links = "".join(f'<a href="#{_id(name)}">{_e(name)}</a>' for name in by_task(views))
    return (
        f'<p class="soft">{len(views)} {"run" if len(views) == 1 else "runs"}, {samples:,} samples, on {_e("; ".join(devices))}. '
        "Intervals are 95 % over samples; differences are paired by sample.</p>"
        f'<nav aria-label="Tasks">{links}<a href="#settings">Settings</a></nav>'
    )


def _id(name: str) -> str:
    return "task-" + re.sub(r"[^\w-]", "-", name)


def _task(name: str, rows: Sequence[RunView], pairs: Sequence[Versus], replays: list[str]) -> str:
    task = rows[0].task
    source = ", ".join(str(task[k]) for k in ("dataset", "split") if task[k])
    parts = [f'<section id="{_id(name)}"><h2>{_e(name)}</h2>']
    metric = f"headline score: {task['metric']}" if task["metric"] else "no score: likelihood, loops and cost"
    parts.append(f'<p class="soft">{_e(metric)}{_e("; data: " + source) if source else ""}</p>')
    for row in rows:
        if row.missing:
            parts.append(f'<p class="card">{_chip(row)} is not complete: {row.missing} samples are missing.</p>')
    parts.append(_table(rows, ROWS, lambda v: v, "What each run scored and cost"))
    parts.append(_charts(rows))
    lengths = length_rows(rows)
    if lengths:
        parts.append(_table(lengths, [*ROWS[:1], *LENGTH_ROWS], lambda v: v, "Gap lengths side by side"))
    parts.append(_acceptance(rows))
    if pairs:
        parts.append(
            _table(
                pairs,
                versus_rows(pairs),
                lambda p: p.a,
                versus_title(pairs),
            )
        )
        parts.append(_diffs(pairs))
    parts.append(_replays(rows, replays))
    return "\n".join(filter(None, parts)) + "</section>"


def _chip(view: RunView) -> str:
    return f'<span class="who"><span class="chip c{(view.number - 1) % 6}">{view.number}</span>{_e(view.label)}</span>'


def _table(rows: Sequence[Any], columns: Sequence[tuple[str, Any]], view_of: Any, caption: str) -> str:
    cells = [[make(row) for _, make in columns] for row in rows]
    # A column that nobody fills says nothing.
    used = [i for i in range(len(columns)) if any(line[i] is not None for line in cells)]
    head = "".join(f"<th>{_e(columns[i][0])}</th>" for i in used)
    body = "".join(
        f"<tr><td>{_chip(view_of(row))}</td>" + "".join(_cell(columns[i][0], line[i]) for i in used) + "</tr>"
        for row, line in zip(rows, cells, strict=True)
    )
    return (
        f'<div class="card"><table><caption>{_e(caption)}</caption><thead><tr><th>run</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(name: str, cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    small = f"<small>{_e(cell.range)}</small>" if cell.range else ""
    mark = f' class="{cell.verdict}"' if cell.verdict in ("higher", "lower") else ""
    note = f"<small>{_e(cell.verdict)}</small>" if cell.verdict else ""
    return f'<td data-name="{_e(name)}"{mark}>{_e(cell.text)}{small}{note}</td>'


def _charts(rows: Sequence[RunView]) -> str:
    judged = [(v, v.quality[1]) for v in rows if v.quality is not None]
    if not judged:
        return ""
    quality = next(v.quality[0] for v in rows if v.quality is not None)
    cards = []
    for x_name, field in (("tokens per forward", "tokens_per_forward"), ("tokens per second", "tokens_per_second")):
        points = [Point(v.number, v.label, x, y) for v, y in judged if (x := getattr(v.measurement, field)) is not None]
        if points:
            cards.append(
                f'<div class="card"><h3>Quality and speed: {_e(x_name)}</h3>{scatter(points, x_name, quality)}</div>'
            )
    return f'<div class="pair">{"".join(cards)}</div>' if cards else ""


def _acceptance(rows: Sequence[RunView]) -> str:
    drafted = [v for v in rows if v.acceptance is not None]
    if not drafted:
        return ""
    curves = [
        Curve(v.number, v.label, [(j + 1.0, rate) for j, rate in enumerate(v.acceptance.rate)])
        for v in drafted
        if v.acceptance is not None
    ]
    legend = "".join(
        f'<span>{_chip(v)}<span class="soft">{v.acceptance.mean_accept_length:.2f} tokens per verify pass, '
        f"{v.acceptance.num_passes:,} passes</span></span>"
        for v in drafted
        if v.acceptance is not None
    )
    chart = lines(curves, "draft position", "share accepted", top=1.0)
    return (
        '<div class="card"><h3>Acceptance by position</h3><p class="soft">Share of all verify passes that accepted the draft token '
        f'at this position.</p>{chart}<div class="legend">{legend}</div></div>'
    )


def _diffs(pairs: Sequence[Versus]) -> str:
    parts = []
    for pair in pairs:
        sides = [{r["id"]: r for r in view.records} for view in (pair.a, pair.b)]
        metric = pair.a.task["metric"]
        common = [i for i in sides[0] if i in sides[1] and sides[0][i]["given"] == sides[1][i]["given"]]
        changed = [i for i in common if sides[0][i]["output"] != sides[1][i]["output"]]
        # Samples whose score changed say most.
        changed.sort(key=lambda i: -abs(sides[0][i]["scores"].get(metric, 0) - sides[1][i]["scores"].get(metric, 0)))
        shown = "".join(_diff(pair, sides[0][i], sides[1][i], metric) for i in changed[:MAX_DIFFS])
        some = f"; {MAX_DIFFS} are shown, changed scores first" if len(changed) > MAX_DIFFS else ""
        differ = f"against run {pair.b.number}: {len(changed)} of {len(common)} outputs differ{some}"
        title = f'{_chip(pair.a)}<span class="soft">{differ}</span>'
        parts.append(
            f'<details class="diff"><summary>{title}</summary><div class="inner">{shown}</div></details>'
            if changed
            else f'<div class="same">{title}</div>'
        )
    return f'<div class="card"><h3>Side by side</h3>{"".join(parts)}</div>'


def _diff(pair: Versus, a: Mapping[str, Any], b: Mapping[str, Any], metric: str) -> str:
    old, new = marked(b["output"], a["output"])

    def side(view: RunView, record: Mapping[str, Any], text: str) -> str:
        score = record["scores"].get(metric)
        cost = f"{record['useful_tokens']} tokens in {record['nfe']} forwards" + (", loops" if record["loops"] else "")
        line = cost if score is None else f"{metric} {score:g}, {cost}"
        return (
            f'<div class="side c{(view.number - 1) % 6}"><div class="soft">run {view.number}: {_e(line)}</div>'
            f'<div class="text">{text}</div></div>'
        )

    reference = (
        f'<div class="soft">reference</div><div class="text given">{_e(a["reference"])}</div>' if a["reference"] else ""
    )
    return (
        f'<details><summary>{_e(a["id"])}</summary><div class="soft">given</div><div class="text given">{_e(given_text(a))}</div>'
        f'{reference}<div class="sides">{side(pair.b, b, old)}{side(pair.a, a, new)}</div></details>'
    )


def given_text(record: Mapping[str, Any]) -> str:
    """What the model was asked, as one text."""
    given = record["given"]
    if "messages" in given:
        return "\n\n".join(f"{m['role']}: {m['content']}" for m in given["messages"])
    if "prompt" in given:
        return str(given["prompt"])
    return f"{given.get('prefix', '')}[...]{given.get('suffix', '')}"


def marked(old: str, new: str) -> tuple[str, str]:
    """Two texts as HTML, word by word: what only the old one has as <del>, what only the new one has as <ins>."""
    words: list[list[str]] = [re.findall(r"\s+|\w+|[^\w\s]", text) for text in (old, new)]
    sides: tuple[list[str], list[str]] = ([], [])
    for kind, i, j, k, m in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, part, tag in ((sides[0], words[0][i:j], "del"), (sides[1], words[1][k:m], "ins")):
            text = _e("".join(part))
            side.append(text if kind == "equal" or not text else f"<{tag}>{text}</{tag}>")
    return "".join(sides[0]), "".join(sides[1])


def _replays(rows: Sequence[RunView], replays: list[str]) -> str:
    """One replay page a task, its runs side by side; they are kept apart and built when opened."""
    runs = [_replay(v, saved) for v in rows for saved in v.replays]
    if not runs:
        return ""
    replays.append(render_replay(runs, "Denoising, replayed"))
    number = len(replays) - 1
    return (
        f'<div class="card"><details data-replay="{number}" id="replay-{number}"><summary>Replay {len(runs)} '
        "recorded samples, step by step</summary></details></div>"
    )


def _replay(view: RunView, saved: Mapping[str, Any]) -> ReplayRun:
    texts = {int(token): text for token, text in saved["texts"].items()}
    return replay_run(
        f"{view.number}. {view.label}",
        saved["prompt"],
        [SimpleNamespace(**step) for step in saved["steps"]],
        lambda token: texts[token],
        length=saved["length"],
        before=[saved["before"]] if saved["before"] else (),
        after=[saved["after"]] if saved["after"] else (),
        stats={"forwards": saved["nfe"], "tokens": saved["length"]},
    )


def _all_settings(views: Sequence[RunView]) -> str:
    parts = []
    for view in views:
        items = "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in flat_settings(view).items())
        parts.append(
            f"<details><summary>{_chip(view)}</summary><dl><dt>task</dt><dd>{_e(view.task['name'])}</dd>{items}</dl></details>"
        )
    return f'<section id="settings"><h2>Settings</h2><div class="card">{"".join(parts)}</div></section>'
