"""What a report shows, out of saved runs: one `RunView` a run, one `Versus` a run against the first run of its task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dllm.evals.grouping import pass_rates, score_interval
from dllm.evals.measure import Measurement, Sample, compare
from dllm.evals.measurement import Comparison
from dllm.evals.run_fields import LINE_FIELDS, read_replays, read_run
from dllm.evals.run_store import RESULT, RUN, load_run
from dllm.evals.runner import REPLAYS
from dllm.evals.statistics import (
    Acceptance,
    Interval,
    acceptance_by_position,
    bootstrap_mean,
    latency_percentiles,
    paired_difference,
)

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class RunView:
    """One run, summarised.

    number: place among the runs of its task, from 1. label: what differs from the other runs. task: its name and metric. missing:
    samples that the run lacks. scores: every metric of the task; score: the headline one, None for a task without. pass_rates: pass@k by
    k, where questions were answered several times. latency:
    {percentile: seconds} of a sample (its call's wall time divided by the rows of the call). acceptance: None without drafts.
    """

    number: int
    label: str
    folder: Path
    task: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    missing: int
    measurement: Measurement
    scores: Mapping[str, Interval]
    pass_rates: Mapping[int, Interval]
    latency: Mapping[float, float]
    batch_rows: int
    acceptance: Acceptance | None
    reference_log_likelihood: Interval | None
    length_error: Interval | None
    replays: Sequence[Mapping[str, Any]]

    @property
    def score(self) -> Interval | None:
        return self.scores.get(self.task["metric"])

    @property
    def quality(self) -> tuple[str, Interval] | None:
        """The vertical axis of a chart: the headline score, or for a task without one the judge's nats per token."""
        if self.score is not None:
            return self.task["metric"], self.score
        found = self.measurement.log_likelihood
        return None if found is None else ("log-likelihood", found)


@dataclass(frozen=True)
class Versus:
    """Run a against run b on the samples that both answered, paired. score: difference of the headline score, a - b."""

    a: RunView
    b: RunView
    n: int
    score: Interval | None
    comparison: Comparison


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders among and below the paths, in the order given and then by name; each once.

    Below a path, a run that was cut before its first sample is passed over.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if (path / RUN).is_file() else sorted(p.parent for p in path.rglob(RUN) if _begun(p.parent))
        if not inside:
            raise ValueError(f"run must be a folder that `dllm eval` wrote, or hold some: got {path}")
        found += [p for p in inside if p not in found]
    return found


def _begun(folder: Path) -> bool:
    return (folder / RESULT).is_file() or any(shard.stat().st_size for shard in folder.glob("shard-*.jsonl"))


def load_views(paths: Iterable[Path]) -> list[RunView]:
    """Read the runs and name each by its settings that differ. Raises ValueError for no runs and damaged ones."""
    folders = find_runs(paths)
    if not folders:
        raise ValueError("runs must hold at least one run: got none")
    for folder in folders:
        read_run(folder / RUN)
    saved = [load_run(folder, LINE_FIELDS) for folder in folders]
    labels = _labels([run.run for run in saved], folders)
    views = []
    for i, (run, folder, label) in enumerate(zip(saved, folders, labels, strict=True)):
        order = {t["index"]: t for t in run.times}
        times = [order[r["index"]] for r in run.records]
        number = 1 + sum(other.run["task"]["name"] == run.run["task"]["name"] for other in saved[:i])
        views.append(_view(number, label, folder, run.run, run.records, times))
    return views


def _view(
    number: int,
    label: str,
    folder: Path,
    run: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    times: Sequence[Mapping[str, Any]],
) -> RunView:
    samples = [_sample(record, time) for record, time in zip(records, times, strict=True)]
    lengths = [n for record in records for n in record["accept_lengths"]]
    longest = max(lengths, default=0)
    likelihoods = [
        r["reference_log_likelihood"] / max(r["reference_tokens"], 1) for r in records if "reference_tokens" in r
    ]
    errors = [len(r["token_ids"]) - r["true_length"] for r in records if r.get("true_length") is not None]
    return RunView(
        number=number,
        label=label,
        folder=folder,
        task=run["task"],
        settings=run["settings"],
        versions=run["versions"],
        records=records,
        missing=run["num_samples"] - len(records),
        measurement=Measurement.of(label, samples, prefill_s=sum(t["prefill_s"] for t in times)),
        scores={name: score_interval(*columns) for name, columns in sorted(_scores(records).items())},
        pass_rates=pass_rates(*_scores(records).get(run["task"]["metric"], ((), ()))),
        latency=latency_percentiles([t["seconds"] for t in times], PERCENTILES),
        batch_rows=max(t["batch_rows"] for t in times),
        acceptance=acceptance_by_position(lengths, longest - 1) if longest > 1 else None,
        reference_log_likelihood=bootstrap_mean(likelihoods) if likelihoods else None,
        length_error=bootstrap_mean(np.asarray(errors, dtype=float)) if errors else None,
        replays=read_replays(folder / REPLAYS),
    )


def _scores(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[str], list[float]]]:
    """Of each score the questions and the values of the records that have it."""
    columns: dict[str, tuple[list[str], list[float]]] = {}
    for record in records:
        for name, value in record["scores"].items():
            questions, values = columns.setdefault(name, ([], []))
            questions.append(record.get("question", record["id"]))
            values.append(value)
    return columns


