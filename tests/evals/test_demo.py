"""The demo's choice of a dtype, what it prints while it runs, and its inputs."""

from __future__ import annotations

import pytest
import torch

from dllm.evals import demo

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def products(monkeypatch):
    """products(seconds) puts a clock in place: a product of ``n`` rows in ``dtype`` as call ``i`` takes seconds(dtype, n, i)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def put(seconds):
        clock: list[float] = [0.0]
        calls: list[torch.dtype] = []

        def forward(layer, x):
            assert x.dtype == layer.weight.dtype and not torch.is_grad_enabled()
            clock[0] += seconds(x.dtype, len(x), len(calls))
            calls.append(x.dtype)

        monkeypatch.setattr(demo.Linear, "forward", forward)
        monkeypatch.setattr(demo.time, "perf_counter", lambda: clock[0])
        return calls

    return put


@pytest.mark.parametrize(("slow", "fast"), [(BF16, FP32), (FP32, BF16)])
def test_the_demo_takes_the_dtype_that_multiplies_faster_here(products, slow, fast):
    products(lambda dtype, rows, call: 10.0 if dtype == slow else 1.0)
    assert demo.faster_dtype() is fast


def test_a_burst_of_load_meets_both_dtypes_and_decides_nothing(products):
    calls = products(lambda dtype, rows, call: (1.0 if dtype == BF16 else 2.0) * (10.0 if 2 <= call < 20 else 1.0))
    assert demo.faster_dtype() is BF16
    assert calls[::2].count(BF16) == len(calls[::2]) and calls[1::2].count(FP32) == len(calls[1::2])


def test_the_rows_of_a_whole_canvas_count_beside_those_of_a_block(products):
    products(
        lambda dtype, rows, call: {(BF16, True): 1.0, (FP32, True): 2.0}.get(
            (dtype, rows <= 8), 9.0 if dtype == BF16 else 3.0
        )
    )
    assert demo.faster_dtype() is FP32
