"""What an adapted model's quality is measured with: the settings, their decoding, and what a suffix adds."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.evals.judge import Judge
from dllm.evals.quality import answer_spans, decoding, quality_settings, suffix_gain
from dllm.likelihood import chain_log_likelihood
from tests.tiny import prompt, tiny_lm
from tests.words import text_lm

PROMPTS = [prompt(n) for n in (3, 7, 5, 4)]


@pytest.fixture(scope="module")
def judge():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return Judge(LlamaForCausalLM(config).eval())


def test_settings_hold_each_threshold_with_and_without_free_dave():
    settings = quality_settings("block_causal", [0.9, 0.8], [2, 4])
    assert list(settings) == [
        "vanilla",
        *(f"threshold {t}{v}" for t in ("0.9", "0.8") for v in ("", ", FreeDave 2", ", FreeDave 4")),
    ]
    assert settings["threshold 0.8, FreeDave 4"]["threshold"] == 0.8
    assert all(options["cache"] == "block" for options in settings.values())
    full = quality_settings("bidirectional", [0.9], [])
    assert [full[name]["cache"] for name in ("vanilla", "dual", "free delay 1")] == ["none", "dual", "free"]


def test_free_dave_gives_the_same_answers_in_no_more_forwards(judge):
    settings = quality_settings("block_causal", [0.8], [4])
    found = decoding(text_lm(), judge, PROMPTS, settings, 16, 2)
    plain, verified = found[1:]
    assert [s.tokens for s in plain.samples] == [s.tokens for s in verified.samples]
    rates = [m.tokens_per_forward.estimate for m in found if m.tokens_per_forward is not None]
    assert len(rates) == 3 and rates[0] <= 1 < rates[1] < rates[2]
    assert "FreeDave" in json.loads(verified.to_json())["settings"]["verifier"]


def test_a_suffix_gain_is_the_paired_difference_of_the_chain():
    lm = tiny_lm()
    spans = [(prompt(4), prompt(3, 1), prompt(4, 2)), (prompt(5), prompt(2, 3), prompt(3, 4))]
    gain = suffix_gain(lm, spans, "x")

    def mean(use_suffix):
        found = [
            chain_log_likelihood(lm.model, lm.spec, a, b, c if use_suffix else [], 16, lm.device) for a, b, c in spans
        ]
        return sum(sum(row) / len(row) for row in found) / len(found)

    assert gain.with_suffix.estimate == pytest.approx(mean(True))
    assert gain.difference.estimate == pytest.approx(mean(True) - mean(False)) and gain.num_spans == 2


def test_spans_are_cut_from_the_middle_of_long_answers():
    rows = [(prompt(4), prompt(90)), (prompt(4), prompt(5))]
    spans = answer_spans(rows)
    assert spans
    for before, middle, after in spans:
        assert [*before, *middle, *after] == [*rows[0][0], *rows[0][1]] and middle and after
