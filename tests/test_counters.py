"""Positions and forwards, exactly: counters, not times, say what a cache saves (P prompt, G generation, S block length)."""

from __future__ import annotations

import pytest

from dllm.cache.block import BlockCache
from dllm.cache.dual import DualCache
from dllm.cache.free import FreeCache
from dllm.cache.none import NoCache
from tests.families.golden import golden_lm
from tests.spy import Spy
from tests.tiny import padded, prompt, tiny_lm

S = 8
ONE_A_STEP = 2.0
BOTH = ["block_causal", "bidirectional"]


def counts(cache, rule, prompt_length, gen, threshold=ONE_A_STEP, **changes):
    """Rows of each forward, checked against the Stats."""
    lm, spy = tiny_lm(rule, eos_token_ids=(), **changes), Spy(cache)
    out = lm.generate(input_ids=[prompt(prompt_length)], max_new_tokens=gen, cache=spy, threshold=threshold)
    assert out.stats.positions == sum(spy.counts())
    assert out.stats.nfe == len(spy.counts())
    assert out.row_stats[0].positions == out.stats.positions
    return spy.counts()


def blocks(gen):
    """Slots of each block of a generation that starts at a block border."""
    return [min(S, gen - at) for at in range(0, gen, S)]


def per_step(gen, first, later):
    """One step per slot: first(block number) rows in a block's first step, later(block number) in the others."""
    return [first(i) if step == 0 else later(i) for i, size in enumerate(blocks(gen)) for step in range(size)]


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize(("length", "gen"), [(1, 1), (5, 8), (13, 20)])
def test_vanilla_computes_prompt_and_generation_in_every_step(rule, length, gen):
    assert counts(NoCache(), rule, length, gen) == [length + gen] * gen


@pytest.mark.parametrize(("length", "gen"), [(1, 1), (5, 8), (13, 16), (13, 20)])
def test_block_cache_prefills_once_then_2s_rows_in_a_blocks_first_step_and_s_later(length, gen):
    sizes = blocks(gen)
    expected = [length, *per_step(gen, lambda i: sizes[i] + (S if i else 0), lambda i: sizes[i])]
    assert counts(BlockCache(), "block_causal", length, gen) == expected


def test_block_cache_of_blocks_done_in_one_step_runs_2s_rows_a_forward():
    assert counts(BlockCache(), "block_causal", 5, 32, threshold=0.0) == [5, S, 2 * S, 2 * S, 2 * S]


@pytest.mark.parametrize("length", [3, 8, 13])
def test_block_cache_on_a_grid_from_zero_keeps_the_prompts_tail_in_the_open_block(length):
    tail = length % S
    got = counts(BlockCache(), "block_causal", length, 16, threshold=0.0, block_origin="zero")
    # Whole prompt blocks are prefilled; the tail is computed with the first block, which then has S rows of which 8 - tail decode.
    sizes = [S, S] if tail == 0 else [S, S, tail]
    expected = [length - tail] * (length > tail) + [sizes[0]] + [S + size for size in sizes[1:]]
    assert got == expected


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize(("length", "gen"), [(1, 8), (5, 16), (13, 20)])
def test_dual_cache_runs_one_full_pass_at_a_blocks_start_then_s_rows(rule, length, gen):
    sizes = blocks(gen)
    expected = per_step(gen, lambda i: length + gen, lambda i: sizes[i])
    assert counts(DualCache(), rule, length, gen) == expected


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_dual_cache_refreshes_every_n_steps_of_a_block(rule, interval):
    expected = [5 + 16 if step % interval == 0 else S for _ in range(2) for step in range(S)]
    assert counts(DualCache(refresh_interval=interval), rule, 5, 16) == expected


