"""The sweep of kernel configurations: the rule first, nothing that cannot run, a gate before each time, and the whole command."""

from __future__ import annotations

import os

import pytest
import torch

from dllm.evals.bench import sweep as sweeping
from dllm.evals.bench.record import Record, read
from dllm.evals.bench.sweep import ATTENTION, HEAD, PARTS, ROW_STATS, TINY, Trial, main, prepare, sweep, trials
from dllm.evals.bench.timing import Deadline

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("part", "shapes"), [("attention", ATTENTION), ("row_stats", ROW_STATS), ("head", HEAD)])
def test_the_rule_comes_first_and_every_configuration_once(part, shapes):
    for shape in shapes:
        found = trials(part, [shape])
        assert found[0].config is None
        assert len(set(found)) == len(found) > 4


def test_an_unknown_part_is_named():
    with pytest.raises(ValueError, match="part must be among attention, row_stats, head: got heads"):
        trials("heads", [(1, 2, 3)])


@interpreted
def test_a_configuration_with_other_numbers_is_not_timed(tmp_path, monkeypatch):
    given = trials("row_stats", TINY["row_stats"])[:2]

    def broken(trial: Trial, device: torch.device, copies: int | None = None):
        runs = prepare(trial, device, copies)
        return runs if trial.config is None else [lambda: 2 * runs[0]()]

    monkeypatch.setattr(sweeping, "prepare", broken)
    record = Record(tmp_path, echo=False)
    sweep(given, CPU, record, Deadline(None))
    right, wrong = record.entries
    assert right["config"] == "rule" and right["us"] > 0
    assert "differs from the rule's" in wrong["red_gate"] and "us" not in wrong


@interpreted
def test_the_command_leaves_an_entry_for_each_part_and_respects_its_limit(tmp_path, capsys):
    assert main(["--device", "cpu", "--tiny", "--time-limit", "1.2", "--out", str(tmp_path)]) == 0
    entries = read(tmp_path)
    assert {entry["name"].split()[0] for entry in entries[1:]} == set(PARTS)
    assert len(entries) < sum(len(trials(part, TINY[part])) for part in PARTS) + 1
    assert "fastest attention" in capsys.readouterr().out
