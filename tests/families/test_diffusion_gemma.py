"""DiffusionGemma behind the decoder's contract equals the wrapped class's own forward."""

import sys
import types

import pytest
import torch

from dllm.families.diffusion_gemma import LayeredStore, gemma_classes
from dllm.families.full_forward import raw_logits
from dllm.types import PADDING_GROUP, Attend
from tests.families.golden import golden_lm, needs_gemma

PROMPT, CANVAS = 20, 16


@pytest.fixture(scope="module")
def lm():
    return golden_lm("diffusion_gemma")


def tokens(batch, length, seed):
    return torch.randint(3, 220, (batch, length), generator=torch.Generator().manual_seed(seed))


@needs_gemma
@torch.no_grad()
def test_logits_equal_the_wrapped_class_with_and_without_conditioning(lm):
    prompt, canvas = tokens(2, PROMPT, 1), tokens(2, CANVAS, 2)
    condition = torch.randn(2, CANVAS, 224, generator=torch.Generator().manual_seed(3))
    for law in (None, condition):
        want = lm.model.wrapped(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=law).logits
        got = raw_logits(lm.model, lm.spec, torch.cat([prompt, canvas], 1), None, law)[:, PROMPT:]
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@needs_gemma
@torch.no_grad()
def test_storing_a_block_and_denoising_the_next_in_one_forward_equals_two(lm):
    prompt, block, canvas = tokens(2, PROMPT, 4), tokens(2, CANVAS, 5), tokens(2, CANVAS, 6)
    rows = torch.arange(PROMPT + 2 * CANVAS).expand(2, -1)
    parts = [rows[:, :PROMPT], rows[:, PROMPT : PROMPT + CANVAS], rows[:, PROMPT + CANVAS :]]

    def run(store, ids, at, write, stored):
        group = torch.div(at - PROMPT, CANVAS, rounding_mode="floor")
        everything = torch.arange(store.capacity).expand(2, -1)
        keys = torch.div(everything - PROMPT, CANVAS, rounding_mode="floor")
        key_group = torch.where(everything < stored, keys, PADDING_GROUP)
        return lm.model(ids, at, store, Attend.by_group(group, None, None, key_group), rows=at, write=write)

    def writes(at, flag):
        return torch.full_like(at, flag).bool()

    apart, fused = (lm.model.new_store(2, PROMPT + 2 * CANVAS) for _ in range(2))
    for store in (apart, fused):
        run(store, prompt, parts[0], writes(parts[0], True), 0)
    run(apart, block, parts[1], writes(parts[1], True), PROMPT)
    want = run(apart, canvas, parts[2], writes(parts[2], False), PROMPT + CANVAS)
    both = torch.cat(parts[1:], 1)
    got = run(fused, torch.cat([block, canvas], 1), both, both < PROMPT + CANVAS, PROMPT)[:, CANVAS:]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for layer in range(3):
        for one, two in zip(apart.view(layer), fused.view(layer), strict=True):
            torch.testing.assert_close(two[:, :, : PROMPT + CANVAS], one[:, :, : PROMPT + CANVAS], atol=1e-5, rtol=1e-5)


@needs_gemma
@torch.no_grad()
def test_a_changed_canvas_changes_no_encoder_row_and_a_later_prompt_token_no_earlier_one(lm):
    prompt, canvas = tokens(1, PROMPT, 7), tokens(1, CANVAS, 8)
    base = raw_logits(lm.model, lm.spec, torch.cat([prompt, canvas], 1))
    other = raw_logits(lm.model, lm.spec, torch.cat([prompt, canvas.flip(1)], 1))
    assert torch.equal(base[:, :PROMPT], other[:, :PROMPT])
    assert not torch.equal(base[:, PROMPT:], other[:, PROMPT:])
    changed = prompt.clone()
    changed[0, 10] = 5
    late = raw_logits(lm.model, lm.spec, torch.cat([changed, canvas], 1))
    torch.testing.assert_close(late[:, :10], base[:, :10], atol=1e-5, rtol=1e-5)
    assert (late[:, 10:PROMPT] - base[:, 10:PROMPT]).abs().amax(-1).min() > 1e-3


@needs_gemma
def test_conditioning_is_refused_where_it_has_no_meaning_or_the_wrong_shape(lm):
    with pytest.raises(ValueError, match="no self-conditioning"):
        raw_logits(golden_lm("mdlm").model, golden_lm("mdlm").spec, tokens(1, 5, 0) % 70, None, torch.zeros(1, 5, 80))
    with pytest.raises(ValueError, match=r"conditioning_logits must be \[1, 16, V\]"):
        raw_logits(lm.model, lm.spec, tokens(1, 30, 0), None, torch.zeros(1, 4, 224))


def test_an_older_transformers_is_told_apart_from_a_broken_checkpoint(monkeypatch):
    older = types.ModuleType("transformers")
    older.__version__ = "5.17.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", older)
    with pytest.raises(ImportError, match=r"DiffusionGemmaForBlockDiffusion .*: got transformers 5\.17\.0"):
        gemma_classes()


def test_a_layered_store_keeps_layers_of_different_shapes_apart():
    store = LayeredStore([(2, 4), (1, 8), (2, 4)], 3, 5, torch.float32, "cpu")
    rows, valid = torch.tensor([[0, 1]] * 3), torch.ones(3, 2, dtype=torch.bool)
    for layer, (heads, width) in enumerate([(2, 4), (1, 8), (2, 4)]):
        value = torch.full((3, heads, 2, width), float(layer + 1))
        store.write(layer, rows, valid, value, -value)
    store.mark(rows, valid)
    store.extent = 2
    assert [float(store.view(layer)[0].mean()) for layer in range(3)] == [1.0, 2.0, 3.0]
    assert [float(store.view(layer)[1].mean()) for layer in range(3)] == [-1.0, -2.0, -3.0]
    kept = store.select(torch.tensor([2]))
    assert (kept.batch, kept.capacity, kept.extent, kept.stored.tolist()) == (
        1,
        5,
        2,
        [[True, True, False, False, False]],
    )
    kept.crop(torch.tensor([1]))
    assert kept.stored.sum() == 1
    assert store.stored.sum() == 6
