"""How kernels are launched: one after the other where asked or where the device cannot do more, with equal results either way."""

from dataclasses import replace

import pytest
import torch

from dllm.kernels._launch import dependent


def test_off_cuda_kernels_are_launched_one_after_the_other():
    assert dependent(torch.zeros(1)) == {"DEPENDENT": False}


def test_the_variable_that_turns_dependent_launches_on_takes_0_and_1(monkeypatch):
    from dllm.environment import dependent_launch

    monkeypatch.delenv("DLLM_DEPENDENT_LAUNCH", raising=False)
    assert not dependent_launch()
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "1")
    assert dependent_launch()
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "no")
    with pytest.raises(ValueError, match="DLLM_DEPENDENT_LAUNCH must be one of 0, 1: got 'no'"):
        dependent_launch()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch", "rows"), [("smollm2-135m", 1, 32), ("smollm2-135m", 3, 7), ("qwen3-4b", 1, 32)]
)
def test_a_captured_step_gives_the_same_bits_in_every_replay_with_and_without_dependent_launches(
    monkeypatch, name, batch, rows
):
    from dllm.evals.bench.plain import PlainStep
    from dllm.evals.bench.shapes import SHAPES
    from dllm.evals.bench.steps import FastStep, Point, fused_decoder
    from dllm.evals.bench.timing import in_graph
    from dllm.model.fast_decoder import FastDecoder

    device, point = torch.device("cuda"), Point(batch, rows, 1000)
    # Few layers: buffers are used again in each, and that is where an early write would show.
    shape = replace(SHAPES[name], layers=6)
    plain = PlainStep(shape, device, torch.bfloat16)
    plain.prepare(point.batch, point.rows, point.keys)
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "0")
    wanted = [x.clone() for x in FastStep(FastDecoder(fused_decoder(shape, plain)), point, plain.kv, plain.ids).step()]
    monkeypatch.setenv("DLLM_DEPENDENT_LAUNCH", "1")
    step = FastStep(FastDecoder(fused_decoder(shape, plain)), point, plain.kv, plain.ids)
    replay = in_graph(step.step, device, repeat=3)
    for _ in range(20):
        got = replay()
        torch.cuda.synchronize()
        for ours, truth in zip(got, wanted, strict=True):
            assert torch.equal(ours, truth)
