"""The demo's choice of a dtype, what it prints while it runs, and its inputs."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dllm.evals import demo
from dllm.evals.judge import LogLikelihood
from dllm.pipeline import DiffusionLM
from tests.words import text_lm

BF16, FP32 = torch.bfloat16, torch.float32
PROMPTS = [
    "the cat sat on the mat and then the cat sat on the hat and then it sat on the bat and the rat",
    "a dog",
    "b",
]


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


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """shown(terminal, width): what the demo prints with tiny models."""
    tiny = {demo.BLOCK_CAUSAL: "block_causal", demo.BIDIRECTIONAL: "bidirectional"}
    monkeypatch.setattr(DiffusionLM, "from_pretrained", lambda name, **_: text_lm(tiny[name], template=True))
    monkeypatch.setattr(demo, "load_target", lambda *_, **__: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(demo, "load_base", lambda *_, **__: SimpleNamespace(decoder=None))
    monkeypatch.setattr(
        demo, "Judge", lambda _: SimpleNamespace(score=lambda ids, rows: [LogLikelihood(-1.0, 1)] * len(rows))
    )
    monkeypatch.setattr(demo, "demo_prompts", lambda: PROMPTS)
    monkeypatch.setattr(demo, "run_drafter_demo", lambda *arguments: arguments[-1]("AR + a drafter"))

    def run(terminal=False, width=80):
        text = io.StringIO()
        demo.run_demo(
            tmp_path / "demo.html", 4, Console(file=text, width=width, force_terminal=terminal, color_system=None)
        )
        return text.getvalue()

    return run


def test_the_demo_says_what_it_decodes_where_there_is_no_bar(shown):
    text = shown()
    first, *rest = text.splitlines()
    assert "minutes" in first
    names = [line.removeprefix("decoding: ") for line in rest if line.startswith("decoding: ")]
    assert names == [f"{i}/6 {name}" for i, (name, _, _) in enumerate(demo.SETTINGS, start=1)] + ["AR + a drafter"]


def test_a_long_prompt_is_cut_between_words_and_says_so(shown):
    [title] = [line for line in shown(width=60).splitlines() if line.startswith("╭─ the cat")]
    shown_words = title.strip("╭─╮ ").removesuffix(" …")
    assert title.count(" …") == 1 and len(title) == 60
    assert PROMPTS[0].startswith(shown_words + " ") and len(shown_words) > 40


def test_a_terminal_has_the_bar_and_no_such_lines(shown):
    text = shown(terminal=True)
    assert "decoding: " not in text and "minutes" in text.splitlines()[0]


def test_the_demos_gaps_leave_the_blank_before_a_word_to_the_fill(shown):
    before = demo.INFILL_TEMPLATE.split("{{")[:-1]
    assert len(before) == len(demo.GAPS) == 2 and all(f"{{{{{name}}}}}" in demo.INFILL_TEMPLATE for name in demo.GAPS)
    assert not any(text.endswith((" ", "\n")) for text in before)
    assert f"{sum(demo.GAPS.values())} tokens in" in shown()
