"""What a block policy is asked and told by the denoising loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.resize import Resize
from tests.oracle import oracle_lm
from tests.tiny import padded, prompt, tiny_lm, tokens

EACH = [("block_causal", "none"), ("block_causal", "block"), ("bidirectional", "none"), ("bidirectional", "dual")]


class Recorder:
    """Answers in turn, and keeps what it was told."""

    def __init__(self, *lengths):
        self.lengths, self.states = lengths, []

    def next(self, state):
        self.states.append(state)
        return self.lengths[(len(self.states) - 1) % len(self.lengths)]


def run(rule, cache, policy, **changes: Any):
    lm = tiny_lm(rule, eos_token_ids=())
    options: dict[str, Any] = {"max_new_tokens": 20, "cache": cache, "threshold": 0.4, **changes}
    return lm, lm.generate(input_ids=[prompt(5)], block_length=policy, **options)


@pytest.mark.parametrize(("rule", "cache"), EACH)
def test_a_policy_is_asked_once_a_block_and_a_constant_one_equals_the_number(rule, cache):
    policy = Recorder(3)
    _, out = run(rule, cache, policy)
    _, plain = run(rule, cache, 3)
    assert tokens(out) == tokens(plain)
    assert (out.stats.nfe, out.stats.positions) == (plain.stats.nfe, plain.stats.positions)
    assert [int(s.position) for s in policy.states] == list(range(5, 25, 3))
    assert [int(s.remaining) for s in policy.states] == list(range(20, 0, -3))
    assert {int(s.total) for s in policy.states} == {20}
    assert {s.default for s in policy.states} == {8}


@pytest.mark.parametrize("cache", ["none", "block"])
def test_lengths_above_and_below_the_models_own_leave_the_exact_cache_exact(cache):
    _, out = run("block_causal", cache, Recorder(2, 11, 4))
    _, plain = run("block_causal", "none", Recorder(2, 11, 4))
    assert tokens(out) == tokens(plain)
    assert out.lengths == [20]


@pytest.mark.parametrize("rule", ["block_causal", "bidirectional"])
def test_it_is_told_the_confidences_with_which_the_block_before_was_committed(rule):
    policy = Recorder(3, 5)
    lm = oracle_lm(lambda slot, call: (10, 0.5 + slot / 100), rule, eos_token_ids=())
    lm.generate(input_ids=[prompt(5)], block_length=policy, max_new_tokens=20, threshold=0.9)
    assert policy.states[0].confidence is None
    found = [s.confidence[0].tolist() for s in policy.states[1:]]
    assert [len(values) for values in found] == [3, 5, 3, 5, 3]
    want = [0.5 + slot / 100 for slot in range(5, 24)]
    assert [v for values in found for v in values] == pytest.approx(want, abs=1e-5)


def test_it_is_told_what_the_prefill_gave():
    policy = Recorder(4)
    lm, _ = run("block_causal", "block", policy)
    ids = torch.tensor([prompt(5)])
    want = lm.forward(ids)[0, -1].topk(64).values
    for state in policy.states:
        torch.testing.assert_close(state.top_logits[0], want, atol=1e-4, rtol=1e-4)
        assert state.hidden.shape == (1, 32)
    no_prefill = Recorder(4)
    run("block_causal", "none", no_prefill)
    assert no_prefill.states[0].hidden is None
    both_ways = Recorder(4)
    run("bidirectional", "none", both_ways)
    assert both_ways.states[0].hidden is not None


@pytest.mark.parametrize(("rule", "cache"), EACH)
def test_a_row_of_a_batch_is_told_what_it_is_told_alone(rule, cache):
    class Sure:
        """Longer after a sure block and after a prompt that says much."""

        def next(self, state):
            if state.confidence is None:
                return 4 if state.top_logits is None else 1 + int(state.top_logits[0, 0] * 10) % 5
            return 1 + int(state.confidence.mean() * 1000) % 6

    lm = tiny_lm(rule, eos_token_ids=(2, 20))
    rows = [prompt(3), prompt(17), prompt(9)]
    options: dict[str, Any] = {"max_new_tokens": 21, "block_length": Sure(), "cache": cache, "threshold": 0.4}
    batch = lm.generate(**padded(rows), **options)
    for b, row in enumerate(rows):
        single = lm.generate(input_ids=[row], **options)
        assert tokens(batch, b) == tokens(single)
        assert batch.row_stats[b].nfe == single.stats.nfe


def test_a_policy_may_refuse_a_model_and_a_growing_gap_refuses_a_policy():
    class Picky(Recorder):
        def check(self, spec):
            raise ValueError(f"not for {spec.attention}")

    with pytest.raises(ValueError, match="not for bidirectional"):
        run("bidirectional", "none", Picky(3))
    with pytest.raises(ValueError, match="block_length must be an int with resize"):
        run("bidirectional", "none", Recorder(3), resize=Resize(4))


def test_what_looks_ahead_needs_a_model_that_sees_ahead():
    class Ahead(Recorder):
        delimiter_ids = (3,)

        def window(self, total, remaining):
            return remaining

    with pytest.raises(ValueError, match="Ahead looks ahead, which needs bidirectional attention"):
        run("block_causal", "none", Ahead(3))
    policy = Ahead(3)
    run("bidirectional", "none", policy)
    assert [s.delimiter_confidence.shape[1] for s in policy.states] == list(range(20, 0, -3))
