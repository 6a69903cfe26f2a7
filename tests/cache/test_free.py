"""FreeCache: invariants F1 to F5 of its notes, and where it is exact."""

from __future__ import annotations

import pytest
import torch

from dllm.cache.free import FreeCache
from dllm.canvas import generation_canvas
from dllm.denoise import DenoiseLoop
from dllm.samplers.threshold import Threshold
from tests.spy import Spy
from tests.tiny import FILLER, MASK, loop_request, prompt, tiny_lm

BOTH = ["block_causal", "bidirectional"]


def run(lm, cache, length=5, gen=24, **options):
    return lm.generate(input_ids=[prompt(length)], max_new_tokens=gen, cache=cache, **options).sequences[0].tolist()


def start_loop(lm, cache, length, gen, threshold):
    canvas = generation_canvas([prompt(length)], [gen], lm.spec, "cpu")
    return DenoiseLoop(lm.model, loop_request(canvas, lm.spec, cache=cache, sampler=Threshold(threshold)))


@pytest.mark.parametrize("length", [1, 5, 12])
def test_f1_with_one_block_the_prompts_keys_stay_those_of_the_first_forward(length):
    """Written down once more: step 0 over everything, later steps over the generation with the prompt's frozen keys."""
    lm = tiny_lm("bidirectional", logits_shift=0, eos_token_ids=())
    gen, total = 8, length + 8
    model, position = lm.model, torch.arange(total)[None]
    ids = torch.tensor([prompt(length) + [0] * gen])
    masked = torch.tensor([[False] * length + [True] * gen])
    store = model.new_store(1, total)
    hidden = torch.zeros(1, total, 32)
    for step in range(gen):
        new = slice(0 if step == 0 else length, total)
        count = total - new.start
        store.extent = new.start
        everything = torch.ones(1, count, total, dtype=torch.bool)
        embeds = model.embed(ids[:, new], masked[:, new], MASK)
        write = torch.ones(1, count, dtype=torch.bool)
        hidden[:, new] = model(
            None, position[:, new], store, everything, embeds=embeds, rows=position[:, new], write=write
        )
        law = model.head(hidden[0, length:]).softmax(-1)
        law[:, [MASK, FILLER]] = 0
        slot = law.amax(-1).masked_fill(~masked[0, length:], -1).argmax()
        ids[0, length + slot], masked[0, length + slot] = law[slot].argmax(), False
    assert run(lm, "free", length, gen, threshold=2.0) == ids[0, length:].tolist()


@pytest.mark.parametrize("threshold", [0.3, 0.9, 2.0])
@pytest.mark.parametrize("length", [1, 4, 8, 13])
def test_f2_on_a_block_causal_model_freezing_final_ids_is_exact(length, threshold):
    lm = tiny_lm(eos_token_ids=())
    exact = run(lm, "none", length, threshold=threshold)
    assert run(lm, "free", length, threshold=threshold, freeze_delay=1) == exact


def test_f2_and_freezing_rows_of_masks_is_not():
    lm = tiny_lm(eos_token_ids=())
    differ = [run(lm, "free", n, threshold=0.3) != run(lm, "none", n, threshold=0.3) for n in range(1, 9)]
    assert any(differ), "freeze_delay 0 must be seen to freeze stale rows"


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("delay", [0, 1])
def test_f3_frozen_rows_are_bit_identical_from_step_to_step(rule, delay):
    lm = tiny_lm(rule, eos_token_ids=())
    spy = Spy(FreeCache(freeze_delay=delay))
    loop = start_loop(lm, spy, 5, 24, 0.5)
    before, changed = None, 0
    for _ in loop.run():
        if not loop.rows:
            break
        now = loop.store.data[:, :, 0, :, :-1].clone()
        if before is not None:
            lowest = spy.forwards[-1].computed[0][0]
            assert torch.equal(now[:, :, :, :lowest], before[:, :, :, :lowest])
            changed += int(not torch.equal(now, before))
        before = now
    assert changed > 3


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("delay", [0, 1])
def test_f3_f4_a_frozen_generated_row_was_computed_from_its_token_if_the_freeze_is_delayed(rule, delay):
    lm = tiny_lm(rule, eos_token_ids=())
    spy = Spy(FreeCache(freeze_delay=delay))
    lm.generate(input_ids=[prompt(5)], max_new_tokens=24, cache=spy, threshold=0.4)
    shift = 1 if rule == "bidirectional" else 0
    from_mask = torch.zeros(29, dtype=torch.bool)
    stale = 0
    for number, forward in enumerate(spy.forwards):
        rows = forward.computed[0]
        if number and not (delay and forward.step[0] == 0):
            assert rows == list(range(forward.lo[0] - shift, 29 - shift))
        from_mask[rows] = forward.masked[0, rows]
        if forward.step[0] > 0 or not delay:
            frozen = torch.arange(29) < rows[0]
            stale += int((from_mask & frozen).sum())
    assert (stale == 0) is (delay == 1)


@pytest.mark.parametrize("rule", BOTH)
def test_f5_refreshing_at_every_step_equals_no_cache(rule):
    lm = tiny_lm(rule, eos_token_ids=())
    for length in (1, 5, 12):
        for threshold in (0.4, 2.0):
            plain = run(lm, "none", length, threshold=threshold)
            for delay in (0, 1):
                cached = run(lm, "free", length, threshold=threshold, refresh_interval=1, freeze_delay=delay)
                assert cached == plain


def test_the_first_block_of_a_bidirectional_model_reads_no_stale_generated_row():
    # Up to the end of the first block nothing but the prompt is frozen, and the prompt's keys are those of step 0.
    lm = tiny_lm("bidirectional", eos_token_ids=())
    assert run(lm, "free", 5, 8, threshold=0.0) == run(lm, "none", 5, 8, threshold=0.0)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"freeze_delay": 2}, "freeze_delay"),
        ({"freeze_delay": -1}, "freeze_delay"),
        ({"refresh_interval": 0}, "refresh_interval"),
        ({"refresh_interval": 1.0}, "refresh_interval"),
    ],
)
def test_bad_numbers_raise_naming_the_number(kwargs, name):
    with pytest.raises(ValueError, match=name):
        FreeCache(**kwargs)
