"""A guide in captured steps: the tokens, reasons and counters of ``GuideHook`` in ``dllm/denoise.py``, which are the guide's own text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm import ARGuide
from dllm.cache.block import BlockCache
from dllm.cache.none import NoCache
from dllm.canvas import generation_canvas
from dllm.denoise import DenoiseLoop, denoise
from dllm.device_guided import GuidedStep
from dllm.device_loop import DeviceStep, begin, denoise_on_device, supports
from dllm.graphs import Buckets
from dllm.kernels._launch import interpreted
from dllm.model.decoder import Decoder
from dllm.model.fast_decoder import FastDecoder
from dllm.noise import CounterNoise
from dllm.request import DenoiseRequest, DenoiseResult
from dllm.samplers.entropy import Entropy
from dllm.samplers.guided import Guided
from dllm.samplers.klass import Klass
from dllm.samplers.sequential import Sequential
from dllm.types import Noise, RowState, RowStats, Step
from tests.test_device_loop import calm_decoder, request_of, same
from tests.tiny import EOS, MASK, loop_request, prompt, tiny_decoder, tiny_spec

EXACT = Guided("exact", "ar", guide_passes=None)
needs_kernels = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def noisy(model: Decoder, size: float) -> Decoder:
    """The same model with a disturbed head: it agrees with it often, not always."""
    torch.manual_seed(5)
    model.head_weight.add_(size * torch.randn_like(model.head_weight))
    return model


def hook_of(model: Decoder, rule: Guided = EXACT) -> Any:
    return partial(ARGuide(model, rule=rule, vocabulary="same").start, tokenizer=None)


def guided_result(request: DenoiseRequest, model: Decoder) -> DenoiseResult:
    """The loop by its captured parts, under Triton's interpreter."""
    loop = DenoiseLoop(model, request)
    begin(loop)
    step = GuidedStep(model, request, len(loop.rows), 48)
    step.load(loop)
    step.run(steps_per_poll=2)
    step.unload(loop)
    return loop.result()


def check(ours: DenoiseResult, host: DenoiseResult) -> None:
    same(ours, host)
    for left, right in zip([ours.stats, *ours.row_stats], [host.stats, *host.row_stats], strict=True):
        assert (left.guide_nfe, left.accept_lengths) == (right.guide_nfe, right.accept_lengths)


@needs_kernels
@pytest.mark.parametrize("passes", [None, 1])
@pytest.mark.parametrize(
    ("block_length", "origin", "shift", "eos"),
    [(8, "prompt", 1, ()), (8, "zero", 1, (EOS, 20, 30)), (3, "zero", 0, ()), (5, "prompt", 1, (EOS, 4, 9))],
)
def test_tokens_reasons_and_counters_equal_the_hook(passes, block_length, origin, shift, eos):
    model = calm_decoder()
    guide = noisy(calm_decoder(), 1.0)
    accepted: list[int] = []
    for rows in ([prompt(9), prompt(4, 1), prompt(11, 2)], [prompt(1, 3)]):
        request = request_of(
            rows, 19, hook=hook_of(guide, replace(EXACT, guide_passes=passes)), block_length=block_length,
            block_origin=origin, logits_shift=shift, eos_token_ids=eos,
        )  # fmt: skip
        host = denoise(model, request)
        check(guided_result(request, model), host)
        accepted += host.stats.accept_lengths
    # Drafts are kept and rejected, so that both ends of the rule were seen.
    assert max(accepted) > 1
    assert min(accepted) == 1


@needs_kernels
def test_ids_that_may_not_be_written_are_left_out_of_the_guides_law():
    model = calm_decoder()
    banned = torch.zeros(64, dtype=torch.bool)
    banned[[MASK, *range(10, 40)]] = True
    request = request_of([prompt(6), prompt(3)], 12, hook=hook_of(tiny_decoder(2)), eos_token_ids=(), banned=banned)
    host, ours = denoise(model, request), guided_result(request, model)
    check(ours, host)
    for row, useful, start in zip(ours.canvas, ours.useful, (6, 3), strict=True):
        assert not banned[row[start : start + useful]].any()
    assert ours.log_confidence[0] < 0


@needs_kernels
@pytest.mark.parametrize("passes", [None, 1])
def test_nothing_is_committed_behind_a_stop_inside_an_accepted_draft(passes):
    model = calm_decoder(0.05)
    hook = hook_of(model, replace(EXACT, guide_passes=passes))
    request = request_of([prompt(7, 1)], 8, hook=hook, eos_token_ids=())
    text = denoise(model, request).canvas[0][7:]
    for stop in set(text):
        request = request_of([prompt(7, 1)], 8, hook=hook, eos_token_ids=(stop,))
        check(guided_result(request, model), denoise(model, request))


@needs_kernels
def test_captured_guides_are_kept_by_guide_and_passes_and_leave_nothing_of_the_call_before(monkeypatch):
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: True)
    model, steps = calm_decoder(), Buckets[DeviceStep]()
    guides = [noisy(calm_decoder(), 1.0), tiny_decoder(2)]
    for guide, passes, seed in ((0, None, 0), (0, None, 1), (0, 1, 1), (1, 1, 1)):
        hook = hook_of(guides[guide], replace(EXACT, guide_passes=passes))
        request = request_of([prompt(5, seed), prompt(3, seed)], 5, hook=hook, eos_token_ids=())
        check(denoise_on_device(model, request, steps), denoise(model, request))
    assert len(steps.built) == 3


