"""The measuring harness: runs a setting over prompts, counts what it produced and what it cost, and compares settings.

    judge = Judge(load_target("smollm2-135m"))
    fast = measure(lambda batch: lm.generate(batch, threshold=0.9), prompts, judge, name="threshold", prompt_ids=ids)
    slow = measure(lambda batch: lm.generate(batch, threshold=1.1), prompts, judge, name="vanilla", prompt_ids=ids)
    compare(fast, slow).log_likelihood_difference      # Interval(estimate=..., low=..., high=..., n=...)

Quality and speed come from the same outputs. All figures of the project are made here, so that any two can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from dllm.evals.judge import Judge, LogLikelihood
from dllm.evals.loops import loops
from dllm.evals.measurement import Comparison, Measurement, Sample
from dllm.evals.statistics import (
    RESAMPLES,
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    paired_difference,
    paired_ratio_of_ratios,
)
from dllm.output import GenerationOutput, InfillOutput

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Comparison", "Measurement", "Output", "RowCost", "Sample", "compare", "filled", "measure", "render_table"]

Prompt = TypeVar("Prompt")


class RowCost(Protocol):
    """The part of `Stats` that is read, of a row or of a call."""

    @property
    def nfe(self) -> int: ...
    @property
    def guide_nfe(self) -> int: ...
    @property
    def draft_nfe(self) -> int: ...
    @property
    def useful_tokens(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def accept_lengths(self) -> Sequence[int]: ...


class Output(Protocol):
    """The part of `GenerationOutput` that is read: one text, one row of ids [B, T], one reason and one cost per
    prompt.
    """

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def sequences(self) -> Tensor: ...
    @property
    def finish_reasons(self) -> Sequence[str]: ...
    @property
    def stats(self) -> RowCost: ...
    @property
    def row_stats(self) -> Sequence[RowCost]: ...


def measure(
    run: Callable[[Sequence[Prompt]], Output],
    prompts: Sequence[Prompt],
    judge: Judge | None = None,
    *,
    name: str,
    settings: dict[str, Any] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
    batch_size: int = 1,
    warmup: int = 0,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Runs `run` on the prompts, `batch_size` at a time, and summarises what came out.

    run: prompts of a batch -> output with one row per prompt. It is timed from outside and has to return with the
        device's work done, as anything that returns texts does.
    prompts: strings, messages or lists of ids (JSON values: their digest pairs them in `compare`).
    judge: scores each answer's tokens given `prompt_ids[i]`, the whole prompt as the model saw it, template included.
        The stop token is not scored.
    encode: text of an answer -> ids of the judge; None if the judge reads the ids of the measured model.
    warmup: batches that run before the clock starts and are thrown away.
    resamples, seed: of the bootstrap.
    progress: called with (prompts done, prompts in all) after each batch.
    Raises ValueError for no prompts, a batch_size below 1, a judge without prompt_ids, and an output whose rows or
    counts contradict each other; TypeError for prompts or settings that are not JSON.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt: got none")
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1: got {batch_size}")
    if warmup < 0:
        raise ValueError(f"warmup must be >= 0: got {warmup}")
    if judge is not None and (prompt_ids is None or len(prompt_ids) != len(prompts)):
        found = "none" if prompt_ids is None else len(prompt_ids)
        raise ValueError(f"prompt_ids must hold one row of ids per prompt ({len(prompts)}) for the judge: got {found}")
    prompt_digests = [_digest(i, prompt) for i, prompt in enumerate(prompts)]
    # Settings that cannot be saved should fail now and not after the last batch.
    json.dumps(settings, allow_nan=False)

    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    for batch in batches[:warmup]:
        run(batch)
    rows: list[dict[str, Any]] = []
    batch_seconds: list[float] = []
    prefill_s = 0.0
    for batch in batches:
        started = time.perf_counter()
        output = run(batch)
        batch_seconds.append(time.perf_counter() - started)
        prefill_s += output.stats.prefill_s
        rows += _rows(output, len(batch), batch_seconds[-1])
        if progress is not None:
            progress(len(rows), len(prompts))

    scores: list[LogLikelihood] | None = None
    if judge is not None and prompt_ids is not None:
        scores = judge.score(prompt_ids, [encode(row["text"]) if encode else row["tokens"] for row in rows])
    samples = []
    for i, row in enumerate(rows):
        score = scores[i] if scores is not None else LogLikelihood(0.0, 0)
        samples.append(
            Sample(
                **row,
                prompt_id=prompt_digests[i],
                log_likelihood=score.total if score.num_tokens else None,
                scored_tokens=score.num_tokens,
                loops=loops(row["tokens"]),
            )
        )
    return Measurement.of(
        name,
        samples,
        settings=settings,
        batch_seconds=batch_seconds,
        prefill_s=prefill_s,
        resamples=resamples,
        seed=seed,
    )


def filled(output: InfillOutput) -> GenerationOutput:
    """What `measure` reads, of an infill: `run=lambda batch: filled(lm.infill(...))`.

    The new tokens of a row are those of its gaps, joined from left to right; its finish reason is "filled". A judge
    that is given the prefix as prompt scores them without the suffix.
    """
    ids = [[token for gap in gaps for token in gap] for gaps in output.fill_ids]
    sequences = torch.zeros(len(ids), max(map(len, ids), default=0), dtype=torch.long)
    for row, tokens in enumerate(ids):
        sequences[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    return GenerationOutput(
        texts=[fill if isinstance(fill, str) else "".join(fill) for fill in output.fills],
        sequences=sequences,
        lengths=[len(tokens) for tokens in ids],
        finish_reasons=["filled"] * len(ids),
        stats=output.stats,
        row_stats=[
            dataclasses.replace(cost, useful_tokens=len(tokens))
            for cost, tokens in zip(output.row_stats, ids, strict=True)
        ],
    )


def compare(a: Measurement, b: Measurement, *, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Setting a against setting b, paired by prompt. Raises ValueError unless both ran the same prompts in the same
    order.
    """
    if [s.prompt_id for s in a.samples] != [s.prompt_id for s in b.samples]:
        raise ValueError(
            f"a and b must have run the same prompts in the same order: {a.name!r} ({len(a.samples)} prompts) and "
            f"{b.name!r} ({len(b.samples)} prompts) did not"
        )
    options = {"resamples": resamples, "seed": seed}
    pairs = list(zip(a.samples, b.samples, strict=True))
    sound = [(x, y) for x, y in pairs if not x.loops and not y.loops]

    def ratio(count: str) -> Interval | None:
        top, bottom = [getattr(x, count) for x, _ in pairs], [getattr(y, count) for _, y in pairs]
        return bootstrap_ratio(top, bottom, **options) if sum(bottom) > 0 else None

    def rate_ratio(chosen: list[tuple[Sample, Sample]], cost: str) -> Interval | None:
        columns = [
            [getattr(s, key) for s in side] for side in zip(*chosen, strict=True) for key in ("useful_tokens", cost)
        ]
        # All but a's tokens stand below a fraction line.
        if not columns or min(sum(column) for column in columns[1:]) <= 0:
            return None
        return paired_ratio_of_ratios((columns[0], columns[1]), (columns[2], columns[3]), **options)

    def likelihood_difference(chosen: list[tuple[Sample, Sample]]) -> Interval | None:
        both = [(x.log_likelihood_per_token, y.log_likelihood_per_token) for x, y in chosen]
        values = [(p, q) for p, q in both if p is not None and q is not None]
        return paired_difference([p for p, _ in values], [q for _, q in values], **options) if values else None

    return Comparison(
        a=a.name,
        b=b.name,
        n=len(pairs),
        num_identical=sum(x.tokens == y.tokens for x, y in pairs),
        log_likelihood_difference=likelihood_difference(pairs),
        log_likelihood_difference_no_loops=likelihood_difference(sound),
        length_ratio=ratio("useful_tokens"),
        nfe_ratio=ratio("nfe"),
        positions_ratio=ratio("positions"),
        loop_rate_points=bootstrap_mean([100.0 * (x.loops - y.loops) for x, y in pairs], **options),
        tokens_per_forward_ratio=rate_ratio(pairs, "nfe"),
        tokens_per_forward_ratio_no_loops=rate_ratio(sound, "nfe"),
        speed_ratio=rate_ratio(pairs, "seconds"),
    )


