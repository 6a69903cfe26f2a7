"""Where texts part: the place, the tokens, and the model's own gap between them."""

from __future__ import annotations

import pytest
import torch

from dllm.evals.divergence import Divergence, divergences, first_difference, next_logits
from dllm.evals.lossless import reference_answers
from dllm.types import Attend
from tests.speculative import hf_target
from tests.tiny import prompt, tiny_decoder

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


def test_a_difference_has_its_place_and_the_models_own_gap():
    target = hf_target()
    expected = list(reference_answers(target, PROMPTS, 6))
    other = (expected[0][2] + 1) % target.config.vocab_size
    got = [[*expected[0][:2], other, 5], expected[1][:-1], expected[2]]
    first, second = divergences(target, PROMPTS, expected, got)
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


def test_a_shorter_text_parts_at_its_stop():
    model, stop = tiny_decoder(), 2
    ids = prompt(5)
    at = torch.arange(len(ids) + 1)[None]
    truth = [7, 9, 11]
    law = model.head(model(torch.tensor([[*ids, 7]]), at, None, Attend.causal(at))[0, -1])
    torch.testing.assert_close(next_logits(model, [*ids, 7]), law)
    first, second = divergences(model, [ids] * 3, [truth] * 3, [truth, [7, 4, 11], [7]], stop)
    assert (first.prompt, first.place, first.got) == (1, 1, 4)
    assert (second.prompt, second.place, second.got) == (2, 1, stop)
    assert first.gap == pytest.approx(float(law[9] - law[4]), abs=1e-4)
    assert second.gap == pytest.approx(float(law[9] - law[stop]), abs=1e-4)
