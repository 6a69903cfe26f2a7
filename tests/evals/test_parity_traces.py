"""Every recorded generation of every family comes out of the public ``generate``, and a wrong setting is seen."""

from __future__ import annotations

import json

import pytest

from dllm.evals.parity_families import load_golden
from dllm.evals.parity_traces import FAMILIES, MAPS, cut, run_trace
from dllm.evals.parity_units import FAMILIES as UNITS
from tests.families.golden import FOLDERS, GOLDEN, NAMES

COUNTS = {
    "sdar": 15,
    "llada": 23,
    "dream": 18,
    "dreamon": 6,
    "fast_dllm_v2": 13,
    "llada2_moe": 17,
    "diffusion_gemma": 5,
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_trace_of_a_family_matches_the_reference(folder):
    results = FAMILIES[folder](GOLDEN / folder)
    assert len(results) >= COUNTS.get(folder, 3)
    assert [r for r in results if r.status != "ok"] == []


@pytest.mark.parametrize("folder", sorted(UNITS))
def test_every_schedule_draw_and_scheduler_step_matches_the_reference(folder):
    results = UNITS[folder](GOLDEN / folder)
    assert len(results) >= 9
    assert [r for r in results if r.status != "ok"] == []


def test_every_golden_family_has_traces_that_are_compared():
    assert sorted(FAMILIES) == NAMES


def trace(folder, name):
    entry = next(t for t in json.loads((GOLDEN / folder / "traces.json").read_text()) if t["name"] == name)
    ids = json.loads((GOLDEN / folder / "unit.json").read_text())["special_ids"]
    return entry, MAPS[folder](entry, ids)


@pytest.mark.parametrize(
    ("folder", "name", "change"),
    [
        ("llada", "fast_dual_thr", {"cache": "none"}),
        ("llada", "official_cfg", {"cfg_scale": 0.0}),
        ("llada", "fastnew_none_factor", {"compat": False}),
        ("dream", "official_entropy_s8_n16", {"eps": 0.2}),
        ("dream", "block_dual_entropy", {"cache": "prefix"}),
        ("sdar", "argmax_top_p", {"logits_processor": None}),
        ("fast_dllm_v2", "gen_block_cache_b16_sb4_thr05", {"sub_block_length": 8}),
        ("llada2_moe", "v21_b8_edit05", {"editing_threshold": 2.0}),
        ("llada2_moe", "v21_b8_edit05", {"max_post_steps": 15}),
    ],
)
def test_a_wrong_setting_is_a_miss(folder, name, change):
    entry, settings = trace(folder, name)
    lm = load_golden(GOLDEN / folder)
    assert run_trace(lm, entry, settings, ()).status == "ok"
    assert run_trace(lm, entry, {**settings, **change}, ()).status == "miss"


def test_both_sides_are_cut_at_the_first_stop():
    assert cut([4, 5, 6, 5], [5]) == [4]
    assert cut([4, 5], []) == [4, 5]
