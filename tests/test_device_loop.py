"""The loop on the device: the same tokens, reasons and counters as ``dllm/denoise.py``, step for step, and clear refusals."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.cache.block import BlockCache
from dllm.cache.dual import DualCache
from dllm.cache.none import NoCache
from dllm.canvas import generation_canvas, infill_canvas
from dllm.denoise import DenoiseLoop, denoise
from dllm.device_loop import DeviceStep, Engine, begin, denoise_on_device, kind_of, supports
from dllm.graphs import Buckets
from dllm.hooks_free_dave import FreeDaveHook
from dllm.kernels._launch import interpreted
from dllm.model.decoder import Decoder
from dllm.model.fast_decoder import FastDecoder
from dllm.noise import CounterNoise
from dllm.registry import hook_starter
from dllm.request import DenoiseRequest, DenoiseResult
from dllm.samplers.entropy import Entropy
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.low_confidence import LowConfidence
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.threshold import Threshold
from tests.tiny import EOS, loop_request, prompt, tiny_decoder, tiny_spec

MODEL = tiny_decoder()
STEPS: Buckets[DeviceStep] = Buckets(16)


def request_of(
    rows: list[list[int]], gen: int, attention: str = "block_causal", seed: int = 0, **changes: Any
) -> DenoiseRequest:
    """A request of the bare loop with the exact cache of its attention rule; changes: of the spec or of the request."""
    spec_names = ("logits_shift", "block_origin", "first_slot", "confidence", "eos_token_ids", "block_length")
    spec = tiny_spec(attention, **{k: changes.pop(k) for k in spec_names if k in changes})
    canvas = generation_canvas(rows, [gen] * len(rows), spec, "cpu")
    values = dict(
        cache=BlockCache() if attention == "block_causal" else NoCache(),
        noise=CounterNoise.for_rows(seed, len(rows)),
        eos_token_ids=spec.eos_token_ids,
        sampler=Threshold(0.6),
    )
    return loop_request(canvas, spec, **(values | changes))


def same(a: DenoiseResult, b: DenoiseResult) -> None:
    assert a.useful == b.useful
    assert a.finish_reasons == b.finish_reasons
    for left, right in zip([a.stats, *a.row_stats], [b.stats, *b.row_stats], strict=True):
        for name in ("nfe", "positions", "useful_tokens"):
            assert getattr(left, name) == getattr(right, name), name
    assert a.canvas == b.canvas
    assert a.log_confidence == pytest.approx(b.log_confidence, rel=1e-4, abs=1e-4)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    gen=st.integers(1, 19),
    block_length=st.sampled_from([1, 3, 8]),
    temperature=st.sampled_from([0.0, 0.8]),
    sampler=st.sampled_from([Threshold(0.2), Threshold(0.6), Threshold(2.0), LowConfidence(2)]),
    rule=st.sampled_from(["block_causal", "bidirectional"]),
    origin=st.sampled_from(["prompt", "zero"]),
    first=st.sampled_from(["free", "commit_first", "commit_store_pass"]),
    limit=st.sampled_from([None, 2]),
    eos=st.sampled_from([(), (EOS, 20, 30)]),
    confidence=st.sampled_from(["raw", "processed"]),
    seed=st.integers(0, 99),
)
def test_tokens_reasons_and_counters_equal_the_plain_loop(
    lengths, gen, block_length, temperature, sampler, rule, origin, first, limit, eos, confidence, seed
):
    request = request_of(
        [prompt(length, i) for i, length in enumerate(lengths)],
        gen,
        rule,
        seed,
        block_length=block_length,
        temperature=temperature,
        sampler=sampler,
        block_origin=origin,
        first_slot=first if rule == "block_causal" else "free",
        confidence=confidence,
        max_denoising_steps=limit,
        eos_token_ids=eos,
    )
    assert supports(request) is None
    same(denoise_on_device(MODEL, request, STEPS), denoise(MODEL, request))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("first", ["free", "commit_first", "commit_store_pass"])
def test_the_fast_decoder_in_the_device_loop_gives_the_plain_loops_tokens(first, temperature):
    for seed in range(4):
        rows = [prompt(3 + 4 * i, seed + i) for i in range(3)]
        request = request_of(rows, 21, seed=seed, first_slot=first, temperature=temperature)
        same(denoise_on_device(FastDecoder(MODEL), request, steps_per_poll=2), denoise(MODEL, request))


def fused_result(request: DenoiseRequest, model: Decoder = MODEL) -> DenoiseResult:
    """The loop with its bookkeeping in the kernels, under Triton's interpreter."""
    loop = DenoiseLoop(model, request)
    begin(loop)
    step = kind_of(request)(model, request, len(loop.rows), 32)
    step.fused = True
    step.load(loop)
    step.run(steps_per_poll=1)
    step.unload(loop)
    return loop.result()


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("sampler", [Threshold(0.3), LowConfidence(2)])
@pytest.mark.parametrize(("first", "limit"), [("free", 2), ("commit_first", None), ("commit_store_pass", None)])
def test_bookkeeping_in_two_launches_equals_the_tensor_operations(sampler, first, limit):
    origin, block_length = ("prompt", 4) if limit else ("zero", 3)
    request = request_of(
        [prompt(9), prompt(11, 1)],
        7,
        sampler=sampler,
        first_slot=first,
        max_denoising_steps=limit,
        block_origin=origin,
        block_length=block_length,
        eos_token_ids=(EOS, 20, 30),
    )
    same(fused_result(request), denoise(MODEL, request))


