"""Chains of settings: a looser number commits a superset, for any confidences that hypothesis can think of.

Confidences, entropies and margins are drawn slot by slot, with ties, zeros, ones and their neighbours, unlike the softmax laws of
``test_rules.py``: a rule may only use the order and the size of its numbers. So are the two numbers of a chain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dllm.noise import CounterNoise
from dllm.registry import SAMPLERS
from dllm.samplers.ancestral import Ancestral
from dllm.samplers.block_refinement import BlockRefinement
from dllm.samplers.confidence_threshold import ConfidenceThreshold
from dllm.samplers.dream_entropy import DreamEntropy
from dllm.samplers.dynamic import Dynamic
from dllm.samplers.end_last import EndLast
from dllm.samplers.entropy import Entropy
from dllm.samplers.entropy_bound import EntropyBound
from dllm.samplers.factor import Factor
from dllm.samplers.frechet import Frechet
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.guided import ACCEPT, Guided, leading
from dllm.samplers.klass import Klass
from dllm.samplers.low_confidence import UNLIMITED, LowConfidence
from dllm.samplers.margin import Margin
from dllm.samplers.maskgit_plus import MaskgitPlus
from dllm.samplers.random import RandomOrder
from dllm.samplers.s2d2 import S2D2, first_run
from dllm.samplers.sequential import Sequential
from dllm.samplers.static import Static
from dllm.samplers.sub_block import SubBlock
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
from dllm.samplers.topk_margin import TopkMargin
from dllm.samplers.uniform_canvas import UniformCanvas
from dllm.samplers.wino import Wino
from dllm.types import RowState, RowStats
from tests.samplers.situations import call

SLOTS, VOCAB, BEYOND = 7, 5, 99
EDGES = [0.0, 1e-7, 0.25, 0.5, 0.5000001, 0.9, 0.99999994, 1.0]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Any number between, round ones more often, so that equalities happen."""
    some = [low + (high - low) * edge for edge in EDGES]
    return st.one_of(st.sampled_from(some), st.floats(low, high, allow_subnormal=False))


# A byte is a number: every edge several times, and what is between.
TABLE = torch.tensor([EDGES[i % len(EDGES)] if i < 8 * len(EDGES) else i / 255 for i in range(256)])


def rows_of(data: bytes, low: float, high: float) -> Tensor:
    """One number for each byte [1, n] in [low, high]."""
    return (low + (high - low) * TABLE[list(data)])[None]


@st.composite
def situations(draw: Any) -> tuple[RowStats, Tensor]:
    """Statistics of one row that no law need have, with laws [1, S, V] beside them, and which slots are masked."""
    # One draw is much faster than one a number.
    parts = bytes_of(draw, 4 + VOCAB)
    logits = torch.stack([rows_of(part, -6, 6) for part in parts[4:]], dim=-1)
    moved = rows_of(parts[3], -1, 1)[..., None] * torch.arange(VOCAB)
    stats = RowStats(
        token=logits.argmax(-1),
        confidence=rows_of(parts[0], 0, 1),
        entropy=rows_of(parts[1], 0, 3),
        margin=rows_of(parts[2], 0, 1),
        logits=logits,
        previous=logits + moved,
    )
    return stats, masks(draw(st.integers(0, 2**SLOTS - 1)))


def bytes_of(draw: Any, count: int) -> list[bytes]:
    """A byte a slot, count times."""
    data = draw(st.binary(min_size=count * SLOTS, max_size=count * SLOTS))
    return [data[i * SLOTS : (i + 1) * SLOTS] for i in range(count)]


def masks(bits: int) -> Tensor:
    """Which slots are masked, bool [1, SLOTS]."""
    return torch.tensor([[bool(bits >> i & 1) for i in range(SLOTS)]])


