"""The CPU comparison of drafters on known runs, and its command on the shipped models."""

from __future__ import annotations

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from dllm.evals.bench import speculate_cpu
from dllm.evals.bench.record import read
from dllm.evals.demo_drafters import DraftedRun


def run(seconds, tokens=((1, 2), (3, 4)), draft_nfe=0):
    return DraftedRun("x", tokens, 4, draft_nfe, seconds, (1, 2, 3) if draft_nfe else ())


def test_ways_are_read_from_names_with_a_number_of_drafts():
    ways = speculate_cpu.read_ways(["a/b:4", "c"])
    assert ways[:2] == speculate_cpu.ALONE
    assert ways[2:] == (("b:4", "a/b", 4), ("c", "c", None))
    for wrong in ("a:0", "a:x", "a:-1"):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            speculate_cpu.read_ways([wrong])


def test_a_ratio_is_against_the_faster_way_of_the_same_round():
    way = ("d:4", "d", 4)
    other = ((1, 2), (3, 5))
    rounds = [
        [run(4.0), run(2.0), run(1.0, other, 5)],
        [run(1.0), run(2.0), run(0.25, other, 5)],
        [run(8.0), run(4.0), run(4.0, other, 5)],
    ]
    entry = speculate_cpu.summarise(way, rounds, 2)
    assert entry["ratio"] == 2.0 and entry["ratio_range"] == [1.0, 4.0]
    assert entry["tokens_per_second"] == 4.0 and entry["tokens_per_second_range"] == [1.0, 16.0]
    assert entry["accept_length"] == 2.0 and entry["differ"] == 1 and entry["tokens"] == 4
    alone = speculate_cpu.summarise(speculate_cpu.ALONE[1], rounds, 1)
    assert alone["accept_length"] is None and alone["differ"] == 0 and alone["ratio"] == 1.0


@pytest.mark.slow
def test_the_command_measures_the_shipped_models_behind_its_gate(tmp_path):
    app = Typer()
    app.command()(speculate_cpu.command)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "What is a sonnet?"}) + "\n", encoding="utf-8")
    arguments = ["--prompts", f"{tmp_path}/p.jsonl", "--drafter", "smollm2-135m-dfly:4", "--out", f"{tmp_path}/o"]
    found = CliRunner().invoke(app, [*arguments, "-n", "6", "--runs", "1"], catch_exceptions=False)
    assert found.exit_code == 0
    entries = {(e["part"], e["name"]): e for e in read(tmp_path / "o")}
    assert entries["gate", "float32"]["differ"] == [0]
    drafted, ours = entries["way", "smollm2-135m-dfly:4"], entries["way", "ours"]
    assert drafted["tokens"] == ours["tokens"] == 6 and drafted["nfe"] < ours["nfe"] == 6