def calm_decoder(attention: float = 0.1) -> Decoder:
    """A tiny decoder whose later predictions are mostly those of before, so that branches come true; attention: how little they depend
    on each other."""
    model = tiny_decoder()
    for layer in model.layers:
        out: Any = layer.get_submodule("attention.out")
        out.weight.mul_(attention)
    return model


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("first", ["free", "commit_first"])
@pytest.mark.parametrize(
    ("sampler", "rule", "origin", "block_length", "shift"),
    [
        (Threshold(2.0), FreeDave(2), "prompt", 8, 1),
        (Threshold(2.0), FreeDave(4), "zero", 8, 1),
        (Threshold(0.5), FreeDave(4), "prompt", 3, 0),
        (LowConfidence(2), FreeDave(3, 2), "zero", 5, 1),
        (LowConfidence(2), FreeDave(2), "zero", 8, 0),
    ],
)
def test_free_dave_in_captured_steps_equals_the_loop_with_the_hook(sampler, rule, origin, block_length, shift, first):
    model = calm_decoder()
    options: dict[str, Any] = dict(
        sampler=sampler,
        first_slot=first,
        block_origin=origin,
        block_length=block_length,
        logits_shift=shift,
        eos_token_ids=(EOS, 20, 30),
    )
    for rows in ([prompt(9), prompt(4, 1), prompt(11, 2)], [prompt(6, 3)]):
        request = request_of(rows, 19, hook=hook_starter(rule), **options)
        host, plain = denoise(model, request), denoise(model, request_of(rows, 19, **options))
        ours = fused_result(request, model)
        same(ours, host)
        assert ours.useful == plain.useful
        for a, b, c in zip(ours.canvas, plain.canvas, ours.useful, strict=True):
            assert a[:c] == b[:c]
        if sampler == Threshold(2.0):
            assert ours.stats.nfe < plain.stats.nfe
        for left, right in zip([ours.stats, *ours.row_stats], [host.stats, *host.row_stats], strict=True):
            assert left.accept_lengths == right.accept_lengths


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("row", "gen", "sampler", "rule", "options"),
    [
        # The last given token stands in the open block, so that its row, which predicts the first slot, differs from branch to branch.
        (prompt(9, 4), 12, Threshold(2.0), FreeDave(4), dict(block_origin="zero", logits_shift=1, eos_token_ids=(0,))),
        # A confirmed step commits as many tokens as one that was not drafted.
        (prompt(12), 8, LowConfidence(2), FreeDave(5, 2), dict(first_slot="commit_first", logits_shift=0)),
    ],
)
def test_branches_of_cut_blocks_and_of_several_tokens_a_step(row, gen, sampler, rule, options):
    model = calm_decoder(0.2)
    request = request_of([row], gen, sampler=sampler, hook=hook_starter(rule), **{"eos_token_ids": (), **options})
    host, ours = denoise(model, request), fused_result(request, model)
    same(ours, host)
    assert ours.stats.accept_lengths == host.stats.accept_lengths
    assert max(host.stats.accept_lengths) > getattr(sampler, "k", 1)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
