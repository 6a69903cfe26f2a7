"""The parity runner: every golden drafter case fits, and what does not fit is seen."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dllm.evals import parity, parity_drafters
from dllm.evals.parity_case import Case

GOLDEN = Path(__file__).parents[1] / "data" / "drafters"
SHARED = Path(__file__).parents[3] / "shared" / "golden"


@pytest.mark.parametrize("family", sorted(parity_drafters.FAMILIES))
def test_every_case_of_a_drafter_family_fits(family):
    rows = parity_drafters.run(GOLDEN / family)
    assert len(rows) >= 12
    assert [row for row in rows if row.status != "ok"] == []


@pytest.mark.parametrize("family", sorted(parity_drafters.FAMILIES))
def test_the_copies_are_the_shared_golden_files(family):
    if not SHARED.is_dir():
        pytest.skip("no shared golden folder beside the repository")
    for copy in (GOLDEN / family).rglob("*.*"):
        assert copy.read_bytes() == (SHARED / family / copy.relative_to(GOLDEN / family)).read_bytes(), copy


def test_a_changed_weight_is_a_miss_and_the_exit_status_says_so(tmp_path, capsys):
    shutil.copytree(GOLDEN / "dflash2", tmp_path / "dflash2")
    file = tmp_path / "dflash2" / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.attention_conv.base_kernel"] *= 1.2
    save_file(tensors, file)
    assert parity.main([str(tmp_path), "--only", "dflash2"]) == 1
    assert "miss  dflash2            one_shot draft_hidden" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["output", "acceptance_lengths", "verified_blocks", "greedy_target_ids"])
def test_a_trace_that_ran_otherwise_is_a_miss(name, tmp_path):
    shutil.copytree(GOLDEN / "dflash", tmp_path / "dflash")
    file = tmp_path / "dflash" / "traces.json"
    traces = json.loads(file.read_text())
    rows = traces[1][name] if name in ("acceptance_lengths", "greedy_target_ids") else traces[1][name][0]
    rows[-1] += 1
    file.write_text(json.dumps(traces))
    missed = [row for row in parity_drafters.run(tmp_path / "dflash") if row.status == "miss"]
    assert [row.name for row in missed] == ["trace block_3"] and "differ at" in missed[0].detail


def test_an_error_of_our_code_is_a_miss(tmp_path):
    shutil.copytree(GOLDEN / "dfly", tmp_path / "dfly")
    (tmp_path / "dfly" / "draft" / "config.json").unlink()
    (row,) = parity.run_family(tmp_path / "dfly")
    assert row.status == "miss" and "config.json" in row.detail


def test_a_family_that_nobody_compares_is_a_skip_and_a_failure(tmp_path, capsys):
    (tmp_path / "unheard_of").mkdir()
    assert parity.main([str(tmp_path)]) == 1
    assert "skip  unheard_of" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("miss", 1), ("skip", 1)])
def test_the_exit_status_is_zero_only_if_everything_fits(tmp_path, monkeypatch, status, code):
    (tmp_path / "one").mkdir()
    monkeypatch.setattr(
        parity_drafters, "FAMILIES", {"one": lambda folder: [Case("a", "ok", ""), Case("b", status, "")]}
    )
    assert parity.main([str(tmp_path)]) == code


def test_an_unknown_family_or_folder_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "one").mkdir()
    assert parity.main([str(tmp_path), "--only", "two"]) == 2
    assert "--only must name families" in capsys.readouterr().err
    assert parity.main([str(tmp_path / "nowhere")]) == 2
