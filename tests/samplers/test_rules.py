"""Rules of all samplers at once: progress, neutral settings, subset chains."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.registry import SAMPLERS, resolve_sampler
from dllm.samplers.dynamic import Dynamic
from dllm.samplers.entropy import Entropy
from dllm.samplers.entropy_bound import EntropyBound
from dllm.samplers.factor import Factor
from dllm.samplers.frechet import Frechet
from dllm.samplers.klass import Klass
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.margin import Margin
from dllm.samplers.maskgit_plus import MaskgitPlus
from dllm.samplers.random import RandomOrder
from dllm.samplers.sequential import Sequential
from dllm.samplers.static import Static
from dllm.samplers.sub_block import SubBlock
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
from tests.samplers.situations import call, confidences, laws, surest

NEUTRAL = [
    LowConfidence(1),
    Threshold(1.5),
    Factor(0.0),
    Frechet(1.0),
    EntropyBound(0.0, by_confidence=True),
    Klass(0.5, max_kl=0.0),
    MaskgitPlus(),
    Static(1),
    Dynamic(1.5),
    SubBlock(1.5, sub_block_length=64),
    TokenEditing(1.5, editing_threshold=1.5),
]


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@given(situation=laws())
def test_every_row_with_a_mask_commits_and_only_masked_slots_are_committed(name, situation):
    rows, masked = situation
    sampler = resolve_sampler(name, {}, {})
    chosen = call(sampler, rows, masked)
    assert not (chosen & ~masked).any()
    # A published schedule may say zero, and then ends by itself.
    assert getattr(sampler, "may_wait", False) or torch.equal(chosen.any(-1), masked.any(-1))


@pytest.mark.parametrize("sampler", NEUTRAL, ids=lambda s: type(s).__name__)
@given(situation=laws(), step=st.integers(0, 3))
def test_the_neutral_setting_commits_the_single_surest_slot(sampler, situation, step):
    rows, masked = situation
    if isinstance(sampler, EntropyBound):
        # A slot without any entropy costs nothing: it may go along at bound 0.
        rows.entropy.clamp_(min=1e-6)
    assert torch.equal(call(sampler, rows, masked, step), surest(rows, masked))


@pytest.mark.parametrize("sampler", [Margin(1), Entropy(1), EntropyBound(0.0), RandomOrder(1), Sequential(1)])
@given(situation=laws())
def test_one_slot_a_step_in_the_order_of_the_rules_own_score(sampler, situation):
    rows, masked = situation
    rows.entropy.clamp_(min=1e-6)
    score = {"Margin": rows.margin, "Sequential": -torch.arange(6.0).expand(2, -1)}.get(type(sampler).__name__)
    chosen = call(sampler, rows, masked)
    assert (chosen.sum(-1) == masked.any(-1)).all()
    if isinstance(sampler, (Entropy, EntropyBound)):
        score = -rows.entropy
    if score is not None:
        best = score.masked_fill(~masked, -math.inf).argmax(-1)
        assert all(bool(chosen[b, best[b]]) for b in range(2) if masked[b].any())


CHAINS = {
    "threshold": [Threshold(t) for t in (1.0, 0.8, 0.5, 0.2, 0.0)],
    "dynamic": [Dynamic(t) for t in (1.0, 0.8, 0.5, 0.2)],
    "factor": [Factor(f) for f in (0.0, 0.3, 1.0, 2.0, 8.0)],
    "factor compat": [Factor(f, compat=True) for f in (0.0, 0.3, 1.0, 2.0, 8.0)],
    "compat takes more": [Factor(0.7), Factor(0.7, compat=True)],
    "frechet": [Frechet(d) for d in (1.0, 0.6, 0.25, 0.0)],
    "frechet covers factor": [Factor(0.75), Frechet(0.25)],
    "entropy bound": [EntropyBound(g) for g in (0.0, 0.05, 0.5, 3.0, 100.0)],
    "entropy bound by confidence": [EntropyBound(g, by_confidence=True) for g in (0.0, 0.05, 0.5, 3.0)],
    "entropy": [Entropy(1, e) for e in (0.0, 0.2, 0.5, 2.0)],
    "low confidence": [LowConfidence(k) for k in (1, 2, 5)],
    "margin": [Margin(k) for k in (1, 2, 5)],
    "random": [RandomOrder(k) for k in (1, 2, 5)],
    "sequential": [Sequential(k) for k in (1, 2, 5)],
    "sub-block": [SubBlock(t, 3) for t in (1.0, 0.5, 0.1)],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@given(situation=laws())
def test_a_looser_number_commits_a_superset(chain, situation):
    rows, masked = situation
    chosen = [call(sampler, rows, masked) for sampler in chain]
    for strict, loose in pairwise(chosen):
        assert not (strict & ~loose).any()


@given(st.lists(st.floats(0, 1, width=32), min_size=6, max_size=6), st.floats(0, 1))
def test_frechet_covers_factor_for_any_confidences(values, delta):
    rows, masked = confidences(torch.tensor([values])), torch.ones(1, 6, dtype=torch.bool)
    # A hair of slack: the two bounds are equal sums, rounded apart.
    assert not (call(Factor(max(0.0, 1 - delta - 1e-9)), rows, masked) & ~call(Frechet(delta), rows, masked)).any()


@given(laws(), st.floats(0, 1))
def test_klass_without_a_bound_on_the_change_is_a_strict_threshold(situation, threshold):
    rows, masked = situation
    chosen = call(Klass(threshold, max_kl=math.inf, n=1), rows, masked)
    assert torch.equal(chosen, call(Dynamic(threshold), rows, masked))


@pytest.mark.parametrize(("c", "factor", "expected"), [(0.9, 1.0, 6), (0.79, 1.0, 3), (0.5, 1.0, 1), (0.9, 0.35, 2)])
def test_factor_with_equal_confidences_takes_the_closed_form(c, factor, expected):
    rows, masked = confidences(torch.full((1, 6), c, dtype=torch.float64)), torch.ones(1, 6, dtype=torch.bool)
    assert call(Factor(factor), rows, masked).sum().item() == expected
    assert expected == min(6, max(1, math.ceil(factor / (1 - c) - 1e-9) - 2))


def test_the_published_factor_code_takes_the_last_failing_slot_too():
    masked = torch.ones(1, 2, dtype=torch.bool)
    rows = confidences(torch.tensor([[0.99, 0.01]]))
    assert call(Factor(1.0), rows, masked).tolist() == [[True, False]]
    assert call(Factor(1.0, compat=True), rows, masked).tolist() == [[True, True]]
    three = confidences(torch.tensor([[0.99, 0.01, 0.02]]))
    assert call(Factor(1.0, compat=True), three, torch.ones(1, 3, dtype=torch.bool)).sum().item() == 1


@pytest.mark.parametrize(
    "sampler", [Threshold(1.5), Factor(0.0), Frechet(1.0), EntropyBound(0.0), LowConfidence(1), Margin(1)]
)
@given(situation=laws(), steps=st.integers(1, 6))
def test_a_step_limit_is_kept(sampler, situation, steps):
    rows, masked = situation
    for done in range(steps):
        masked = masked & ~call(sampler, rows, masked, done, steps)
    assert not masked.any()


@pytest.mark.parametrize("sampler", [Static(1), Dynamic(1.5), Sequential(1)])
def test_the_quota_of_block_models_counts_the_given_tokens_of_the_block(sampler):
    rows, masked = confidences(torch.tensor([[0.1, 0.2, 0.3, 0.4]])), torch.ones(1, 4, dtype=torch.bool)
    counts = [call(sampler, rows, masked, i, 3, block_length=torch.tensor([8])).sum().item() for i in range(3)]
    assert counts == [3, 3, 2]


def test_random_order_differs_by_row_and_takes_two_a_step_in_the_order_of_one_a_step():
    rows = confidences(torch.linspace(0, 1, 16).repeat(2, 1))
    masked, order = torch.ones(2, 16, dtype=torch.bool), []
    for step in range(16):
        chosen = call(RandomOrder(1), rows, masked, step)
        order.append(chosen.long().argmax(-1).tolist())
        masked = masked & ~chosen
    assert [a for a, _ in order] != [b for _, b in order]
    assert [a for a, _ in order] != list(range(16))
    pair = call(RandomOrder(2), rows, torch.ones(2, 16, dtype=torch.bool))
    assert pair[0].nonzero()[:, 0].tolist() == sorted(a for a, _ in order[:2])


def test_a_sub_block_is_finished_before_the_next_one_is_touched():
    rows, masked = confidences(torch.tensor([[0.1, 0.2, 0.9, 0.95, 0.9, 0.9]])), torch.ones(1, 6, dtype=torch.bool)
    assert call(SubBlock(0.5, 2), rows, masked).tolist() == [[False, True] + [False] * 4]
    masked[:, :2] = False
    assert call(SubBlock(0.5, 2), rows, masked).tolist() == [[False, False, True, True, False, False]]
    # Slots are counted from the block's first row, given tokens included.
    start = call(SubBlock(0.5, 2), rows, torch.ones(1, 6, dtype=torch.bool), block_start=torch.tensor([-1]))
    assert start.tolist() == [[True] + [False] * 5]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomOrder(0),
        lambda: Margin(True),
        lambda: Entropy(1, -0.1),
        lambda: Factor(-1.0),
        lambda: Factor(1.0, compat=1),  # type: ignore[arg-type]
        lambda: Frechet(float("nan")),
        lambda: EntropyBound("0.1"),  # type: ignore[arg-type]
        lambda: EntropyBound(0.1, by_confidence=1),  # type: ignore[arg-type]
        lambda: Klass(n=0),
        lambda: Klass(max_kl=-1),
        lambda: MaskgitPlus(alg_temp=-1),
        lambda: Dynamic(-1),
        lambda: SubBlock(0.9, 0),
        lambda: TokenEditing(max_post_steps=-1),
    ],
)
def test_a_bad_number_raises(make):
    with pytest.raises(ValueError, match="must be"):
        make()