def test_captured_free_dave_is_kept_by_its_numbers_and_leaves_nothing_of_the_call_before(monkeypatch):
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: True)
    model, steps = calm_decoder(), Buckets[DeviceStep]()
    for draft_steps, seed in ((3, 0), (3, 1), (2, 1)):
        request = request_of(
            [prompt(5, seed)], 7, sampler=Threshold(2.0), hook=hook_starter(FreeDave(draft_steps)), eos_token_ids=()
        )
        host, ours = denoise(model, request), denoise_on_device(model, request, steps)
        same(ours, host)
        assert ours.stats.accept_lengths == host.stats.accept_lengths
    assert len(steps.built) == 2


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
def test_a_draft_made_in_the_first_forward_is_used_on_the_device():
    # Nothing to prefill: the first forward decodes, and what it drafted is carried over.
    spec = tiny_spec(first_slot="commit_first", logits_shift=0, block_origin="zero")
    model, used = calm_decoder(), []
    for seed in range(4):
        request = loop_request(
            generation_canvas([[]], [15], spec, "cpu"), spec, cache=BlockCache(), sampler=Threshold(2.0 if seed % 2 else 0.3),
            noise=CounterNoise.for_rows(seed, 1), eos_token_ids=(), hook=hook_starter(FreeDave(4)),
        )  # fmt: skip
        loop = DenoiseLoop(model, request)
        begin(loop)
        assert isinstance(loop.hook, FreeDaveHook) and loop.hook.lo is not None
        used.append(int(loop.hook.exists.sum()))
        host, ours = denoise(model, request), fused_result(request, model)
        same(ours, host)
        assert ours.stats.accept_lengths == host.stats.accept_lengths
    assert max(used) > 0


def test_free_dave_is_left_to_the_host_where_its_steps_cannot_be_captured(monkeypatch):
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: True)
    request = request_of([prompt(5)], 9, hook=hook_starter(FreeDave(4)))
    assert supports(request) is None
    assert supports(replace(request, hook=hook_starter(FreeDave(32)))) is None
    stored = request_of([prompt(5)], 9, hook=hook_starter(FreeDave(4)), first_slot="commit_store_pass")
    for reason, changed in {
        "FreeDave without the block cache and kernels": replace(request, cache=NoCache()),
        "FreeDave with rule 'subset'": replace(request, hook=hook_starter(FreeDave(4, rule="subset"))),
        "FreeDave with 264 rows": replace(request, hook=hook_starter(FreeDave(33))),
        "FreeDave without a draft": replace(request, hook=hook_starter(FreeDave(1))),
        "FreeDave behind a pass that only stores": stored,
        "hook": replace(request, hook=hook_starter(S2D2())),
    }.items():
        assert supports(changed) == reason
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: False)
    assert supports(request) == "FreeDave without the block cache and kernels"


def test_a_second_call_reuses_the_captured_step_and_leaves_nothing_of_the_first():
    steps: Buckets[DeviceStep] = Buckets()
    first = request_of([prompt(9), prompt(4, 1)], 20, seed=3, temperature=1.0)
    second = request_of([prompt(30, 2), prompt(2, 3)], 40, seed=8, temperature=1.0)
    before = denoise_on_device(MODEL, first, steps)
    same(denoise_on_device(MODEL, second, steps), denoise(MODEL, second))
    same(denoise_on_device(MODEL, first, steps), before)
    assert len(steps.built) == 1


def test_moved_weights_are_another_captured_step():
    model, steps = tiny_decoder(), Buckets[DeviceStep]()
    request = request_of([prompt(5)], 9)
    denoise_on_device(model, request, steps)
    down: Any = model.layers[0].get_submodule("mlp.down")
    down.weight = torch.nn.Parameter(-down.weight, requires_grad=False)
    same(denoise_on_device(model, request, steps), denoise(model, request))
    assert len(steps.built) == 2


def test_a_captured_step_that_nobody_keeps_gives_its_memory_back():
    steps: Buckets[DeviceStep] = Buckets(1)
    request = request_of([prompt(5)], 9)
    denoise_on_device(MODEL, request, steps)
    gone = weakref.ref(next(iter(steps.built.values())))
    denoise_on_device(MODEL, request_of([prompt(5), prompt(6)], 9), steps)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_fault_raises_what_the_plain_loop_raises_with_row_and_step(fused):
    if fused and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    model = tiny_decoder()
    model.head_weight[5] = float("nan")
    request = request_of([prompt(5), prompt(9, 1)], 9)
    with pytest.raises(ValueError, match="logits must be finite") as plain:
        denoise(model, request)
    step = DeviceStep(model, request, 2, 32)
    step.fused = fused
    loop = DenoiseLoop(model, request)
    begin(loop)
    step.load(loop)
    step.run(3)
    with pytest.raises(ValueError, match="logits must be finite") as ours:
        step.unload(loop)
    assert str(ours.value) == str(plain.value)


