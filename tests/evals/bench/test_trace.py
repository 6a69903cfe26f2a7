"""Shares of GPU time from a trace, the host's calls beside them, and profiles that cannot be made."""

from __future__ import annotations

import pytest
import torch

from dllm.evals.bench import profile as profiling
from dllm.evals.bench.profile import profile_methods, profile_steps
from dllm.evals.bench.record import Record
from dllm.evals.bench.report import markdown
from dllm.evals.bench.shapes import SHAPES
from dllm.evals.bench.steps import Point
from dllm.evals.bench.timing import Deadline
from dllm.evals.bench.trace import Event, group_of, summarise, trace

EVENTS = [
    Event("cudaStreamSynchronize", False, 1.0, 5.0),
    Event("cudaGraphLaunch", False, 10.0, 2.0),
    Event("_linear_kernel", True, 11.0, 30.0),
    Event("_linear_kernel", True, 12.0, 30.0),
    Event("nvjet_tst_128x64", True, 13.0, 20.0),
    Event("cudaMemcpyAsync", False, 14.0, 1.0),
    Event("Memcpy DtoH (Device -> Pinned)", True, 15.0, 5.0),
    Event("void at::native::elementwise_kernel<128>", True, 16.0, 15.0),
    Event("aten::add", False, 17.0, 9.0),
    Event("cudaGraphLaunch", False, 20.0, 2.0),
    Event("cudaEventSynchronize", False, 30.0, 2.0),
]


def test_shares_counts_and_the_calls_between_the_graphs_are_those_of_the_events():
    summary = summarise(EVENTS, steps=2)
    assert summary["gpu_ms"] == pytest.approx(0.1)
    assert summary["gpu_us_a_step"] == pytest.approx(50.0)
    assert summary["shares"] == pytest.approx({"ours": 0.6, "cublas": 0.2, "memory": 0.05, "other": 0.15})
    assert summary["our_share"] == pytest.approx(0.6)
    assert summary["kernels"][0] == ["_linear_kernel", pytest.approx(0.6), pytest.approx(30.0), pytest.approx(1.0)]
    assert summary["host"] == {
        "cudaStreamSynchronize": 1, "cudaGraphLaunch": 2, "cudaMemcpyAsync": 1, "cudaEventSynchronize": 1,
    }  # fmt: skip
    # The first wait came before decoding, the last one after it.
    assert summary["decoding"] == {"cudaMemcpyAsync": 1}


def test_a_trace_without_graphs_has_no_decoding_part_and_one_without_kernels_no_shares():
    assert summarise([e for e in EVENTS if "Graph" not in e.name], 1)["decoding"] is None
    with pytest.raises(ValueError, match="events must hold kernels of the device: got none"):
        summarise([e for e in EVENTS if not e.on_device], 1)
    with pytest.raises(ValueError, match="steps must be >= 1: got 0"):
        summarise(EVENTS, 0)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_attention_kernel", "ours"),
        ("sm90_xmma_gemm_bf16bf16_tn", "cublas"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("Memset (Device)", "memory"),
        ("triton_poi_fused_add_0", "other"),
    ],
)
def test_a_kernel_belongs_to_the_group_of_its_name(name, group):
    assert group_of(name) == group


def test_a_traced_call_gives_its_result_and_its_operations():
    result, events = trace(lambda: torch.ones(3) + 1, torch.device("cpu"))
    assert result.tolist() == [2, 2, 2]
    assert "aten::add" in [event.name for event in events]
    assert not any(event.on_device for event in events)


def test_a_method_that_fails_is_named_and_the_next_one_is_profiled(tmp_path, monkeypatch):
    record = Record(tmp_path, echo=False)

    def broken(*_, drafts):
        raise RuntimeError("no such drafter")

    monkeypatch.setattr(profiling, "_threshold", lambda *_: ((lambda: None), (lambda _: 2)))
    monkeypatch.setattr(profiling, "_rounds", broken)
    monkeypatch.setattr(profiling, "_guided", lambda *_, **rule: ((lambda: None), (lambda _: 4 + len(rule))))
    monkeypatch.setattr(profiling, "_generated", lambda *_, **options: ((lambda: None), (lambda _: 3)))
    monkeypatch.setattr(profiling, "trace", lambda run, device: (run(), EVENTS))

    class Model:
        device = torch.device("cpu")

    profile_methods(Model(), record, Deadline(None))  # type: ignore[arg-type]
    first, verified, rounds, drafted, exact, guided = record.entries
    assert [e["steps"] for e in (first, verified, exact, guided)] == [2, 3, 6, 4]
    assert rounds["failed"] == drafted["failed"] == "RuntimeError: no such drafter"
    text = markdown(record.entries, {}, {})
    assert "| threshold + block cache | 2 | 50.0 | 60.0 | 20.0 | 0.0 | 5.0 | 15.0 | 2 | cudaMemcpyAsync 1 |" in text
    assert "AR rounds: failed: RuntimeError: no such drafter" in text


def test_a_step_is_profiled_at_each_point(tmp_path, monkeypatch):
    record, ran = Record(tmp_path, echo=False), []

    def traced(run, device):
        ran.append(run())
        return None, EVENTS

    monkeypatch.setattr(profiling, "trace", traced)
    points = (Point(1, 4, 32), Point(2, 3, 7))
    profile_steps([SHAPES["tiny"]], record, Deadline(None), torch.device("cpu"), torch.float32, points)
    assert [entry["name"] for entry in record.entries] == ["step tiny b1 r4 n32", "step tiny b2 r3 n7"]
    assert [len(replays) for replays in ran] == [profiling.REPLAYS] * 2
    assert ran[1][0][1].shape == (2, 3)