def _sample(record: Mapping[str, Any], time: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt_id=record["id"],
        text=record["output"],
        tokens=tuple(record["token_ids"]),
        finish_reason=record["finish_reason"],
        nfe=record["nfe"],
        guide_nfe=record["guide_nfe"],
        draft_nfe=record["draft_nfe"],
        positions=record["positions"],
        seconds=time["seconds"],
        decode_s=time["decode_s"],
        log_likelihood=record["log_likelihood"],
        scored_tokens=record["scored_tokens"],
        loops=record["loops"],
        accept_lengths=tuple(record["accept_lengths"]),
    )


def versus_first(views: Sequence[RunView]) -> list[Versus]:
    """Each run against its `baseline`, on the samples that both answered."""
    pairs = []
    for rows in by_task(views).values():
        for view in rows[1:]:
            pair = _versus(view, baseline(view, rows))
            if pair is not None:
                pairs.append(pair)
    return pairs


def baseline(view: RunView, rows: Sequence[RunView]) -> RunView:
    """What a run is compared with: the first run of its task that has the same length setting, or else the first one.

    A fill of a given length says nothing about one whose length had to be found.
    """
    same = next(other for other in rows if other.settings.get("length") == view.settings.get("length"))
    return rows[0] if same is view else same


def by_task(views: Sequence[RunView]) -> dict[str, list[RunView]]:
    """Runs by the name of their task, in order."""
    groups: dict[str, list[RunView]] = {}
    for view in views:
        groups.setdefault(view.task["name"], []).append(view)
    return groups


def _versus(a: RunView, b: RunView) -> Versus | None:
    asked = [{r["id"]: (r["given"], r["reference"]) for r in view.records} for view in (a, b)]
    common = [i for i in asked[1] if asked[0].get(i) == asked[1][i]]
    if not common:
        return None
    sides = []
    for view in (a, b):
        chosen = {s.prompt_id: s for s in view.measurement.samples}
        whole_run = list(chosen) == common
        sides.append(view.measurement if whole_run else Measurement.of(view.label, [chosen[i] for i in common]))
    metric = a.task["metric"]
    columns = [{r["id"]: r["scores"].get(metric) for r in view.records} for view in (a, b)]
    values = [[column[i] for i in common] for column in columns]
    whole = all(value is not None for column in values for value in column)
    score = paired_difference(values[0], values[1]) if whole else None
    return Versus(a, b, len(common), score, compare(*sides))


def verdict(interval: Interval | None) -> str:
    """What a 95 % interval of a difference says."""
    if interval is None:
        return ""
    if interval.n < 2:
        return "one sample"
    if interval.low == interval.high == 0.0:
        return "no difference"
    if interval.excludes(0.0):
        return "higher" if interval.estimate > 0 else "lower"
    return "no difference seen"


def flat_settings(view: RunView) -> dict[str, str]:
    """Settings and versions of a run as name -> text, those that are not set left out."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        elif value is not None and value is not False:
            found[prefix.removeprefix("options.")] = value if isinstance(value, str) else json.dumps(value)

    walk("", view.settings)
    walk("", view.versions)
    return found


def _labels(runs: Sequence[Mapping[str, Any]], folders: Sequence[Path]) -> list[str]:
    """For each run the model and what else differs from another run of its task; by folder where that is the same."""
    labels = []
    for run in runs:
        peers = [other for other in runs if other["task"]["name"] == run["task"]["name"]]
        words = [Path(str(run["settings"].get("model", "model"))).name]
        for name, value in _shown(run).items():
            if value is not None and any(_shown(other).get(name) != value for other in peers):
                words.append(value)
        labels.append(", ".join(words))
    twice = {
        i for i, a in enumerate(labels) for j, b in enumerate(labels)
        if i != j and a == b and runs[i]["task"]["name"] == runs[j]["task"]["name"]
    }  # fmt: skip
    return [f"{label} ({folders[i]})" if i in twice else label for i, label in enumerate(labels)]


def _shown(run: Mapping[str, Any]) -> dict[str, str | None]:
    """Settings as words for a label."""
    settings = run["settings"]
    plain = {"length": "length {}", "ar_infill": "by {}", "drafter": "drafter {}", "guide": "guide {}"}
    words: dict[str, str | None] = {
        name: form.format(Path(str(settings[name])).name) if settings.get(name) is not None else None
        for name, form in plain.items()
    }
    options = settings.get("options", {})
    for name, value in options.items():
        # "threshold 0.9" says both.
        if not (name == "sampler" and value == "threshold" and "threshold" in options):
            words[name] = f"{name} {value}"
    for name in ("batch_size", "max_new_tokens", "limit", "seed"):
        words[name] = f"{name} {settings[name]}" if settings.get(name) is not None else None
    for name in ("device", "dtype", "commit"):
        words[name] = f"{run['versions'][name]}" if run["versions"].get(name) is not None else None
    return words
