"""The reference of the row statistics against NumPy, and its sampling law against the probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.kernels.row_stats import row_stats, row_stats_reference, sample_by_inversion
from dllm.noise import CounterNoise

ALL = frozenset({"top1", "entropy", "margin", "logits", "previous"})


def random_logits(seed, batch=2, slots=3, vocab=17, scale=3.0):
    return torch.randn(batch, slots, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def stats_of(*args: Any, **kwargs: Any) -> Any:
    """row_stats without the Nones of its type."""
    return row_stats(*args, **kwargs)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("function", [row_stats, row_stats_reference], ids=["public", "reference"])
@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.1, 30))
def test_token_confidence_entropy_and_margin_are_numpys(function, seed, vocab, scale):
    logits = random_logits(seed, vocab=vocab, scale=scale)
    stats = function(logits, ALL)
    law = softmax(logits.double().numpy())
    ranked = np.sort(law, -1)
    np.testing.assert_array_equal(stats.token, law.argmax(-1))
    np.testing.assert_allclose(stats.confidence, ranked[..., -1], rtol=1e-5)
    np.testing.assert_allclose(stats.margin, ranked[..., -1] - ranked[..., -2], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.entropy, -(law * np.log(law + 1e-300)).sum(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.log_total, np.log(np.exp(logits.double().numpy()).sum(-1)), rtol=1e-5, atol=1e-5)


def test_what_is_not_needed_is_not_computed():
    stats = stats_of(random_logits(0))
    assert (stats.entropy, stats.margin, stats.logits, stats.previous) == (None, None, None, None)


def test_previous_logits_are_handed_through_beside_todays():
    logits, before = random_logits(1), random_logits(2)
    stats = stats_of(logits, frozenset({"previous"}), previous=before)
    assert torch.equal(stats.logits, logits)
    assert torch.equal(stats.previous, before)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 2, 9)
    logits[0, 1, [4, 7]] = 2.0
    assert stats_of(logits).token.tolist() == [[0, 4]]


def test_exact_ties_stay_ties_in_bfloat16():
    logits = torch.zeros(1, 1, 9, dtype=torch.bfloat16)
    logits[..., [3, 5]] = 1.0
    stats = stats_of(logits, ALL)
    assert stats.token.item() == 3
    assert stats.margin.item() == 0
    assert stats.confidence.dtype == torch.float32


def test_a_banned_id_is_never_proposed_but_keeps_its_mass_in_the_law():
    logits = torch.tensor([[[3.0, 1.0, 2.0]]])
    law = softmax(logits.numpy())[0, 0]
    banned = torch.tensor([True, False, False])
    stats = stats_of(logits, ALL, banned)
    assert stats.token.item() == 2
    assert stats.confidence.item() == pytest.approx(law[2])
    assert stats.margin.item() == pytest.approx(law[2] - law[1])
    assert stats.entropy.item() == pytest.approx(-(law * np.log(law)).sum())


def test_ids_may_be_banned_slot_by_slot():
    logits = torch.tensor([[[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]])
    banned = torch.zeros(1, 2, 3, dtype=torch.bool)
    banned[0, 1, 0] = True
    assert stats_of(logits, banned=banned).token.tolist() == [[0, 2]]


def test_a_forbidden_logit_is_legal_and_counts_nothing():
    logits = torch.tensor([[[-math.inf, 1.0, 0.0]]])
    stats = stats_of(logits, ALL)
    assert stats.token.item() == 1
    assert stats.entropy.item() == pytest.approx(stats_of(logits[..., 1:], ALL).entropy.item())
    assert stats.log_total.isfinite().all()


@pytest.mark.parametrize(
    ("value", "everywhere"),
    [(math.nan, False), (math.inf, False), (-math.inf, True)],
    ids=["nan", "inf", "all-minus-inf"],
)
def test_log_total_is_not_finite_where_logits_are_no_law_even_at_a_banned_id(value, everywhere):
    logits = random_logits(3)
    logits[1, 2, slice(None) if everywhere else 0] = value
    banned = torch.zeros(17, dtype=torch.bool)
    banned[0] = True
    broken = ~stats_of(logits, banned=banned).log_total.isfinite()
    assert broken.nonzero().tolist() == [[1, 2]]


def test_temperature_zero_takes_the_argmax_whatever_the_uniform_number():
    logits = random_logits(4)
    assert torch.equal(stats_of(logits, uniform=torch.rand(2, 3)).token, logits.argmax(-1))


def test_a_tiny_temperature_is_greedy_and_confidence_stays_untempered():
    logits = random_logits(5)
    greedy, cold = stats_of(logits), stats_of(logits, uniform=torch.full((2, 3), 0.999), temperature=1e-6)
    assert torch.equal(greedy.token, cold.token)
    assert torch.equal(greedy.confidence, cold.confidence)


def test_temperature_needs_uniform_numbers():
    with pytest.raises(ValueError, match="uniform must be given"):
        stats_of(random_logits(0), temperature=1.0)


def test_confidence_of_a_sampled_token_is_raw_or_processed_as_asked():
    logits = torch.tensor([[[2.0, 1.0, 0.0]]])
    uniform = torch.tensor([[0.999]])
    cut = torch.tensor([[[-math.inf, 1.0, 0.0]]]) / 0.5
    raw = stats_of(logits, uniform=uniform, temperature=0.5, law=cut)
    processed = stats_of(logits, uniform=uniform, temperature=0.5, law=cut, processed_confidence=True)
    assert raw.token.item() == processed.token.item() == 2
    assert raw.confidence.item() == pytest.approx(softmax(logits.numpy())[0, 0, 2])
    assert processed.confidence.item() == pytest.approx(1 / (1 + math.exp(2)))


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8), st.floats(1e-6, 1 - 1e-6))
def test_inversion_picks_the_first_id_whose_cumulative_mass_exceeds_the_number(weights, u):
    law = np.array(weights) / sum(weights)
    expected = int(np.searchsorted(law.cumsum(), u, side="right"))
    # At a border to within rounding either neighbour is right.
    if np.abs(law.cumsum() - u).min() > 1e-6:
        assert sample_by_inversion(torch.tensor(law).log(), torch.tensor(u)).item() == min(expected, len(law) - 1)


def test_an_id_without_mass_is_never_drawn_not_even_at_the_ends():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    u = torch.tensor([2**-24, 0.5, 1 - 2**-24])
    drawn = sample_by_inversion(logits.expand(3, -1), u)
    assert drawn.tolist() == [1, 3, 3]


def test_sampled_tokens_follow_the_tempered_law_without_the_banned_ids():
    logits, temperature, count = torch.tensor([1.0, 0.0, 2.0, 0.5, -1.0]), 0.7, 20000
    banned = torch.tensor([False, True, False, False, False])
    uniform = CounterNoise.for_rows(0, 1).uniform(torch.arange(count)[None], torch.zeros(1, dtype=torch.int64))
    drawn = stats_of(logits.expand(1, count, -1), banned=banned, uniform=uniform, temperature=temperature).token
    law = softmax(np.where(banned, -np.inf, logits.numpy()) / temperature)
    observed = torch.bincount(drawn.flatten(), minlength=5).double().numpy()
    assert observed[1] == 0
    keep = law > 0
    chi_squared = ((observed - law * count)[keep] ** 2 / (law * count)[keep]).sum()
    # Three degrees of freedom: 16.3 is p = 0.001; the seed is fixed.
    assert chi_squared < 16.3
