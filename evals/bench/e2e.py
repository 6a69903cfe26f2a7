"""Whole generations: the shipped diffusion model decoded by one loop on different steps, the AR model beside it, and the published
LLaDA rule at LLaDA-8B's shape.

All runs of a table have the same weights, prompts and seeds. The device loop (``dllm/device_loop.py``) is driven by our kernels, by the
plain decoder, and by the plain decoder compiled, each in a CUDA graph; beside them stands the plain eager loop. Tokens of the fp32 runs
are compared first (the gate): kernels on the device against references on the CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.cache.none import NoCache
from dllm.canvas import generation_canvas
from dllm.denoise import denoise
from dllm.device_loop import Steps, denoise_on_device
from dllm.evals.bench.plain import PlainStep, captured, plain_layer, rms_norm
from dllm.evals.bench.record import Record
from dllm.evals.bench.shapes import SHAPES, Shape
from dllm.evals.bench.steps import fused_decoder
from dllm.evals.bench.timing import Deadline, summary
from dllm.evals.bench.trace import summarise, trace
from dllm.model.fast_decoder import FastDecoder
from dllm.noise import CounterNoise
from dllm.pipeline import DiffusionLM
from dllm.request import DenoiseRequest, DenoiseResult
from dllm.samplers.low_confidence import LowConfidence
from dllm.types import DecodeSpec

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "List five practical tips for learning a new language.",
    "What is the difference between weather and climate?",
    "Describe how bread is made, step by step.",
    "Give me three ideas for a birthday party in a park.",
    "Summarise what photosynthesis does for a plant.",
    "Write a polite email that asks for a day off.",
)


@contextmanager
def reference_kernels() -> Iterator[None]:
    """DLLM_KERNELS=reference for the calls inside, and as it was before afterwards."""
    before = os.environ.get("DLLM_KERNELS")
    os.environ["DLLM_KERNELS"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DLLM_KERNELS"]
        else:
            os.environ["DLLM_KERNELS"] = before


def request_for(lm: DiffusionLM, prompts: tuple[str, ...], new_tokens: int, **options: Any) -> DenoiseRequest:
    """The loop's request for chat prompts, as ``generate`` builds it."""
    config = lm._config(None, dict(max_new_tokens=new_tokens, seed=0, **options))
    rows = lm._prompts(list(prompts), None, None, None, "auto", config)
    return lm._request(config, lm._generation_canvas(rows, config))


def equal_tokens(a: DenoiseResult, b: DenoiseResult) -> str | None:
    """None if two results have the same useful tokens in every row, else where they part."""
    for row, (left, right, n, m) in enumerate(zip(a.canvas, b.canvas, a.useful, b.useful, strict=True)):
        if n != m or left != right:
            at = next((i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y), -1)
            return f"row {row} differs from slot {at} on (useful tokens {n} and {m})"
    return None


def gate_fp32(lm: DiffusionLM, fp32: DiffusionLM, new_tokens: int) -> str | None:
    """Kernels on lm's device in fp32 against the plain loop on the CPU, on two prompts; None if all tokens are the same.

    Mutates nothing; fp32: the model on the CPU in fp32.
    """
    from copy import deepcopy

    moved = DiffusionLM(deepcopy(fp32.model).to(lm.device), fp32.spec, fp32.tokenizer)
    ours = denoise_on_device(FastDecoder(moved.model), request_for(moved, PROMPTS[:2], new_tokens))
    truth = denoise(fp32.model, request_for(fp32, PROMPTS[:2], new_tokens))
    return equal_tokens(ours, truth)


