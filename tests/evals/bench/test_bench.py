"""The benchmark: its floors, its gates, what a cut run leaves behind, and the whole command on tiny sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dllm.cache.none import NoCache
from dllm.canvas import generation_canvas
from dllm.cli import app
from dllm.denoise import denoise
from dllm.evals.bench import kernels as kernel_bench
from dllm.evals.bench.e2e import PublishedRule, compiled_layers, equal_tokens
from dllm.evals.bench.kernels import TINY, Case, bench_kernels
from dllm.evals.bench.plain import PlainStep
from dllm.evals.bench.record import Record, read
from dllm.evals.bench.report import markdown
from dllm.evals.bench.run import main
from dllm.evals.bench.shapes import SHAPES, floor_ms
from dllm.evals.bench.steps import FastStep, Point, bench_shape, fit_costs, fused_decoder, gate
from dllm.evals.bench.timing import Deadline, Rates, summary, timed
from dllm.evals.bench.warm import warm
from dllm.model.fast_decoder import FastDecoder
from dllm.noise import CounterNoise
from dllm.request import DenoiseRequest
from dllm.samplers.low_confidence import LowConfidence
from dllm.types import DecodeSpec
from tests.tiny import tiny_decoder

CPU = torch.device("cpu")
RATES = Rates(4.25e12, 7e14)


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds"),
    [
        ("llada-8b", 1, 3.66),
        ("llada-8b", 8, 4.57),
        ("qwen3-8b", 1, 3.60),
        ("qwen3-4b", 1, 1.93),
        ("smollm2-135m", 1, 0.07),
    ],
)
def test_floors_of_the_published_shapes_are_those_of_their_weights_and_keys(name, batch, milliseconds):
    shape = SHAPES[name]
    floor = floor_ms(shape.step_bytes(batch, 32, 1024), 0, RATES.copy, RATES.matmul)
    assert floor == pytest.approx(milliseconds, rel=0.03)
    # At batch 1 memory is the limit.
    whole = floor_ms(shape.step_bytes(batch, 32, 1024), shape.step_flops(batch, 32, 1024), RATES.copy, RATES.matmul)
    assert whole == floor or batch > 1


def test_many_rows_are_bound_by_arithmetic():
    shape = SHAPES["llada-8b"]
    flops = shape.step_flops(64, 64, 0)
    floor = floor_ms(shape.step_bytes(64, 64, 0), flops, RATES.copy, RATES.matmul)
    assert floor == pytest.approx(1e3 * flops / RATES.matmul)
    with pytest.raises(ValueError, match="copy_rate must be > 0: got 0"):
        floor_ms(1, 1, 0, 1)


@pytest.mark.parametrize("point", [Point(1, 4, 32), Point(2, 3, 7)])
def test_our_step_and_the_plain_one_give_the_same_tokens_and_probabilities(point):
    plain = PlainStep(SHAPES["tiny"], CPU, torch.float32)
    plain.prepare(point.batch, point.rows, point.keys)
    fast = FastStep(FastDecoder(fused_decoder(SHAPES["tiny"], plain)), point, plain.kv, plain.ids)
    ours, truth = fast.step(), plain.step()
    assert gate(ours, truth, torch.float32) is None
    # Both wrote the new rows' keys and values.
    torch.testing.assert_close(fast.store.data[..., :-1, :], plain.kv, rtol=1e-4, atol=1e-4)
    assert "probabilities differ" in str(gate((ours[0] * 1.01, ours[1]), truth, torch.float32))
    assert "tokens agree" in str(gate((ours[0], ours[1] + 1), truth, torch.float32))
    assert "probabilities differ" in str(gate((ours[0] * float("nan"), ours[1]), truth, torch.bfloat16))


def test_the_published_rule_commits_the_tokens_of_our_loop_under_that_rule():
    shape, prompt, new, block = SHAPES["tiny"], 6, 8, 4
    plain = PlainStep(shape, CPU, torch.float32, seed=3)
    rule = PublishedRule(plain, prompt, new, block, shape.vocab - 1)
    for _ in range(new // block):
        for _ in range(block):
            rule.step()
        rule.end += block
    spec = DecodeSpec(shape.vocab - 1, (), 0, "bidirectional", block, 4096, shape.vocab)
    banned = torch.zeros(shape.vocab, dtype=torch.bool)
    canvas = generation_canvas([list(range(prompt))], [new], spec, "cpu")
    request = DenoiseRequest(canvas, spec, LowConfidence(1), NoCache(), CounterNoise.for_rows(0, 1), block, banned)
    result = denoise(fused_decoder(shape, plain), request)
    assert rule.canvas[0].tolist() == result.canvas[0]


def test_points_are_warmed_in_processes_of_their_own():
    assert warm([("tiny", Point(1, 4, 32))], CPU, torch.float32, jobs=2) == ["tiny b1 r4 n32"]
    with pytest.raises(ValueError, match="jobs must be >= 1: got 0"):
        warm([], CPU, torch.float32, 0)


def test_a_red_gate_gives_no_time(tmp_path, monkeypatch):
    def wrong(*arguments: Any) -> Any:
        def make():
            return (lambda: torch.ones(3)), (lambda: torch.zeros(3)), (lambda: torch.full((3,), 2.0))

        yield Case("wrong", 10, make, 1e-3, "nothing")

    monkeypatch.setattr(kernel_bench, "cases", wrong)
    record = Record(tmp_path, echo=False)
    bench_kernels(TINY, CPU, RATES, record, Deadline(None), torch.float32)
    (entry,) = record.entries
    assert "error 0.5, allowed 0.001" in entry["red_gate"]
    assert "ours" not in entry
    text = markdown(record.entries, {}, {})
    assert "Red gates" in text
    assert "## Kernels" not in text


def test_a_cut_run_keeps_what_it_has_measured(tmp_path, monkeypatch):
    record = Record(tmp_path, echo=False)
    clock = Deadline(None)
    seen: list[int] = []

    def left() -> float:
        seen.append(1)
        return 100.0 if len(seen) < 3 else 0.0

    monkeypatch.setattr(clock, "left", left)
    points = [Point(1, 4, 32), Point(2, 4, 32), Point(1, 4, 64), Point(1, 8, 32)]
    bench_shape(SHAPES["tiny"], points, CPU, RATES, record, clock, compile_plain=False, dtype=torch.float32)
    assert [entry["name"] for entry in read(tmp_path)] == ["tiny b1 r4 n32", "tiny b2 r4 n32"]
    assert read(tmp_path) == json.loads(json.dumps(record.entries))


def test_the_fitted_costs_are_those_that_made_the_times():
    entries = [
        dict(part="steps", shape="x", batch=1, rows=r, keys=n, ours={"ms": 0.5 + 0.01 * r + 2e-5 * n})
        for r, n in ((1, 1024), (16, 1024), (32, 1024), (32, 4096), (64, 256))
    ]
    entries.append(dict(part="steps", shape="x", batch=8, rows=1, keys=1, ours={"ms": 99.0}))
    (cost,) = fit_costs(entries).values()
    assert cost["a_ms"] == pytest.approx(0.5)
    assert cost["b_ms"] == pytest.approx(0.01)
    assert cost["c_ms"] == pytest.approx(2e-5)
    assert cost["worst"] < 1e-9
    assert fit_costs(entries[:2]) == {}
    # One context only: its share of the time could be anything.
    assert fit_costs(entries[:3]) == {}


def test_timings_are_medians_with_their_spread():
    timing = summary([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.ms, timing.p10, timing.p90, timing.runs) == (3.0, 1.4, 4.6, 5)
    with pytest.raises(ValueError, match="at least one run"):
        summary([])
    calls: list[int] = []
    assert timed(lambda: calls.append(1), CPU, runs=7, warmup=2).runs == 7
    assert len(calls) == 9


def test_compiled_layers_are_plain_again_afterwards():
    model = tiny_decoder()
    with compiled_layers(model):
        assert all("forward" in vars(layer) for layer in model.layers)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_results_that_differ_are_named_by_row_and_slot():
    class Result:
        canvas, useful = [[1, 2, 3], [4, 5, 6]], [2, 3]

    class Other:
        canvas, useful = [[1, 2, 3], [4, 9, 6]], [2, 3]

    assert equal_tokens(Result(), Result()) is None  # type: ignore[arg-type]
    assert equal_tokens(Result(), Other()) == "row 1 differs from slot 1 on (useful tokens 3 and 3)"  # type: ignore[arg-type]


def test_the_command_measures_tiny_sizes_and_writes_table_json_and_costs(tmp_path):
    arguments = ["--device", "cpu", "--shape", "tiny", "--part", "kernels,steps,8b", "--no-compile", "--no-picture"]
    assert main([*arguments, "--out", str(tmp_path), "--time-limit", "200"]) == 0
    text = (tmp_path / "report.md").read_text()
    for title in ("## Steps", "## Kernels", "## Published LLaDA rule", "## Fitted cost"):
        assert title in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["entries"] == read(tmp_path)
    assert set(results["costs"]) == {"tiny"}
    assert sum(entry["part"] == "kernels" and "ours" in entry for entry in results["entries"]) >= 15
    with pytest.raises(SystemExit, match="--part must be among"):
        main(["--part", "nothing", "--device", "cpu", "--out", str(tmp_path)])


def test_dllm_bench_gives_its_arguments_to_the_benchmark(tmp_path, monkeypatch):
    given: list[str] = []

    def run(arguments: list[str]) -> int:
        given.extend(arguments)
        return 1

    monkeypatch.setattr("dllm.evals.bench.run.main", run)
    result = CliRunner().invoke(app, ["bench", "--part", "steps", "--out", str(tmp_path), "--quick"])
    assert (given, result.exit_code) == (["--part", "steps", "--out", str(tmp_path), "--quick"], 1)


def test_dllm_bench_names_a_wrong_part(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--part", "none", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "--part must be among" in result.output