def render_table(
    measurements: Sequence[Measurement],
    baseline: str | None = None,
    *,
    intervals: bool = True,
    title: str | None = None,
) -> Table:
    """A rich table, one row a measurement: print it with `rich.console.Console().print`.

    baseline: name of the measurement that the ratio column (useful tokens per wall second) is relative to; None: the
        first one. Rows that ran other prompts have no ratio.
    intervals: a second, dim line with the 95 % interval under each estimate that has one over at least two prompts;
        such a table needs 95 columns of the terminal, one without them 80.
    Raises ValueError for no measurements and for an unknown baseline.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    names = [m.name for m in measurements]
    if not names:
        raise ValueError("measurements must hold at least one measurement: got none")
    if baseline is not None and baseline not in names:
        raise ValueError(f"baseline must be one of {names}: got {baseline!r}")
    reference = measurements[names.index(baseline) if baseline is not None else 0]
    reference_prompts = [s.prompt_id for s in reference.samples]

    def cell(interval: Interval | None, digits: int, scale: float = 1.0) -> str:
        if interval is None:
            return "-"
        text = f"{scale * interval.estimate:.{digits}f}"
        if intervals and interval.n >= 2:
            text += f"\n[dim]{scale * interval.low:.{digits}f}..{scale * interval.high:.{digits}f}[/dim]"
        return text

    table = Table(
        title=title,
        caption=(
            f"forwards: passes through the model; positions: rows computed in them; ratio: tokens per second against "
            f"{escape(reference.name)}; log-lik.: nats per token by the judge, an AR model; loops: answers in which eight "
            f"tokens in a row come three times"
        ),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("setting", min_width=15)
    for heading in (
        "useful\ntokens",
        "forwards",
        "tokens/\nforward",
        "positions",
        "seconds",
        "ratio",
        "log-lik.",
        "loops\n%",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measurements:
        same = [s.prompt_id for s in m.samples] == reference_prompts
        table.add_row(
            escape(m.name),
            f"{m.total('useful_tokens'):,}",
            f"{m.total('nfe'):,}",
            cell(m.tokens_per_forward, 2),
            f"{m.total('positions'):,}",
            f"{m.total('seconds'):.1f}",
            "1.00" if m is reference else cell(compare(m, reference).speed_ratio if same else None, 2),
            cell(m.log_likelihood, 2),
            cell(m.loop_rate, 0, 100.0),
        )
    return table


def _digest(i: int, prompt: Any) -> str:
    try:
        text = json.dumps(prompt, sort_keys=True)
    except TypeError as error:
        raise TypeError(
            f"prompts must be JSON values (text, messages, ids): prompt {i} is a {type(prompt).__name__}"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(output: Output, batch: int, seconds: float) -> list[dict[str, Any]]:
    """The fields of each row's Sample that the output gives, checked against each other."""
    counts = {
        "texts": len(output.texts),
        "sequences": len(output.sequences),
        "finish_reasons": len(output.finish_reasons),
        "row_stats": len(output.row_stats),
    }
    if set(counts.values()) != {batch}:
        raise ValueError(f"run must give one row per prompt ({batch}): got {counts}")
    rows = []
    for i, cost in enumerate(output.row_stats):
        if not 0 <= cost.useful_tokens <= output.sequences.shape[1]:
            raise ValueError(
                f"row_stats[{i}].useful_tokens must be in 0 .. {output.sequences.shape[1]}, the width of sequences: "
                f"got {cost.useful_tokens}"
            )
        if cost.useful_tokens > 0 and cost.nfe < 1:
            raise ValueError(f"row_stats[{i}].nfe must be >= 1 for {cost.useful_tokens} useful tokens: got {cost.nfe}")
        rows.append(
            {
                "text": output.texts[i],
                "tokens": tuple(output.sequences[i, : cost.useful_tokens].tolist()),
                "finish_reason": output.finish_reasons[i],
                "nfe": cost.nfe,
                "guide_nfe": cost.guide_nfe,
                "draft_nfe": cost.draft_nfe,
                "positions": cost.positions,
                "seconds": seconds / batch,
                "decode_s": output.stats.decode_s / batch,
                "accept_lengths": tuple(cost.accept_lengths),
            }
        )
    return rows
