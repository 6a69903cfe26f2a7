"""The acceptance measurement against rounds that are counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.evals.acceptance import acceptance_table, measure_acceptance, read_prompts, summarise
from dllm.speculate import speculative_generate
from tests.speculative import hf_target, random_drafter

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
