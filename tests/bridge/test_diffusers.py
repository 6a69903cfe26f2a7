"""Diffusers: our samplers as schedulers, its schedulers as our samplers, and the pipeline, saved and loaded again."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from diffusers import BlockRefinementScheduler, DiffusionPipeline, EntropyBoundScheduler, LLaDA2Pipeline
from diffusers.callbacks import PipelineCallback
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.bridge.diffusers import DllmModel, DllmPipeline, SamplerScheduler, SchedulerSampler
from dllm.config import GenerationConfig
from dllm.kernels.row_stats import row_stats
from dllm.noise import CounterNoise
from dllm.pipeline import DiffusionLM
from dllm.registry import SAMPLERS
from dllm.samplers.block_refinement import BlockRefinement
from dllm.samplers.end_last import EndLast
from dllm.samplers.entropy_bound import bounded_count
from dllm.samplers.klass import Klass
from dllm.samplers.low_confidence import best
from dllm.samplers.threshold import Threshold
from dllm.samplers.token_editing import TokenEditing
from dllm.samplers.uniform_canvas import UniformCanvas
from dllm.types import RowState
from tests.families.golden import golden_lm, needs_gemma
from tests.tiny import MASK, VOCAB, padded, prompt, tiny_lm, tokens
from tests.words import speaking

IDS = [[3, 40, 21, 7, 33], [11, 12, 50, 4, 9]]
NAMES = sorted(set(SAMPLERS) - {"wino"})


def drive(lm, scheduler, ids, length, **options):
    """What a diffusers user writes: one block behind the prompt, the logits of the whole text in each step."""
    spec, start = lm.spec, len(ids[0])
    sample = torch.tensor([row + [MASK] * length for row in ids])
    positions = torch.arange(start, start + length).expand(len(ids), -1)
    for timestep in scheduler.timesteps:
        logits = lm.forward(sample)[:, start - spec.logits_shift : start + length - spec.logits_shift]
        out = scheduler.step(logits, timestep, sample[:, start:], positions=positions, **options)
        sample = torch.cat([sample[:, :start], out.prev_sample], 1)
    return sample[:, start:].tolist()


# The uniform ones have no mask.
MASKED = sorted(set(NAMES) - {"uniform_canvas", "block_refinement"})


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_driven_by_hand_give_what_generate_gives(name, temperature):
    lm = tiny_lm("bidirectional", logits_shift=0, eos_token_ids=(), filler_token_id=None)
    # An editor would go on after the step at which the loop finds the block settled.
    numbers = {"editing_threshold": 2.0} if name == "token_editing" else {}
    scheduler = SamplerScheduler(sampler=name, numbers=numbers, mask_token_id=MASK)
    scheduler.set_timesteps(7)
    for ids in IDS:
        out = lm.generate(
            input_ids=[ids],
            max_new_tokens=12,
            block_length=12,
            max_denoising_steps=7,
            sampler=scheduler.sampler,
            temperature=temperature,
            seed=5,
        )
        assert drive(lm, scheduler, [ids], 12, temperature=temperature, seed=5) == out.sequences.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_sampler_is_saved_with_its_numbers_and_loaded_again(name, tmp_path):
    scheduler = SamplerScheduler(sampler=name, num_inference_steps=9, mask_token_id=MASK)
    scheduler.save_pretrained(tmp_path)
    again = SamplerScheduler.from_pretrained(tmp_path)
    assert again.sampler == scheduler.sampler
    assert (again.num_inference_steps, again.config["mask_token_id"]) == (9, MASK)
    assert SamplerScheduler.of(scheduler.sampler, 9, MASK).sampler == scheduler.sampler


def test_numbers_survive_the_config_and_can_be_replaced():
    scheduler = SamplerScheduler.of(EndLast((5, 6)))
    assert SamplerScheduler.from_config(scheduler.config).sampler == EndLast((5, 6))
    other = SamplerScheduler.from_config(SamplerScheduler.of(Threshold(0.4)).config, numbers={"threshold": 0.2})
    assert other.sampler == Threshold(0.2)


def test_a_block_that_begins_forgets_the_one_before():
    scheduler = SamplerScheduler.of(Klass(), 4, MASK)
    logits = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    fresh = torch.full((2, 6), MASK)
    first = [scheduler.step(logits, 0, fresh).prev_sample.tolist() for _ in range(2)]
    scheduler.step(logits, 1, fresh)
    assert first[0] == first[1] == scheduler.step(logits, 0, fresh).prev_sample.tolist()


def test_a_scheduler_protects_the_prompt_and_never_writes_the_mask():
    logits = torch.zeros(1, 4, VOCAB)
    logits[..., MASK], logits[..., 9] = 20.0, 3.0
    sample = torch.tensor([[5, MASK, MASK, MASK]])
    out = SamplerScheduler(sampler="threshold", mask_token_id=MASK).step(logits, 31, sample)
    assert out.prev_sample.tolist() == [[5, 9, 9, 9]]
    editing = SamplerScheduler.of(TokenEditing(0.0, 0.0), 2, MASK)
    sharp = torch.zeros(1, 4, VOCAB)
    sharp[..., 9] = 20.0
    kept = editing.step(sharp, 0, sample, prompt_mask=torch.tensor([True, False, False, False]))
    assert kept.prev_sample.tolist() == [[5, 9, 9, 9]]
    assert editing.step(sharp, 0, sample).prev_sample.tolist() == [[9, 9, 9, 9]]
    # A typed mask id is told apart by a mask tensor.
    typed = torch.tensor([[MASK, MASK, MASK, MASK]])
    only = editing.step(
        sharp, 0, typed, masked=torch.tensor([[False, True, True, False]]), prompt_mask=torch.tensor([1, 0, 0, 1])
    )
    assert only.prev_sample.tolist() == [[MASK, 9, 9, MASK]]


def test_positions_that_the_model_would_not_use_raise():
    model = DllmModel(golden_lm("llada"))
    ids, mask = torch.tensor(IDS), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    counted = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert torch.equal(model(ids, mask, counted).logits, model(ids, mask).logits)
    with pytest.raises(ValueError, match="position_ids must count the tokens"):
        model(ids, mask, torch.arange(5).expand(2, -1))


def test_a_tuple_is_given_where_no_dict_is_wanted():
    scheduler = SamplerScheduler(sampler="threshold", mask_token_id=MASK)
    logits, sample = torch.randn(1, 3, VOCAB), torch.full((1, 3), MASK)
    found = scheduler.step(logits, 0, sample, return_dict=False)
    named = scheduler.step(logits, 0, sample)
    assert torch.equal(found[0], named.prev_sample)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SamplerScheduler(sampler="wino"), "needs shadow rows"),
        (lambda: SamplerScheduler(sampler="thresh"), "sampler must be one of"),
        (
            lambda: SamplerScheduler(sampler="threshold", numbers={"k": 3}),
            r"numbers of sampler 'threshold' must be among \['threshold'\]",
        ),
        (lambda: SamplerScheduler.of(GenerationConfig()), "sampler must be one of"),
        (lambda: SamplerScheduler().set_timesteps(0), "num_inference_steps must be an int >= 1"),
        (lambda: step_of(3, torch.zeros(1, 2)), "mask_token_id must be given"),
        (lambda: step_of(3, torch.zeros(1, 3), mask_token_id=1), r"model_output must be \[B, S, V\]"),
        (lambda: step_of(32, torch.zeros(1, 2), mask_token_id=1), r"timestep must be in \[0, 32\)"),
        (lambda: step_of(3, torch.zeros(1, 2), mask_token_id=1, top_k=3), "need temperature > 0"),
        (lambda: step_of(3, torch.zeros(1, 2), masked=torch.ones(2, 2)), "masked must be"),
        (lambda: step_of(3, torch.zeros(1, 2), mask_token_id=1, value=float("nan")), "model_output must be finite"),
        (
            lambda: step_of(0, torch.zeros(1, 2), mask_token_id=1, seed=1, generator=torch.Generator()),
            "seed and generator must not both",
        ),
    ],
)
def test_a_scheduler_refuses_what_it_cannot_honour(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def step_of(timestep, sample, value=0.0, **options):
    logits = torch.full((1, 2, VOCAB), value)
    return SamplerScheduler().step(logits, timestep, sample.long(), **options)


# Diffusers' schedulers in our loop.


@pytest.mark.parametrize("editing", [None, 0.35])
@pytest.mark.parametrize("steps", [None, 5])
def test_block_refinement_in_our_loop_equals_our_token_editing(editing, steps):
    lm = golden_lm("llada2_moe")
    theirs = SchedulerSampler(
        BlockRefinementScheduler(num_inference_steps=8, threshold=0.3, editing_threshold=editing), lm.spec.mask_token_id
    )
    ours = TokenEditing(0.3, 2.0 if editing is None else editing)
    rows = [[3, 40, 21, 7, 33], [11, 12, 50]]
    options: dict[str, Any] = {"max_new_tokens": 14, "block_length": 8, "max_denoising_steps": steps or 8}
    choices: tuple[list[int] | None, ...] = ([], None)
    for stop in choices:
        found = lm.generate(**padded(rows), sampler=theirs, eos_token_id=stop, **options)
        want = lm.generate(**padded(rows), sampler=ours, eos_token_id=stop, **options)
        assert found.sequences.tolist() == want.sequences.tolist()
        assert [s.nfe for s in found.row_stats] == [s.nfe for s in want.row_stats]


def test_a_row_of_a_batch_equals_its_single_run_at_a_temperature():
    lm = tiny_lm("bidirectional")
    sampler = SchedulerSampler(BlockRefinementScheduler(threshold=0.4), MASK, temperature=0.8, top_k=20)
    rows = [prompt(3), prompt(9)]
    options: dict[str, Any] = {"max_new_tokens": 13, "sampler": sampler}
    batch = lm.generate(**padded(rows), seed=3, **options)
    singles = [lm.generate(input_ids=[row], seed=3 + b, **options) for b, row in enumerate(rows)]
    assert [tokens(batch, b) for b in range(2)] == [tokens(single) for single in singles]
    assert tokens(singles[0]) != tokens(lm.generate(input_ids=[rows[0]], seed=9, **options))


def state_of(step, steps, shape):
    batch, slots = shape
    one = torch.ones(batch, dtype=torch.int64)
    return RowState(one * step, one * steps, one * slots, torch.arange(slots).expand(batch, -1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([None, 0.3]))
def test_uniform_block_refinement_commits_and_edits_as_our_twin(seed, steps, threshold, editing):
    generator = torch.Generator().manual_seed(seed)
    theirs = SchedulerSampler(BlockRefinementScheduler(threshold=threshold, editing_threshold=editing))
    ours = BlockRefinement(threshold, editing)
    canvas = torch.randint(0, 20, (2, 6), generator=generator)
    open_, noise = torch.ones(2, 6, dtype=torch.bool), CounterNoise.for_rows(seed, 2)
    for step in range(steps):
        laws = row_stats(torch.randn(2, 6, 20, generator=generator) * 3, ours.needs)
        state = state_of(step, steps, (2, 6))
        found, want = (rule.step(laws, canvas, open_, state, noise) for rule in (theirs, ours))
        assert torch.equal(found.transfer_index, want.transfer_index)
        assert torch.equal(found.tokens[found.transfer_index], want.tokens[want.transfer_index])
        edits = [rule.revise(laws, canvas, ~open_, state, noise) for rule in (theirs, ours)]
        assert torch.equal(edits[0].edit, edits[1].edit)
        assert found.canvas is not None
        canvas = torch.where(found.transfer_index | edits[0].edit, laws.token, torch.where(open_, found.canvas, canvas))
        open_ = open_ & ~found.transfer_index
    assert not open_.any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from([0.0, 0.1, 2.0]))
def test_entropy_bound_keeps_what_our_twin_keeps_and_ends_with_the_arg_max(seed, step, bound):
    generator = torch.Generator().manual_seed(seed)
    # Laws without a second choice: a drawn token is the arg-max, so what is kept shows which slots were.
    logits = torch.full((2, 6, 20), -40.0)
    sure = torch.randint(0, 20, (2, 6), generator=generator)
    logits.scatter_(2, sure[..., None], 40.0)
    logits[:, ::2] *= torch.rand(2, 3, 1, generator=generator) * 0.03
    laws = row_stats(logits, frozenset({"top1", "logits"}))
    theirs, ours = SchedulerSampler(EntropyBoundScheduler(bound)), UniformCanvas(bound)
    canvas, open_ = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.bool)
    state, noise = state_of(step, 4, (2, 6)), CounterNoise.for_rows(seed, 2)
    found, want = (rule.step(laws, canvas, open_, state, noise) for rule in (theirs, ours))
    torch.testing.assert_close(found.conditioning, want.conditioning)
    assert found.canvas is not None
    assert want.canvas is not None
    assert want.conditioning is not None
    law = want.conditioning.log_softmax(-1)
    entropy = -(law.exp() * law).sum(-1)
    kept = best(-entropy, open_, bounded_count(entropy, -entropy, open_, bound)) & (entropy < 1e-6)
    assert torch.equal(found.canvas[kept], sure[kept])
    assert torch.equal(want.canvas[kept], sure[kept])
    assert found.transfer_index.all() == (step == 3)
    assert torch.equal(found.tokens, want.tokens)


@needs_gemma
@pytest.mark.parametrize(
    "scheduler", [EntropyBoundScheduler(0.5, num_inference_steps=5), BlockRefinementScheduler(num_inference_steps=5)]
)
def test_uniform_schedulers_fill_canvases_in_our_loop(scheduler):
    lm = golden_lm("diffusion_gemma")
    rows = [[3, 40, 21, 7, 33], [11, 12, 50]]
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [], "max_denoising_steps": 5}
    out = lm.generate(**padded(rows), sampler=SchedulerSampler(scheduler), seed=1, **options)
    assert out.lengths == [20, 20]
    for b, row in enumerate(rows):
        single = lm.generate(input_ids=[row], sampler=SchedulerSampler(scheduler), seed=1 + b, **options)
        assert tokens(out, b) == tokens(single)


def test_an_id_that_may_not_be_written_never_comes_out_of_a_foreign_scheduler():
    def say_mask(logits, slots):
        out = logits.clone()
        out[..., MASK] = 30.0
        return out

    lm = tiny_lm("bidirectional")
    ids = prompt(5)
    ids[2] = MASK
    sampler = SchedulerSampler(BlockRefinementScheduler(threshold=0.4, editing_threshold=0.1), MASK)
    out = lm.generate(input_ids=[ids], max_new_tokens=9, sampler=sampler, logits_processor=say_mask, eos_token_id=[])
    assert out.lengths == [9]
    assert MASK not in tokens(out)


def test_a_foreign_scheduler_of_another_kind_or_with_arguments_that_it_has_not_raises():
    with pytest.raises(TypeError, match="BlockRefinementScheduler or EntropyBoundScheduler: got SamplerScheduler"):
        SchedulerSampler(SamplerScheduler())
    with pytest.raises(ValueError, match="must not be given with EntropyBoundScheduler"):
        SchedulerSampler(EntropyBoundScheduler(), MASK)
    with pytest.raises(ValueError, match="is for models of uniform corruption"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, sampler=SchedulerSampler(EntropyBoundScheduler()))


# The pipeline.


@pytest.mark.parametrize("folder", ["llada", "dream", "sdar", "fast_dllm_v2", "llada2_moe", "mdlm", "bd3lm", "dreamon"])
def test_a_pipeline_generates_as_the_model_does_and_so_does_the_loaded_one(folder, tmp_path):
    lm = golden_lm(folder)
    pipe = DllmPipeline.of(lm)
    options: dict[str, Any] = {"gen_length": 9, "output_type": "seq"}
    want = lm.generate(input_ids=IDS, max_new_tokens=9, seed=2)
    found = pipe(input_ids=torch.tensor(IDS), seed=2, **options)
    assert found.sequences.tolist() == want.sequences.tolist()
    assert (found.finish_reasons, found.stats.nfe) == (want.finish_reasons, want.stats.nfe)
    pipe.save_pretrained(tmp_path)
    again = DllmPipeline.from_pretrained(tmp_path)
    assert again.model.spec == lm.spec
    torch.testing.assert_close(again.model(torch.tensor(IDS)).logits, lm.forward(IDS), atol=2e-5, rtol=1e-5)
    assert again(input_ids=torch.tensor(IDS), seed=2, **options).sequences.tolist() == want.sequences.tolist()


@needs_gemma
def test_a_wrapped_class_is_saved_by_that_class(tmp_path):
    lm = golden_lm("diffusion_gemma")
    pipe = DllmPipeline.of(lm, EntropyBoundScheduler(num_inference_steps=3))
    want = pipe(input_ids=torch.tensor(IDS), gen_length=8, num_inference_steps=3, seed=1, output_type="seq")
    pipe.save_pretrained(tmp_path)
    again = DllmPipeline.from_pretrained(tmp_path)
    assert isinstance(again.scheduler, EntropyBoundScheduler)
    found = again(input_ids=torch.tensor(IDS), gen_length=8, num_inference_steps=3, seed=1, output_type="seq")
    assert found.sequences.tolist() == want.sequences.tolist()


def test_text_tokenizer_and_number_type_survive_the_round_trip(tmp_path):
    lm = speaking_golden()
    pipe = DllmPipeline.of(lm, SamplerScheduler.of(Threshold(0.3), 16, lm.spec.mask_token_id))
    want = pipe("the cab", gen_length=12).texts
    assert want == lm.generate("the cab", max_new_tokens=12, sampler="threshold", threshold=0.3).texts
    pipe.save_pretrained(tmp_path)
    again = DllmPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert {p.dtype for p in again.model.module.parameters()} == {torch.bfloat16}
    # Computed tables are no weights: they stay exact, whichever way the numbers are changed.
    assert again.model.module.inv_freq.dtype == torch.float32
    assert again.to(torch.float32).to(torch.bfloat16).model.module.inv_freq.dtype == torch.float32
    same = DllmPipeline.from_pretrained(tmp_path)
    assert same("the cab", gen_length=12).texts == want
    assert isinstance(same, DiffusionPipeline)


def speaking_golden() -> DiffusionLM:
    """A loadable model that reads and writes text: its vocabulary is larger than the tokenizer's."""
    lm = speaking(golden_lm("llada"))
    return DiffusionLM(lm.model, lm.spec, lm.tokenizer, lm.config)