def bench_decoding(
    lm: DiffusionLM,
    record: Record,
    deadline: Deadline,
    gate: Callable[[], str | None] | None = None,
    new_tokens: int = 128,
    batches: tuple[int, ...] = (1, 8),
    runs: int = 5,
) -> None:
    """One table row a driver and batch: tokens/s, ms a forward, forwards. Adds nothing but the reason where the gate is red."""
    reason = None if gate is None else gate()
    if reason is not None:
        record.add("e2e", "gate", red_gate=reason)
        return
    record.add("e2e", "gate", red_gate=None)
    fast = FastDecoder(lm.model)
    for batch in batches:
        request = partial(request_for, lm, PROMPTS[:batch], new_tokens)
        drivers = {
            "ours": partial(_on_device, fast, request, Steps()),
            "plain graph": partial(_with_references, partial(_on_device, lm.model, request, Steps())),
            "plain eager": partial(_with_references, partial(_eagerly, lm.model, request)),
        }
        for name, run in drivers.items():
            if deadline.left() > 3:
                # The eager loop takes seconds a run, and the compiled models behind it need them.
                _decode(f"{name} b{batch}", run, record, lm.device, min(runs, 3) if "eager" in name else runs, batch)
        if batch == 1 and lm.device.type == "cuda":
            if deadline.left() > 3:
                result, events = trace(drivers["ours"], lm.device)
                record.add("e2e", "profile ours b1", **summarise(events, result.stats.nfe))
            if deadline.left() > 40:
                with compiled_layers(lm.model):
                    twin = partial(_with_references, partial(_on_device, lm.model, request, Steps()))
                    _decode("plain compiled b1", twin, record, lm.device, runs, batch)


def _on_device(model: Any, request: Callable[[], DenoiseRequest], steps: Steps) -> DenoiseResult:
    return denoise_on_device(model, request(), steps)


def _eagerly(model: Any, request: Callable[[], DenoiseRequest]) -> DenoiseResult:
    return denoise(model, request())


def _with_references(run: Callable[[], DenoiseResult]) -> DenoiseResult:
    with reference_kernels():
        return run()


@contextmanager
def compiled_layers(model: Any) -> Iterator[None]:
    """The decoder's layers through ``torch.compile`` inside, plain again afterwards."""
    for layer in model.layers:
        layer.forward = torch.compile(type(layer).forward, dynamic=None).__get__(layer)
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward


def _decode(
    name: str, run: Callable[[], DenoiseResult], record: Record, device: torch.device, runs: int, batch: int
) -> DenoiseResult:
    result = run()
    seconds, whole = [], []
    for _ in range(runs):
        begin = _now(device)
        result = run()
        whole.append(1e3 * (_now(device) - begin))
        seconds.append(1e3 * result.stats.decode_s)
    decode, total = summary(seconds), summary(whole)
    tokens, nfe = result.stats.useful_tokens, result.stats.nfe
    record.add(
        "e2e",
        name,
        batch=batch,
        tokens=tokens,
        nfe=nfe,
        tokens_per_s=tokens / (decode.ms / 1e3),
        decode_ms=decode.ms,
        decode_p10=decode.p10,
        decode_p90=decode.p90,
        call_ms=total.ms,
        ms_per_forward=decode.ms / max(nfe - 1, 1),
    )
    return result


def bench_ar(record: Record, deadline: Deadline, device: torch.device, new_tokens: int = 128, runs: int = 3) -> None:
    """transformers' ``generate`` for the AR model that the diffusion model was made from: dynamic cache, then compiled static cache."""
    from dllm.target import load_target

    model = load_target("smollm2-135m", dtype=torch.bfloat16, device=device)
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, tokenize=False
    )
    inputs = model.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)
    for name, extra in (("dynamic cache", {}), ("compiled static cache", {"cache_implementation": "static"})):
        if deadline.left() < (5 if not extra else 45):
            break
        options = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **extra)
        for _ in range(2 if extra else 1):
            model.generate(**inputs, **options)
        times = []
        for _ in range(runs):
            begin = _now(device)
            model.generate(**inputs, **options)
            times.append(1e3 * (_now(device) - begin))
        timing = summary(times)
        record.add(
            "e2e", f"AR generate, {name} b1", batch=1, tokens=new_tokens, nfe=new_tokens, call_ms=timing.ms,
            tokens_per_s=new_tokens / (timing.ms / 1e3), ms_per_forward=timing.ms / new_tokens,
        )  # fmt: skip


