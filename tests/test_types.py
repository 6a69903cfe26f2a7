"""Attend: each constructor's mask against the sentence that defines it, evaluated pair by pair."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.types import PADDING_GROUP, Attend, Plan, pack_bits, unpack_bits
from tests.tiny import tiny_spec


@st.composite
def shapes(draw):
    """batch, queries, keys and a generator for the numbers."""
    batch, queries, keys = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 7, 20, 66])), draw(st.integers(0, 9))
    return batch, queries, keys, torch.Generator().manual_seed(draw(st.integers(0, 10**6)))


def pairwise(batch, queries, keys, rule):
    """bool [B, Q, keys] of rule(b, q, k)."""
    return torch.tensor(
        [[[bool(rule(b, q, k)) for k in range(keys)] for q in range(queries)] for b in range(batch)], dtype=torch.bool
    ).view(batch, queries, keys)


@given(st.integers(1, 3), st.sampled_from([1, 2, 63, 64, 65, 128, 130]), st.integers(0, 10**6))
def test_packed_bits_come_back_for_all_widths_around_a_word(batch, rows, seed):
    mask = torch.rand(batch, rows, rows, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.int64
    assert bits.shape == (batch, rows, -(-rows // 64))
    assert torch.equal(unpack_bits(bits, rows), mask)


def test_bit_j_of_word_w_is_new_row_64_w_plus_j():
    mask = torch.zeros(1, 1, 70, dtype=torch.bool)
    mask[0, 0, [0, 5, 63, 64, 69]] = True
    bits = pack_bits(mask)[0, 0].tolist()
    assert [b % 2**64 for b in bits] == [1 + 2**5 + 2**63, 1 + 2**5]


@given(shapes())
def test_by_group_is_the_group_rule_for_stored_keys_and_new_rows_alike(shape):
    batch, queries, keys, generator = shape
    group = torch.randint(-3, 4, (batch, queries), generator=generator)
    low = torch.randint(-4, 3, (batch, queries), generator=generator)
    valid = torch.rand(batch, queries, generator=generator) < 0.8
    stored = torch.randint(-4, 5, (batch, keys), generator=generator)
    stored[torch.rand(batch, keys, generator=generator) < 0.3] = PADDING_GROUP
    attend = Attend.by_group(group, low, valid, stored)
    g, low_of, v, n = group.tolist(), low.tolist(), valid.tolist(), stored.tolist()

    def sees_stored(b, q, k):
        return n[b][k] != PADDING_GROUP and low_of[b][q] <= n[b][k] <= g[b][q]

    def sees_new(b, q, k):
        return q == k or (v[b][k] and low_of[b][q] <= g[b][k] <= g[b][q])

    assert torch.equal(attend.stored_mask, pairwise(batch, queries, keys, sees_stored))
    assert torch.equal(attend.new_mask, pairwise(batch, queries, queries, sees_new))
    assert torch.equal(attend.mask(), torch.cat([attend.stored_mask, attend.new_mask], -1))
    # The dense mask that the constructor leaves behind is what the bits say.
    assert torch.equal(unpack_bits(attend.bits, queries), attend.new_mask)


@given(shapes(), st.integers(1, 9))
def test_bidirectional_causal_and_block_causal_are_what_their_names_say(shape, block_length):
    batch, queries, _, generator = shape
    valid = torch.rand(batch, queries, generator=generator) < 0.7
    position = torch.randint(0, 40, (batch, queries), generator=generator)
    at, real = position.tolist(), valid.tolist()
    cases = {
        "bidirectional": (Attend.bidirectional(valid), lambda b, q, k: True),
        "causal": (Attend.causal(position, valid), lambda b, q, k: at[b][k] <= at[b][q]),
        "block_causal": (
            Attend.block_causal(position, block_length, valid),
            lambda b, q, k: at[b][k] // block_length <= at[b][q] // block_length,
        ),
    }
    for name, (attend, rule) in cases.items():
        # A padded row may look at whatever it likes (nobody reads it), but nobody looks at a padded row.
        expected = pairwise(
            batch, queries, queries, lambda b, q, k, rule=rule: q == k or (real[b][k] and rule(b, q, k))
        )
        assert torch.equal(attend.mask(), expected), name


def test_block_length_one_is_causal_and_a_block_that_holds_all_is_bidirectional():
    position = torch.arange(13)[None]
    assert torch.equal(Attend.block_causal(position, 1).mask(), Attend.causal(position).mask())
    everything = torch.ones(1, 13, dtype=torch.bool)
    assert torch.equal(Attend.block_causal(position, 13).mask(), Attend.bidirectional(everything).mask())


@given(shapes(), st.integers(1, 12))
def test_a_window_bounds_the_distance_to_stored_keys_only(shape, window):
    batch, queries, keys, generator = shape
    position = torch.randint(10, 40, (batch, queries), generator=generator)
    key_position = torch.randint(0, 40, (batch, keys), generator=generator)
    plain = Attend.causal(position, None, key_position)
    windowed = replace(plain, window=window, position=position, key_position=key_position)
    at, key_at = position.tolist(), key_position.tolist()
    expected = pairwise(batch, queries, keys, lambda b, q, k: key_at[b][k] <= at[b][q] < key_at[b][k] + window)
    assert torch.equal(windowed.stored_mask, expected)
    assert torch.equal(windowed.new_mask, plain.new_mask)


def test_every_row_sees_something_so_that_no_softmax_is_empty():
    attend = Attend.bidirectional(torch.tensor([[True, False, False]]), torch.full((1, 4), PADDING_GROUP))
    assert attend.mask().any(-1).all()


def test_plan_of_ranges_and_of_mask_name_the_same_rows():
    start, stop = torch.tensor([2, 0]), torch.tensor([5, 1])
    decode = torch.tensor([True, True])
    compute = (torch.arange(7) >= start[:, None]) & (torch.arange(7) < stop[:, None])
    for plan in (Plan.of_ranges(start, stop, 7, decode), Plan.of_mask(compute, decode)):
        rows = [row[valid].tolist() for row, valid in zip(plan.rows, plan.valid, strict=True)]
        assert rows == [[2, 3, 4], [0]]
        assert torch.equal(plan.write, plan.valid)


@pytest.mark.parametrize(
    "change",
    [
        {"mask_token_id": 64},
        {"mask_token_id": -1},
        {"block_length": 0},
        {"logits_shift": 2},
        {"attention": "full"},
        {"infill": "middle"},
        {"block_origin": "end"},
        {"first_slot": "none"},
        {"confidence": "tempered"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_spec_refuses_a_value_that_no_decoder_honours_and_names_the_field(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        tiny_spec(**change)