def test_callbacks_see_each_step_from_zero_and_may_not_change_anything():
    pipe = DllmPipeline.of(golden_lm("llada"))
    seen: list[Any] = []

    def see(pipe, step, timestep, kwargs):
        seen.append((step, timestep, sorted(kwargs), int(kwargs["masked"].sum())))
        return kwargs

    names = ["canvas", "masked"]
    options: dict[str, Any] = {"input_ids": torch.tensor(IDS[:1]), "gen_length": 8, "output_type": "seq"}
    out = pipe(**options, callback_on_step_end=see, callback_on_step_end_tensor_inputs=names)
    assert [entry[:3] for entry in seen] == [(i, i, names) for i in range(out.stats.nfe)]
    assert seen[-1][3] == 0

    class Watch(PipelineCallback):
        tensor_inputs: ClassVar[list[str]] = ["slots"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            seen.append(callback_kwargs["slots"].shape)
            return callback_kwargs

    pipe(**options, callback_on_step_end=Watch(cutoff_step_ratio=None, cutoff_step_index=2))
    assert len(seen[-1]) == 2
    with pytest.raises(ValueError, match="must return the tensors that it got"):
        pipe(**options, callback_on_step_end=lambda p, s, t, kw: {"canvas": kw["canvas"] + 1})
    with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs must be among"):
        pipe(**options, callback_on_step_end=see, callback_on_step_end_tensor_inputs=["latents"])


def test_what_the_pipeline_cannot_honour_raises():
    pipe = DllmPipeline.of(golden_lm("llada"))
    ids = torch.tensor(IDS[:1])
    with pytest.raises(ValueError, match="output_type 'text' needs a tokenizer"):
        pipe(input_ids=ids, gen_length=4)
    with pytest.raises(ValueError, match="output_type must be"):
        pipe(input_ids=ids, output_type="image")
    with pytest.raises(TypeError, match="unknown argument 'guidance'"):
        pipe(input_ids=ids, gen_length=4, output_type="seq", guidance=3)
    with pytest.raises(ValueError, match="seed and generator"):
        pipe(input_ids=ids, gen_length=4, output_type="seq", seed=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="no family reads"):
        DllmModel(tiny_lm())


def test_diffusers_own_pipeline_runs_our_model_through_its_scheduler():
    lm = golden_lm("llada2_moe")
    size = lm.spec.block_length
    pipe = LLaDA2Pipeline(model=DllmModel(lm), scheduler=BlockRefinementScheduler(threshold=0.3))
    out = pipe(
        input_ids=torch.tensor([[3, 40, 21, 7, 33, 9, 10, 11]]),
        gen_length=16,
        block_length=size,
        num_inference_steps=8,
        threshold=0.3,
        editing_threshold=None,
        mask_token_id=lm.spec.mask_token_id,
        eos_token_id=-1,
        output_type="seq",
    )
    want = lm.generate(
        input_ids=[[3, 40, 21, 7, 33, 9, 10, 11]],
        max_new_tokens=16,
        block_length=size,
        max_denoising_steps=8,
        sampler=SchedulerSampler(pipe.scheduler, lm.spec.mask_token_id),
        eos_token_id=[],
    )
    assert out.sequences.tolist() == want.sequences.tolist()
