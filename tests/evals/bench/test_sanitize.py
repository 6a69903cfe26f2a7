"""The sanitizer's run: every kernel against its reference on odd sizes, and what the tools' words mean."""

from __future__ import annotations

import os

import pytest
import torch

from dllm.evals.bench import sanitize
from dllm.evals.bench.sanitize import DONE, main, run_checks, verdict

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@interpreted
def test_every_kernel_gives_its_references_numbers():
    assert run_checks(torch.device("cpu")) == []


@pytest.mark.gpu
def test_every_kernel_gives_its_references_numbers_on_the_device():
    assert run_checks(torch.device("cuda")) == []


def test_a_kernel_that_differs_is_named(monkeypatch):
    def checks(device):
        yield "right", (lambda: torch.ones(2)), (lambda: torch.ones(2))
        yield "wrong", (lambda: [torch.ones(2), torch.ones(2)]), (lambda: [torch.ones(2), torch.full((2,), 2.0)])
        yield "not a number", (lambda: torch.full((1,), float("nan"))), (lambda: torch.ones(1))

    monkeypatch.setattr(sanitize, "checks", checks)
    assert run_checks(torch.device("cpu")) == [
        "wrong: output 1 differs by 0.5",
        "not a number: output 0 differs by nan",
    ]
    assert main(["--child", "cpu"]) == 1


def test_the_words_of_a_tool_become_a_status():
    assert verdict("memcheck", f"{DONE}\n========= ERROR SUMMARY: 0 errors\n") == (
        0,
        "memcheck: 0 errors, all kernels ran",
    )
    status, line = verdict(
        "racecheck", f"{DONE}\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
    )
    assert (status, line) == (1, "racecheck: 3 errors, all kernels ran")
    assert verdict("memcheck", "========= ERROR SUMMARY: 0 errors") == (
        2,
        "memcheck: no answer: ========= ERROR SUMMARY: 0 errors",
    )
    assert verdict("racecheck", "") == (2, "racecheck: no answer: nothing printed")


def test_a_machine_without_the_tool_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert main([]) == 2
    assert "compute-sanitizer must be on the path" in capsys.readouterr().out
