"""Which rows each cache recomputes, forward by forward (the table of the caches that users expect), and where it equals no cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dllm.cache.delayed import DelayedCache
from dllm.cache.dual import DualCache
from dllm.cache.free import FreeCache
from dllm.cache.none import NoCache
from dllm.cache.prefix import PrefixCache
from dllm.cache.sliding import SlidingCache
from dllm.cache.sub_block import SubBlockCache
from dllm.cache.vicinity import VicinityCache
from dllm.samplers.sub_block import SubBlock
from tests.spy import Spy
from tests.tiny import tiny_lm

P, G, S = 5, 20, 8
TOTAL = P + G
WIDE = 1000


def prompt(length=P):
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(100 * length)).tolist()


def watch(cache, attention="bidirectional", shift=0, length=P, sampler="threshold", gen=G, **changes):
    """The forwards of one greedy row, one token a step."""
    options: dict[str, Any] = {"threshold": 2.0} if sampler == "threshold" else {}
    lm, spy = tiny_lm(attention, eos_token_ids=(), logits_shift=shift, **changes), Spy(cache)
    out = lm.generate(input_ids=[prompt(length)], max_new_tokens=gen, cache=spy, sampler=sampler, **options)
    return spy.forwards, out.sequences[0].tolist()


def block(forward):
    lo = forward.lo[0]
    return lo, min(lo + S, TOTAL)


def rows(start, stop):
    return list(range(max(start, 0), min(stop, TOTAL)))


TABLE = [
    (NoCache(), lambda f, i, lo, hi, s: rows(0, TOTAL)),
    (FreeCache(), lambda f, i, lo, hi, s: rows(0, TOTAL) if i == 0 else rows(lo - s, TOTAL - s)),
    (PrefixCache(), lambda f, i, lo, hi, s: rows(0, TOTAL) if f.step[0] == 0 else rows(lo - s, TOTAL - s)),
    (DualCache(), lambda f, i, lo, hi, s: rows(0, TOTAL) if f.step[0] == 0 else rows(lo - s, hi - s)),
    (
        VicinityCache(2, 3, warmup_steps=2),
        lambda f, i, lo, hi, s: rows(0, TOTAL) if f.step[0] == 0 or i < 2 else rows(lo - s - 2, hi - s + 3),
    ),
]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("cache", "expected"), TABLE, ids=[type(c).__name__ for c, _ in TABLE])
def test_the_rows_of_every_forward_are_those_of_the_table(cache, expected, shift):
    forwards, _ = watch(cache, shift=shift)
    assert len(forwards) == G
    for i, forward in enumerate(forwards):
        assert forward.computed[0] == expected(forward, i, *block(forward), shift)


@pytest.mark.parametrize("shift", [0, 1])
def test_sliding_computes_a_window_around_the_frontier_and_never_looks_beyond(shift):
    forwards, _ = watch(SlidingCache(3), shift=shift)
    first = forwards[0]
    assert first.computed[0] == rows(0, P + S)
    for forward in forwards[1:]:
        lo, hi = block(forward)
        known = [i for i in range(lo, hi) if not forward.masked[0, i]]
        frontier = known[-1] if known else lo - 1
        assert forward.computed[0] == rows(min(frontier - 3, lo - shift), max(frontier + 3, hi))
        assert not forward.stored[0, max(frontier + 3, hi) :].any()


def test_sliding_reads_a_given_suffix_as_the_first_forward_left_it():
    lm, spy = tiny_lm("bidirectional", eos_token_ids=(), logits_shift=0), Spy(SlidingCache(2))
    from dllm.canvas import infill_canvas
    from dllm.config import GenerationConfig
    from dllm.denoise import denoise

    canvas = infill_canvas([[[5, 6, 7], [8, 9, 10, 11, 12, 13]]], [[4]], lm.spec, lm.device)
    config = GenerationConfig.from_kwargs({"cache": spy, "threshold": 2.0})
    denoise(lm.model, lm._request(config, canvas, infill=True))
    assert spy.forwards[0].computed[0] == list(range(13))
    assert all(f.stored[0, 9:].all() for f in spy.forwards[1:])
    assert all(12 not in f.computed[0] for f in spy.forwards[1:])


@pytest.mark.parametrize("shift", [0, 1])
def test_delayed_freezes_a_row_only_after_it_was_computed_from_its_token(shift):
    forwards, _ = watch(DelayedCache(None), shift=shift)
    seen: set[int] = set()
    for i, forward in enumerate(forwards):
        masks = {j for j in range(TOTAL) if forward.masked[0, j]}
        assert not masks & set(forward.written[0]), "a frozen row was computed from a mask"
        predicting = {j - 1 for j in masks} if shift else set()
        expected = set(range(TOTAL)) if i < 2 else (set(range(TOTAL)) - seen) | predicting
        assert set(forward.computed[0]) == expected
        seen |= set(forward.written[0])
    if not shift:
        # The row set shrinks by the tokens decoded a step before.
        counts = [len(f.computed[0]) for f in forwards[2:]]
        assert [a - b for a, b in pairwise(counts)] == [1] * (len(counts) - 1)


def test_delayed_refreshes_every_row_every_n_forwards():
    forwards, _ = watch(DelayedCache(4))
    assert [i for i, f in enumerate(forwards) if len(f.computed[0]) == TOTAL] == [0, 1, 4, 8, 12, 16]


NEUTRAL = [
    PrefixCache(1),
    VicinityCache(0, 0, 0, refresh_interval=1),
    VicinityCache(WIDE, WIDE, 0),
    SlidingCache(WIDE),
    DelayedCache(1),
]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
@pytest.mark.parametrize("cache", NEUTRAL, ids=str)
def test_a_refresh_at_every_step_equals_no_cache(cache, attention, shift):
    for length in (1, 5, 9):
        assert watch(cache, attention, shift, length)[1] == watch(NoCache(), attention, shift, length)[1]


@pytest.mark.parametrize("origin", ["prompt", "zero"])
@pytest.mark.parametrize("cache", [PrefixCache(), VicinityCache(1, 2, 0), SubBlockCache(WIDE)], ids=str)
def test_caches_that_are_exact_for_block_causal_attention_equal_no_cache(cache, origin):
    for length in (1, 8, 13):
        with_cache = watch(cache, "block_causal", 1, length, block_origin=origin)[1]
        assert with_cache == watch(NoCache(), "block_causal", 1, length, block_origin=origin)[1]


@pytest.mark.parametrize("cache", [PrefixCache(), VicinityCache(0, 0, 0), SlidingCache(1), DelayedCache(None)], ids=str)
def test_it_is_an_approximation_for_bidirectional_attention(cache):
    differ = [watch(cache, length=n)[1] != watch(NoCache(), length=n)[1] for n in range(1, 9)]
    assert any(differ), "stale rows must be seen to be read"


def test_the_first_step_of_each_block_is_the_same_with_prefix_and_dual():
    (prefix, _), (dual, _) = watch(PrefixCache()), watch(DualCache())
    for a, b in zip(prefix, dual, strict=True):
        if a.step[0] == 0:
            assert a.computed == b.computed


@pytest.mark.parametrize("origin", ["prompt", "zero"])
def test_a_sub_block_is_run_alone_once_its_first_token_is_known(origin):
    sampler = SubBlock(2.0, 4)
    forwards, text = watch(SubBlockCache(4), "block_causal", 1, P, sampler, block_origin=origin)
    assert len(text) == G
    for forward in forwards[1:]:
        start = forward.row_lo[0]
        hi = (start // S + 1) * S if origin == "zero" else start + S
        open_rows = rows(start, hi)
        first = next(i for i in open_rows if forward.masked[0, i])
        begin = start + (first - start) // 4 * 4
        alone = not forward.masked[0, begin] and forward.stored[0, open_rows].all() and forward.step[0] > 0
        before = rows(forward.prev_lo[0], start) if forward.step[0] == 0 else []
        assert forward.computed[0] == before + (rows(begin, min(begin + 4, hi)) if alone else open_rows)
        assert forward.written[0] == forward.computed[0]
    assert any(len(f.computed[0]) <= 4 for f in forwards[1:])


def test_in_sub_blocks_as_long_as_the_block_every_pass_is_a_whole_one():
    forwards, _ = watch(SubBlockCache(S), "block_causal", 1)
    assert {len(f.computed[0]) for f in forwards[1:] if f.step[0]} == {S, (P + G - P) % S}


@pytest.mark.parametrize("cache", [SubBlockCache()])
def test_sub_blocks_need_block_causal_attention(cache):
    with pytest.raises(ValueError, match="block-causal attention only"):
        watch(cache)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefixCache(0),
        lambda: PrefixCache(True),
        lambda: SlidingCache(0),
        lambda: VicinityCache(before=-1),
        lambda: VicinityCache(warmup_steps=1.5),  # type: ignore[arg-type]
        lambda: DelayedCache("8"),  # type: ignore[arg-type]
        lambda: SubBlockCache(0),
    ],
)
def test_a_bad_number_raises(make):
    with pytest.raises(ValueError, match="must be an int >="):
        make()
