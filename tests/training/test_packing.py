"""Packed sequences: documents stay apart, slots keep their rows, batches are full."""

import numpy as np
import pytest
import torch

from dllm.model.adapter import add_lora
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.training.corruption import CorruptionConfig, corrupt
from dllm.training.data import Documents
from dllm.training.forward import TrainingForward
from dllm.training.layout import dense_mask, training_mask
from dllm.training.packing import SLOT_MULTIPLE, PackedBatches, batch_loader, pack

CONFIG = CorruptionConfig("block_causal", block_length=4, max_rows=192, max_gap=16)


def documents(count: int = 30, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of((rng.integers(16, 60, rng.integers(12, 50)), int(rng.integers(1, 8))) for _ in range(count))


def layouts(count: int):
    rng, source = np.random.default_rng(3), documents()
    return [corrupt(*source[i], CONFIG, rng) for i in range(count)]


def test_a_packed_document_has_its_own_mask_and_sees_nobody_else() -> None:
    first, second, third = layouts(3)
    batch = pack([[first, second], [third]], 420)
    mask = training_mask(batch.document, batch.copy, batch.group, batch.low)
    a, b = first.num_rows, first.num_rows + second.num_rows
    assert torch.equal(mask[0, :a, :a], dense_mask(first)[0])
    assert torch.equal(mask[0, a:b, a:b], dense_mask(second)[0])
    assert not mask[0, :a, a:].any() and not mask[0, a:b, :a].any() and not mask[0, :b, b:].any()
    assert not mask[0, b:, :b].any() and mask[0, b:, b:].all()
    assert torch.equal(mask[1, : third.num_rows, : third.num_rows], dense_mask(third)[0])


def test_slots_point_at_the_rows_of_their_own_document() -> None:
    parts = layouts(4)
    batch = pack([parts[:2], parts[2:]], 420)
    rows = batch.slot_row[batch.slot_weight > 0]
    token = torch.cat([torch.from_numpy(p.slot_token.astype(np.int64)) for p in parts])
    assert torch.equal(batch.slot_token[: len(token)], token)
    expected = []
    for b, pair in enumerate((parts[:2], parts[2:])):
        at = 0
        for part in pair:
            expected += [b * 420 + at + int(r) for r in part.slot_row]
            at += part.num_rows
    assert rows.tolist() == expected
    assert len(batch.slot_row) % SLOT_MULTIPLE == 0


def test_hidden_states_of_a_document_do_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    model = add_lora(Decoder(DecoderConfig(64, 32, 48, 2, 4, 2, 8, 256)), 2, 4, 3)
    forward = TrainingForward(model, "sdpa", compiled=False)
    first, second, third = layouts(3)
    with torch.no_grad():
        alone = forward.hidden(pack([[second]], 420))[0, : second.num_rows]
        packed = forward.hidden(pack([[first, second, third]], 640))[0]
    there = packed[first.num_rows : first.num_rows + second.num_rows]
    torch.testing.assert_close(there, alone, rtol=1e-5, atol=1e-5)


def test_a_document_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must hold the documents of sequence 0"):
        pack([layouts(2)], 64)


def test_batches_are_nearly_full_and_the_same_for_the_same_seed() -> None:
    source = [(documents(), 1.0)]
    stream = iter(PackedBatches(source, CONFIG, 4, 384, seed=5))
    again = iter(PackedBatches(source, CONFIG, 4, 384, seed=5))
    filled = []
    for _ in range(5):
        batch, twin = next(stream), next(again)
        assert torch.equal(batch.ids, twin.ids) and torch.equal(batch.masked, twin.masked)
        assert batch.ids.shape == (4, 384)
        filled.append((batch.document >= 0).float().mean().item())
    assert min(filled) > 0.85
    other = next(iter(PackedBatches(source, CONFIG, 4, 384, seed=6)))
    assert not torch.equal(other.ids, next(iter(PackedBatches(source, CONFIG, 4, 384, seed=5))).ids)


def test_every_document_is_drawn_once_an_epoch_and_sources_by_their_shares() -> None:
    many = Documents.of((np.full(12, 20 + i), 2) for i in range(10))
    other = Documents.of((np.full(12, 50), 2) for _ in range(3))
    config = CorruptionConfig("bidirectional", infill_share=0.0, max_rows=192, max_extra=0)
    stream = PackedBatches([(many, 0.75), (other, 0.25)], config, 1, 192, 0).layouts(np.random.default_rng(0))
    first = [int(next(stream).ids[0]) for _ in range(400)]
    mine = [i for i in first if i != 50]
    assert sorted(mine[:10]) == list(range(20, 30)) and sorted(mine[10:20]) == list(range(20, 30))
    assert 60 < len(first) - len(mine) < 140


def test_worker_processes_draw_different_batches() -> None:
    dataset = PackedBatches([(documents(), 1.0)], CONFIG, 2, 384, seed=5)
    stream = iter(batch_loader(dataset, workers=2, pin=False))
    first, second = next(stream), next(stream)
    assert first.ids.shape == second.ids.shape == (2, 384)
    assert not torch.equal(first.ids, second.ids)


def test_bad_sources_and_rows_are_named() -> None:
    with pytest.raises(ValueError, match="sources must hold"):
        PackedBatches([], CONFIG, 2, 384, 0)
    with pytest.raises(ValueError, match="max_rows must be <= rows 128: got 192"):
        PackedBatches([(documents(), 1.0)], CONFIG, 2, 128, 0)


def test_workers_share_the_documents_of_an_epoch() -> None:
    documents = Documents.of([([1, 2, 10 + i, 3], 1) for i in range(30)])
    dataset = PackedBatches(
        [(documents, 1.0)], CorruptionConfig("block_causal", infill_share=0.0, max_rows=128), 2, 128, 0
    )
    seen = []
    for part in range(3):
        stream = dataset.layouts(np.random.default_rng(part), (part, 3))
        seen.append({int(next(stream).ids[2]) for _ in range(10)})
    assert [len(x) for x in seen] == [10, 10, 10]
    assert set.union(*seen) == set(range(10, 40))
