"""SimSD: invariants S1 to S7 of its notes, the leak of the published layout, and the exact one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm import ARGuide, DiffusionLM, SimSD
from dllm.block_draft import BlockDraft
from dllm.canvas import generation_canvas
from dllm.denoise import DenoiseLoop
from dllm.hooks_simsd import SimSDHook
from dllm.registry import hook_starter
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import gate_stop, temporal_mask
from tests.tiny import EOS, loop_request, padded, prompt, tiny_decoder, tiny_lm, tiny_spec, tokens


def drafter(seed: int = 3, shift: int = 1) -> DiffusionLM:
    return tiny_lm(seed=seed, logits_shift=shift)


def run(lm, verifier, length=5, **options):
    return lm.generate(
        input_ids=[prompt(length)], **{"max_new_tokens": 12, "threshold": 0.6, "verifier": verifier, **options}
    )


def rule_mask(times, known):
    """The rule of the notes, entry by entry, for one block: R, D_i, M_i."""
    n, r = len(times), known
    kinds = [("R", i) for i in range(r)] + [("D", i) for i in range(n)] + [("M", i) for i in range(n)]

    def sees(query, key):
        (a, i), (b, j) = query, key
        if a == "R":
            return b == "R"
        if b == "R":
            return True
        if a == "D":
            return times[j] <= times[i] if b == "D" else times[j] > times[i]
        return times[j] < times[i] if b == "D" else times[j] >= times[i]

    return [[sees(q, k) for k in kinds] for q in kinds]


@pytest.mark.parametrize("n", range(1, 9))
def test_s2_the_mask_equals_the_rule_for_random_orders_and_each_row_sees_either_copy_of_every_slot(n):
    chance = torch.Generator().manual_seed(n)
    for known in (0, 1, 3):
        for _ in range(6):
            times = torch.randint(1, n + 1, (1, n), generator=chance)
            real = torch.ones(1, n, dtype=torch.bool)
            mask = temporal_mask(times, real, torch.ones(1, known, dtype=torch.bool))[0]
            assert mask.tolist() == rule_mask(times[0].tolist(), known)
            data, masks = mask[known:, known : known + n], mask[known:, known + n :]
            assert (data ^ masks).all()
            wide = temporal_mask(times, real, torch.ones(1, known, dtype=torch.bool), queries=True)[0]
            assert torch.equal(wide[-n:, : known + 2 * n], mask[-n:])
            assert not wide[:, known + 2 * n :].any()


def test_the_masks_of_the_notes_example():
    mask = temporal_mask(torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 0, dtype=torch.bool))
    assert mask[0].int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]]


class Fixed:
    """A drafter that proposes what it was told to, in the order that it was told."""

    def __init__(self, tokens, order):
        self.tokens, self.order = torch.tensor([tokens]), torch.tensor([order])

    def draft(self, slots, drafted):
        return BlockDraft(self.tokens, self.order, drafted, None)


def law_after(lm, exact, draft, order, length=5):
    """Logits [n, V] of the layout for the first block of a prompt."""
    canvas = generation_canvas([prompt(length)], [8], lm.spec, "cpu")
    loop = DenoiseLoop(lm.model, loop_request(canvas, lm.spec, hook=hook_starter(SimSD(lm, exact))))
    assert isinstance(loop.hook, SimSDHook)
    loop.hook.drafter = Fixed(draft, order)
    loop._forward(loop.request.cache.plan(loop.state))
    return loop.hook.laws(torch.arange(length, length + 8)[None])[0]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("order", [[3, 0, 7, 5, 1, 6, 2, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_s3_with_one_layer_each_law_is_that_of_the_real_denoising_state(shift, order):
    lm = DiffusionLM(tiny_decoder(2, 1), tiny_spec(logits_shift=shift))
    draft = prompt(8)
    found = law_after(lm, False, draft, order)
    for i in range(8):
        ids = torch.tensor([prompt(5) + draft])
        masked = torch.tensor([[False] * 5 + [order[j] >= order[i] for j in range(8)]])
        # Blocks count from the prompt's end: padding of three in front makes it one block of the grid.
        grid = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], dim=1)
        flags = torch.cat([torch.zeros(1, 3, dtype=torch.bool), masked], dim=1)
        real = torch.cat([torch.zeros(1, 3, dtype=torch.bool), torch.ones(1, 13, dtype=torch.bool)], dim=1)
        law = state_logits(lm, grid, flags, real)[8 + i - shift]
        assert (found[i] - law).abs().max() < 1e-5 * law.abs().max().clamp(min=1)


def state_logits(lm, ids, masked, real):
    """A plain pass over one state, block-causal with blocks that end where the prompt does."""
    from dllm.types import Attend

    at = torch.arange(ids.shape[1])
    group = torch.div(at, 8, rounding_mode="floor")[None]
    position = (at - 3).clamp(min=0)[None]
    hidden = lm.model(None, position, None, Attend.by_group(group, None, real), embeds=lm.model.embed(ids, masked, 63))
    return lm.model.head(hidden[0])


@pytest.mark.parametrize("shift", [0, 1])
def test_s5_a_one_step_draft_is_judged_by_the_plain_one_step_law_at_any_depth(shift):
    lm = DiffusionLM(tiny_decoder(2, 3), tiny_spec(logits_shift=shift))
    found = law_after(lm, False, prompt(8), [0] * 8)
    ids = torch.tensor([[0] * 3 + prompt(5) + [0] * 8])
    masked = torch.tensor([[False] * 8 + [True] * 8])
    real = torch.tensor([[False] * 3 + [True] * 13])
    law = state_logits(lm, ids, masked, real)[8 - shift : 16 - shift]
    assert (found - law).abs().max() < 1e-4


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_s7_the_published_layout_leaks_from_two_layers_on_and_the_exact_one_never(shift, layers):
    lm = DiffusionLM(tiny_decoder(2, layers), tiny_spec(logits_shift=shift))
    order, draft = [3, 0, 7, 5, 1, 6, 2, 4], prompt(8)
    for exact in (False, True):
        base = law_after(lm, exact, draft, order)
        for i in range(8):
            other = list(draft)
            other[i] = (other[i] + 7) % 60
            change = float((law_after(lm, exact, other, order) - base)[i].abs().max())
            leaks = not exact and layers > 1 and order[i] < 7
            if leaks and not (shift and i == 0):
                assert change > 1e-4, (layers, i)
            else:
                assert change == 0, (exact, layers, i)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["none", "block"])
def test_exact_greedy_decoding_gives_one_text_whatever_drafts(shift, cache):
    lm = tiny_lm(logits_shift=shift, eos_token_ids=())
    drafters: list[Any] = [drafter(3, shift), 1, ARGuide(tiny_decoder(3))]
    wanted = tokens(run(lm, S2D2(-float("inf")), max_new_tokens=13))
    for draft in drafters:
        out = run(lm, SimSD(draft, exact=True), cache=cache, max_new_tokens=13)
        assert tokens(out) == wanted
        assert out.stats.draft_nfe > 0
        assert sum(out.stats.accept_lengths) == 13


@pytest.mark.parametrize("exact", [False, True])
def test_s1_with_blocks_of_one_slot_it_is_the_targets_own_greedy_decode(exact):
    for shift in (0, 1):
        lm = tiny_lm(logits_shift=shift, block_length=1)
        assert tokens(run(lm, SimSD(1, exact))) == tokens(run(lm, None))


@pytest.mark.parametrize("draft", ["smaller", "layers", "causal"])
def test_s4_each_round_commits_at_least_one_and_at_most_what_is_left_of_the_block(draft):
    lm = tiny_lm(eos_token_ids=())
    source = {"smaller": drafter(), "layers": 1, "causal": ARGuide(tiny_decoder(3))}[draft]
    for policy in ("truncate", "target_argmax", "draft_argmax"):
        out = run(lm, SimSD(source, after_reject=policy), max_new_tokens=20)
        lengths = out.stats.accept_lengths
        assert sum(lengths) == 20
        assert all(1 <= n <= 8 for n in lengths)
        # Without a cache there is no prefill: one forward a round.
        assert out.stats.nfe == len(lengths)
        if policy != "truncate":
            assert lengths == [8, 8, 4]


def test_s6_a_last_slot_adds_the_known_tokens_and_two_rows():
    lm = tiny_lm(logits_shift=0, eos_token_ids=(), default_cache="block")
    out = run(lm, SimSD(lm, exact=False), 5, max_new_tokens=8)
    left, expected = 8, 5
    for length in out.stats.accept_lengths:
        # The step's own rows are the block's 8.
        expected += 8 + (8 - left) + 2 * left
        left -= length
    assert out.stats.positions == expected


def test_a_threshold_draft_costs_fewer_draft_forwards_than_one_token_a_step():
    lm = tiny_lm(eos_token_ids=())
    slow = run(lm, SimSD(drafter(), exact=True), threshold=2.0)
    fast = run(lm, SimSD(drafter(), exact=True), threshold=0.2)
    assert fast.stats.draft_nfe < slow.stats.draft_nfe
    assert tokens(fast) == tokens(slow)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_of_a_ragged_batch_equals_its_single_run_with_its_counts(exact, temperature):
    lm, rows = tiny_lm(), [prompt(3), prompt(12)]
    for source in (drafter(), ARGuide(tiny_decoder(3))):
        options: dict[str, Any] = {
            "max_new_tokens": 10,
            "threshold": 0.7,
            "verifier": SimSD(source, exact),
            "temperature": temperature,
        }
        both = lm.generate(**padded(rows), **options, seed=4)
        for b, ids in enumerate(rows):
            single = lm.generate(input_ids=[ids], **options, seed=4 + b)
            assert tokens(both, b) == tokens(single)
            for name in ("nfe", "draft_nfe", "positions", "accept_lengths"):
                assert getattr(both.row_stats[b], name) == getattr(single.stats, name), name


def test_at_a_temperature_the_exact_layout_has_the_views_law():
    """Chi-squared of the first two tokens between two drafters: the law is the verifier's, not the drafter's."""
    lm = tiny_lm(logits_shift=0, eos_token_ids=())
    count, ids = 1500, prompt(5)
    seen = []
    for source in (drafter(3, 0), ARGuide(tiny_decoder(4))):
        out = lm.generate(
            input_ids=[ids] * count,
            max_new_tokens=2,
            temperature=1.0,
            seed=5,
            verifier=SimSD(source, exact=True),
            threshold=0.9,
        )
        seen.append(torch.bincount(out.sequences[:, 1], minlength=64).double())
    likely = seen[0] + seen[1] > 16
    a, b = (torch.cat([x[likely], x[~likely].sum()[None]]) for x in seen)
    statistic, freedom = float(((a - b) ** 2 / (a + b).clamp(min=1)).sum()), int(likely.sum())
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5 + 2


def test_the_stop_gate_replaces_an_unlikely_stop_by_the_best_other_token():
    law = torch.tensor([[[0.1, 0.2, 0.4, 0.3], [0.0, 0.05, 0.9, 0.05]]])
    own, stops = torch.tensor([[EOS, EOS]]), torch.tensor([EOS])
    assert gate_stop(own, law, stops, 0.5).tolist() == [[3, EOS]]
    assert gate_stop(own, law, stops, 0.0).tolist() == [[EOS, EOS]]


@pytest.mark.parametrize(
    ("rule", "verifier", "options", "match"),
    [
        ("bidirectional", SimSD(1), {}, "does not see the open block"),
        ("block_causal", SimSD(1), {"cfg_scale": 1.0}, "cfg_scale"),
        ("block_causal", SimSD(1), {"logits_processor": lambda logits, slots: logits}, "logits_processor"),
        ("block_causal", SimSD(1), {"sampler": "klass"}, "Klass needs the steps of one block"),
        ("block_causal", SimSD(9), {}, "at most the target's 2 layers"),
        ("block_causal", SimSD(tiny_lm("bidirectional")), {}, "block_causal attention"),
    ],
)
def test_combinations_without_meaning_raise_and_say_why(rule, verifier, options, match):
    with pytest.raises(ValueError, match=match):
        run(tiny_lm(rule), verifier, **options)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"draft": 0}, "draft must be"),
        ({"draft": "tiny"}, "draft must be"),
        ({"draft": 1, "exact": 1}, "exact"),
        ({"draft": 1, "after_reject": "stop"}, "after_reject"),
        ({"draft": 1, "exact": True, "after_reject": "draft_argmax"}, "nobody verified"),
        ({"draft": 1, "eos_min_prob": -1}, "eos_min_prob"),
    ],
)
def test_bad_numbers_raise(numbers, match):
    with pytest.raises((ValueError, TypeError), match=match):
        SimSD(**numbers)
