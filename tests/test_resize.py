"""Gaps that grow and shrink: limits, budgets, pinned text, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.resize import Resize
from tests.families.golden import golden_lm
from tests.tiny import MASK, tiny_lm

EXPAND, DELETE = 60, 61


def lm_of(**changes):
    return tiny_lm("bidirectional", logits_shift=0, expand_token_id=EXPAND, delete_token_id=DELETE, **changes)


def wish(token, times=1000):
    """A processor that wants ``token`` in the first ``times`` steps, and plain text (token 7) afterwards."""
    calls = [0]

    def process(logits, slots):
        calls[0] += 1
        out = torch.zeros_like(logits)
        out[..., 7] = 5.0
        if calls[0] <= times:
            out[..., token] = 9.0
        # What the loop has barred stays barred.
        return out.masked_fill(logits == -float("inf"), -float("inf"))

    return process


def fill(lm, resize, token, times=1000, ids=((5, MASK, MASK, 9),), **options):
    masked = [[t == MASK for t in row] for row in ids]
    settings: dict[str, Any] = {"max_new_tokens": 0, "block_length": 32, "sampler": "low_confidence", **options}
    return lm.generate(
        input_ids=[list(r) for r in ids], masked=masked, resize=resize, logits_processor=wish(token, times), **settings
    )


def test_an_expansion_makes_two_masks_of_one_and_a_deletion_removes_it():
    lm = lm_of()
    assert fill(lm, Resize(10), EXPAND, times=1).sequences.tolist() == [[7, 7, 7, 9]]
    assert fill(lm, Resize(10), DELETE, times=1).sequences.tolist() == [[7, 9]]
    assert fill(lm, Resize(10, delete_to_right=True), DELETE, times=1).sequences.tolist() == [[9]]


@pytest.mark.parametrize(
    ("resize", "length"), [(Resize(2), 2), (Resize(5), 5), (Resize(40, expand_budget=3), 5), (Resize(9, 0), 2)]
)
def test_growth_ends_at_the_longest_gap_or_with_the_budget(resize, length):
    out = fill(lm_of(), resize, EXPAND)
    assert out.sequences.tolist() == [[7] * length + [9]]
    assert out.stats.useful_tokens == length


def test_a_gap_may_vanish():
    out = fill(lm_of(), Resize(4), DELETE)
    assert out.sequences.tolist() == [[9]]
    assert out.stats.useful_tokens == 0
    assert out.stats.nfe == 2


def test_several_slots_that_ask_for_the_last_place_get_one_and_the_rest_stay_masks():
    out = fill(lm_of(), Resize(3), EXPAND, times=1, sampler="threshold", threshold=0.0)
    assert out.sequences.tolist() == [[7, 7, 7, 9]]


def test_rows_of_a_batch_grow_apart_and_equal_their_single_runs():
    lm = golden_lm("dreamon")
    prompts = [[141, 20, 102, 6, 150, 150, 61, 140], [141, 56, 150, 150, 150, 36, 137, 140]]
    options: dict[str, Any] = {
        "max_new_tokens": 0,
        "block_length": 32,
        "sampler": "dream_entropy",
        "resize": Resize(9, 6),
    }
    masked = [[t == 150 for t in row] for row in prompts]
    both = lm.generate(input_ids=prompts, masked=masked, **options)
    for b, row in enumerate(prompts):
        single = lm.generate(input_ids=[row], masked=[masked[b]], **options)
        assert both.sequences[b, : both.lengths[b]].tolist() == single.sequences[0].tolist()
        assert both.row_stats[b].nfe == single.stats.nfe
        assert both.row_stats[b].useful_tokens == single.stats.useful_tokens


@pytest.mark.parametrize("to_right", [False, True])
def test_a_block_that_is_deleted_gives_way_to_the_next_one(to_right):
    lm = lm_of()
    ids = (5, *[MASK] * 6, 9)
    # A block of three goes in one step, the other one is filled, and one of the given token alone closes the row.
    out = fill(
        lm, Resize(9, delete_to_right=to_right), DELETE, 1, (ids,), block_length=3, sampler="threshold", threshold=0.0
    )
    assert out.sequences.tolist() == [[9] if to_right else [7, 7, 7, 9]]
    assert out.stats.nfe == (1 if to_right else 3)
    # A deletion that takes the masks to its right along reaches beyond its block.
    out = fill(lm, Resize(9, delete_to_right=to_right), DELETE, 1, (ids,), block_length=3, sampler="sequential")
    assert out.sequences.tolist() == [[9] if to_right else [7] * 5 + [9]]


@pytest.mark.parametrize("to_right", [False, True])
def test_rows_that_shrink_in_blocks_equal_their_single_runs(to_right):
    ids = [[5, 8, MASK, MASK, 7, MASK, MASK, MASK, MASK, 9], [5, *[MASK] * 4, 11, 12, MASK, MASK, 9]]
    masked = [[t == MASK for t in row] for row in ids]
    options: dict[str, Any] = {"max_new_tokens": 0, "block_length": 3, "resize": Resize(9, delete_to_right=to_right)}
    for seed in range(12):
        lm = tiny_lm("bidirectional", seed, logits_shift=0, expand_token_id=EXPAND, delete_token_id=DELETE)
        lm.model.lm_head.weight[EXPAND : DELETE + 1] *= 1.6
        both = lm.generate(input_ids=ids, masked=masked, **options)
        for b, row in enumerate(ids):
            single = lm.generate(input_ids=[row], masked=[masked[b]], **options)
            assert both.sequences[b, : both.lengths[b]].tolist() == single.sequences[0].tolist()
            assert both.row_stats[b].nfe == single.stats.nfe


def test_without_resize_the_expand_token_is_never_written():
    lm = lm_of()
    out = lm.generate(
        input_ids=[[5, MASK, MASK, 9]],
        masked=[[0, 1, 1, 0]],
        max_new_tokens=0,
        block_length=8,
        logits_processor=wish(EXPAND),
    )
    assert out.sequences.tolist() == [[7, 7, 9]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Resize(0), "max_gap_length must be an int >= 1"),
        (lambda: Resize(3, -1), "expand_budget must be an int >= 0"),
        (lambda: Resize(3, delete_to_right=1), "delete_to_right must be a bool"),  # type: ignore[arg-type]
        (lambda: fill(tiny_lm("bidirectional"), Resize(4), 7), "expand and a delete token"),
        (lambda: fill(lm_of(), Resize(1), 7), "max_gap_length must be >= the number of masks 2"),
        (lambda: fill(lm_of(), Resize(4), 7, cache="dual"), "cache must be 'none' with resize"),
        (lambda: fill(lm_of(), Resize(400), 7), "must fit in 256 positions"),
        (lambda: lm_of().generate(input_ids=[[5]], max_new_tokens=2, resize=Resize(4)), "resize needs masked"),
    ],
)
def test_what_cannot_be_honoured_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()
