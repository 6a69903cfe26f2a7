"""The benchmark of drafting: the whole command on a tiny model, its gate, and what it says of texts that part."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.draft_cost import CostTable
from dllm.evals.bench import speculate
from dllm.evals.bench.speculate import Bench, Bucket, compile_bucket, gate, main
from dllm.evals.bench.timing import Deadline
from dllm.evals.divergence import next_logits
from dllm.model.decoder import Decoder
from dllm.training.block_pilot_costs import RoundCosts
from dllm.training.block_pilot_traces import LengthCounts
from tests.speculative import greedy_text, own_target, prompts, random_drafter

MODEL = own_target()


def test_the_command_measures_every_batch_size_and_chooses_by_its_own_costs(tmp_path, monkeypatch):
    out, kept = tmp_path / "bench.json", tmp_path / "costs.json"
    monkeypatch.setattr(speculate, "table_path", lambda drafter: kept)
    given = f"--keep-costs --device cpu --tiny --batch 1,2 --prompts 2 --new-tokens 6 --runs 2 --out {out}"
    assert main(given.split()) == 0
    report = json.loads(out.read_text())
    assert report["red_gate"] is None
    assert [entry["batch"] for entry in report["entries"]] == [1, 2]
    for entry in report["entries"]:
        ar, drafts = entry["ar"], entry["drafts"]
        # fp32: the same text, so the same useful tokens, in at most as many rounds.
        assert entry["differ"] == 0 and ar["useful_tokens"] == drafts["useful_tokens"] > 0
        assert drafts["rounds"] <= ar["rounds"] and drafts["accept_length"] >= 1 == ar["accept_length"]
        assert entry["ratio"] == pytest.approx(drafts["tokens_per_s"] / ar["tokens_per_s"])
        assert ar["spread"][0] <= ar["tokens_per_s"] <= ar["spread"][1]
        assert entry["auto"]["ratio"] == (entry["ratio"] if entry["auto"]["expected"] > 1 else 1.0)
        assert entry["rounds_saved"] == ar["rounds"] / drafts["rounds"] >= report["cost_table"]["accept_length"]
    assert CostTable.load(kept).plain_ms == {
        1: report["entries"][0]["ar_round_ms"],
        2: report["entries"][1]["ar_round_ms"],
    }


def test_rounds_of_other_block_lengths_leave_cost_tables_that_the_pilots_costs_read(tmp_path):
    costs = tmp_path / "costs"
    given = (
        f"--device cpu --tiny --no-gate --batch 1 --prompts 1 --new-tokens 4 --runs 1 --out {tmp_path / 'bench.json'}"
    )
    assert main([*given.split(), "--lengths", "2,4", "--length-costs", str(costs)]) == 0
    tables = [CostTable.load(costs / f"length_{n}_batch_1.json") for n in (2, 4)]
    assert [table.num_drafts for table in tables] == [1, 3]
    read = RoundCosts.of_tables(tables, (1, 2, 4))
    for length, table in zip((2, 4), tables, strict=True):
        one = LengthCounts(tokens=1, passes=1, positions=1)
        assert read.ms(length, one) == pytest.approx(table.verify_ms[1] + table.draft_ms[1])
    for lengths, rest, message in (
        ("9", ["--length-costs", str(costs)], r"--lengths must be in 2\.\.4: got 9"),
        ("2", [], "--length-costs must name a folder"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*given.split(), "--lengths", lengths, *rest])


def test_a_red_gate_leaves_no_figures(tmp_path, monkeypatch):
    out = tmp_path / "bench.json"
    monkeypatch.setattr(speculate, "gate", lambda *given: "tokens differ")
    assert main(f"--device cpu --tiny --out {out}".split()) == 1
    assert json.loads(out.read_text()).get("entries") is None


def test_the_gate_sees_rounds_that_commit_other_tokens(monkeypatch):
    rows = prompts(0)

    def load(model: Decoder):
        return random_drafter("dfly", model)

    assert gate(MODEL, load, rows, ()) is None
    plain = speculate.speculate_on_device

    def wrong(target, drafter, request, *rest):
        result = plain(target, drafter, request, *rest)
        if drafter is not None:
            result.tokens[0][-1] += 1
        return result

    monkeypatch.setattr(speculate, "speculate_on_device", wrong)
    reason = gate(MODEL, load, rows, ())
    assert reason is not None and "with 7 drafts" in reason


def test_where_texts_part_the_gap_of_the_two_logits_is_told():
    bench = Bench(MODEL, random_drafter("dflash", MODEL), prompts(0), (), 8)
    row = prompts(0)[0]
    truth = greedy_text(MODEL, row, 6)[len(row) :]
    law = next_logits(MODEL, [*row, *truth[:3]])
    second = int(law.topk(2).indices[1])
    found = bench.differences([row, row], [truth, [*truth[:3], second, 0, 0]], [truth, truth])
    assert found["differ"] == 1 and found["first_at"] == [3]
    values = law.topk(2).values
    assert found["logit_gaps"] == pytest.approx([float(values[0] - values[1])])
    with pytest.raises(ValueError, match="must end together"):
        bench.differences([row], [truth[:4]], [truth])


def test_a_pass_is_measured_even_where_the_time_is_over():
    bench = Bench(MODEL, random_drafter("dflash", MODEL), prompts(0), (), 5)
    measured = bench.measure(2, 2, 3, 3, Deadline(0.0))
    assert measured["runs"] == 1 and measured["useful_tokens"] == 10
    with pytest.raises(ValueError, match="at most"):
        Bench(MODEL, bench.drafter, [torch.zeros(600).tolist()], (), 5)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_bucket_can_be_built_from_its_shapes_alone(drafts):
    drafter = random_drafter("dfly", MODEL)
    bucket = Bucket(2, drafts, 5, 6, torch.float32)
    assert compile_bucket(bucket, MODEL.config, drafter.config, "cpu", 1, {"head_candidates": None}) is bucket
