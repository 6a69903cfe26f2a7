"""Several samples of one question: repeating it, and the statistics that keep its samples together.

Samples of one question are not independent, so that intervals are taken over questions: of each the mean, or its pass@k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dllm.evals.metrics import accuracy, mean_pass_at_k
from dllm.evals.statistics import Interval, bootstrap_mean
from dllm.evals.task import Sample


def repeated(samples: Sequence[Sample], times: int) -> list[Sample]:
    """Each sample ``times`` times, with ids "id#1", "id#2", ...: their noise differs, since a seed is made of the id.

    times 1 gives the samples unchanged. Raises ValueError for times below 1.
    """
    if times < 1:
        raise ValueError(f"samples per task must be >= 1: got {times}")
    if times == 1:
        return list(samples)
    return [
        replace(sample, id=f"{sample.id}#{i}", question=sample.id) for sample in samples for i in range(1, times + 1)
    ]


def question_means(questions: Sequence[str], values: Sequence[float]) -> list[float]:
    """Mean of the values of each question, in the order in which questions first come; one value each stays as it is."""
    if len(set(questions)) == len(questions):
        return list(values)
    return [sum(group) / len(group) for group in _groups(questions, values).values()]


def score_interval(questions: Sequence[str], values: Sequence[float]) -> Interval:
    """Mean score with its interval: Wilson's for passes and fails, one a question, else a bootstrap over questions.

    Where every answer fails or every one passes, a bootstrap has no width.
    """
    means = question_means(questions, values)
    if len(means) == len(values) and all(value in (0.0, 1.0) for value in values):
        return accuracy(values)
    return bootstrap_mean(means)


def pass_rates(questions: Sequence[str], scores: Sequence[float]) -> dict[int, Interval]:
    """pass@k with its interval over questions, for k = 1, 2, 4, ... and the fewest samples that a question has.

    Chen et al. 2021 (arXiv:2107.03374), equation 1; see `metrics.pass_at_k`. Empty where every question has one sample, where there
    are none, and for a score that is no pass or fail (a value other than 0 and 1).
    """
    groups = _groups(questions, scores)
    most = min(map(len, groups.values()), default=0)
    if most < 2 or any(score not in (0.0, 1.0) for score in scores):
        return {}
    counts = [(len(group), int(sum(group))) for group in groups.values()]
    ks = sorted({most, *(2**i for i in range(most.bit_length()))})
    return {k: mean_pass_at_k(counts, k) for k in ks}


def _groups(questions: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for question, value in zip(questions, values, strict=True):
        groups.setdefault(question, []).append(value)
    return groups
