"""Gaps of unknown length in a model that expands and deletes masks (DreamOn): ``infill(length="auto")``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.infill import START_LENGTH
from dllm.pipeline import DiffusionLM
from dllm.resize import Resize
from tests.families.golden import golden_lm
from tests.tiny import tiny_decoder, tiny_spec
from tests.words import byte_tokenizer, speaking, text_lm

EXPAND, DELETE, PLAIN = 60, 61, 7


def lm_of(**changes: Any) -> DiffusionLM:
    """A shifted bidirectional model with the two tokens, and a document start for empty prefixes."""
    spec = tiny_spec("bidirectional", filler_token_id=None, expand_token_id=EXPAND, delete_token_id=DELETE, **changes)
    return speaking(DiffusionLM(tiny_decoder(), spec))


def wish(token, times=1000):
    """A processor that wants ``token`` in the first steps and plain text afterwards; what is barred stays barred."""
    calls = [0]

    def process(logits, slots):
        calls[0] += 1
        out = torch.zeros_like(logits)
        out[..., PLAIN] = 5.0
        if calls[0] <= times:
            out[..., token] = 9.0
        return out.masked_fill(logits == -float("inf"), -float("inf"))

    return process


@pytest.mark.parametrize(
    ("token", "times", "length"),
    [(EXPAND, 0, START_LENGTH), (EXPAND, 3, START_LENGTH + 3), (EXPAND, 1000, 12), (DELETE, 2, 2), (DELETE, 1000, 0)],
)
def test_a_gap_gets_the_length_that_the_model_asks_for_within_the_limit(token, times, length):
    lm = lm_of()
    fill = lm.infill("the cab", " abc.", max_length=12, sampler="low_confidence", logits_processor=wish(token, times))
    assert fill.lengths == [[length]]
    assert fill.fill_ids == [[[PLAIN] * length]]
    assert fill.texts == ["the cab" + fill.fills[0] + " abc."]
    assert fill.stats.useful_tokens == length


def test_the_first_length_and_the_rules_of_growth_can_be_chosen():
    lm = lm_of()
    options: dict[str, Any] = {"max_length": 12, "sampler": "low_confidence", "logits_processor": wish(EXPAND)}
    assert lm.infill("ab", "cd", start_length=2, resize=Resize(12, expand_budget=3), **options).lengths == [[5]]
    assert lm.infill("ab", "cd", start_length=9, logits_processor=wish(EXPAND, 0), max_length=12).lengths == [[9]]
    assert lm.infill("ab", "cd", 3, logits_processor=wish(PLAIN)).lengths == [[3]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_grow_apart_and_equal_their_single_runs_and_given_tokens_stay(temperature):
    golden = golden_lm("dreamon")
    lm = DiffusionLM(golden.model, golden.spec, byte_tokenizer(), golden.config)
    rows = [("the cab ", " abc é."), ("ab", ""), ("cd the a", "a")]
    options: dict[str, Any] = {"max_length": 9, "sampler": "dream_entropy", "temperature": temperature}
    both = lm.infill([r[0] for r in rows], [r[1] for r in rows], seed=4, **options)
    for b, (prefix, suffix) in enumerate(rows):
        single = lm.infill(prefix, suffix, seed=4 + b, **options)
        assert both.fill_ids[b] == single.fill_ids[0]
        assert both.row_stats[b].nfe == single.stats.nfe
        assert both.lengths[b][0] <= 9
        assert both.texts[b].startswith(prefix)
        assert both.texts[b].endswith(suffix)
        special = {lm.spec.mask_token_id, lm.spec.expand_token_id, lm.spec.delete_token_id}
        assert not special & set(both.fill_ids[b][0])


def test_known_and_growing_lengths_go_together():
    lm = lm_of()
    both = lm.infill(["the ", "ab "], ["cd", "cab"], [3, "auto"], max_length=8, logits_processor=None)
    assert both.lengths[0] == [3]
    assert both.fill_ids[0] == lm.infill("the ", "cd", 3).fill_ids[0]
    assert both.fill_ids[1] == lm.infill("ab ", "cab", max_length=8).fill_ids[0]


def test_the_score_search_is_still_there():
    fill = lm_of().infill("the ", "cd", max_length=5, length_method="score")
    assert 1 <= fill.lengths[0][0] <= 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: text_lm("bidirectional").infill("a", "b", length_method="grow"),
            "needs a model with expand and delete",
        ),
        (lambda: lm_of().infill("a", "b", start_length=0), r"start_length must be an int in \[1, max_length 64\]"),
        (lambda: lm_of().infill("a", "b", 4, start_length=2), "start_length goes with gaps that grow"),
        (lambda: lm_of().infill("a", "b", 4, resize=Resize(9)), "resize goes with gaps that grow"),
        (lambda: lm_of().infill("a", "b", resize=Resize(9)), "must be equal: got 9"),
        (lambda: lm_of().infill("a", "b", cache="dual"), "cache must be 'none' with resize"),
        (lambda: lm_of().infill(template="a {{x}} b {{y}} c", gaps={}), "cannot grow: give lengths"),
        (lambda: lm_of().infill("a", "b", length_method="stretch"), "length_method must be"),
    ],
)
def test_what_cannot_grow_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()
