"""The block cache against no cache: the same tokens in fp32, for every prompt length, batch and threshold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.cache.block import BlockCache
from dllm.noise import CounterNoise
from tests.spy import Spy
from tests.tiny import EOS, padded, prompt, tiny_lm
from tests.words import text_lm


def assert_equal(lm, rows, **options):
    plain = lm.generate(**padded(rows, "right", EOS), cache="none", **options)
    cached = lm.generate(**padded(rows, "right", EOS), cache="block", **options)
    assert cached.lengths == plain.lengths
    assert torch.equal(cached.sequences, plain.sequences)
    assert cached.finish_reasons == plain.finish_reasons
    for a, b in zip(cached.row_stats, plain.row_stats, strict=True):
        assert a.nfe <= b.nfe + 1
    return plain


@pytest.mark.parametrize("threshold", [0.3, 0.9])
@pytest.mark.parametrize("origin", ["prompt", "zero"])
@pytest.mark.parametrize("length", range(1, 25))
def test_block_equals_none_for_every_prompt_length(length, origin, threshold):
    lm = tiny_lm(block_origin=origin, eos_token_ids=())
    out = assert_equal(lm, [prompt(length)], max_new_tokens=20, threshold=threshold)
    assert len(set(out.sequences[0].tolist())) > 2, "a constant text would hide a difference"


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    gen=st.integers(1, 27),
    threshold=st.sampled_from([0.2, 0.5, 0.9, 2.0]),
    temperature=st.sampled_from([0.0, 0.8]),
    origin=st.sampled_from(["prompt", "zero"]),
    block_length=st.sampled_from([1, 3, 8, 16]),
    seed=st.integers(0, 3),
)
def test_block_equals_none_for_ragged_batches(lengths, gen, threshold, temperature, origin, block_length, seed):
    lm = tiny_lm(seed=seed, block_origin=origin, eos_token_ids=(EOS, 40))
    rows = [prompt(n, i) for i, n in enumerate(lengths)]
    assert_equal(
        lm,
        rows,
        max_new_tokens=gen,
        threshold=threshold,
        temperature=temperature,
        block_length=block_length,
        noise=CounterNoise.for_rows(seed, len(rows)),
    )


@pytest.mark.parametrize("origin", ["prompt", "zero"])
def test_block_equals_none_under_a_policy_of_changing_block_lengths(origin):
    class Changing:
        def next(self, state):
            return 1 + (3 * int(state.position)) % 7

    lm = tiny_lm(block_origin=origin, eos_token_ids=())
    for length in (1, 5, 12):
        assert_equal(
            lm, [prompt(length), prompt(length + 3)], max_new_tokens=30, block_length=Changing(), threshold=0.6
        )


@pytest.mark.parametrize("gaps", [(8, 3), (5, 9), (3, 3), (12, 2)], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"block_origin": "zero", "infill": "canvas"}], ids=["rank", "canvas-from-zero"]
)
def test_block_equals_none_for_two_gaps_under_a_policy(changes, gaps):
    """Blocks off the grid: the second gap's first block may begin before the last block of the first gap does."""

    class Three:
        def next(self, state):
            return 3

    lm = text_lm(**changes)
    options: dict[str, Any] = dict(
        template="thex{{x}}a{{y}}cd", gaps=dict(zip("xy", gaps, strict=True)), block_length=Three(), threshold=0.6
    )
    assert lm.infill(cache="block", **options).fill_ids == lm.infill(cache="none", **options).fill_ids


def test_a_block_is_stored_beside_the_next_ones_first_step_from_its_final_tokens():
    lm, spy = tiny_lm(eos_token_ids=()), Spy(BlockCache())
    lm.generate(input_ids=[prompt(5)], max_new_tokens=24, cache=spy, threshold=0.9)
    prefill, *later = spy.forwards
    assert prefill.computed == prefill.written == [[0, 1, 2, 3, 4]]
    assert prefill.decode == [False]
    stored = [0, 1, 2, 3, 4]
    for forward in later:
        lo, first = forward.lo[0], forward.step[0] == 0
        previous = list(range(lo - 8, lo)) if first and lo > 5 else []
        assert forward.prev_lo[0] == (previous[0] if previous else forward.row_lo[0])
        assert forward.computed[0] == previous + list(range(lo, lo + 8))
        assert forward.written[0] == previous
        assert not forward.masked[0, forward.written[0]].any(), "a masked row was frozen"
        assert forward.stored[0].nonzero().flatten().tolist() == stored
        stored += previous
    # The last block is never stored: nobody reads it.
    assert stored == list(range(5 + 16))


def test_a_model_whose_logits_are_not_shifted_is_cached_exactly_too():
    lm = tiny_lm(logits_shift=0, eos_token_ids=())
    for length in (1, 8, 11):
        assert_equal(lm, [prompt(length)], max_new_tokens=20, threshold=0.5)


def test_a_bidirectional_model_is_refused():
    with pytest.raises(ValueError, match="cache 'block' is exact for block-causal attention only"):
        BlockCache().check(tiny_lm("bidirectional").spec)
