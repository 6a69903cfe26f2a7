"""Likelihoods: the chain against single forwards, the masked bound against all of its terms, fixed seeds, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dllm.families.full_forward import raw_logits
from tests.tiny import tiny_lm

RULES = ["bidirectional", "block_causal"]
CONTEXT, SPAN = [5, 9, 13, 21, 4], [7, 30, 11]


def law(lm, ids, masked, slot):
    """ln p of ids[slot] with the flagged slots masked; the span lies in one block."""
    logits = raw_logits(lm.model, lm.spec, torch.tensor([ids]), masked=torch.tensor([masked]))
    row = slot - lm.spec.logits_shift
    return float(logits[0, row].log_softmax(-1)[ids[slot]])


@pytest.mark.parametrize("shift", [0, 1])
def test_the_chain_is_the_product_of_the_laws_that_see_exactly_what_is_before(shift):
    lm = tiny_lm("bidirectional", logits_shift=shift)
    ids, expected = CONTEXT + SPAN, 0.0
    for i in range(len(SPAN)):
        slot = len(CONTEXT) + i
        expected += law(lm, ids, [j >= slot for j in range(len(ids))], slot)
    assert lm.loglikelihood(CONTEXT, SPAN, "chain") == pytest.approx(expected, abs=1e-4)


def test_the_bound_is_the_mean_over_all_numbers_and_choices_of_masked_tokens():
    lm = tiny_lm("bidirectional", logits_shift=0)
    ids, n, exact = CONTEXT + SPAN, len(SPAN), 0.0
    for count in range(1, n + 1):
        choices = list(itertools.combinations(range(n), count))
        for choice in choices:
            flags = [False] * len(CONTEXT) + [i in choice for i in range(n)]
            values = sum(law(lm, ids, flags, len(CONTEXT) + i) for i in choice)
            exact += values * n / count / len(choices) / n
    found = [lm.loglikelihood(CONTEXT, SPAN, "mc", seed=s, num_samples=64) for s in range(12)]
    spread = torch.tensor(found).std().item() / len(found) ** 0.5
    assert abs(sum(found) / len(found) - exact) < 4 * spread + 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_blocks_of_one_token_and_spans_of_one_token_make_every_method_the_chain(rule):
    lm = tiny_lm(rule, block_length=1)
    assert lm.loglikelihood(CONTEXT, SPAN, "block") == pytest.approx(lm.loglikelihood(CONTEXT, SPAN, "chain"), abs=1e-4)
    for method in ("mc", "block"):
        one = lm.loglikelihood(CONTEXT, SPAN[:1], method)
        assert one == pytest.approx(lm.loglikelihood(CONTEXT, SPAN[:1], "chain"), abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_the_seed_fixes_the_estimate(rule):
    lm = tiny_lm(rule)
    a, b, c = (lm.loglikelihood(CONTEXT, SPAN, "mc", seed=s, num_samples=5) for s in (3, 3, 4))
    assert a == b != c
    assert lm.loglikelihood(CONTEXT, [], "mc") == 0


def test_what_cannot_be_scored_raises():
    lm = tiny_lm()
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((CONTEXT, SPAN, "exact"), "method must be"),
        (("text", SPAN), "context must be a list of ids"),
        ((CONTEXT, [99]), r"continuation must hold ids in \[0, 64\)"),
        (([], SPAN), "empty prefix"),
        ((CONTEXT, SPAN, "mc", 0, 0), "num_samples must be >= 1"),
        ((CONTEXT * 60, SPAN), "must fit in 256 positions"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            lm.loglikelihood(*arguments)