def pairs(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    """Two numbers, the smaller one first."""
    return st.tuples(numbers(low, high), numbers(low, high)).map(lambda pair: (min(pair), max(pair)))


def whole(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    """Two whole numbers, the smaller one first."""
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


# A chain: from a number to a sampler; which numbers; whether the larger one is the looser one.
CHAINS: dict[str, tuple[Any, Any, bool]] = {
    "threshold": (Threshold, pairs(0, 1.1), False),
    "confidence_threshold": (ConfidenceThreshold, pairs(0, 1.1), False),
    "confidence_threshold under a cap": (lambda t: ConfidenceThreshold(t, cap=3), pairs(0, 1.1), False),
    "confidence_threshold by its cap": (lambda n: ConfidenceThreshold(0.3, cap=n), whole(1, 9), True),
    "low_confidence_dynamic": (Dynamic, pairs(0, 1.1), False),
    "sub_block": (lambda t: SubBlock(t, 3), pairs(0, 1.1), False),
    "token_editing": (lambda t: TokenEditing(t), pairs(0, 1.1), False),
    "wino": (Wino, pairs(0, 1.1), False),
    "wino by its most": (lambda n: Wino(0.2, low=n, high=20), whole(1, 9), True),
    "block_refinement": (BlockRefinement, pairs(0, 1.1), False),
    "block_refinement by its steps": (lambda n: BlockRefinement(1.1, num_steps=n), whole(1, 9), False),
    "factor": (Factor, pairs(0, 10), True),
    "factor as published code": (lambda f: Factor(f, compat=True), pairs(0, 10), True),
    "frechet": (Frechet, pairs(0, 1.1), False),
    "entropy_bound": (EntropyBound, pairs(0, 8), True),
    "entropy_bound by confidence": (lambda g: EntropyBound(g, by_confidence=True), pairs(0, 8), True),
    "entropy": (lambda e: Entropy(1, e), pairs(0, 3), True),
    "entropy by k": (Entropy, whole(1, 9), True),
    "low_confidence": (LowConfidence, whole(1, 9), True),
    "low_confidence_static": (Static, whole(1, 9), True),
    "margin": (Margin, whole(1, 9), True),
    "random": (RandomOrder, whole(1, 9), True),
    "sequential": (Sequential, whole(1, 9), True),
    "end_last": (lambda k: EndLast((1, 3), k), whole(1, 9), True),
    "ancestral": (lambda n: Ancestral(num_steps=n), whole(1, 9), False),
}
# These commit by a schedule alone, so that their number is the step limit.
SCHEDULED: dict[str, Any] = {
    "low_confidence": LowConfidence(),
    "low_confidence_static": Static(),
    "margin": Margin(),
    "entropy": Entropy(),
    "sequential": Sequential(),
    "random": RandomOrder(),
    "end_last": EndLast((1, 3)),
    "maskgit_plus": MaskgitPlus(),
    "maskgit_plus drawn": MaskgitPlus(alg_temp=0.5),
    "topk_margin": TopkMargin(),
    "dream_entropy": DreamEntropy(),
    "threshold": Threshold(0.8),
    "factor": Factor(0.5),
    "frechet": Frechet(0.5),
    "entropy_bound": EntropyBound(0.2),
    "block_refinement": BlockRefinement(0.8),
}
# Tested below, or (first_hitting) without any number that could be looser.
OTHERS = {"klass", "uniform_canvas", "first_hitting"}


def test_every_sampler_with_a_number_has_a_chain():
    assert {name.split(" ")[0] for name in [*CHAINS, *SCHEDULED]} | OTHERS == set(SAMPLERS)


def covers(strict: Tensor, loose: Tensor) -> bool:
    return not bool((strict & ~loose).any())


@pytest.mark.parametrize("name", CHAINS)
@given(data=st.data(), situation=situations())
def test_the_looser_of_two_numbers_commits_a_superset(name, data, situation):
    make, choice, larger_is_looser = CHAINS[name]
    small, large = data.draw(choice)
    strict, loose = (call(make(n), *situation) for n in ((small, large) if larger_is_looser else (large, small)))
    assert covers(strict, loose)


@pytest.mark.parametrize("name", SCHEDULED)
@given(steps=whole(1, 10), situation=situations())
def test_fewer_steps_commit_a_superset_in_the_first_one(name, steps, situation):
    rows, masked = situation
    few, many = (call(SCHEDULED[name], rows, masked, 0, limit) for limit in steps)
    assert covers(many, few)


@given(situation=situations(), delta=numbers(0, 1))
def test_frechet_covers_factor_and_both_lie_between_one_slot_and_a_threshold(situation, delta):
    # A hair of slack: two equal sums that are rounded apart.
    factor = call(Factor(max(0.0, 1 - delta - 1e-9)), *situation)
    frechet = call(Frechet(delta), *situation)
    assert covers(call(Threshold(1.1), *situation), factor)
    assert covers(factor, frechet)
    # L_n <= c_n, so that a slot that Frechet takes beside the surest has c - (1 - c) > delta.
    assert covers(frechet, call(Threshold((1 + delta) / 2 - 1e-6), *situation))


@given(situation=situations(), factor=numbers(0, 10))
def test_the_published_factor_code_covers_the_published_formula(situation, factor):
    assert covers(call(Factor(factor), *situation), call(Factor(factor, compat=True), *situation))


@given(situation=situations(), threshold=numbers(0, 1))
def test_samplers_of_one_threshold_nest_by_what_they_add_to_it(situation, threshold):
    plain = call(Threshold(threshold), *situation)
    for sampler in (
        Dynamic(threshold),
        SubBlock(threshold, 3),
        Wino(threshold, low=2),
        ConfidenceThreshold(threshold, 2),
    ):
        inside = call(sampler, *situation)
        if isinstance(sampler, SubBlock):
            # The surest slot of a sub-block need not be the surest of all.
            inside = inside & (situation[0].confidence >= threshold)
        assert covers(inside, plain), sampler
    assert torch.equal(call(ConfidenceThreshold(threshold), *situation), plain)
    assert covers(plain & (situation[0].confidence > threshold), call(Dynamic(threshold), *situation))


@given(situation=situations(), thresholds=pairs(0, 1), kls=pairs(0, 2))
def test_what_klass_finds_sure_is_nested_in_both_its_numbers(situation, thresholds, kls):
    rows, masked = situation
    strict = call(Klass(thresholds[1], max_kl=kls[0], n=1), rows, masked)
    best = call(LowConfidence(), rows, masked)
    # The surest slot alone may be the fallback of a step that found nothing sure, which promises nothing.
    sure = strict if not torch.equal(strict, best) else torch.zeros_like(strict)
    assert covers(sure, rows.confidence > thresholds[1])
    for loose in (Klass(thresholds[0], max_kl=kls[0], n=1), Klass(thresholds[1], max_kl=kls[1], n=1)):
        assert covers(sure, call(loose, rows, masked))


def state_of(history: dict[str, Tensor] | None = None) -> RowState:
    """The second step of a block without a step limit."""
    one = torch.ones(1, dtype=torch.int64)
    return RowState(one, one * UNLIMITED, one * SLOTS, torch.arange(SLOTS)[None], history or {}, post_steps=one * 0)


@given(situation=situations(), thresholds=pairs(0, 1.1), seed=st.integers(0, 9))
def test_a_lower_editing_threshold_edits_a_superset(situation, thresholds, seed):
    rows, masked = situation
    canvas = torch.randint(0, VOCAB, (1, SLOTS), generator=torch.Generator().manual_seed(seed))
    for make in (lambda t: TokenEditing(0.7, t), lambda t: BlockRefinement(0.9, t)):
        low, high = (
            make(t).revise(rows, canvas, ~masked, state_of(), CounterNoise.for_rows(0, 1)).edit for t in thresholds
        )
        assert covers(high, low)
        assert covers(low, ~masked & (rows.token != canvas))


@given(situation=situations(), thresholds=pairs(0, 1.1), counts=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_a_higher_verify_threshold_revokes_a_superset_and_never_more_than_one_less_than_was_committed(
    situation, thresholds, counts
):
    rows, masked = situation
    history = {"wino": torch.tensor([counts])}
    low, high = (
        Wino(verify_threshold=t)
        .revise(rows, masked.long(), ~masked, state_of(dict(history)), CounterNoise.for_rows(0, 1))
        .remask
        for t in thresholds
    )
    assert covers(low, high)
    assert int(high.sum()) < max(counts[0], 1)
    assert counts[1] > 1 or not high.any()


@given(situation=situations(), bounds=pairs(0, 8))
def test_a_larger_bound_keeps_a_superset_of_a_canvas_and_bound_0_the_slot_of_lowest_entropy(situation, bounds):
    rows, masked = situation
    # Kept tokens are told from random ones by an id that is never drawn.
    rows = replace(rows, token=torch.full_like(rows.token, BEYOND))
    kept = []
    for bound in (0.0, *bounds):
        canvas = UniformCanvas(bound, sample=False).step(
            rows, masked.long(), masked, state_of(), CounterNoise.for_rows(0, 1)
        )
        assert canvas.canvas is not None
        kept.append((canvas.canvas == BEYOND) & masked)
    assert all(covers(strict, loose) for strict, loose in pairwise(kept))
    assert bool(kept[0].any()) == bool(masked.any())


# Guides: which drafts pass, and how far the accepted prefix goes.

GUIDES: dict[str, tuple[Any, Any, bool]] = {
    "topk": (lambda k: Guided("topk", accept_top_k=k), whole(1, VOCAB + 2), True),
    "topk_relative by k": (lambda k: Guided("topk_relative", accept_top_k=k), whole(1, VOCAB + 2), True),
    "topk_relative": (lambda r: Guided("topk_relative", accept_ratio=r), pairs(0, 1.1), False),
    "dynamic_threshold": (lambda p: Guided("dynamic_threshold", accept_prob=p), pairs(0, 1.1), False),
    "log_ratio": (lambda r: Guided("log_ratio", accept_ratio=r), pairs(0, 3), True),
}
BESIDE_EACH_OTHER = [
    # On the left what accepts no more than what is on the right of it, for any law.
    [
        Guided("never"),
        Guided("exact"),
        Guided("topk", accept_top_k=1),
        Guided("topk"),
        Guided("aggressive"),
        Guided("always"),
    ],
    [
        Guided("topk_relative", accept_ratio=0.7),
        Guided("topk_relative", accept_ratio=0.0),
        Guided("topk"),
        Guided("always"),
    ],
    [Guided("topk_relative", accept_ratio=1.0, accept_top_k=1), Guided("exact")],
    [Guided("dynamic_threshold", accept_prob=0.05), Guided("aggressive")],
    [Guided("never"), Guided("original"), Guided("always")],
]


@st.composite
def drafts(draw: Any) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of ``Guided.accepts`` for one row, and which slots are offered: one run."""
    parts = bytes_of(draw, 3 + VOCAB)
    law = torch.stack([rows_of(part, -6, 6) for part in parts[3:]], dim=-1).softmax(-1)
    draft = torch.tensor([list(parts[0])]) % VOCAB
    uniform = rows_of(parts[1], 1e-6, 1 - 1e-6)
    first, last = draw(whole(0, SLOTS))
    offered = (torch.arange(SLOTS) >= first) & (torch.arange(SLOTS) < last)
    return (draft, law.argmax(-1), law, rows_of(parts[2], 0, 1), uniform), offered[None]


@pytest.mark.parametrize("name", GUIDES)
@given(data=st.data(), case=drafts())
def test_the_looser_of_two_guides_accepts_a_superset_and_a_prefix_no_shorter(name, data, case):
    make, choice, larger_is_looser = GUIDES[name]
    small, large = data.draw(choice)
    arguments, offered = case
    strict, loose = (make(n).accepts(*arguments) for n in ((small, large) if larger_is_looser else (large, small)))
    assert covers(strict, loose)
    lengths = [int(leading(passed, offered)) for passed in (strict, loose)]
    assert 0 <= lengths[0] <= lengths[1] <= int(offered.sum())


@pytest.mark.parametrize("chain", BESIDE_EACH_OTHER, ids=lambda chain: " < ".join(guide.accept for guide in chain))
@given(case=drafts())
def test_guides_of_different_rules_nest(chain, case):
    arguments, _ = case
    assert all(covers(a.accepts(*arguments), b.accepts(*arguments)) for a, b in pairwise(chain))


def test_every_guide_is_in_a_chain():
    # Speculative acceptance is no test of one draft at a time.
    named = {name.split(" ")[0] for name in GUIDES} | {guide.accept for chain in BESIDE_EACH_OTHER for guide in chain}
    assert named == set(ACCEPT) - {"speculative"}


# Verifiers: which rows are verified, and what a verified branch reveals.


@given(situation=situations(), costs=pairs(-2, 8), limits=pairs(-3, 3), was=st.booleans(), spans=whole(1, 7))
def test_a_cheaper_verification_is_chosen_wherever_a_dearer_one_is(situation, costs, limits, was, spans):
    rows, masked = situation
    run = first_run(masked)
    asked = (rows.entropy, run, run.sum(-1), torch.tensor([was]), VOCAB)

    def routes(**numbers):
        return bool(S2D2(**numbers).routes(*asked))

    base = dict(cost=costs[1], score_threshold=limits[1], min_span=spans[1])
    assert routes(**base) <= routes(**{**base, "cost": costs[0]})
    assert routes(**base) <= routes(**{**base, "score_threshold": limits[0]})
    assert routes(**base) <= routes(**{**base, "min_span": spans[0]})
    # A lower bar for staying than for starting.
    assert routes(**base) <= routes(**base, score_off=limits[0])
    assert not routes(cost=math.inf)
    assert routes(cost=-math.inf) == bool(masked.any())


@given(situation=situations(), steps=whole(1, 6), k=st.integers(1, 3))
def test_branches_reveal_more_and_more_and_fewer_draft_steps_are_the_first_of_more(situation, steps, k):
    rows, masked = situation
    few, many = (FreeDave(n, k).draft(rows.confidence, masked) for n in steps)
    assert torch.equal(few[0], many[0][:, : few[0].shape[1]])
    assert torch.equal(few[1], many[1][:, : few[1].shape[1]])
    assert all(covers(a, b) for a, b in pairwise(many[0].unbind(1)))
    assert covers(many[0].any(1), masked)
