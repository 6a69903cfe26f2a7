"""Dual cache: a full pass at a block's start, in-place replacement of the block's rows, and where that is exact."""

from __future__ import annotations

import pytest

from dllm.cache.dual import DualCache
from tests.spy import Spy
from tests.tiny import prompt, tiny_lm

BOTH = ["block_causal", "bidirectional"]


def run(lm, cache, length=5, gen=24, **options):
    return lm.generate(input_ids=[prompt(length)], max_new_tokens=gen, cache=cache, **options).sequences[0].tolist()


@pytest.mark.parametrize("threshold", [0.3, 0.9, 2.0])
@pytest.mark.parametrize("origin", ["prompt", "zero"])
@pytest.mark.parametrize("length", [1, 4, 8, 13])
def test_dual_is_exact_for_block_causal_attention(length, origin, threshold):
    lm = tiny_lm(block_origin=origin, eos_token_ids=())
    assert run(lm, "dual", length, threshold=threshold) == run(lm, "none", length, threshold=threshold)


@pytest.mark.parametrize("rule", BOTH)
def test_a_refresh_at_every_step_equals_no_cache(rule):
    lm = tiny_lm(rule, eos_token_ids=())
    for length in (1, 5, 12):
        for threshold in (0.4, 2.0):
            assert run(lm, "dual", length, threshold=threshold, refresh_interval=1) == run(
                lm, "none", length, threshold=threshold
            )


def test_it_is_an_approximation_for_bidirectional_attention():
    lm = tiny_lm("bidirectional", eos_token_ids=())
    differ = [run(lm, "dual", n, threshold=2.0) != run(lm, "none", n, threshold=2.0) for n in range(1, 9)]
    assert any(differ), "stale rows must be seen to be read"


@pytest.mark.parametrize("shift", [0, 1])
def test_a_step_replaces_the_rows_that_predict_the_block_and_reads_all_others(shift):
    lm, spy = tiny_lm("bidirectional", eos_token_ids=(), logits_shift=shift), Spy(DualCache())
    lm.generate(input_ids=[prompt(5)], max_new_tokens=20, cache=spy, threshold=2.0)
    for forward in spy.forwards:
        lo = forward.lo[0]
        hi = min(lo + 8, 25)
        expected = list(range(25)) if forward.step[0] == 0 else list(range(lo - shift, hi - shift))
        assert forward.computed[0] == forward.written[0] == expected
    assert spy.forwards[-1].stored[0].all()


@pytest.mark.parametrize("interval", [0, -1, 2.0, "1"])
def test_a_bad_refresh_interval_raises(interval):
    with pytest.raises(ValueError, match="refresh_interval must be an int >= 1 or None"):
        DualCache(refresh_interval=interval)
