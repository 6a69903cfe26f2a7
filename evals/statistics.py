"""Intervals over prompts, paired comparisons, latency percentiles and acceptance by position. numpy only.

The unit that is resampled is the prompt: tokens of one answer are not independent of each other, answers to different
    prompts are. Every
interval is the percentile bootstrap (Efron 1979): n prompts are drawn n times with replacement, the statistic is taken
again, and the interval holds the middle `level` of the results. A seed fixes the draws, so the same numbers give the
same interval.

What an interval from here cannot say: with one prompt its width is zero (look at `n`), and so it is where all values
    are equal. A loop rate
of 0 out of n is such a case: the rate may still be as high as about 3 / n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
# Resampling weights are drawn in slices of about this many numbers, so that memory stays flat for many prompts.
MAX_WEIGHTS = 2_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its bootstrap interval: `low` and `high` bound the middle `level` of the resamples of `n`
    prompts.
    """

    estimate: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def excludes(self, value: float) -> bool:
        """True if `value` lies outside of the interval; never true for fewer than two prompts."""
        return self.n >= 2 and not self.low <= value <= self.high


def bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Callable[[Floats], Floats],
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval of a statistic that is a function of column means.

    columns: C sequences of n finite numbers, entry i of each belonging to prompt i, which are resampled together.
    statistic: column means [R, C] -> [R]. Resamples where it is not finite (a ratio over nothing) are left out.
    level: share of the resamples between the bounds, in (0, 1).
    Raises ValueError for empty, ragged or non-finite columns and where the statistic of the data itself is not finite.
    """
    table = _table(columns)
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1: got {resamples}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1): got {level}")
    n = table.shape[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(statistic(table.mean(axis=0, keepdims=True))[0])
        if not np.isfinite(estimate):
            raise ValueError(f"the statistic of the data must be finite: got {estimate}")
        values = statistic(_resampled_means(table, resamples, seed))
    values = values[np.isfinite(values)]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail]) if values.size else (estimate, estimate)
    return Interval(estimate, float(low), float(high), n, level)


def bootstrap_mean(values: ArrayLike, *, resamples: int = RESAMPLES, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of values [n], one a prompt."""
    return bootstrap([values], lambda means: means[:, 0], resamples=resamples, level=level, seed=seed)


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, *, resamples: int = RESAMPLES, level: float = 0.95, seed: int = 0
) -> Interval:
    """sum(numerators) / sum(denominators), both [n]: for instance useful tokens over forwards.

    The ratio of sums weighs prompts by their denominator, as one long run would; the mean of the n ratios is another
    quantity.
    """
    columns = [numerators, denominators]
    return bootstrap(columns, lambda means: means[:, 0] / means[:, 1], resamples=resamples, level=level, seed=seed)


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, resamples: int = RESAMPLES, level: float = 0.95, seed: int = 0
) -> Interval:
    """Mean of a - b over prompts, a and b [n] being the same prompts under two settings."""
    columns = [a, b]
    return bootstrap(columns, lambda means: means[:, 0] - means[:, 1], resamples=resamples, level=level, seed=seed)


def paired_ratio_of_ratios(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """(sum a0 / sum a1) / (sum b0 / sum b1), all [n], resampled together: for instance a gain in tokens per forward."""
    return bootstrap(
        [*a, *b],
        lambda means: (means[:, 0] / means[:, 1]) / (means[:, 2] / means[:, 3]),
        resamples=resamples,
        level=level,
        seed=seed,
    )


def latency_percentiles(
    seconds: ArrayLike, percentiles: Sequence[float] = (50.0, 90.0, 95.0, 99.0)
) -> dict[float, float]:
    """Percentiles of latencies [n] in seconds, linear between the two neighbouring values; {percentile: seconds}."""
    for percentile in percentiles:
        if not 0.0 <= percentile <= 100.0:
            raise ValueError(f"percentiles must be in [0, 100]: got {percentile}")
    values = _table([seconds])[:, 0]
    if (values < 0.0).any():
        raise ValueError(f"seconds must be >= 0: got {values.min()}")
    return {float(p): float(np.percentile(values, p)) for p in percentiles}


@dataclass(frozen=True)
class Acceptance:
    """How far drafts got, over `num_passes` verify passes.

    rate[j]: share of all passes in which draft token j (0-based) was accepted; never rises with j.
    conditional[j]: the same share among the passes that accepted the j tokens before it; None where there was no such
        pass.
    mean_accept_length: tokens committed per pass, bonus included.
    """

    rate: tuple[float, ...]
    conditional: tuple[float | None, ...]
    mean_accept_length: float
    num_passes: int


def acceptance_by_position(accept_lengths: Sequence[int], draft_length: int) -> Acceptance:
    """Acceptance of each draft position from a flat list of tokens committed per verify pass, bonus included.

    A pass that commits a tokens accepted a - 1 draft tokens, so a lies in 1 .. draft_length + 1; 0 is a pass whose
    first token was the
    stop. A pass cut by a stop or by the length limit counts for what it committed: the rates are then a lower bound,
        by at most one pass a row.
    """
    if draft_length < 1:
        raise ValueError(f"draft_length must be >= 1: got {draft_length}")
    lengths = np.asarray(accept_lengths)
    if lengths.ndim != 1 or lengths.size == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"accept_lengths must be a flat, non-empty list of ints: got shape {lengths.shape}, dtype {lengths.dtype}"
        )
    if lengths.min() < 0 or lengths.max() > draft_length + 1:
        raise ValueError(
            f"accept_lengths must be in 0 .. draft_length + 1 = {draft_length + 1}: "
            f"got {lengths.min()} .. {lengths.max()}"
        )
    accepted = np.maximum(lengths - 1, 0)
    # reached[j] = passes that accepted at least j draft tokens.
    reached = [int((accepted >= j).sum()) for j in range(draft_length + 1)]
    return Acceptance(
        rate=tuple(reached[j + 1] / lengths.size for j in range(draft_length)),
        conditional=tuple(reached[j + 1] / reached[j] if reached[j] else None for j in range(draft_length)),
        mean_accept_length=float(lengths.mean()),
        num_passes=int(lengths.size),
    )


def _table(columns: Sequence[ArrayLike]) -> Floats:
    """Columns of n numbers -> [n, C] float64, checked."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    shapes = [array.shape for array in arrays]
    if not arrays or any(array.ndim != 1 or array.size == 0 or array.shape != shapes[0] for array in arrays):
        raise ValueError(f"values must be non-empty, one-dimensional and of one length: got shapes {shapes}")
    table = np.stack(arrays, axis=1)
    if not np.isfinite(table).all():
        raise ValueError(f"values must be finite: got {table[~np.isfinite(table).all(axis=1)][0].tolist()}")
    return table


def _resampled_means(table: Floats, resamples: int, seed: int) -> Floats:
    """table [n, C] -> column means of each resample [R, C]. How often a prompt is drawn is multinomial."""
    n = table.shape[0]
    random = np.random.default_rng(seed)
    step = max(1, MAX_WEIGHTS // n)
    slices = [
        random.multinomial(n, np.full(n, 1.0 / n), size=min(step, resamples - start)) @ table / n
        for start in range(0, resamples, step)
    ]
    return np.concatenate(slices)
