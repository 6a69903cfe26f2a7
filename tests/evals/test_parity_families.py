"""Every golden case of every family matches, and a wrong model or rule is seen."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dllm.evals.parity_families import FAMILIES, Golden, forward_case, logit_cases
from tests.families.golden import FOLDERS, GOLDEN, NAMES

SHARED = Path(__file__).parents[3] / "shared" / "golden"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_case_of_a_family_matches_the_reference(folder):
    results = FAMILIES[folder](GOLDEN / folder)
    assert len(results) >= (0 if folder == "dreamon" else 3)
    assert [r for r in results if r.status != "ok"] == []


@pytest.mark.parametrize("folder", NAMES)
def test_the_copies_are_the_shared_golden_files(folder):
    if not SHARED.is_dir():
        pytest.skip("no shared golden folder beside the repository")
    for copy in (GOLDEN / folder).iterdir():
        assert copy.read_bytes() == (SHARED / folder / copy.name).read_bytes(), copy.name


def test_every_golden_family_has_a_comparison():
    assert sorted(FAMILIES) == NAMES


def test_a_changed_weight_is_a_miss(tmp_path):
    shutil.copytree(GOLDEN / "sdar", tmp_path / "sdar")
    tensors = load_file(tmp_path / "sdar" / "model.safetensors")
    tensors["model.layers.1.self_attn.k_norm.weight"] *= 1.05
    save_file(tensors, tmp_path / "sdar" / "model.safetensors")
    assert {r.status for r in logit_cases(tmp_path / "sdar")} == {"miss"}


@torch.no_grad()
@pytest.mark.parametrize("change", [{"attention": "bidirectional"}, {"block_length": 1}, {"block_length": 8}])
def test_a_wrong_attention_rule_is_a_miss(change):
    golden = Golden.load(GOLDEN / "sdar")
    case = next(c for c in golden.cases if c["name"] == "block_causal_4")
    assert forward_case(golden, case, golden.lm.spec).status == "ok"
    assert forward_case(golden, case, replace(golden.lm.spec, **change)).status == "miss"


@torch.no_grad()
def test_an_output_that_nothing_computes_is_a_miss():
    golden = Golden.load(GOLDEN / "mdlm")
    case = {**golden.cases[0], "outputs": ["logits", "attention_maps"]}
    assert "attention_maps" in forward_case(golden, case, golden.lm.spec).detail
    assert forward_case(golden, case, golden.lm.spec).status == "miss"


def test_an_unknown_kind_of_case_is_a_miss(tmp_path):
    shutil.copytree(GOLDEN / "mdlm", tmp_path / "mdlm")
    text = (tmp_path / "mdlm" / "cases.json").read_text().replace('"kind": "forward"', '"kind": "sideways"', 1)
    (tmp_path / "mdlm" / "cases.json").write_text(text)
    assert [r.status for r in logit_cases(tmp_path / "mdlm")] == ["miss", "ok", "ok"]
