"""How kernels are launched: one after the other where asked or where the device cannot do more, with equal results either way."""

import inspect
import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm.kernels._launch import EARLY_SIZE, dependent

FILES = ("attention", "lm_head_stats", "norm_rope_kv", "row_stats", "skinny_linear")
"""Files of the kernels that may be launched dependently."""
SHAPES_TESTED = (("smollm2-135m", 1, 32), ("smollm2-135m", 3, 7), ("qwen3-4b", 1, 32))


def test_off_cuda_kernels_are_launched_one_after_the_other():
    assert dependent(torch.zeros(1)) == {"DEPENDENT": False}


def test_the_variable_of_dependent_launches_takes_auto_0_and_1(monkeypatch):
    from dllm.environment import dependent_launch

    monkeypatch.delenv("DLLM_DEPENDENT_LAUNCH", raising=False)
    assert dependent_launch() == "auto"
    for value in ("auto", "0", "1"):
        monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", value)
        assert dependent_launch() == value
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "no")
    with pytest.raises(ValueError, match="DLLM_DEPENDENT_LAUNCH must be one of auto, 0, 1: got 'no'"):
        dependent_launch()


@pytest.mark.parametrize(
    ("asked", "size", "capability", "early"),
    [
        ("auto", EARLY_SIZE, 9, True),
        ("auto", EARLY_SIZE + 1, 9, False),
        ("auto", 1, 8, False),
        ("1", EARLY_SIZE + 1, 9, True),
        ("1", 1, 8, False),
        ("0", 1, 9, False),
    ],
)
def test_small_kernels_are_launched_early_on_devices_that_can(monkeypatch, asked, size, capability, early):
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", asked)
    monkeypatch.setattr("dllm.kernels._launch._capability", lambda device: capability)
    on_cuda: Any = SimpleNamespace(is_cuda=True, device="cuda", numel=lambda: size)
    assert dependent(on_cuda) == ({"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False})


def kernels_of(file: str) -> dict[str, str]:
    """Name and source of every kernel of a file that takes DEPENDENT."""
    source = inspect.getsource(import_module(f"dllm.kernels.{file}"))
    blocks = re.split(r"\n(?=@jit\n)", source)[1:]
    found = {}
    for block in blocks:
        body = re.split(r"\n\n\n(?=\S)", block)[0]
        name = re.search(r"def (\w+)\(", body)
        assert name is not None
        if "DEPENDENT: tl.constexpr" in body:
            found[name.group(1)] = body
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_kernel_that_may_be_launched_early_touches_no_memory_but_weights_before_it_waits(file):
    kernels = kernels_of(file)
    assert kernels
    for name, source in kernels.items():
        before, wait, after = source.partition("begin_dependent(DEPENDENT)")
        assert wait, f"{name} takes DEPENDENT and never waits"
        assert "begin_dependent" not in after, f"{name} waits twice"
        assert not re.search(r"tl\.(load|store|atomic_\w+)\(", before), f"{name} touches memory before it waits"
        for asked in re.findall(r"prefetch_lines\((\w+)", before):
            assert "weight" in asked or asked.startswith("up"), (
                f"{name} asks early for {asked}, which may not be a weight"
            )


def test_a_kernel_waits_before_it_lets_the_next_one_in():
    from dllm.kernels import _launch

    source = inspect.getsource(_launch).partition("def begin_dependent")[2].partition("@jit")[0]
    assert -1 < source.index("tl.extra.cuda.gdc_wait()") < source.index("tl.extra.cuda.gdc_launch_dependents()")


def step_and_layers(name: str, batch: int, rows: int, device: str = "cuda") -> tuple[Any, Any]:
    """(shape, () -> a step that gives every layer's output, then probability and token) on one set of weights."""
    from dllm.evals.bench.plain import PlainStep
    from dllm.evals.bench.shapes import SHAPES
    from dllm.evals.bench.steps import FastStep, Point, fused_decoder
    from dllm.model.fast_decoder import FastDecoder

    # Few layers: buffers are used again in each, and that is where an early write would show.
    shape = replace(SHAPES[name], layers=6)
    point = Point(batch, rows, 1000)
    plain = PlainStep(shape, torch.device(device), torch.bfloat16)
    plain.prepare(point.batch, point.rows, point.keys)

    def make(tapped: bool) -> Any:
        fast = FastStep(FastDecoder(fused_decoder(shape, plain)), point, plain.kv, plain.ids)

        @torch.no_grad()
        def step() -> list[Tensor]:
            embeds = fast.decoder.embed(fast.ids)
            taps = range(shape.layers) if tapped else ()
            hidden = fast.decoder(
                None, fast.rows, fast.store, fast.attend, taps, embeds=embeds, rows=fast.rows, write=fast.valid
            )
            hidden, layers = hidden if tapped else (hidden, [])
            laws = fast.decoder.head_stats(hidden, frozenset({"top1"}), None)
            return [*layers, hidden, laws.confidence, laws.token]

        return step

    return shape, make


def differing(replay: Any, truth: list[Tensor], names: list[str], replays: int = 20) -> str | None:
    """None if every replay gives truth's bits, else the first that does not: replay, what of it, in how many of its numbers."""
    for number in range(replays):
        got = replay()
        torch.cuda.synchronize()
        for name, ours, wanted in zip(names, got, truth, strict=True):
            if not torch.equal(ours, wanted):
                wrong = (ours != wanted).sum().item()
                rows = (
                    (ours != wanted).flatten(0, 1).view(ours.shape[:2].numel(), -1).any(1).nonzero().flatten().tolist()
                )
                return f"replay {number}: {name} differs in {wrong} of {ours.numel()} numbers, rows {rows[:8]}"
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["auto", "1"])
@pytest.mark.parametrize("tapped", [False, True], ids=["step", "layers kept"])
@pytest.mark.parametrize(("name", "batch", "rows"), SHAPES_TESTED)
def test_a_captured_step_gives_the_same_bits_in_every_replay_with_and_without_dependent_launches(
    monkeypatch, name, batch, rows, tapped, asked
):
    """Eager and captured without dependent launches, then captured with them: in all files at once, and if that differs in each alone.

    ``layers kept`` names the first layer that differs, but keeps its buffers from being used again.
    """
    from dllm.evals.bench.timing import in_graph

    shape, make = step_and_layers(name, batch, rows)
    names = [f"layer {i}" for i in range(shape.layers if tapped else 0)] + ["hidden", "confidence", "token"]
    device = torch.device("cuda")
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "0")
    truth = [x.clone() for x in make(tapped)()]
    assert differing(in_graph(make(tapped), device, repeat=3), truth, names) is None, "without dependent launches"
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", asked)
    whole = differing(in_graph(make(tapped), device, repeat=3), truth, names)
    if whole is None:
        return
    alone = {}
    for file in FILES:
        with monkeypatch.context() as patch:
            for other in FILES:
                if other != file:
                    patch.setattr(f"dllm.kernels.{other}.dependent", lambda tensor: {"DEPENDENT": False})
            alone[file] = differing(in_graph(make(tapped), device, repeat=3), truth, names)
    pytest.fail(f"all files: {whole}; each file alone: {alone}")
