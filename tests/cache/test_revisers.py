"""Caches under a sampler that changes committed tokens: a block without masks stays open until the sampler has settled it."""

from __future__ import annotations

from typing import Any

import pytest

from dllm.cache.delayed import DelayedCache
from dllm.cache.none import NoCache
from dllm.cache.sub_block import SubBlockCache
from dllm.samplers.token_editing import TokenEditing
from tests.spy import Spy
from tests.tiny import padded, prompt, tiny_lm, tokens

EDITING = TokenEditing(0.3, 0.2)


@pytest.mark.parametrize(
    "cache", ["none", "block", "dual", "prefix", "free", "sliding", "vicinity", "dkv", "sub_block"]
)
@pytest.mark.parametrize("sampler", [TokenEditing(), EDITING], ids=str)
def test_a_row_of_a_batch_equals_its_single_run(cache, sampler):
    options: dict[str, Any] = dict(sampler=sampler, cache=cache, max_new_tokens=15, block_length=16)
    for seed in range(3):
        lm, rows = tiny_lm("block_causal", seed), [prompt(k, seed) for k in (8, 12, 17)]
        out = lm.generate(**padded(rows), **options)
        for b, row in enumerate(rows):
            single = lm.generate(input_ids=[row], **options)
            assert tokens(out, b) == tokens(single)
            assert out.row_stats[b].positions == single.row_stats[0].positions


@pytest.mark.parametrize("cache", [DelayedCache(None), SubBlockCache(4)], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_an_open_block_without_masks_is_computed_whole(cache, shift):
    spy = Spy(cache)
    lm = tiny_lm("block_causal", 1, logits_shift=shift, eos_token_ids=())
    lm.generate(input_ids=[prompt(9)], max_new_tokens=24, sampler=EDITING, cache=spy)
    judged = 0
    for forward in spy.forwards[1:]:
        lo = forward.lo[0]
        if forward.step[0] and not forward.masked[0, lo : lo + 8].any():
            assert set(range(lo, lo + 8)) <= set(forward.computed[0])
            judged += 1
    assert judged > 2


@pytest.mark.parametrize("rule", ["block_causal", "bidirectional"])
def test_delayed_caching_that_refreshes_every_step_equals_no_cache(rule):
    for seed in range(3):
        lm = tiny_lm(rule, seed)
        texts = [
            tokens(lm.generate(input_ids=[prompt(9, seed)], max_new_tokens=20, sampler=EDITING, cache=cache))
            for cache in (NoCache(), DelayedCache(1))
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("cache", ["dkv", "sub_block"])
def test_shadow_rows_need_all_rows_of_the_open_block(cache):
    lm = tiny_lm("block_causal", logits_shift=0)
    with pytest.raises(ValueError, match="cache must compute all rows of the open block .* use 'none', 'block'"):
        lm.generate(
            input_ids=[prompt(9)], max_new_tokens=32, block_length=16, sampler="wino", threshold=0.05, cache=cache
        )