@dataclass(eq=True)
class Loose:
    """A sampler of the caller's own, which cannot be hashed."""

    needs = frozenset({"top1", "logits"})

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        return Step(rows.token, masked)


@needs_kernels
@pytest.mark.parametrize("sampler", [Klass(), Entropy(), Loose()])
def test_a_sampler_beside_a_guide_has_no_say_whatever_it_reads(sampler, monkeypatch):
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: True)
    model = calm_decoder()
    request = request_of([prompt(6), prompt(3)], 9, hook=hook_of(tiny_decoder(2)), sampler=sampler)
    assert supports(request) is None
    check(denoise_on_device(FastDecoder(model), request), denoise(model, request))


@needs_kernels
@pytest.mark.parametrize("token", [5, MASK])
def test_a_guide_without_a_law_is_named(token):
    guide = tiny_decoder(2)
    guide.head_weight[token] = float("nan")
    request = request_of([prompt(6)], 12, hook=hook_of(guide))
    with pytest.raises(ValueError, match="the guide's logits must be finite"):
        denoise(calm_decoder(), request)
    with pytest.raises(ValueError, match="the guide's logits must be finite"):
        guided_result(request, calm_decoder())


@needs_kernels
def test_a_diffusion_model_without_a_law_raises_what_the_loop_raises():
    model = tiny_decoder()
    model.head_weight[5] = float("nan")
    request = request_of([prompt(5), prompt(9, 1)], 9, hook=hook_of(tiny_decoder(2)))
    with pytest.raises(ValueError, match="logits must be finite") as plain:
        denoise(model, request)
    with pytest.raises(ValueError, match="logits must be finite") as ours:
        guided_result(request, model)
    assert str(ours.value) == str(plain.value)


def test_guides_are_left_to_the_host_where_their_steps_cannot_be_captured(monkeypatch):
    monkeypatch.setattr("dllm.device_hooks.use_triton", lambda tensor: True)
    request = request_of([prompt(5)], 9, hook=hook_of(tiny_decoder(2)))
    assert supports(request) is None
    assert supports(replace(request, sampler=Sequential())) is None

    class Own(ARGuide):
        """May decide otherwise."""

    assert supports(replace(request, hook=partial(Own(tiny_decoder(2), rule=EXACT).start, tokenizer=None))) == "hook"
    assert supports(replace(request, hook=hook_of(tiny_decoder(2), replace(EXACT, verify_batch_size=8)))) is None
    long = hook_of(tiny_decoder(2), replace(EXACT, verify_batch_size=200))
    assert supports(replace(request, hook=long, block_length=128)) is None
    assert supports(replace(request, hook=long, block_length=129)) == "a guide with blocks of 129"
    watched = tiny_decoder(2)
    watched.register_forward_hook(lambda *arguments: None)
    assert supports(replace(request, hook=hook_of(watched))) == "a guide where modules have hooks"
    foreign = partial(ARGuide(tiny_decoder(2), vocabulary="text").start, tokenizer=None)
    for reason, changed in {
        "a guide that is not the guide's own greedy text": replace(request, temperature=0.5),
        "a guide with 2 passes": replace(request, hook=hook_of(tiny_decoder(2), replace(EXACT, guide_passes=2))),
        "a guide that reads a block in parts": replace(
            request, hook=hook_of(tiny_decoder(2), replace(EXACT, verify_batch_size=7))
        ),
        "a guide without the block cache and kernels": replace(request, cache=NoCache()),
    }.items():
        assert supports(changed) == reason
    foreign_rule = ARGuide(tiny_decoder(2), rule=EXACT, vocabulary="text")
    assert supports(replace(request, hook=foreign)) == "a guide that is not the guide's own greedy text"
    assert (
        supports(replace(request, hook=partial(foreign_rule.start, tokenizer=None))) == "a guide of another vocabulary"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [None, 1])
def test_on_the_gpu_captured_readings_give_the_hooks_tokens_and_counters(passes):
    truth_model, steps = calm_decoder(), Buckets[DeviceStep](16)
    model = FastDecoder(calm_decoder().cuda())
    guide, moved = noisy(calm_decoder(), 1.0), noisy(calm_decoder(), 1.0).cuda()
    for seed in range(6):
        rows = [prompt(3 + 4 * i, seed + i) for i in range(1 + seed % 4)]
        spec = tiny_spec(first_slot=("free", "commit_first")[seed % 2])

        def request(device: str, reader: Decoder, rows=rows, spec=spec, seed=seed) -> DenoiseRequest:
            return loop_request(
                generation_canvas(rows, [21] * len(rows), spec, device),
                spec,
                cache=BlockCache(),
                noise=CounterNoise.for_rows(seed, len(rows), device),
                eos_token_ids=spec.eos_token_ids,
                hook=hook_of(reader, replace(EXACT, guide_passes=passes)),
            )

        assert supports(request("cuda", moved)) is None
        check(denoise_on_device(model, request("cuda", moved), steps), denoise(truth_model, request("cpu", guide)))
    for step in steps.built.values():
        assert isinstance(step, GuidedStep)
        assert step.captured.graph is not None
        assert step.reading.graph is not None
