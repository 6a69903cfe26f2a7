"""The report's baselines are what they say, and only the oracle and hindsight look at what is reported."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from dllm.evals.block_pilot_report import FIXED, ORACLE, PILOT, as_json, build_report, command, render, time_prediction
from dllm.samplers.block_pilot import BlockPilot, BlockPilotConfig, PilotNetwork
from dllm.training.block_pilot_costs import RoundCosts
from dllm.training.block_pilot_traces import LengthCounts, PromptTrace, record

LENGTHS = (1, 4)
COSTS = RoundCosts({1: 1.0, 4: 2.0})


def trace(key, group, passes, sign):
    counts = {n: LengthCounts(60, p, 99, (1,) * p) for n, p in passes.items()}
    return PromptTrace(key, group, 5, torch.tensor([float(sign)]), torch.zeros(1), counts)


def requests(name, code, chat):
    """Code: 4 is twice as fast as 1 (60 ms and 30); chat: 1 (60) is faster than 4 (100)."""
    rows = [trace(f"{name}c{i}", "code", {1: 60, 4: 15}, 1) for i in range(code)]
    return rows + [trace(f"{name}t{i}", "chat", {1: 60, 4: 50}, -1) for i in range(chat)]


def pilot(weight):
    """Says 4 where weight * feature > 0, else 1."""
    network = PilotNetwork(BlockPilotConfig(LENGTHS, "draft", ("hidden",), (1,), 0))
    network.last.weight.data.copy_(torch.tensor([[0.0], [weight]]))
    network.last.bias.data.copy_(torch.tensor([0.0, -0.1]))
    return BlockPilot(BlockPilotConfig(LENGTHS, "draft", ("hidden",), (1,), 0), network)


def speeds(report):
    return {row.name: row.tokens_per_second.estimate for row in report.rows}


def test_every_row_is_tokens_over_the_time_of_its_lengths():
    # In training most requests are code, so 4 is the best fixed length and the commonest label; among those reported chat wins.
    report = build_report(pilot(1.0), requests("a", 6, 2), requests("b", 2, 4), COSTS, 4)
    tokens = 6 * 60 * 1000
    four, one, best = tokens / (2 * 30 + 4 * 100), tokens / (6 * 60), tokens / (2 * 30 + 4 * 60)
    assert speeds(report) == pytest.approx(
        {
            "fixed 1": one,
            "fixed 4 (default)": four,
            FIXED: four,
            "fixed, best in hindsight": one,
            "best of the class in training": best,
            "constant prediction (commonest label)": four,
            PILOT: best,
            ORACLE: best,
        }
    )
    assert report.captured is not None and report.captured.estimate == pytest.approx(1.0)
    assert report.best_lengths == {"code": 4, "chat": 1}
    assert report.by_class["code"][PILOT] == pytest.approx(2000)


def test_a_pilot_that_is_always_wrong_captures_less_than_nothing():
    report = build_report(pilot(-1.0), requests("a", 6, 2), requests("b", 4, 4), COSTS, 4)
    assert report.captured is not None and report.captured.estimate < 0
    assert next(r for r in report.rows if r.name == PILOT).against_fixed.estimate < 1


def test_the_time_of_the_prediction_counts_once_a_round():
    free, dear = (build_report(pilot(1.0), requests("a", 3, 3), requests("b", 4, 0), COSTS, 4, ms) for ms in (0, 1.0))
    # 15 rounds of 2 ms, then of 3.
    assert speeds(free)[PILOT] == pytest.approx(2000) and speeds(dear)[PILOT] == pytest.approx(60000 / 45)
    assert speeds(free)[ORACLE] == speeds(dear)[ORACLE]


def test_where_the_oracle_gains_nothing_there_is_no_share():
    report = build_report(pilot(1.0), requests("a", 3, 0), requests("b", 3, 0), COSTS, 4)
    assert report.captured is None and report.captured_from_default is None


def test_requests_that_were_trained_on_and_unknown_defaults_are_refused():
    rows = requests("a", 2, 2)
    with pytest.raises(ValueError, match="4 are in both"):
        build_report(pilot(1.0), rows, rows, COSTS, 4)
    with pytest.raises(ValueError, match="default_length must be one of"):
        build_report(pilot(1.0), rows, requests("b", 2, 2), COSTS, 8)
    with pytest.raises(ValueError, match="one request each at least"):
        build_report(pilot(1.0), rows, [], COSTS, 4)


def test_the_command_writes_json_and_a_table(tmp_path, capsys):
    pilot(1.0).save_pretrained(tmp_path / "pilot")
    for name in "ab":
        rows = requests(name, 3, 3)

        def decode(prompts, rows=rows):
            return rows

        record(tmp_path / f"{name}.jsonl", [(t.group, [i, ord(name)]) for i, t in enumerate(rows)], decode, {}, 6)
    out = tmp_path / "r.json"
    command(
        tmp_path / "pilot",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        out,
        forward_ms=1.0,
        row_ms=0.001,
        default_length=4,
    )
    raw = json.loads(out.read_text())
    assert {row["name"] for row in raw["rows"]} >= {PILOT, ORACLE, FIXED}
    assert raw["requests"] == {"chat": 3, "code": 3} and raw["policy_ms"] > 0
    assert "share of the oracle" in capsys.readouterr().out.replace("\n", " ")


def test_the_table_says_what_the_json_says():
    report = build_report(
        pilot(1.0),
        requests("a", 6, 2),
        requests("b", 2, 4),
        COSTS,
        4,
        time_prediction(pilot(1.0), requests("c", 1, 0)[0], 5),
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(report))
    text = console.export_text()
    for row in json.loads(as_json(report))["rows"]:
        assert row["name"] in text and f"{row['tokens_per_second']['estimate']:.2f}" in text
