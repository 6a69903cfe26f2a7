"""The comparison of drafted text with a target's own: equal on a tiny target, and able to see what differs."""

from __future__ import annotations

import pytest
import torch

from dllm.evals import lossless
from dllm.evals.lossless import Divergence, divergences, drafted_answers, first_difference, reference_answers
from tests.speculative import hf_target, random_drafter

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11], [12, 13]]


@pytest.mark.parametrize("drafts", [0, 2, 7])
@pytest.mark.parametrize("size", [1, 4])
def test_both_ways_give_the_reference(drafts, size):
    target = hf_target()
    drafter = random_drafter("dfly", target)
    expected = list(reference_answers(target, PROMPTS, 9))
    assert sum(map(len, expected)) > 20
    for way in lossless.WAYS:
        got = []
        for start in range(0, len(PROMPTS), size):
            got += drafted_answers(way, target, drafter, PROMPTS[start : start + size], drafts, 9)
        assert got == expected
        assert divergences(target, PROMPTS, expected, got) == []


def test_a_difference_has_its_place_and_the_models_own_gap():
    target = hf_target()
    expected = list(reference_answers(target, PROMPTS[:3], 6))
    other = (expected[0][2] + 1) % target.config.vocab_size
    got = [[*expected[0][:2], other, 5], expected[1][:-1], expected[2]]
    first, second = divergences(target, PROMPTS[:3], expected, got)
    with torch.no_grad():
        logits = target(torch.tensor([[*PROMPTS[0], *expected[0][:2]]])).logits[0, -1]
    assert first.gap is not None and first.gap > 0
    assert first.gap == pytest.approx(float(logits[expected[0][2]] - logits[other]))
    assert first == Divergence(0, 2, expected[0][2], other, first.gap)
    assert second == Divergence(1, len(expected[1]) - 1, expected[1][-1], None, None)


def test_first_differences_of_texts_that_end_apart():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3, 4]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"), [("0", "batch must be"), ("1,x", "batch must be"), ("", "batch must be")]
)
def test_numbers_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lossless._numbers(arguments, "batch", 1)
