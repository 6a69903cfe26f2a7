"""The store of keys and values: what is written where, what is forgotten, and that a rotated key equals a fresh one."""

from __future__ import annotations

import pytest
import torch

from dllm.model.kv_store import KVStore
from dllm.types import Attend
from tests.tiny import tiny_decoder


def filled(batch=2, capacity=6):
    """A store whose key and value at row n of sequence b say b and n."""
    store = KVStore(2, batch, 1, capacity, 2)
    numbers = torch.arange(batch)[:, None] * 100 + torch.arange(capacity)
    rows = torch.arange(capacity).expand(batch, -1)
    for layer in range(2):
        k = (numbers + 1000 * layer)[:, None, :, None].expand(-1, 1, -1, 2).float()
        store.write(layer, rows, torch.ones_like(rows, dtype=torch.bool), k, -k)
    store.mark(rows, torch.ones_like(rows, dtype=torch.bool))
    return store


def numbers_of(store, layer=0):
    return store.view(layer)[0][:, 0, :, 0].long().tolist()


def test_rows_are_written_where_they_belong_and_only_where_valid():
    store = KVStore(1, 2, 1, 4, 2)
    rows, valid = torch.tensor([[3, 1, 0], [2, 2, 1]]), torch.tensor([[True, True, False], [False, True, True]])
    k = torch.tensor([[30, 10, 99], [99, 20, 15]])[:, None, :, None].expand(-1, 1, -1, 2).float()
    store.write(0, rows, valid, k, -k)
    assert numbers_of(store) == [[0, 10, 0, 30], [0, 15, 20, 0]]
    assert torch.equal(store.view(0)[1], -store.view(0)[0])
    assert not store.stored.any()
    store.mark(rows, valid)
    assert store.stored.tolist() == [[False, True, False, True], [False, True, True, False]]


def test_extent_bounds_the_view():
    store = filled()
    store.extent = 2
    keys, values = store.view(1)
    assert keys.shape == values.shape == (2, 1, 2, 2)


def test_crop_forgets_what_lies_behind_each_sequences_length():
    store = filled()
    store.crop(torch.tensor([2, 5]))
    assert store.stored.sum(-1).tolist() == [2, 5]
    assert store.stored[0].tolist() == [True, True, False, False, False, False]


def test_compact_moves_rows_and_their_marks_in_every_layer():
    store = filled()
    store.crop(torch.tensor([4, 6]))
    store.compact(torch.tensor([[3, 0, 5, -1], [5, 5, 1, 2]]))
    assert [row[:4] for row in numbers_of(store)] == [[3, 0, 5, 0], [105, 105, 101, 102]]
    assert [row[:4] for row in numbers_of(store, 1)][1] == [1105, 1105, 1101, 1102]
    # Row 5 of the first sequence was forgotten before it was moved; -1 is an empty row; everything behind is forgotten.
    assert store.stored.tolist() == [[True, True, False, False, False, False], [True, True, True, True, False, False]]
    with pytest.raises(ValueError, match="index must have at most 6 columns: got 7"):
        store.compact(torch.zeros(2, 7, dtype=torch.int64))


def test_select_copies_the_chosen_sequences_in_order():
    store = filled(3)
    other = store.select(torch.tensor([2, 0, 2]))
    assert other.batch == 3
    assert [row[0] for row in numbers_of(other)] == [200, 0, 200]
    other.data.zero_()
    assert numbers_of(store)[2][0] == 200


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_moving_keys_by_a_distance_equals_computing_them_there(rotary_dim):
    from dataclasses import replace

    from dllm.model.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(replace(tiny_decoder().config, rotary_dim=rotary_dim)).eval().requires_grad_(False)
    ids, rows = torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None]
    everything = torch.ones_like(rows, dtype=torch.bool)
    stores = []
    for start in (0, 11):
        store = decoder.new_store(1, 4)
        store.extent = 0
        decoder(ids, rows + start, store, Attend.causal(rows), rows=rows, write=everything)
        stores.append(store)
    moved, fresh = stores
    chosen = torch.tensor([[True, True, False, True]])
    cos, sin = (x[:, 0] for x in decoder.rotary(torch.full_like(rows, 11)))
    before = moved.data.clone()
    moved.rotate(rows, chosen, cos, sin)
    torch.testing.assert_close(
        moved.data[:, 0, :, :, [0, 1, 3]], fresh.data[:, 0, :, :, [0, 1, 3]], atol=1e-5, rtol=1e-5
    )
    assert torch.equal(moved.data[:, 0, :, :, 2], before[:, 0, :, :, 2])
    assert torch.equal(moved.data[:, 1, :, :, :4], before[:, 1, :, :, :4])
    assert not torch.allclose(before[:, 0, :, :, :2], fresh.data[:, 0, :, :, :2])


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="KVStore sizes must be >= 1.*capacity 0"):
        KVStore(1, 1, 1, 0, 4)
