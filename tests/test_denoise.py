"""The denoising loop: what it asks of samplers, what it shows to callbacks, and that rows of a batch know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm.cache.block import BlockCache
from dllm.canvas import generation_canvas
from dllm.denoise import DenoiseLoop, denoise
from dllm.pipeline import DiffusionLM
from dllm.samplers.threshold import Threshold
from dllm.types import Step
from tests.oracle import oracle_lm, peaked, sentence
from tests.tiny import EOS, FILLER, MASK, loop_request, padded, prompt, tiny_decoder, tiny_lm, tiny_spec, tokens

# Independence of rows and calls


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    gen=st.integers(1, 19),
    block_length=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.8]),
    threshold=st.sampled_from([0.2, 0.6, 0.95]),
    rule=st.sampled_from(["block_causal", "bidirectional"]),
    origin=st.sampled_from(["prompt", "zero"]),
    eos=st.sampled_from([(), (EOS, 20, 30)]),
    seed=st.integers(0, 99),
)
def test_a_row_of_any_batch_equals_its_single_run(
    lengths, gen, block_length, temperature, threshold, rule, origin, eos, seed
):
    lm = tiny_lm(rule, block_origin=origin, eos_token_ids=eos)
    rows = [prompt(length, i) for i, length in enumerate(lengths)]
    options: dict[str, Any] = dict(
        max_new_tokens=gen, block_length=block_length, temperature=temperature, threshold=threshold
    )
    cache = "block" if rule == "block_causal" else "dual"
    batch = lm.generate(**padded(rows), seed=seed, cache=cache, **options)
    for i, row in enumerate(rows):
        single = lm.generate(input_ids=[row], seed=[seed + i], cache=cache, **options)
        assert tokens(batch, i) == tokens(single)
        assert batch.finish_reasons[i] == single.finish_reasons[0]
        for name in ("nfe", "positions", "useful_tokens"):
            assert getattr(batch.row_stats[i], name) == getattr(single.stats, name)


def test_two_calls_in_a_row_leave_nothing_behind():
    lm = tiny_lm()
    first = lm.generate(input_ids=[prompt(7)], max_new_tokens=20, cache="block")
    lm.generate(**padded([prompt(9), prompt(3)]), max_new_tokens=11, cache="block", temperature=1.0)
    again = lm.generate(input_ids=[prompt(7)], max_new_tokens=20, cache="block")
    assert tokens(first) == tokens(again)


def test_num_return_sequences_repeats_each_prompt_and_every_row_has_its_own_seed():
    lm = tiny_lm(eos_token_ids=())
    rows = [prompt(4), prompt(6)]
    options: dict[str, Any] = dict(max_new_tokens=12, temperature=1.0)
    out = lm.generate(**padded(rows), num_return_sequences=2, seed=40, **options)
    assert len(out.lengths) == 4
    for i in range(4):
        assert tokens(out, i) == tokens(lm.generate(input_ids=[rows[i // 2]], seed=40 + i, **options))
    assert tokens(out, 0) != tokens(out, 1)
    listed = lm.generate(**padded(rows), num_return_sequences=2, seed=[43, 42, 41, 40], **options)
    assert tokens(listed, 3) == tokens(lm.generate(input_ids=[rows[1]], seed=40, **options))
    with pytest.raises(ValueError, match="seed must be an int or one int a row \\(4\\): got 2"):
        lm.generate(**padded(rows), num_return_sequences=2, seed=[1, 2], **options)


def test_seeds_change_samples_and_repeat_them():
    lm = tiny_lm(eos_token_ids=())
    draw = [tokens(lm.generate(input_ids=[prompt(5)], max_new_tokens=16, temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]


def test_sampled_first_tokens_follow_the_models_tempered_law():
    logits = torch.full((64,), -30.0)
    logits[[5, 6, 7]] = torch.tensor([1.0, 0.0, -1.0])
    count, temperature = 3000, 1.5
    lm = oracle_lm(lambda slot, call: logits)
    out = lm.generate(input_ids=[[5]], max_new_tokens=1, num_return_sequences=count, temperature=temperature, seed=0)
    observed = torch.bincount(out.sequences[:, 0], minlength=64)[[5, 6, 7]].double()
    expected = (logits[[5, 6, 7]].double() / temperature).softmax(0) * count
    # Two degrees of freedom: 13.8 is p = 0.001; the seed is fixed.
    assert ((observed - expected) ** 2 / expected).sum() < 13.8


class TableNoise:
    """Numbers that a user supplies: u for every position, no ``select``."""

    def __init__(self, u):
        self.u = u

    def uniform(self, positions, step, stream=0):
        return torch.full(positions.shape, self.u)


def test_a_users_noise_object_supplies_the_numbers_and_needs_select_for_a_batch():
    logits = torch.full((64,), -math.inf)
    logits[[5, 6]] = 0.0
    lm = oracle_lm(lambda slot, call: logits)
    for u, token in ((0.25, 5), (0.75, 6)):
        out = lm.generate(input_ids=[[9]], max_new_tokens=9, temperature=1.0, noise=TableNoise(u))
        assert tokens(out) == [token] * 9
    with pytest.raises(TypeError, match="noise must have select"):
        lm.generate(input_ids=[[9], [9]], max_new_tokens=9, temperature=1.0, noise=TableNoise(0.5))


# Faults of models and samplers


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_raise_naming_row_and_step(value, temperature):
    broken, certain = torch.zeros(64), torch.full((64,), -math.inf)
    broken[7], certain[10] = value, 0.0
    # A block a step: in step 3 row 0 is at slots 17 to 24, row 1 at 25 to 32.
    lm = oracle_lm(lambda slot, call: broken if slot == 28 and call == 3 else certain, eos_token_ids=())
    with pytest.raises(ValueError, match="logits must be finite.*row 1, step 3"):
        lm.generate(**padded([prompt(1), prompt(9)]), max_new_tokens=24, temperature=temperature, seed=0)


def test_infinity_at_a_banned_id_is_no_law_either():
    broken = torch.zeros(64)
    broken[MASK] = math.inf
    with pytest.raises(ValueError, match="logits must be finite.*row 0, step 1"):
        oracle_lm(lambda slot, call: broken).generate(input_ids=[[5]], max_new_tokens=4)


def test_minus_infinity_at_some_ids_is_a_law():
    logits = torch.full((64,), -math.inf)
    logits[20] = 0.0
    assert tokens(oracle_lm(lambda slot, call: logits).generate(input_ids=[[5]], max_new_tokens=4)) == [20] * 4


@dataclass(frozen=True)
class Scripted:
    """A sampler that does what a test tells it to."""

    transfer: Callable[[Tensor], Tensor]
    token: int = 10
    needs = frozenset({"top1"})

    def step(self, rows, canvas, masked, state, noise):
        return Step(torch.full_like(rows.token, self.token), self.transfer(masked))


@pytest.mark.parametrize("cache", ["none", "block"])
def test_a_sampler_that_commits_nothing_raises_instead_of_looping_for_ever(cache):
    with pytest.raises(RuntimeError, match="Scripted committed nothing in row 0, step 1"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, sampler=Scripted(torch.zeros_like), cache=cache)


def test_under_a_step_limit_a_step_may_commit_nothing_and_the_last_one_takes_all():
    out = tiny_lm(eos_token_ids=()).generate(
        input_ids=[[5]], max_new_tokens=12, sampler=Scripted(torch.zeros_like), max_denoising_steps=3
    )
    assert (tokens(out), out.stats.nfe) == ([10] * 12, 6)


@pytest.mark.parametrize("token", [MASK, FILLER])
def test_a_sampler_that_commits_a_banned_token_raises(token):
    with pytest.raises(ValueError, match="Scripted committed a mask or banned token in row 0, step 1"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, sampler=Scripted(torch.clone, token))


def test_a_sampler_that_commits_the_stop_too_early_raises():
    with pytest.raises(ValueError, match="committed a mask or banned token"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, min_new_tokens=2, sampler=Scripted(torch.clone, EOS))


class Greedy:
    """Commits slots 0, 1, 2 of a block, and in the next step everything, with another token."""

    needs = frozenset({"top1"})

    def step(self, rows, canvas, masked, state, noise):
        column = torch.arange(masked.shape[1]).expand_as(masked)
        return Step(20 + state.step[:, None].expand_as(rows.token), (column < 3) | (state.step > 0)[:, None])


def test_a_sampler_cannot_overwrite_what_is_committed_or_given():
    # It wants everything in every step, but only masked slots of the row's own block are its to commit.
    lm = tiny_lm(eos_token_ids=(), block_origin="zero")
    out = lm.generate(**padded([prompt(3), prompt(9)]), max_new_tokens=12, sampler=Greedy())
    for b, sizes in enumerate(([5, 7], [7, 5])):
        assert tokens(out, b) == [20 + int(i >= 3) for size in sizes for i in range(size)]


def test_a_sampler_that_returns_another_shape_raises():
    with pytest.raises(ValueError, match="transfer_index \\(1, 4\\): got \\(1, 3\\)"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, sampler=Scripted(lambda masked: masked[:, :-1]))


class Recorder:
    """Commits one slot a step and keeps what it was shown."""

    needs = frozenset({"top1", "logits", "previous"})

    def __init__(self):
        self.seen = []

    def step(self, rows, canvas, masked, state, noise):
        self.seen.append((rows, masked.clone(), state.step.clone(), state.slots.clone(), state.masks_at_start.clone()))
        first = masked & (masked.long().cumsum(-1) == 1)
        return Step(rows.token, first)


def test_the_law_of_the_step_before_is_aligned_by_slot_and_uniform_in_a_blocks_first_step():
    recorder = Recorder()
    lm = tiny_lm("bidirectional", eos_token_ids=())
    lm.generate(**padded([prompt(3), prompt(6)]), max_new_tokens=11, sampler=recorder)
    for i, (rows, masked, step, slots, at_start) in enumerate(recorder.seen):
        assert rows.previous.shape == rows.logits.shape
        for b in range(masked.shape[0]):
            if step[b] == 0:
                assert (rows.previous[b] == 0).all()
                assert masked[b].sum() == at_start[b]
            else:
                before, _, _, slots_before, _ = recorder.seen[i - 1]
                shared = min(slots.shape[1], slots_before.shape[1])
                assert torch.equal(slots[b, :shared], slots_before[b, :shared])
                assert torch.equal(rows.previous[b, :shared], before.logits[b, :shared])
    assert {int(s) for _, _, step, _, _ in recorder.seen for s in step} == set(range(8))


# Callbacks and history


def watch(lm, **kwargs):
    """The output, and for each step (step, rows, masks left, committed slots)."""
    seen = []

    def callback(model, step, timestep, kw):
        assert model is lm
        assert step == timestep
        assert kw["canvas"].shape == kw["masked"].shape
        committed = [s[t].tolist() for s, t in zip(kw["slots"], kw["transfer_index"], strict=True)]
        seen.append((step, list(kw["rows"]), kw["masked"].sum(-1).tolist(), committed))

    return lm.generate(callback_on_step_end=callback, **kwargs), seen


def test_callbacks_come_after_each_step_with_the_rows_still_running_and_count_without_a_gap():
    table = {slot: (10 + slot, 0.95) for slot in range(20)} | dict.fromkeys(range(20, 99), (EOS, 0.95))
    out, seen = watch(oracle_lm(table), **padded([prompt(2), prompt(18)]), max_new_tokens=30)
    assert [step for step, *_ in seen] == [1, 2, 3]
    assert [rows for _, rows, *_ in seen] == [[0, 1], [0], [0]]
    assert seen[0][3] == [list(range(2, 10)), list(range(18, 26))]
    assert out.row_stats[0].nfe == 3


def test_step_numbers_never_fall_back_when_the_fastest_row_leaves():
    # Row 0 (nothing to prefill) decodes while row 1 prefills, and is done first; row 1 is then a step behind.
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    _, seen = watch(lm, **padded([prompt(3), prompt(17)]), max_new_tokens=6, threshold=2.0, cache="block")
    steps = [step for step, *_ in seen]
    assert steps == list(range(1, len(steps) + 1))


def test_a_row_that_waits_for_its_prefill_shows_no_final_slot():
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    canvas = generation_canvas([prompt(3), prompt(17)], [6, 6], lm.spec, "cpu")
    loop = DenoiseLoop(lm.model, loop_request(canvas, lm.spec, cache=BlockCache()))
    view = next(loop.run())
    assert view.transfer_index[0].any()
    assert not view.transfer_index[1].any()
    assert view.frontier[1] == 17
    assert all(view.masked[b, : view.frontier[b]].sum() == 0 for b in range(2))


def test_the_loop_leaves_the_callers_canvas_as_it_was():
    lm = tiny_lm()
    canvas = generation_canvas([prompt(3)], [6], lm.spec, "cpu")
    before = [t.clone() for t in (canvas.ids, canvas.masked, canvas.group, canvas.low)]
    result = denoise(lm.model, loop_request(canvas, lm.spec))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (canvas.ids, canvas.masked, canvas.group, canvas.low), strict=True)
    )
    assert result.canvas[0][:3] == prompt(3)
    assert result.useful == [6]


def test_the_log_confidence_is_the_sum_over_committed_tokens_at_their_step():
    table = {3: (11, 0.95), 4: (12, 0.5), 5: (13, 0.25)}
    lm = oracle_lm(table)
    canvas = generation_canvas([[5, 6, 7]], [3], lm.spec, "cpu")
    result = denoise(lm.model, loop_request(canvas, lm.spec, sampler=Threshold(0.9)))
    assert result.log_confidence[0] == pytest.approx(math.log(0.95) + math.log(0.5) + math.log(0.25), abs=1e-5)


@pytest.mark.parametrize("rule", ["block_causal", "bidirectional"])
def test_history_tells_for_each_step_what_is_there_what_is_new_and_what_is_guessed(rule):
    lm = tiny_lm(rule)
    out = lm.generate(
        **padded([prompt(3), prompt(9), prompt(5)]), max_new_tokens=13, threshold=0.5, output_history=True
    )
    plain = lm.generate(**padded([prompt(3), prompt(9), prompt(5)]), max_new_tokens=13, threshold=0.5)
    assert plain.history is None
    assert torch.equal(out.sequences, plain.sequences)
    assert out.history is not None
    for b, frames in enumerate(out.history):
        assert [f.step for f in frames] == list(range(1, len(frames) + 1))
        assert [f.nfe for f in frames] == list(range(1, len(frames) + 1))
        assert frames[-1].nfe == out.row_stats[b].nfe
        masked = [True] * 13
        for frame in frames:
            assert len(frame.token_ids) == len(frame.provisional_ids) == 13
            assert [m and not n for m, n in zip(masked, frame.new, strict=True)] == frame.masked
            masked = frame.masked
            for i in range(13):
                if not masked[i]:
                    assert frame.provisional_ids[i] == frame.token_ids[i]
        kept = tokens(out, b)
        assert frames[-1].token_ids[: len(kept)] == frames[-1].provisional_ids[: len(kept)] == kept


def test_guesses_cover_each_rows_own_open_block_and_nothing_behind_it():
    # The rows' blocks end at 8 and 16, and at 16 and 22, the canvas's end: never the same number of slots.
    lm = oracle_lm(lambda slot, call: (10 + slot, 0.5), eos_token_ids=(), block_origin="zero")
    out = lm.generate(**padded([prompt(3), prompt(9)]), max_new_tokens=13, output_history=True)
    assert out.history is not None
    for b, length in enumerate((3, 9)):
        for frame in out.history[b]:
            # The last slot of this step's block, whether or not the step has filled it.
            touched = length + frame.new.index(True)
            end = min((touched // 8 + 1) * 8, length + 13) - length
            assert frame.provisional_ids == [10 + length + i for i in range(end)] + [0] * (13 - end)


# Lengths and blocks


def test_prompt_and_generation_must_fit_the_model():
    lm = tiny_lm()
    with pytest.raises(ValueError, match="prompt of 7 tokens.*row 1 needs 257"):
        lm.generate(**padded([prompt(6), prompt(7)]), max_new_tokens=250)
    canvas = generation_canvas([prompt(7)], [250], lm.spec, "cpu")
    with pytest.raises(ValueError, match="must fit in 256 positions: got 257"):
        DenoiseLoop(lm.model, loop_request(canvas, lm.spec))
    assert lm.generate(input_ids=[prompt(6)], max_new_tokens=250, threshold=0).lengths[0] <= 250


def test_a_causal_model_is_refused_with_advice():
    with pytest.raises(ValueError, match="adapt it first"):
        DiffusionLM(tiny_decoder(), tiny_spec("causal"))


def test_an_eos_of_the_call_replaces_the_models():
    lm = oracle_lm({1: (11, 0.95), 2: (EOS, 0.95), 3: (20, 0.95)})
    assert tokens(lm.generate(input_ids=[[5]], max_new_tokens=5)) == [11]
    assert tokens(lm.generate(input_ids=[[5]], max_new_tokens=5, eos_token_id=20)) == [11, EOS]
    assert tokens(lm.generate(input_ids=[[5]], max_new_tokens=5, eos_token_id=[20, 11])) == []
    assert lm.generate(input_ids=[[5]], max_new_tokens=5, eos_token_id=[]).lengths == [5]
    with pytest.raises(ValueError, match="eos_token_id must be in \\[0, 64\\): got 64"):
        lm.generate(input_ids=[[5]], max_new_tokens=5, eos_token_id=64)


def test_stop_strings_without_a_tokenizer_raise():
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=5, stop_strings="x")


def test_sequences_are_right_padded_and_lengths_say_how_far_they_go():
    table = dict.fromkeys(range(9), (11, 0.95)) | dict.fromkeys(range(9, 99), (EOS, 0.95))
    out = oracle_lm(table).generate(**padded([prompt(2), prompt(6)]), max_new_tokens=20)
    assert out.lengths == [7, 3]
    assert out.sequences.tolist() == [[11] * 7, [11] * 3 + [0] * 4]


def test_on_a_grid_from_zero_a_given_block_length_holds_for_prompt_and_generation():
    ends = []
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    lm.generate(
        input_ids=[prompt(6)],
        max_new_tokens=9,
        block_length=4,
        threshold=0.0,
        callback_on_step_end=lambda lm, i, t, kw: ends.append(int((~kw["masked"][0]).sum())),
    )
    assert ends == [8, 12, 15]


@pytest.mark.parametrize("sampler", ["low_confidence", "threshold"])
def test_a_row_that_waits_for_its_prefill_does_not_lose_a_step_of_its_limit(sampler):
    # Row 0 has nothing to prefill and decodes in the first forward, while row 1 prefills.
    lm, rows = tiny_lm(block_origin="zero", eos_token_ids=()), [prompt(3), prompt(17)]
    options: dict[str, Any] = dict(
        max_new_tokens=20, cache="block", max_denoising_steps=3, sampler=sampler, output_history=True
    )
    batch = lm.generate(**padded(rows), **options)
    assert batch.history is not None
    for i, row in enumerate(rows):
        assert [batch.history[i]] == lm.generate(input_ids=[row], **options).history


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_steps_are_forwards_without_a_cache(threshold):
    out = tiny_lm("bidirectional", eos_token_ids=()).generate(
        input_ids=[prompt(6)], max_new_tokens=17, threshold=threshold
    )
    assert out.stats.nfe == (3 if threshold == 0 else 17)


def test_seconds_are_counted_for_prefill_and_decoding():
    stats = tiny_lm(eos_token_ids=()).generate(input_ids=[prompt(6)], max_new_tokens=9, cache="block").stats
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.tokens_per_second == pytest.approx(9 / stats.decode_s)


# The smallest correct decoder, written down once more


def vanilla_greedy(lm, ids, gen):
    """VG of the notes: no cache, one surest slot a step in blocks behind the prompt, every row sees every row."""
    canvas, masked = torch.tensor([ids + [0] * gen]), torch.tensor([[False] * len(ids) + [True] * gen])
    length = canvas.shape[1]
    everything = torch.ones(1, length, length, dtype=torch.bool)
    for lo in range(len(ids), length, 8):
        hi = min(lo + 8, length)
        while masked[0, lo:hi].any():
            hidden = lm.model(
                None, torch.arange(length)[None], None, everything, embeds=lm.model.embed(canvas, masked, MASK)
            )
            law = lm.model.head(hidden)[0, lo - 1 : hi - 1].softmax(-1)
            law[:, [MASK, FILLER]] = 0
            surest = law.amax(-1).masked_fill(~masked[0, lo:hi], -1).argmax()
            canvas[0, lo + surest], masked[0, lo + surest] = law[surest].argmax(), False
    return canvas[0, len(ids) :].tolist()


@pytest.mark.parametrize("length", [1, 6, 11])
def test_a_threshold_above_one_is_vanilla_greedy_decoding(length):
    lm = tiny_lm("bidirectional", eos_token_ids=())
    for options in (dict(threshold=1.5), dict(sampler="low_confidence", k=1)):
        assert tokens(lm.generate(input_ids=[prompt(length)], max_new_tokens=19, **options)) == vanilla_greedy(
            lm, prompt(length), 19
        )


@pytest.mark.parametrize("length", [1, 6, 11])
def test_block_length_one_of_a_block_causal_model_with_blocks_from_zero_is_left_to_right_decoding(length):
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    ids = prompt(length)
    for _ in range(12):
        position = torch.arange(len(ids))[None]
        hidden = lm.model(torch.tensor([ids]), position, None, position[:, :, None] >= position[:, None, :])
        law = lm.model.head(hidden)[0, -1]
        law[[MASK, FILLER]] = -math.inf
        ids = [*ids, int(law.argmax())]
    for cache in ("none", "block"):
        out = lm.generate(input_ids=[prompt(length)], max_new_tokens=12, block_length=1, cache=cache)
        assert tokens(out) == ids[length:]


def test_a_sentence_of_the_oracle_comes_out_as_it_is():
    words = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    assert tokens(oracle_lm(sentence(4, words)).generate(input_ids=[prompt(4)], max_new_tokens=32)) == words
    assert peaked(9, 0.9).softmax(0)[9] == pytest.approx(0.9)
