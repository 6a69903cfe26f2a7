"""The acceptance measurement against rounds that are counted by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm.evals import acceptance
from dllm.evals.acceptance import acceptance_table, load_results, measure_acceptance, read_prompts, summarise
from dllm.speculate import speculative_generate
from tests.speculative import hf_target, own_target, random_drafter

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def test_rows_are_those_of_single_calls_in_the_order_of_the_prompts():
    target = hf_target()
    drafter = random_drafter("dfly", target)
    found = measure_acceptance(target, drafter, PROMPTS, 12, batch_size=3)
    for prompt, (answer, passes) in zip(PROMPTS, found, strict=True):
        single = speculative_generate(target, drafter, torch.tensor([prompt]), max_new_tokens=12)
        assert answer == single.sequences[0, : single.lengths[0]].tolist()
        assert passes == single.stats.accept_lengths


def test_summary_separates_looping_answers_and_weighs_by_passes():
    looping = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    found = [(looping, [4, 4, 4, 4]), ([1, 2, 3], [1, 1]), (list(range(20)), [2, 3, 1]), ([], [])]
    result = summarise("d", "chat", "greedy", found, 3)
    assert result.accept_length.estimate == pytest.approx(24 / 9)
    assert result.no_loops is not None and result.no_loops.estimate == pytest.approx(8 / 5)
    assert (result.prompts, result.loops, result.tokens, result.passes) == (4, 1, 24, 9)
    assert result.by_position == (round(6 / 9, 4), round(5 / 9, 4), round(4 / 9, 4))
    assert acceptance_table([result]).row_count == 1


def test_no_pass_at_all_is_an_error_that_names_the_domain():
    with pytest.raises(ValueError, match="no verify pass on maths"):
        summarise("d", "maths", "greedy", [([], [])], 3)


def test_a_line_without_a_prompt_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"answer": 3}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: expected question, prompt, text or turns: got \['answer'\]"):
        read_prompts(file, None, 3)


def test_results_are_read_back_and_those_of_other_settings_refused(tmp_path):
    result = summarise("d", "chat", "greedy", [([1, 2, 3], [1, 2])], 3)
    file, settings = tmp_path / "out.json", {"count": 2}
    assert load_results(file, settings) == []
    file.write_text(json.dumps({"settings": settings, "results": [asdict(result)], "failed": {}}))
    assert load_results(file, settings) == [result]
    with pytest.raises(ValueError, match=r"of these settings: got \{'count': 2\}, wanted \{'count': 3\}"):
        load_results(file, {"count": 3})


def test_a_run_saves_every_entry_goes_on_after_a_failure_and_does_not_measure_twice(tmp_path, monkeypatch):
    target = own_target()
    base = SimpleNamespace(decoder=target, spec=SimpleNamespace(eos_token_ids=(39,)))
    monkeypatch.setattr(acceptance, "load_base", lambda *_: base)
    monkeypatch.setattr(acceptance, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(acceptance, "read_prompts", lambda path, *_: [[3, 4]] if path.name == "bad" else PROMPTS)
    asked = []

    def load(name, target):
        asked.append(name)
        return random_drafter("dfly", target)

    monkeypatch.setattr(acceptance.Drafter, "from_pretrained", load)
    real = acceptance.measure_acceptance

    def measure(target, drafter, prompts, *rest, **settings):
        if len(prompts) == 1:
            raise RuntimeError("no device")
        return real(target, drafter, prompts, *rest, **settings)

    monkeypatch.setattr(acceptance, "measure_acceptance", measure)
    out = tmp_path / "out.json"
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "batch_size": 3,
        "device": "cpu",
        "seed": 0,
        "time_limit": 1e9,
        "count": 4,
    }
    acceptance.command(["a/dfly"], ["bad=bad", "chat=good"], out, mode=["greedy", "sampled, sampled drafts"], **options)
    report = json.loads(out.read_text())
    assert [(r["domain"], r["mode"]) for r in report["results"]] == [
        ("chat", "greedy"),
        ("chat", "sampled, sampled drafts"),
    ]
    assert report["failed"]["dfly, bad, greedy"] == "RuntimeError: no device"
    before = len(asked)
    acceptance.command(["a/dfly"], ["chat=good"], out, mode=["greedy"], **options)
    assert len(asked) == before
    acceptance.command(["a/dfly"], ["more=good"], out, mode=["greedy"], **{**options, "time_limit": -1.0})
    assert len(json.loads(out.read_text())["results"]) == 2