class PublishedRule:
    """LLaDA's published sampling written plainly (Nie et al. 2025, algorithm 5): every step runs the whole canvas, takes the likeliest
    token of every row, and commits the surest masked one of the open block."""

    def __init__(self, plain: PlainStep, prompt: int, new_tokens: int, block: int, mask_id: int) -> None:
        plain.prepare(1, prompt + new_tokens, 0)
        self.plain, self.prompt, self.block, self.mask_id = plain, prompt, block, mask_id
        self.canvas = plain.ids.clone()
        self.canvas[:, prompt:] = mask_id
        self.end = torch.tensor(prompt + block, device=plain.device)
        self.column = torch.arange(prompt + new_tokens, device=plain.device)

    @torch.no_grad()
    def step(self) -> Tensor:
        """One step; mutates the canvas."""
        plain = self.plain
        x = F.embedding(self.canvas, plain.embedding)
        for index, weights in enumerate(plain.layers):
            x = plain_layer(plain.shape, weights, x, plain.cos, plain.sin, plain.kv[index, 0], plain.kv[index, 1], 0)
        logits = F.linear(rms_norm(x, plain.norm), plain.head)
        token = logits.argmax(-1)
        probability = logits.float().softmax(-1).gather(-1, token[..., None])[..., 0]
        open_slots = (self.canvas == self.mask_id) & (self.column < self.end)
        best = probability.masked_fill(~open_slots, -torch.inf).argmax(-1, keepdim=True)
        self.canvas.scatter_(1, best, token.gather(1, best))
        return self.canvas


def bench_published(
    device: torch.device,
    record: Record,
    deadline: Deadline,
    shape: Shape = SHAPES["llada-8b"],
    prompt: int = 128,
    new_tokens: int = 128,
    block: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One token a step over the whole canvas: the plain rule eager and in a graph, and our loop under the same rule, ms a step."""
    plain = PlainStep(shape, device, dtype)
    rule = PublishedRule(plain, prompt, new_tokens, block, shape.vocab - 1)
    steps = 16
    for name in ("published rule, eager", "published rule, graph"):
        run: Callable[[], Any] = rule.step
        if name.endswith("graph"):
            if device.type != "cuda":
                continue
            run, _ = captured(rule.step)
        run()
        times = []
        for _ in range(steps):
            begin = _now(device)
            run()
            times.append(1e3 * (_now(device) - begin))
        timing = summary(times)
        record.add("8b", name, shape=shape.name, ms_per_step=timing.ms, p10=timing.p10, p90=timing.p90)
    decoder = fused_decoder(shape, plain)
    del rule
    plain.kv = torch.empty(0)
    spec = DecodeSpec(
        mask_token_id=shape.vocab - 1, eos_token_ids=(), logits_shift=0, attention="bidirectional",
        block_length=block, max_positions=4096, vocab_size=shape.vocab,
    )  # fmt: skip
    banned = torch.zeros(shape.vocab, dtype=torch.bool)
    banned[shape.vocab - 1] = True
    captured_steps = Steps()
    times = []
    for _ in range(3):
        if deadline.left() < 3:
            break
        canvas = generation_canvas([list(range(prompt))], [new_tokens], spec, device)
        request = DenoiseRequest(
            canvas, spec, LowConfidence(1), NoCache(), CounterNoise.for_rows(0, 1, device), block, banned
        )
        result = denoise_on_device(FastDecoder(decoder), request, captured_steps)
        times.append(1e3 * result.stats.decode_s / result.stats.nfe)
    if times:
        timing = summary(times)
        record.add("8b", "ours, the same rule", shape=shape.name, ms_per_step=timing.ms, p10=timing.p10, p90=timing.p90)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
