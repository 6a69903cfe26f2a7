import numpy as np
import pytest

from dllm.evals import statistics
from dllm.evals.statistics import (
    Interval,
    acceptance_by_position,
    bootstrap_mean,
    bootstrap_ratio,
    latency_percentiles,
    paired_difference,
    paired_ratio_of_ratios,
)


def test_the_interval_of_a_mean_agrees_with_the_normal_approximation():
    values = np.random.default_rng(3).normal(5.0, 2.0, size=400)
    interval = bootstrap_mean(values, resamples=4000)
    half = 1.96 * values.std() / np.sqrt(400)
    assert interval.estimate == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)
    assert interval.n == 400


def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100():
    random = np.random.default_rng(0)
    covered = [
        not bootstrap_mean(random.exponential(1.0, size=60), resamples=500, seed=i).excludes(1.0) for i in range(300)
    ]
    assert 0.89 <= np.mean(covered) <= 0.98


def test_a_seed_fixes_the_interval_whatever_the_slice_of_memory(monkeypatch):
    values = np.random.default_rng(1).normal(size=50)
    first = bootstrap_mean(values, seed=7)
    assert bootstrap_mean(values, seed=8) != first
    monkeypatch.setattr(statistics, "MAX_WEIGHTS", 333)
    sliced = bootstrap_mean(values, seed=7)
    assert (sliced.low, sliced.high) == pytest.approx((first.low, first.high), abs=1e-12)


def test_a_ratio_is_the_ratio_of_sums_and_not_the_mean_of_ratios():
    interval = bootstrap_ratio([10, 90], [10, 10])
    assert interval.estimate == 5.0
    assert bootstrap_ratio([1, 30], [1, 10]).estimate == pytest.approx(31 / 11)


def test_resamples_without_a_denominator_are_left_out():
    interval = bootstrap_ratio([0, 4], [0, 2])
    assert (interval.estimate, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_pairing_removes_what_the_settings_share():
    random = np.random.default_rng(2)
    prompts = random.normal(0.0, 10.0, size=100)
    a, b = prompts + 0.1 + random.normal(0.0, 0.05, 100), prompts + random.normal(0.0, 0.05, 100)
    paired = paired_difference(a, b)
    assert paired.estimate == pytest.approx(a.mean() - b.mean())
    assert paired.excludes(0.0)
    assert paired.high - paired.low < 0.05
    assert not bootstrap_mean(a).excludes(bootstrap_mean(b).estimate)


def test_a_gain_in_tokens_per_forward_is_resampled_with_both_settings_together():
    random = np.random.default_rng(5)
    tokens, forwards = random.integers(20, 200, 60), random.integers(20, 200, 60)
    gain = paired_ratio_of_ratios((3 * tokens, forwards), (tokens, forwards))
    assert (gain.estimate, gain.low, gain.high) == pytest.approx((3.0, 3.0, 3.0))


def test_one_prompt_excludes_nothing():
    assert not Interval(1.0, 1.0, 1.0, n=1).excludes(0.0)
    assert Interval(1.0, 0.5, 1.5, n=2).excludes(0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_mean([]), "non-empty"),
        (lambda: bootstrap_mean([[1.0, 2.0]]), "one-dimensional"),
        (lambda: bootstrap_mean([1.0, float("nan")]), "finite"),
        (lambda: paired_difference([1.0], [1.0, 2.0]), "one length"),
        (lambda: bootstrap_ratio([1.0], [0.0]), "finite"),
        (lambda: bootstrap_mean([1.0], level=1.0), "level"),
        (lambda: bootstrap_mean([1.0], resamples=0), "resamples"),
    ],
)
def test_bad_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_latency_percentiles_are_those_of_the_sorted_list():
    seconds = np.random.default_rng(0).permutation(np.arange(101.0))
    assert latency_percentiles(seconds, (50, 90, 99, 100)) == {50: 50.0, 90: 90.0, 99: 99.0, 100: 100.0}
    with pytest.raises(ValueError, match="percentiles"):
        latency_percentiles(seconds, (101,))
    with pytest.raises(ValueError, match="seconds"):
        latency_percentiles([-1.0])


def test_acceptance_by_position_counts_the_passes_that_got_as_far():
    # Drafts of 3: accepted 0, 1, 3, 3 and a pass whose first token was the stop.
    acceptance = acceptance_by_position([1, 2, 4, 4, 0], draft_length=3)
    assert acceptance.rate == (3 / 5, 2 / 5, 2 / 5)
    assert acceptance.conditional == (3 / 5, 2 / 3, 1.0)
    assert acceptance.mean_accept_length == 11 / 5
    assert acceptance.num_passes == 5


def test_acceptance_given_a_draft_that_never_got_there_is_none():
    assert acceptance_by_position([1, 1], draft_length=2).conditional == (0.0, None)


def test_acceptance_recovers_the_rate_of_independent_trials():
    random = np.random.default_rng(0)
    accepted = (np.cumprod(random.random((20000, 5)) < 0.7, axis=1)).sum(axis=1)
    acceptance = acceptance_by_position((accepted + 1).tolist(), draft_length=5)
    assert acceptance.conditional == pytest.approx([0.7] * 5, abs=0.02)
    assert acceptance.rate == pytest.approx([0.7**j for j in range(1, 6)], abs=0.02)


@pytest.mark.parametrize("lengths", [[], [5], [-1], [1.5], [[1, 2]]])
def test_impossible_accept_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="accept_lengths"):
        acceptance_by_position(lengths, draft_length=3)
