"""What a predicted block length is worth: a BlockPilot against fixed lengths, lengths a class, a constant prediction and the oracle.

Dataset: traces of held-out requests of several classes (chat, code, maths), each decoded at every fixed length, as
`dllm train-block-pilot` records them. Metric: tokens per second under a cost table, sum of tokens over sum of time, with a 95 %
bootstrap interval over requests. Nothing is decided on the requests that are reported but the row that says "in hindsight" and the
oracle: fixed and class lengths are the best of the training traces.

    python -m dllm.evals.block_pilot_report --pilot pilot --training pilot/traces.jsonl --held-out b.jsonl --cost-table t.json --out r.json
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dllm.draft_cost import CostTable
from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.statistics import Interval, bootstrap, bootstrap_ratio, paired_ratio_of_ratios
from dllm.samplers.block_pilot import BlockPilot, Head
from dllm.training.block_pilot import merits
from dllm.training.block_pilot_costs import Costs, ForwardCosts, RoundCosts, milliseconds, useful_tokens
from dllm.training.block_pilot_traces import PromptTrace, read_traces

ORACLE = "oracle (best length of each request)"
FIXED = "fixed, best in training"
PILOT = "BlockPilot"


@dataclass(frozen=True)
class PolicyRow:
    """One way to choose lengths. tokens_per_second under the cost table; against_fixed: its ratio to the fixed length that was best in
    training, paired; mean_length over requests; chosen: how many requests got each length.
    """

    name: str
    tokens_per_second: Interval
    against_fixed: Interval
    mean_length: float
    chosen: Mapping[int, int]


@dataclass(frozen=True)
class PilotReport:
    """rows: the policies, all requests; by_class: tokens per second of every policy in each class; captured: share of the oracle's gain
    over the fixed length best in training that the pilot gets (None where the oracle gains nothing), and over the default length;
    best_lengths: of each class in hindsight; policy_ms: time of one prediction, part of the pilot's row, once a round.
    """

    rows: tuple[PolicyRow, ...]
    by_class: Mapping[str, Mapping[str, float]]
    captured: Interval | None
    captured_from_default: Interval | None
    best_lengths: Mapping[str, int]
    default_length: int
    requests: Mapping[str, int]
    training_requests: int
    policy_ms: float
    costs: str
    pilot: str


def best_fixed(traces: Sequence[PromptTrace], lengths: Sequence[int], costs: Costs) -> int:
    """Place among lengths of the one with most tokens over time of all traces together."""
    return int((useful_tokens(traces, lengths).sum(0) / milliseconds(traces, lengths, costs).sum(0)).argmax())


def build_report(
    pilot: BlockPilot,
    training: Sequence[PromptTrace],
    measured: Sequence[PromptTrace],
    costs: Costs,
    default_length: int,
    policy_ms: float = 0.0,
) -> PilotReport:
    """training: what the pilot learnt from; measured: other requests; default_length: what is used without any of this.

    Raises ValueError where a request is in both, where there are none, or default_length is not among the pilot's lengths.
    """
    lengths = pilot.config.lengths
    if not training or not measured:
        raise ValueError(
            f"training and measured must hold one request each at least: got {len(training)} and {len(measured)}"
        )
    both = {t.key for t in training} & {t.key for t in measured}
    if both:
        raise ValueError(
            f"measured must hold other requests than training: {len(both)} are in both, one is {min(both)}"
        )
    if default_length not in lengths:
        raise ValueError(f"default_length must be one of {list(lengths)}: got {default_length}")
    speeds = merits(measured, lengths, "speed", costs).numpy()
    learnt = merits(training, lengths, "speed", costs).argmax(1).numpy()
    groups = [t.group for t in measured]
    places: dict[str, np.ndarray] = {}
    count = len(measured)
    for place, length in enumerate(lengths):
        places[f"fixed {length}" + (" (default)" if length == default_length else "")] = np.full(count, place)
    places[FIXED] = np.full(count, best_fixed(training, lengths, costs))
    places["fixed, best in hindsight"] = np.full(count, best_fixed(measured, lengths, costs))
    by_group = {
        g: best_fixed([t for t in training if t.group == g] or training, lengths, costs) for g in sorted(set(groups))
    }
    places["best of the class in training"] = np.array([by_group[g] for g in groups])
    places["constant prediction (commonest label)"] = np.full(
        count, np.bincount(learnt, minlength=len(lengths)).argmax()
    )
    chosen = pilot.choose(torch.stack([t.hidden for t in measured]), torch.stack([t.top_logits for t in measured]))
    places[PILOT] = np.array([lengths.index(int(n)) for n in chosen])
    places[ORACLE] = speeds.argmax(1)
    tokens, ms = useful_tokens(measured, lengths), milliseconds(measured, lengths, costs)
    passes = np.array([[t.counts[n].passes for n in lengths] for t in measured], dtype=np.float64)

    def sums(name: str) -> tuple[np.ndarray, np.ndarray]:
        rows, at = np.arange(count), places[name]
        own = policy_ms * passes[rows, at] if name == PILOT else 0.0
        return 1000 * tokens[rows, at], ms[rows, at] + own

    rows = [
        PolicyRow(
            name=name,
            tokens_per_second=bootstrap_ratio(*sums(name)),
            against_fixed=paired_ratio_of_ratios(sums(name), sums(FIXED)),
            mean_length=float(np.mean([lengths[i] for i in at])),
            chosen={n: int((at == i).sum()) for i, n in enumerate(lengths)},
        )
        for name, at in places.items()
    ]
    classes = {
        g: {name: float(sums(name)[0][inside].sum() / sums(name)[1][inside].sum()) for name in places}
        for g in sorted(set(groups))
        for inside in [np.array([x == g for x in groups])]
    }
    default = next(name for name in places if name.endswith("(default)"))
    return PilotReport(
        rows=tuple(rows),
        by_class=classes,
        captured=_captured(sums(PILOT), sums(FIXED), sums(ORACLE)),
        captured_from_default=_captured(sums(PILOT), sums(default), sums(ORACLE)),
        best_lengths={
            g: lengths[best_fixed([t for t in measured if t.group == g], lengths, costs)] for g in sorted(set(groups))
        },
        default_length=default_length,
        requests={g: groups.count(g) for g in sorted(set(groups))},
        training_requests=len(training),
        policy_ms=policy_ms,
        costs=str(costs),
        pilot=pilot.describe(),
    )


Sums = tuple[np.ndarray, np.ndarray]


def _captured(pilot: Sums, base: Sums, oracle: Sums) -> Interval | None:
    """(pilot - base) / (oracle - base) in tokens per second; None where the oracle gains less than a thousandth."""

    def rates(means: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return means[:, 0] / means[:, 1], means[:, 2] / means[:, 3], means[:, 4] / means[:, 5]

    own, without, best = (float(a.sum() / b.sum()) for a, b in (pilot, base, oracle))
    if best < 1.001 * without or not math.isfinite(own):
        return None

    def share(means: np.ndarray) -> np.ndarray:
        a, b, c = rates(means)
        return (a - b) / (c - b)

    return bootstrap([*pilot, *base, *oracle], share)


def time_prediction(pilot: BlockPilot, trace: PromptTrace, repeats: int = 200) -> float:
    """Milliseconds of one prediction for one request on this machine: the fastest of several runs, so that other load counts little."""
    hidden, logits = trace.hidden[None], trace.top_logits[None]
    spans = []
    for _ in range(repeats):
        begin = time.perf_counter()
        pilot.choose(hidden, logits)
        spans.append(time.perf_counter() - begin)
    return 1000 * min(spans)


def as_json(report: PilotReport, **more: Any) -> str:
    """The report as indented JSON."""
    return json.dumps({**asdict(report), **more}, indent=2) + "\n"


def render(report: PilotReport) -> Table:
    """The policies as one table: all requests, then each class."""
    table = Table(
        box=box.SIMPLE,
        title=f"{report.pilot}\n{dict(report.requests)} requests, {report.training_requests} in training; {report.costs}",
        caption=f"share of the oracle's gain: {_said(report.captured)} over the fixed length best in training, "
        f"{_said(report.captured_from_default)} over the default; best in hindsight {dict(report.best_lengths)}; "
        f"a prediction takes {report.policy_ms:.3f} ms, counted each round",
    )
    for column in ("length", "tokens/s", "against fixed", "mean length", *report.by_class):
        table.add_column(column, justify="left" if column == "length" else "right")
    for row in report.rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_second.estimate:.2f} [{row.tokens_per_second.low:.2f}, {row.tokens_per_second.high:.2f}]",
            f"{row.against_fixed.estimate:.3f} [{row.against_fixed.low:.3f}, {row.against_fixed.high:.3f}]",
            f"{row.mean_length:.2f}",
            *(f"{values[row.name]:.2f}" for values in report.by_class.values()),
        )
    return table


def _said(value: Interval | None) -> str:
    return "none to capture" if value is None else f"{value.estimate:.0%} [{value.low:.0%}, {value.high:.0%}]"


def command(
    pilot: Annotated[Path, typer.Option(help="Folder of the pilot.")],
    training: Annotated[Path, typer.Option(help="Traces that it learnt from.")],
    held_out: Annotated[Path, typer.Option(help="Traces of other requests.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    cost_table: Annotated[list[Path] | None, typer.Option(help="CostTable files of a drafter's pilot.")] = None,
    forward_ms: Annotated[float, typer.Option(help="For a diffusion model's pilot: fixed ms of a forward.")] = 0.0,
    row_ms: Annotated[float, typer.Option(help="For a diffusion model's pilot: ms of each row.")] = 0.0,
    default_length: Annotated[int, typer.Option(help="Length used without a policy.")] = 8,
    serving_batch: Annotated[int, typer.Option(help="Requests that run side by side.")] = 1,
    target: Annotated[str | None, typer.Option(help="Model whose head a whole-vocabulary pilot needs.")] = None,
) -> None:
    """Compare a pilot with fixed lengths, a constant prediction and the oracle on held-out requests."""
    lessons, learnt = read_traces(training)
    settings, measured = read_traces(held_out)
    if settings != lessons:
        raise ValueError(f"held_out must be recorded with the settings of training, {lessons}: got {settings}")
    policy = BlockPilot.from_pretrained(pilot, head=None if target is None else _head(target))
    costs: Costs
    if cost_table:
        costs = RoundCosts.of_tables([CostTable.load(p) for p in cost_table], policy.config.lengths, serving_batch)
    else:
        costs = ForwardCosts(forward_ms, row_ms)
    report = build_report(policy, learnt, measured, costs, default_length, time_prediction(policy, measured[0]))
    write_text_atomic(out, as_json(report, settings=settings, training=dict(policy.training)))
    Console(width=160).print(render(report))


def _head(target: str) -> Head:
    from dllm.training.base import load_base

    decoder = load_base(target).decoder
    return lambda hidden: decoder.head(hidden.to(decoder.device, decoder.dtype)).float().cpu()


if __name__ == "__main__":
    typer.run(command)
