"""S2D2: a block-diffusion model verifies its own draft from left to right, without any leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.canvas import generation_canvas
from dllm.denoise import DenoiseLoop
from dllm.hooks_s2d2 import S2D2Hook
from dllm.noise import CounterNoise
from dllm.registry import hook_starter
from dllm.samplers.s2d2 import S2D2, first_run, view_mask
from dllm.types import Attend
from tests.tiny import FILLER, MASK, loop_request, padded, prompt, tiny_lm, tokens

ALWAYS, NEVER = S2D2(-float("inf")), S2D2(float("inf"))


def run(lm, length=5, **options):
    return lm.generate(input_ids=[prompt(length)], **{"max_new_tokens": 18, "threshold": 0.6, **options})


def view_law(lm, text, slot, block_start, given):
    """Logits of a slot given the text before it, written down once more: finished blocks as they are, the open block token-causal,
    the slot's own row a mask (unshifted) or none (shifted)."""
    spec = lm.spec
    at = torch.arange(slot + (spec.logits_shift == 0))
    ids = torch.tensor([[*text[:slot], 0][: len(at)]])
    # Blocks count from the prompt's end; inside the open one a row is a group of its own.
    group = torch.div(at - given, spec.block_length, rounding_mode="floor") * 100
    group = torch.where(at >= block_start, group + at - block_start, group)[None]
    masked = (at >= slot)[None]
    hidden = lm.model(None, at[None], None, Attend.by_group(group), embeds=lm.model.embed(ids, masked, MASK))
    logits = lm.model.head(hidden[0, -1]).clone()
    logits[[MASK, FILLER]] = -torch.inf
    return logits


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["none", "block"])
def test_verified_always_and_greedily_the_text_is_the_views_left_to_right_greedy_text(shift, cache):
    lm = tiny_lm(logits_shift=shift, eos_token_ids=())
    for length in (3, 10):
        text = prompt(length)
        for slot in range(length, length + 18):
            start = length + (slot - length) // 8 * 8
            text.append(int(view_law(lm, text, slot, start, length).argmax()))
        out = run(lm, length, verifier=ALWAYS, cache=cache)
        assert tokens(out) == text[length:]
        assert sum(out.stats.accept_lengths) == 18
        assert max(out.stats.accept_lengths) > 1


@pytest.mark.parametrize("shift", [0, 1])
def test_never_verified_it_is_the_plain_sampler_at_no_cost(shift):
    lm = tiny_lm(logits_shift=shift)
    plain, never = run(lm), run(lm, verifier=NEVER)
    assert tokens(never) == tokens(plain)
    assert never.stats.nfe == plain.stats.nfe
    assert never.stats.accept_lengths == []


@pytest.mark.parametrize("shift", [0, 1])
def test_with_blocks_of_one_slot_it_is_the_models_ar_mode(shift):
    lm = tiny_lm(logits_shift=shift, block_length=1)
    assert tokens(run(lm, verifier=ALWAYS)) == tokens(run(lm))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("layers", [1, 3])
def test_no_row_depends_on_the_token_that_it_judges_or_on_later_ones(shift, layers):
    from dllm import DiffusionLM
    from tests.tiny import tiny_decoder, tiny_spec

    lm = DiffusionLM(tiny_decoder(2, layers), tiny_spec(logits_shift=shift))
    canvas = generation_canvas([prompt(5)], [8], lm.spec, "cpu")
    loop = DenoiseLoop(lm.model, loop_request(canvas, lm.spec, hook=hook_starter(ALWAYS)))
    loop._forward(loop.request.cache.plan(loop.state))
    slots = torch.arange(5, 13)[None]
    run_mask, draft = torch.ones(1, 8, dtype=torch.bool), torch.tensor([prompt(8)])
    assert isinstance(loop.hook, S2D2Hook)
    base = loop.hook.view(slots, run_mask, draft)
    for i in range(8):
        other = draft.clone()
        other[0, i] = (other[0, i] + 7) % 60
        moved = (loop.hook.view(slots, run_mask, other) - base).abs().amax(-1)[0]
        assert moved[: i + 1].max() == 0, "a row saw the token that it judges"
        assert i == 7 or moved[i + 1 :].min() > 0, "later rows must see the draft"


