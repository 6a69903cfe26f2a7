"""docs/families.md says what the code says."""

from __future__ import annotations

import pytest

from dllm.evals.families_table import GOLDEN, PAGE, PUBLISHED, checked, main, page
from dllm.families import families
from tests.families.golden import golden_lm


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m dllm.evals.families_table --write"


def test_it_prints_and_names_every_diffusion_family(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    causal = {"llama", "qwen"}
    assert set(PUBLISHED) == set(families()) - causal
    for name, (checkpoints, _) in PUBLISHED.items():
        assert f"| {name} | {checkpoints} |" in shown
        assert checked(name, GOLDEN) in shown


@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "fast_dllm_v2"])
def test_the_published_conventions_are_those_of_the_tiny_checkpoints(name):
    spec, tiny = families()[name].spec(PUBLISHED[name][1]), golden_lm(name).spec
    for field in (
        "logits_shift",
        "attention",
        "first_slot",
        "block_origin",
        "infill",
        "default_sampler",
        "default_cache",
    ):
        assert getattr(spec, field) == getattr(tiny, field), field


def test_a_family_without_golden_files_raises(tmp_path):
    with pytest.raises(ValueError, match="golden must hold the folder of family 'llada'"):
        checked("llada", tmp_path)
