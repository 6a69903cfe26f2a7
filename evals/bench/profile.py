"""The part ``profile`` of ``dllm bench``: where the GPU's time goes, per decoding method and per step shape.

Methods, on the shipped SmolLM2 models, batch 1, greedy: threshold with the block cache, the same with FreeDave, the AR model, the AR model
with its DFly drafter, a diffusion draft under a lossless AR guide (captured steps all five), and under the guide's published rule (the
host's loop). Steps: one captured forward of each shape at
batch 1 and 8. A method that fails leaves its error in the record, and the others go on. Prompts and tokens as in ``e2e``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dllm.device_loop import Steps, denoise_on_device
from dllm.evals.bench.plain import PlainStep
from dllm.evals.bench.record import Record
from dllm.evals.bench.shapes import Shape
from dllm.evals.bench.steps import FastStep, Point, fused_decoder
from dllm.evals.bench.timing import Deadline, in_graph
from dllm.evals.bench.trace import summarise, trace
from dllm.model.fast_decoder import FastDecoder
from dllm.pipeline import DiffusionLM
from dllm.samplers.free_dave import FreeDave

DRAFTER, TARGET = "smollm2-135m-dfly", "smollm2-135m"
REPLAYS = 5
"""Replays of a captured step in one trace."""
SETUP_S = 4.0
"""Seconds that one method takes at most on the benchmarked devices, its compilation apart."""

Prepared = tuple[Callable[[], Any], Callable[[Any], int]]
"""(a call, what it gave -> its forwards)."""


def profile_methods(lm: DiffusionLM, record: Record, deadline: Deadline, new_tokens: int = 128) -> None:
    """Adds one entry a method; lm: the shipped block-diffusion model, which gives the prompts and the guide."""
    methods: dict[str, Callable[[], Prepared]] = {
        "threshold + block cache": lambda: _threshold(lm, new_tokens),
        "threshold + FreeDave 4": lambda: _generated(lm, new_tokens, verifier=FreeDave(4)),
        "AR rounds": lambda: _rounds(lm, new_tokens, drafts=False),
        "AR + DFly rounds": lambda: _rounds(lm, new_tokens, drafts=True),
        "guided, exact": lambda: _guided(lm, new_tokens, accept="exact", on_reject="ar"),
        "guided": lambda: _guided(lm, new_tokens),
    }
    for name, prepare in methods.items():
        if deadline.left() < SETUP_S:
            break
        _add(name, prepare, record, lm.device)


def profile_steps(
    shapes: Iterable[Shape],
    record: Record,
    deadline: Deadline,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    points: tuple[Point, ...] = (Point(1, 32, 1024), Point(8, 32, 1024)),
) -> None:
    """Adds one entry a shape and point."""
    for shape in shapes:
        if deadline.left() < SETUP_S:
            break
        plain = PlainStep(shape, device, dtype)
        decoder = FastDecoder(fused_decoder(shape, plain))
        for point in points:

            def prepare(point: Point = point, plain: PlainStep = plain, decoder: FastDecoder = decoder) -> Prepared:
                plain.prepare(point.batch, point.rows, point.keys)
                step = FastStep(decoder, point, plain.kv, plain.ids)
                replay = in_graph(step.step, device)
                return (lambda: [replay() for _ in range(REPLAYS)]), (lambda _: REPLAYS)

            _add(f"step {shape.name} b{point.batch} r{point.rows} n{point.keys}", prepare, record, device)


def _add(name: str, prepare: Callable[[], Prepared], record: Record, device: torch.device) -> None:
    try:
        run, forwards = prepare()
        result, events = trace(run, device)
        record.add("profile", name, **summarise(events, max(1, forwards(result))))
    except Exception as error:  # noqa: BLE001
        # One method must not cost the others their minutes on the device; the record says what is missing.
        record.add("profile", name, failed=f"{type(error).__name__}: {error}"[:300])


def _threshold(lm: DiffusionLM, new_tokens: int) -> Prepared:
    from dllm.evals.bench.e2e import PROMPTS, request_for

    fast, steps = FastDecoder(lm.model), Steps()
    run = lambda: denoise_on_device(fast, request_for(lm, PROMPTS[:1], new_tokens), steps)  # noqa: E731
    return run, lambda result: result.stats.nfe


def _rounds(lm: DiffusionLM, new_tokens: int, drafts: bool) -> Prepared:
    from dllm.drafters.drafter import Drafter
    from dllm.evals.bench.e2e import PROMPTS
    from dllm.evals.bench.speculate import Bench
    from dllm.training.base import load_base

    base = load_base(TARGET, str(lm.device), lm.model.dtype)
    drafter = Drafter.from_pretrained(DRAFTER, target=base.decoder, dtype=lm.model.dtype, device=lm.device)
    config = lm._config(None, dict(max_new_tokens=new_tokens, seed=0))
    prompts = lm._prompts(list(PROMPTS[:1]), None, None, None, "auto", config)
    bench = Bench(base.decoder, drafter, prompts, base.spec.eos_token_ids, new_tokens)
    wanted = drafter.max_drafts if drafts else 0
    return (lambda: bench.decode(1, 1, wanted)), (lambda results: sum(r.stats.nfe for r in results))


def _guided(lm: DiffusionLM, new_tokens: int, **rule: Any) -> Prepared:
    from dllm.guide import ARGuide

    return _generated(lm, new_tokens, guide=ARGuide.of_base(lm, **rule))


def _generated(lm: DiffusionLM, new_tokens: int, **options: Any) -> Prepared:
    from dllm.evals.bench.e2e import PROMPTS

    run = lambda: lm.generate(PROMPTS[0], max_new_tokens=new_tokens, **options)  # noqa: E731
    return run, lambda output: output.stats.nfe