def test_the_views_mask_is_its_rule():
    data, slots = torch.tensor([[3, 4, 5]]), torch.tensor([[4, 5]])
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert view_mask(data, slots)[0].int().tolist() == expected
    assert view_mask(data, None)[0].int().tolist() == [row[:3] for row in expected[:3]]


def test_a_run_is_the_first_slots_without_a_gap():
    offered = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert first_run(offered).int().tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_routing_follows_the_expected_length_minus_the_price_with_hysteresis_and_a_least_run():
    run_mask = torch.tensor([[True, True, False]])
    entropy = torch.tensor([[0.0, float(torch.log(torch.tensor(64.0))), 9.0]])
    expected = 1 + torch.tensor(-1.0).exp()
    assert S2D2().expected(entropy, run_mask, 64).tolist() == pytest.approx([float(expected)])
    no, yes, two = torch.tensor([False]), torch.tensor([True]), torch.tensor([2])
    assert S2D2(cost=1.3).routes(entropy, run_mask, two, no, 64).tolist() == [True]
    assert S2D2(cost=1.4).routes(entropy, run_mask, two, no, 64).tolist() == [False]
    assert S2D2(cost=0.7, cost_by_count=True).routes(entropy, run_mask, two, no, 64).tolist() == [False]
    wide = S2D2(cost=1.4, score_off=-0.5)
    assert wide.routes(entropy, run_mask, two, no, 64).tolist() == [False]
    assert wide.routes(entropy, run_mask, two, yes, 64).tolist() == [True]
    assert S2D2(cost=0, min_span=3).routes(entropy, run_mask, two, no, 64).tolist() == [False]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_row_of_a_ragged_batch_equals_its_single_run_with_its_counts(shift):
    lm, rows = tiny_lm(logits_shift=shift), [prompt(3), prompt(12), prompt(5)]
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {
            "max_new_tokens": 17,
            "threshold": 0.7,
            "verifier": S2D2(0.5),
            "temperature": temperature,
        }
        both = lm.generate(**padded(rows), **options, seed=4)
        for b, ids in enumerate(rows):
            single = lm.generate(input_ids=[ids], **options, seed=4 + b)
            assert tokens(both, b) == tokens(single)
            assert both.row_stats[b].nfe == single.stats.nfe
            assert both.row_stats[b].positions == single.stats.positions
            assert both.row_stats[b].accept_lengths == single.stats.accept_lengths


def test_verified_tokens_have_the_views_law():
    """Chi-squared over the second token given the first one, for the commonest first token."""
    lm = tiny_lm(logits_shift=0, eos_token_ids=())
    count, ids = 3000, prompt(5)
    out = lm.generate(
        input_ids=[ids] * count,
        max_new_tokens=2,
        temperature=1.0,
        noise=CounterNoise.for_rows(5, count),
        verifier=ALWAYS,
    )
    first = int(out.sequences[:, 0].mode().values)
    second = out.sequences[out.sequences[:, 0] == first, 1]
    law = view_law(lm, [*ids, first], 6, 5, 5).softmax(-1).double()
    likely = law > 8 / len(second)
    seen = torch.bincount(second, minlength=64).double()
    expected = torch.cat([law[likely], law[~likely].sum()[None]]) * len(second)
    found = torch.cat([seen[likely], seen[~likely].sum()[None]])
    statistic, freedom = float(((found - expected) ** 2 / expected.clamp(min=1e-9)).sum()), int(likely.sum())
    assert len(second) > 100
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5 + 2


@pytest.mark.parametrize(
    ("rule", "options", "match"),
    [
        ("bidirectional", {}, "no left-to-right view"),
        ("block_causal", {"cfg_scale": 1.0}, "cfg_scale"),
        ("block_causal", {"logits_processor": lambda logits, slots: logits}, "logits_processor"),
        ("block_causal", {"max_denoising_steps": 4}, "max_denoising_steps"),
    ],
)
def test_combinations_without_meaning_raise_and_say_why(rule, options, match):
    with pytest.raises(ValueError, match=match):
        run(tiny_lm(rule), verifier="s2d2", **options)


@pytest.mark.parametrize("numbers", [{"cost": "1"}, {"score_off": True}, {"min_span": 0}, {"cost_by_count": 1}])
def test_bad_numbers_raise_naming_the_number(numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        S2D2(**numbers)