def test_requests_of_the_plain_loop_are_refused_by_name():
    request = request_of([prompt(5)], 9)
    assert supports(request) is None
    changes: dict[str, dict[str, Any]] = {
        "sampler Entropy": dict(sampler=Entropy()),
        "cache DualCache": dict(cache=DualCache()),
        "cfg_scale": dict(cfg_scale=1.0),
        "find_stop": dict(find_stop=lambda ids: None),
        "logits_processor": dict(logits_processor=lambda logits, slots: logits),
        "output_history": dict(want_history=True),
        "closed_slots": dict(closed_slots=torch.zeros(1, 14, dtype=torch.bool)),
    }
    for reason, change in changes.items():
        assert supports(replace(request, **change)) == reason
    gaps = infill_canvas([[prompt(4), prompt(3), prompt(2)]], [[2, 3]], request.spec, "cpu")
    assert "several" in str(supports(replace(request, canvas=gaps)))
    with pytest.raises(ValueError, match="that the device loop supports: got cfg_scale"):
        denoise_on_device(MODEL, replace(request, cfg_scale=1.0))


def test_the_engine_leaves_the_cpu_and_the_reference_mode_to_the_plain_loop(monkeypatch):
    engine = Engine(MODEL)
    request = request_of([prompt(5)], 9)
    assert engine.model is MODEL
    assert engine.refuses(request) == "device cpu"
    monkeypatch.setattr(Engine, "_off", lambda self: None)
    assert isinstance(engine.model, FastDecoder)
    assert engine.refuses(request) is None
    same(engine.run(request), denoise(MODEL, request))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_the_gpu_graphs_and_kernels_give_the_plain_loops_tokens(temperature):
    model = tiny_decoder().cuda()
    steps: Buckets[DeviceStep] = Buckets(16)
    for seed in range(6):
        rows = [prompt(3 + 4 * i, seed + i) for i in range(1 + seed % 4)]
        spec = tiny_spec(first_slot=("free", "commit_first", "commit_store_pass")[seed % 3])

        def request(device: str, rows=rows, spec=spec, seed=seed) -> DenoiseRequest:
            return loop_request(
                generation_canvas(rows, [21] * len(rows), spec, device),
                spec,
                cache=BlockCache(),
                noise=CounterNoise.for_rows(seed, len(rows), device),
                eos_token_ids=spec.eos_token_ids,
                sampler=Threshold(0.6),
                temperature=temperature,
            )

        truth = denoise(MODEL, request("cpu"))
        same(denoise_on_device(FastDecoder(model), request("cuda"), steps), truth)
        same(denoise_on_device(model, request("cuda"), steps), truth)
    assert all(step.captured.graph is not None for step in steps.built.values())


@pytest.mark.gpu
@pytest.mark.parametrize("draft_steps", [2, 4])
def test_on_the_gpu_captured_free_dave_gives_the_hooks_tokens_and_counters(draft_steps):
    truth_model, steps = calm_decoder(), Buckets[DeviceStep](16)
    model = FastDecoder(calm_decoder().cuda())
    for seed in range(6):
        rows = [prompt(3 + 4 * i, seed + i) for i in range(1 + seed % 4)]
        spec = tiny_spec(first_slot=("free", "commit_first")[seed % 2])

        def request(device: str, rows=rows, spec=spec, seed=seed) -> DenoiseRequest:
            return loop_request(
                generation_canvas(rows, [21] * len(rows), spec, device),
                spec,
                cache=BlockCache(),
                noise=CounterNoise.for_rows(seed, len(rows), device),
                eos_token_ids=spec.eos_token_ids,
                sampler=Threshold(2.0),
                hook=hook_starter(FreeDave(draft_steps)),
            )

        assert supports(request("cuda")) is None
        truth = denoise(truth_model, request("cpu"))
        ours = denoise_on_device(model, request("cuda"), steps)
        same(ours, truth)
        assert ours.stats.accept_lengths == truth.stats.accept_lengths
    assert all(step.captured.graph is not None for step in steps.built.values())
