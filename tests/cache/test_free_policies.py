"""FreeCache's freeze policies: which rows are recomputed, when a row freezes, and what is exact."""

from __future__ import annotations

import pytest
import torch

from dllm.cache.free import FreeCache
from dllm.guide import ARGuide
from dllm.samplers.guided import Guided
from tests.spy import Spy
from tests.tiny import padded, prompt, tiny_decoder, tiny_lm, tokens

POLICIES = ["prompt", "aligned", "aggressive", "sliding"]
NUMBERS = {"freeze_block": 4, "freeze_window": 6}


def run(lm, cache, length=5, gen=20, **options):
    return lm.generate(input_ids=[prompt(length)], max_new_tokens=gen, cache=cache, **options)


def lm(shift=1):
    return tiny_lm("bidirectional", logits_shift=shift, eos_token_ids=())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("delay", [0, 1])
def test_the_recomputed_rows_follow_the_policy_when_slots_are_filled_from_left_to_right(policy, shift, delay):
    """The rule of each policy, written down once more for an order of one slot a step."""
    length, gen = 7, 12
    spy = Spy(FreeCache(policy=policy, freeze_delay=delay, **NUMBERS))
    run(lm(shift), spy, length, gen, sampler="sequential")
    total = length + gen
    for number, forward in enumerate(spy.forwards):
        # ``number`` slots are known; the newest has not been computed from its token yet.
        last = length + number - 1
        stop = total - shift
        if policy == "sliding":
            # The open block is of 8 slots.
            stop = min(stop, max(last + 6, length + 8 * (number // 8 + 1) - shift))
        start = {"prompt": length, "aligned": (last + 1) // 4 * 4, "aggressive": last, "sliding": last - 6}[
            policy
        ] - shift
        if delay and number:
            start = min(start, last)
        expected = list(range(max(start, 0), stop)) if number else list(range(stop if policy == "sliding" else total))
        if number == 0 and policy == "sliding":
            expected = list(range(max(stop + shift, length)))
        assert forward.computed[0] == expected, (policy, number)


@pytest.mark.parametrize("shift", [0, 1])
def test_prompt_is_active_with_one_block_over_the_whole_generation(shift):
    for length in (1, 5, 12):
        for threshold in (0.4, 2.0):
            one = run(lm(shift), "free", length, threshold=threshold, block_length=20)
            same = run(lm(shift), "free", length, threshold=threshold, block_length=20, policy="prompt")
            assert tokens(one) == tokens(same)
            assert one.stats.positions == same.stats.positions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("delay", [0, 1])
def test_f5_refreshing_at_every_step_equals_no_cache(policy, delay):
    if policy == "sliding":
        numbers = {"freeze_window": 64}
    else:
        numbers = {"freeze_block": 4}
    for threshold in (0.4, 2.0):
        plain = run(lm(), "none", threshold=threshold)
        cache = FreeCache(delay, 1, policy, **numbers)
        assert tokens(run(lm(), cache, threshold=threshold)) == tokens(plain)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_f4_with_a_delay_no_frozen_row_was_computed_from_a_mask_and_without_it_some_were(policy, shift, threshold):
    stale = {}
    for delay in (0, 1):
        spy = Spy(FreeCache(policy=policy, freeze_delay=delay, freeze_block=4, freeze_window=2))
        run(lm(shift), spy, 6, 20, threshold=threshold)
        written_from_mask, count = torch.zeros(26, dtype=torch.bool), 0
        for forward in spy.forwards:
            read = forward.stored[0].clone()
            read[forward.computed[0]] = False
            # A mask that is still one is no stale row.
            count += int((read & written_from_mask & ~forward.masked[0]).sum())
            rows = forward.written[0]
            written_from_mask[rows] = forward.masked[0, rows]
        stale[delay] = count
    assert stale[1] == 0
    if policy not in ("prompt", "sliding"):
        assert stale[0] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_f3_frozen_rows_do_not_change(policy):
    from dllm.canvas import generation_canvas
    from dllm.denoise import DenoiseLoop
    from tests.tiny import loop_request

    model = lm()
    spy = Spy(FreeCache(policy=policy, **NUMBERS))
    canvas = generation_canvas([prompt(5)], [20], model.spec, "cpu")
    loop, before = DenoiseLoop(model.model, loop_request(canvas, model.spec, cache=spy)), None
    for _ in loop.run():
        if not loop.rows:
            break
        assert loop.store is not None
        now = loop.store.data[:, :, 0, :, :-1].clone()
        if before is not None:
            still = torch.ones(25, dtype=torch.bool)
            still[spy.forwards[-1].computed[0]] = False
            assert torch.equal(now[:, :, :, still], before[:, :, :, still])
        before = now


@pytest.mark.parametrize("policy", [*POLICIES, "active"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_row_of_a_ragged_batch_equals_its_single_run_alone_and_with_a_guide(policy, delay):
    cache = FreeCache(delay, 7, policy, 4, 6)
    rows = [prompt(3), prompt(11), prompt(6)]
    for extra in ({"threshold": 0.5}, {"guide": ARGuide(tiny_decoder(1), rule=Guided("topk"))}):
        both = lm().generate(**padded(rows), max_new_tokens=18, cache=cache, **extra)
        for b, ids in enumerate(rows):
            single = lm().generate(input_ids=[ids], max_new_tokens=18, cache=cache, **extra)
            assert tokens(both, b) == tokens(single)
            assert both.row_stats[b].positions == single.stats.positions


def test_more_frozen_is_fewer_rows():
    counts = [
        run(lm(), "free", 12, 40, policy=p, sampler="sequential", **NUMBERS).stats.positions
        for p in ("prompt", "aligned", "aggressive")
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] < run(lm(), "none", 12, 40, sampler="sequential").stats.positions


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"policy": "all"}, "policy must be one of"),
        ({"freeze_block": 0}, "freeze_block"),
        ({"freeze_window": True}, "freeze_window"),
    ],
)
def test_bad_numbers_raise(numbers, match):
    with pytest.raises(ValueError, match=match):
        FreeCache(**numbers)


def test_a_block_causal_model_has_the_active_policy_only():
    with pytest.raises(ValueError, match="'aggressive' of cache 'free' is for bidirectional models"):
        tiny_lm().generate(input_ids=[prompt(5)], max_new_tokens=8, cache="free", policy="aggressive")
