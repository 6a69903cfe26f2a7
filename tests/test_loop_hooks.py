"""What families add to the loop: guidance, processed logits, revisers, first slots, pinned slots, random corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dllm.cache.block import BlockCache
from dllm.cache.dual import DualCache
from dllm.cache.prefix import PrefixCache
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
from dllm.types import Revision
from tests.families.golden import golden_lm, needs_gemma
from tests.spy import Spy
from tests.tiny import EOS, MASK, tiny_lm

RULES = ["bidirectional", "block_causal"]
PROMPT = [5, 9, 13, 21, 4]


def run(lm, **options):
    options = {"input_ids": [PROMPT], "max_new_tokens": 12, "eos_token_id": [], **options}
    return lm.generate(**options)


# Guidance and processed logits


@pytest.mark.parametrize("rule", RULES)
def test_guidance_is_the_published_mix_of_two_laws(rule):
    lm = tiny_lm(rule)
    found = run(lm, cfg_scale=1.5, threshold=2.0, max_new_tokens=1, cache="none").sequences.tolist()
    ids = torch.tensor([[*PROMPT, MASK], [*[MASK] * len(PROMPT), MASK]])
    with torch.no_grad():
        from dllm.families.full_forward import raw_logits

        masked = torch.tensor([[False] * 5 + [True], [True] * 6])
        full = raw_logits(lm.model, lm.spec, ids, masked=masked)
    conditional, unconditional = full[:, len(PROMPT) - 1]
    mixed = unconditional + 2.5 * (conditional - unconditional)
    mixed[[MASK, lm.spec.filler_token_id]] = -float("inf")
    assert found == [[int(mixed.argmax())]]


@pytest.mark.parametrize("rule", RULES)
def test_guidance_gives_every_row_of_a_ragged_batch_its_single_run_and_counts_one_forward(rule):
    lm = tiny_lm(rule, eos_token_ids=())
    for cache in ("none", "dual"):
        options: dict[str, Any] = {"cfg_scale": 0.7, "threshold": 0.6, "max_new_tokens": 12, "cache": cache}
        both = lm.generate(
            input_ids=[[0, 0, *PROMPT], [*PROMPT, 8, 9]], attention_mask=[[0, 0, 1, 1, 1, 1, 1], [1] * 7], **options
        )
        single = [lm.generate(input_ids=[p], **options) for p in (PROMPT, [*PROMPT, 8, 9])]
        assert [both.sequences[b].tolist() for b in range(2)] == [s.sequences[0].tolist() for s in single]
        assert [s.nfe for s in both.row_stats] == [s.stats.nfe for s in single]


@pytest.mark.parametrize("rule", RULES)
def test_a_processor_that_changes_nothing_changes_nothing_and_a_barred_token_never_comes(rule):
    lm = tiny_lm(rule)
    plain = run(lm).sequences.tolist()
    assert run(lm, logits_processor=lambda logits, slots: logits).sequences.tolist() == plain
    barred = plain[0][0]

    def bar(logits, slots):
        assert logits.shape[:2] == slots.shape
        logits = logits.clone()
        logits[..., barred] = -float("inf")
        return logits

    assert barred not in run(lm, logits_processor=bar).sequences[0].tolist()


@pytest.mark.parametrize("wrong", [lambda logits, slots: logits[..., :-1], lambda logits, slots: None])
def test_a_processor_must_keep_the_shape(wrong):
    with pytest.raises(ValueError, match="logits_processor must return logits of shape"):
        run(tiny_lm(), logits_processor=wrong)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("cfg_scale", -1.0, ValueError),
        ("cfg_scale", "1", TypeError),
        ("logits_processor", 3, TypeError),
        ("resize", {"max_gap_length": 3}, TypeError),
    ],
)
def test_a_bad_hook_raises_naming_it(name, value, error):
    with pytest.raises(error, match=name):
        run(tiny_lm(), **{name: value})


# Revisers


@dataclass(frozen=True)
class Fickle:
    """Commits everything at once, then sends slot ``slot`` back to the mask ``times`` times."""

    slot: int
    times: int

    needs = frozenset({"top1"})

    def step(self, rows, canvas, masked, state, noise):
        return Threshold(0.0).step(rows, canvas, masked, state, noise)

    def revise(self, rows, canvas, committed, state, noise):
        back = committed & (state.slots == self.slot) & (state.step <= self.times)[:, None]
        return Revision(rows.token, torch.zeros_like(back), back, ~back.any(-1) & (state.step >= self.times))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_slot_sent_back_to_the_mask_is_filled_again_before_the_block_ends(rule, cache):
    lm = tiny_lm(rule, eos_token_ids=())
    out = lm.generate(input_ids=[PROMPT], max_new_tokens=8, sampler=Fickle(7, 2), cache=cache, output_history=True)
    assert MASK not in out.sequences[0].tolist()
    assert out.history is not None
    assert [frame.masked[2] for frame in out.history[0]][:2] == [False, True]
    assert not any(out.history[0][-1].masked)


@pytest.mark.parametrize("rule", RULES)
def test_editing_above_one_is_the_plain_threshold_in_tokens_and_forwards(rule):
    lm = tiny_lm(rule)
    plain = run(lm, sampler="low_confidence_dynamic", threshold=0.5)
    edited = run(lm, sampler=TokenEditing(0.5, 1.5))
    assert edited.sequences.tolist() == plain.sequences.tolist()
    assert edited.stats.nfe == plain.stats.nfe


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("posts", [0, 1, 3])
def test_editing_changes_only_what_this_call_wrote_and_ends(rule, posts):
    lm = tiny_lm(rule, eos_token_ids=(), block_origin="zero")
    out = run(lm, sampler=TokenEditing(0.3, 0.0, posts), output_history=True)
    blocks = 3
    assert out.stats.nfe <= out.stats.useful_tokens + blocks * (posts + 1) + 1
    assert MASK not in out.sequences[0].tolist()
    if not posts:
        # The block ends with its last mask: one step may still have edited.
        assert out.stats.nfe <= run(lm, sampler="low_confidence_dynamic", threshold=0.3).stats.nfe + 1


def test_a_stop_that_is_edited_away_does_not_stop():
    lm = golden_lm("llada2_moe")
    text = lm.generate(
        input_ids=[PROMPT], max_new_tokens=11, block_length=8, sampler=TokenEditing(0.4, 0.3), eos_token_id=[]
    )
    for frame_token in set(text.sequences[0].tolist()):
        cut = lm.generate(
            input_ids=[PROMPT],
            max_new_tokens=11,
            block_length=8,
            sampler=TokenEditing(0.4, 0.3),
            eos_token_id=[frame_token],
        )
        whole = text.sequences[0].tolist()
        assert cut.sequences[0].tolist()[: cut.lengths[0]] == whole[: whole.index(frame_token)]
        assert cut.finish_reasons == ["stop"]


# First slots


def test_dream_commits_a_blocks_first_token_alone_from_the_full_pass():
    lm = tiny_lm("bidirectional", eos_token_ids=(), first_slot="commit_full_pass")
    for cache in (DualCache(), PrefixCache()):
        out = run(lm, cache=cache, threshold=0.0, output_history=True)
        frames = out.history[0]
        assert [sum(f.new) for f in frames] == [1, 7, 1, 3]
        assert frames[0].new[0] and frames[2].new[8]
    # Without a cached pass there is nothing to be careful about.
    assert run(lm, cache="none", threshold=0.0).stats.nfe == 2


@pytest.mark.parametrize("origin", ["zero", "prompt"])
def test_fast_dllm_commits_a_blocks_first_token_from_the_pass_that_stores_the_block_before(origin):
    lm = tiny_lm("block_causal", eos_token_ids=(), first_slot="commit_store_pass", block_origin=origin)
    spy = Spy(BlockCache())
    out = run(lm, cache=spy, threshold=0.0)
    for forward in spy.forwards[1:]:
        if forward.step[0] == 0 and forward.lo[0] == forward.row_lo[0]:
            assert forward.computed[0] == list(range(forward.prev_lo[0], forward.lo[0]))
    assert out.sequences.tolist() == run(lm, cache="none", threshold=0.0).sequences.tolist()


# Pinned slots


@pytest.mark.parametrize("shift", [0, 1])
def test_pinned_tokens_stay_and_only_masked_slots_are_filled(shift):
    lm = tiny_lm("bidirectional", logits_shift=shift)
    ids = [[5, MASK, 7, MASK, MASK, EOS, 9]]
    masked = [[0, 1, 0, 1, 1, 0, 0]]
    out = lm.generate(input_ids=ids, masked=masked, max_new_tokens=2, block_length=16, eos_token_id=[])
    text = out.sequences[0].tolist()
    assert len(text) == 8
    assert [text[1], text[4], text[5]] == [7, EOS, 9]
    assert MASK not in text
    assert out.stats.useful_tokens == out.row_stats[0].useful_tokens == 5


def test_a_pinned_stop_token_does_not_end_the_row():
    lm = tiny_lm("bidirectional", logits_shift=0, eos_token_ids=(EOS,))
    out = lm.generate(input_ids=[[5, 6, EOS, 6]], masked=[[0, 1, 0, 1]], max_new_tokens=0, block_length=8)
    assert out.finish_reasons == ["length"]
    assert out.sequences[0, 1] == EOS


def test_masked_goes_with_ids_and_with_bidirectional_attention():
    with pytest.raises(ValueError, match="masked needs bidirectional attention"):
        tiny_lm().generate(input_ids=[[5, 6]], masked=[[0, 1]], max_new_tokens=0)
    with pytest.raises(ValueError, match="masked must have the shape of input_ids"):
        tiny_lm("bidirectional").generate(input_ids=[[5, 6]], masked=[[0]], max_new_tokens=0)
    with pytest.raises(ValueError, match="masked must hold booleans"):
        tiny_lm("bidirectional").generate(input_ids=[[5, 6]], masked=[[0, 2]], max_new_tokens=0)


# Uniform corruption


def test_a_sampler_of_random_canvases_needs_a_model_without_mask():
    for name in ("uniform_canvas", "block_refinement"):
        with pytest.raises(ValueError, match="models of uniform corruption"):
            run(tiny_lm(), sampler=name)


@needs_gemma
def test_a_canvas_model_generates_by_default_and_a_row_equals_its_single_run():
    lm = golden_lm("diffusion_gemma")
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "max_denoising_steps": 4, "eos_token_id": []}
    both = lm.generate(input_ids=[[0, *PROMPT], [*PROMPT, 8]], attention_mask=[[0, 1, 1, 1, 1, 1], [1] * 6], **options)
    single = [lm.generate(input_ids=[p], **{**options, "seed": 3 + i}) for i, p in enumerate((PROMPT, [*PROMPT, 8]))]
    assert [both.sequences[b].tolist() for b in range(2)] == [s.sequences[0].tolist() for s in single]
    assert lm.generate(input_ids=[PROMPT], **options).stats.nfe == 1 + 4 * -(-20 // lm.spec.block_length)