@pytest.mark.parametrize("folder", ["llada", "dream"])
@pytest.mark.parametrize(("length", "gen", "block_length"), [(5, 12, 4), (9, 16, 8), (5, 11, 4)])
@pytest.mark.parametrize("threshold", [ONE_A_STEP, 0.1])
def test_dual_cache_on_llada_and_dream_computes_exactly_the_blocks_length_in_every_cached_step(
    folder, length, gen, block_length, threshold
):
    lm, spy = golden_lm(folder), Spy(DualCache())
    steps: list[int] = []
    ids = prompt(length)
    out = lm.generate(
        input_ids=[ids],
        max_new_tokens=gen,
        block_length=block_length,
        cache=spy,
        threshold=threshold,
        eos_token_id=[],
        callback_on_step_end=lambda lm, step, timestep, kwargs: steps.append(int(kwargs["slots"][0, 0])),
    )
    # One forward a step; the first of each block computes everything, and decodes as well.
    assert out.stats.nfe == len(steps) == len(spy.counts())
    expected = []
    for at, start in enumerate(steps):
        rows = min(block_length, length + gen - start)
        expected.append(length + gen if at == 0 or steps[at - 1] != start else rows)
    assert spy.counts() == expected
    assert out.stats.positions == sum(expected)
    assert len(set(steps)) == -(-gen // block_length)
    if threshold == ONE_A_STEP:
        assert len(steps) == gen
    else:
        assert len(steps) < gen, "a step of several tokens costs the same rows"
    # What the rows are: a shifted model reads slot i one row before it, but Dream's first slot comes from the full pass alone.
    for forward, start, count in zip(spy.forwards, steps, expected, strict=True):
        first = 0 if count == length + gen else start
        assert forward.computed == [list(range(first, first + count))]


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize(("length", "gen"), [(1, 8), (5, 16), (13, 20)])
def test_free_cache_runs_everything_once_then_the_open_block_and_what_follows(rule, length, gen):
    expected = per_step(gen, lambda i: gen - i * S, lambda i: gen - i * S)
    expected[0] = length + gen
    assert counts(FreeCache(), rule, length, gen) == expected


@pytest.mark.parametrize("rule", BOTH)
def test_free_cache_with_delay_computes_the_finished_block_once_more(rule):
    expected = per_step(24, lambda i: 24 - i * S + (S if i else 0), lambda i: 24 - i * S)
    expected[0] = 5 + 24
    assert counts(FreeCache(freeze_delay=1), rule, 5, 24) == expected


@pytest.mark.parametrize("interval", [1, 3])
def test_free_cache_refreshes_every_n_forwards(interval):
    expected = per_step(16, lambda i: 16 - i * S, lambda i: 16 - i * S)
    expected = [5 + 16 if n % interval == 0 else rows for n, rows in enumerate(expected)]
    assert counts(FreeCache(refresh_interval=interval), "bidirectional", 5, 16) == expected


CASES = [
    (BlockCache(), "block_causal"),
    (DualCache(), "block_causal"),
    (DualCache(), "bidirectional"),
    (FreeCache(), "bidirectional"),
    (FreeCache(freeze_delay=1), "block_causal"),
    (NoCache(), "bidirectional"),
]


@pytest.mark.parametrize("threshold", [0.0, 0.5, ONE_A_STEP])
@pytest.mark.parametrize(("cache", "rule"), CASES, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_each_row_of_a_ragged_batch_is_counted_as_if_it_were_alone(cache, rule, threshold):
    lm = tiny_lm(rule)
    rows = [prompt(n) for n in (3, 17, 9)]
    out = lm.generate(**padded(rows), max_new_tokens=20, cache=cache, threshold=threshold)
    for b, row in enumerate(rows):
        single = lm.generate(input_ids=[row], max_new_tokens=20, cache=cache, threshold=threshold)
        assert (out.row_stats[b].nfe, out.row_stats[b].positions) == (single.stats.nfe, single.stats.positions)
    assert out.stats.positions == sum(s.positions for s in out.row_stats)
    # The call's forwards: as many as the row that took longest.
    assert out.stats.nfe == max(s.nfe for s in out.row_stats)


def test_a_row_that_is_done_costs_nothing_more():
    lm, spy = tiny_lm("bidirectional", eos_token_ids=(2, 20, 28, 30)), Spy(NoCache())
    out = lm.generate(input_ids=[prompt(4), prompt(4, 1)], max_new_tokens=40, cache=spy, threshold=ONE_A_STEP)
    fewest = min(s.nfe for s in out.row_stats)
    assert fewest < out.stats.nfe, "the rows must end at different steps for this test to say anything"
    assert [len(f.computed) for f in spy.forwards] == [2] * fewest + [1] * (out.stats.nfe - fewest)
