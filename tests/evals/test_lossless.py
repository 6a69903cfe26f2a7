"""The comparison of drafted text with a target's own: equal on a tiny target, and able to see what differs."""

from __future__ import annotations

import pytest

from dllm.evals import lossless
from dllm.evals.divergence import divergences
from dllm.evals.lossless import drafted_answers, reference_answers
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
            got += drafted_answers(way, target, drafter, PROMPTS[start : start + size], drafts, 9, frozenset())
        assert got == expected
        assert divergences(target, PROMPTS, expected, got) == []


def test_both_ways_end_at_the_targets_stop():
    target = hf_target()
    stop = next(reference_answers(target, PROMPTS, 9))[4]
    target.generation_config.eos_token_id = stop
    expected = list(reference_answers(target, PROMPTS, 9))
    assert all(stop not in answer for answer in expected) and len(expected[0]) <= 4
    for way in lossless.WAYS:
        got = drafted_answers(way, target, random_drafter("dfly", target), PROMPTS, 2, 9, frozenset([stop]))
        assert got == expected


@pytest.mark.parametrize(
    ("arguments", "message"), [("0", "batch must be"), ("1,x", "batch must be"), ("", "batch must be")]
)
def test_numbers_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lossless._numbers(arguments, "batch", 1)
