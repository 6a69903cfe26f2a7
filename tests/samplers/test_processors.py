"""Logit processors: against transformers' own, on the growing prefix, at ties, and the published tables."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dllm.samplers.processors import PrefixCounts, Processors, keep_min_p, keep_top_k, keep_top_p, process_logits

CASES = load_file(Path(__file__).parents[1] / "data" / "drafters" / "dflash" / "cases.safetensors")
TABLES = [name for name in CASES if ".out_" in name]


@pytest.fixture
def logits():
    return torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: keep_top_k(x, 7), TopKLogitsWarper(7)),
        (lambda x: keep_top_p(x, 0.8), TopPLogitsWarper(0.8)),
        (lambda x: keep_min_p(x, 0.1), MinPLogitsWarper(0.1)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_filter_keeps_what_the_transformers_filter_keeps(logits, ours, theirs):
    flat = logits.flatten(0, 1)
    assert torch.equal(ours(logits).flatten(0, 1), theirs(None, flat))


@pytest.mark.parametrize("name", TABLES)
def test_published_tables_of_temperature_top_k_and_top_p(name):
    found = re.search(r"T([\d.]+)_p([\d.]+)_k(\d+)", name)
    assert found is not None
    temperature, top_p, top_k = found.groups()
    processors = Processors(temperature=float(temperature), top_p=float(top_p), top_k=int(top_k) or None)
    law = processors.law(CASES[name.split(".")[0] + ".logits"])
    torch.testing.assert_close(law, CASES[name], atol=1e-6, rtol=1e-5)


def test_ties_at_the_border_are_all_kept():
    tied = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert keep_top_k(tied, 2).isfinite().tolist() == [True, True, True, False]
    assert keep_top_p(tied, 0.6).isfinite().tolist() == [True, True, True, False]
    assert keep_top_p(tied, 1e-9).isfinite().tolist() == [True, False, False, False]


def test_a_top_p_below_the_smallest_number_of_fp32_keeps_the_likeliest_token():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    for p in (1e-30, 1e-46):
        assert keep_top_p(logits, p).isfinite().tolist() == [[False, True, False, True]]


def test_banned_ids_lose_their_mass_before_the_filters_see_it():
    logits = torch.tensor([[[5.0, 2.0, 1.0, 0.0]]])
    kept = process_logits(logits, temperature=2.0, top_k=2, banned=torch.tensor([True, False, False, False]))
    assert kept.isfinite().tolist() == [[[False, True, True, False]]]
    assert kept[0, 0, 1:3].tolist() == [1.0, 0.5]


def test_each_row_of_a_draft_is_processed_as_if_the_drafts_before_it_were_committed(logits):
    prompt = torch.tensor([[1, 2, 3, 0], [4, 4, 0, 0], [9, 8, 7, 6]])
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    done = torch.tensor([[5, 5], [6, 1], [0, 0]])
    done_valid = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    drafts = torch.tensor([[10, 5, 10], [4, 11, 11], [9, 9, 9]])
    processors = Processors(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={10: 1.5, 49: -2.0},
        min_new_tokens=3,
        eos_token_ids=(11, 12),
    )
    counts = PrefixCounts.of_prompt(prompt, valid, 50)
    counts.append(done, done_valid)
    got = processors.adjust(logits, drafts, counts)
    for b in range(3):
        given = prompt[b][valid[b]].tolist()
        generated = done[b][done_valid[b]].tolist()
        for k in range(4):
            output = generated + drafts[b, :k].tolist()
            ids = torch.tensor([given + output])
            scores = logits[b, k : k + 1].clone()
            scores[:, 10] += 1.5
            scores[:, 49] -= 2.0
            scores = RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)
            for token in set(output):
                scores[:, token] -= 0.4 + 0.2 * output.count(token)
            scores = MinNewTokensLengthLogitsProcessor(len(given), 3, [11, 12])(ids, scores)
            torch.testing.assert_close(got[b, k : k + 1], scores, msg=f"row {b}, slot {k}")


def test_neutral_settings_change_nothing_and_need_no_counts(logits):
    processors = Processors()
    assert not processors.needs_counts
    assert torch.equal(processors.adjust(logits, torch.zeros(3, 3, dtype=torch.int64)), logits)


def test_counts_are_not_changed_by_looking_at_a_draft(logits):
    counts = PrefixCounts.of_prompt(torch.tensor([[1]] * 3), torch.ones(3, 1, dtype=torch.bool), 50)
    Processors(presence_penalty=1.0).adjust(logits, torch.tensor([[7, 7, 7]] * 3), counts)
    assert not counts.generated.any()
    assert counts.length.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0: got -1.0"),
        ({"temperature": float("nan")}, "temperature must be >= 0"),
        ({"top_k": 0}, "top_k must be >= 1: got 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": 1.5}, "min_p must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be >= 0"),
    ],
)
def test_a_setting_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Processors(**options)


def test_what_is_missing_is_named(logits):
    with pytest.raises(ValueError, match="counts must be given"):
        Processors(presence_penalty=1.0).adjust(logits, torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature must be > 0 for a law: got 0"):
        Processors().law(logits)
