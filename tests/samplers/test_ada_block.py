"""AdaBlock: the rule by itself, then in the loop on a hand-written model and on a random one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.samplers.ada_block import AdaBlock
from dllm.types import BlockPolicy, ForesightPolicy, PolicyState
from tests.oracle import oracle_lm
from tests.tiny import VOCAB, padded, prompt, tiny_lm, tokens

NEWLINE = 40


def state(found, remaining, default=8):
    one = torch.ones(1, dtype=torch.int64)
    sure = torch.tensor([found], dtype=torch.float32)
    return PolicyState(one, one * remaining, default, total=one * 40, delimiter_confidence=sure)


def blocks_of(lm, policy, ids, **options):
    """The blocks [lo, hi) of one row, in order."""
    seen: list[tuple[int, int]] = []

    def see(lm, step, timestep, kwargs):
        slots = kwargs["slots"][0]
        seen.append((int(slots[0]), int(slots[-1]) + 1))

    out = lm.generate(input_ids=[ids], block_length=policy, callback_on_step_end=see, **options)
    return list(dict.fromkeys(seen)), out


def test_it_is_a_block_policy_that_looks_ahead():
    assert isinstance(AdaBlock(), BlockPolicy)
    assert isinstance(AdaBlock(), ForesightPolicy)


def test_the_window_is_a_quarter_of_the_gap_as_far_as_it_reaches():
    assert [AdaBlock().window(512, n) for n in (512, 128, 100)] == [128, 128, 100]
    assert AdaBlock().window(3, 3) == 0
    assert AdaBlock(lookahead=1.0).window(10, 10) == 10


@pytest.mark.parametrize(
    ("found", "remaining", "length"),
    [
        ([0, 0, 0.9, 0], 30, 3),
        ([0.5, 0, 0.4, 0], 30, 1),
        ([0, 0.6, 0.6, 0], 30, 2),
        ([0, 0.29, 0], 30, 8),
        ([0, 0.3, 0], 30, 2),
        ([0, 0, 0], 30, 8),
        ([0, 0, 0], 5, 5),
        ([], 30, 8),
        # Longer than the fixed length, where the window is.
        ([0] * 9 + [0.8], 30, 10),
    ],
)
def test_the_surest_delimiter_ends_the_block_behind_itself_and_else_the_length_is_fixed(found, remaining, length):
    assert AdaBlock(0.3).next(state(found, remaining)) == length


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), max_size=12), st.integers(12, 40), st.floats(0, 1.2), st.integers(1, 16))
def test_the_length_is_at_least_one_at_most_what_is_left_and_fixed_above_one(found, remaining, threshold, default):
    length = AdaBlock(threshold, default=default).next(state(found, remaining))
    assert 1 <= length <= remaining
    assert AdaBlock(1.01, default=default).next(state(found, remaining)) == min(default, remaining)


def test_blocks_end_at_the_lines_that_the_model_expects_and_the_first_forward_decodes_too():
    said = {slot: (10 + slot % 7, 0.95) for slot in range(4, 60)} | dict.fromkeys((6, 15, 16, 30), (NEWLINE, 0.93))
    lm = oracle_lm(said, "bidirectional", eos_token_ids=())
    blocks, out = blocks_of(lm, AdaBlock(0.5, (NEWLINE,)), prompt(4), max_new_tokens=40)
    # A window of ten slots: the lines at 6 and 15, then the one at 16 alone; from 17 on none is in sight until 25.
    assert blocks == [(4, 7), (7, 16), (16, 17), (17, 25), (25, 31), (31, 39), (39, 44)]
    assert out.stats.nfe == len(blocks)
    assert tokens(out) == [said[s][0] for s in range(4, 44)]


@pytest.mark.parametrize("cache", ["none", "dual", "prefix", "free"])
@pytest.mark.parametrize("threshold", [0.02, 0.2, 1.1])
def test_blocks_partition_the_gap_and_above_one_they_are_the_fixed_ones(cache, threshold):
    lm = tiny_lm("bidirectional", eos_token_ids=())
    anything = AdaBlock(threshold, tuple(range(VOCAB)), lookahead=0.5)
    options: dict[str, Any] = {"max_new_tokens": 30, "cache": cache, "threshold": 0.5}
    blocks, out = blocks_of(lm, anything, prompt(5), **options)
    assert (blocks[0][0], blocks[-1][1]) == (5, 35)
    assert all(left[1] == right[0] for left, right in pairwise(blocks))
    fixed, plain = blocks_of(lm, 8, prompt(5), **options)
    if threshold > 1:
        assert (blocks, tokens(out), out.stats.nfe) == (fixed, tokens(plain), plain.stats.nfe)
    else:
        assert blocks != fixed


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_row_of_a_batch_gets_the_blocks_of_its_single_run(cache):
    lm = tiny_lm("bidirectional", eos_token_ids=(2, 20))
    policy = AdaBlock(0.15, tuple(range(0, VOCAB, 3)), lookahead=0.5)
    rows = [prompt(3), prompt(17), prompt(9)]
    options: dict[str, Any] = {"max_new_tokens": 26, "block_length": policy, "cache": cache, "threshold": 0.4}
    batch = lm.generate(**padded(rows), **options)
    for b, row in enumerate(rows):
        single = lm.generate(input_ids=[row], **options)
        assert tokens(batch, b) == tokens(single)
        assert batch.row_stats[b].nfe == single.stats.nfe
        assert batch.row_stats[b].positions == single.stats.positions


def test_a_pinned_line_is_no_guess_of_one():
    lm = oracle_lm({5: (NEWLINE, 0.95)}, "bidirectional", eos_token_ids=())
    ids, masked = [7, 0, 0, 0, 0, NEWLINE, 0, 0], [False, True, True, True, True, False, True, True]
    lengths: list[int] = []
    lm.generate(
        input_ids=[ids],
        masked=[masked],
        max_new_tokens=0,
        block_length=AdaBlock(0.5, (NEWLINE,), lookahead=1.0),
        callback_on_step_end=lambda lm, i, t, kw: lengths.append(kw["slots"].shape[1]),
    )
    assert set(lengths) == {7}


def test_models_whose_blocks_are_fixed_by_training_are_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"AdaBlock needs bidirectional attention: got block_causal, .*fixed in training"
    ):
        tiny_lm("block_causal").generate(input_ids=[[5]], max_new_tokens=4, block_length=AdaBlock(delimiter_ids=(3,)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AdaBlock(-0.1), "threshold must be a number >= 0"),
        (lambda: AdaBlock(lookahead=1.5), "lookahead must be <= 1"),
        (lambda: AdaBlock(delimiter_ids=()), "delimiter_ids must be ids >= 0"),
        (lambda: AdaBlock(delimiter_ids=(-1,)), "delimiter_ids must be ids >= 0"),
        (lambda: AdaBlock(default=0), "default must be an int >= 1 or None"),
        (
            lambda: tiny_lm("bidirectional").generate(input_ids=[[5]], max_new_tokens=4, block_length=AdaBlock()),
            r"delimiter_ids must be in \[0, 64\)",
        ),
    ],
)
def test_numbers_out_of_range_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
