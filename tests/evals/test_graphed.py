"""Captured forwards give what the model gives, whatever the loop around them asks for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dllm import ARGuide
from dllm.cache.free import FreeCache
from dllm.evals.graphed import GraphedForward, row_bucket
from dllm.model.fast_decoder import FastDecoder
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import SimSD
from dllm.types import Attend
from tests.tiny import padded, prompt, tiny_decoder, tiny_lm, tokens


def graphed(lm: Any) -> Any:
    other = copy.copy(lm)
    other.model = GraphedForward(FastDecoder(lm.model))
    return other


def guide(model: Any, **rule: Any) -> ARGuide:
    return ARGuide(model).with_rule(**rule)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("block_causal", {"cache": "block"}),
    ("block_causal", {"cache": "none", "temperature": 0.7, "seed": 3}),
    ("block_causal", {"cache": "block", "verifier": SimSD(draft=1)}),
    ("block_causal", {"cache": "block", "verifier": SimSD(draft=1, exact=True)}),
    ("block_causal", {"cache": "block", "verifier": S2D2(cost=float("-inf"))}),
    ("block_causal", {"cache": "block", "verifier": FreeDave(4)}),
    ("bidirectional", {"cache": "dual"}),
    ("bidirectional", {"cache": "prefix"}),
    ("bidirectional", {"cache": FreeCache()}),
    ("bidirectional", {"cache": FreeCache(policy="aggressive", freeze_delay=1)}),
]


@pytest.mark.parametrize(("attention", "options"), CASES)
def test_text_and_counts_are_those_of_the_plain_model(attention, options):
    lm = tiny_lm(attention)
    fast = graphed(lm)
    for length in (3, 21):
        plain, ours = (model.generate(input_ids=[prompt(length)], max_new_tokens=40, **options) for model in (lm, fast))
        assert tokens(ours) == tokens(plain)
        assert (ours.stats.nfe, ours.stats.positions) == (plain.stats.nfe, plain.stats.positions)
    assert fast.model.replays > 0 and fast.model.eager == 0


def test_a_guide_with_captured_forwards_accepts_the_same():
    lm, causal = tiny_lm(), tiny_decoder(1)
    rule = {"accept": "exact", "on_reject": "ar", "guide_passes": None}
    plain = lm.generate(input_ids=[prompt(5)], max_new_tokens=30, guide=guide(causal, **rule))
    wrapped = GraphedForward(FastDecoder(causal))
    ours = graphed(lm).generate(input_ids=[prompt(5)], max_new_tokens=30, guide=guide(wrapped, **rule))
    assert tokens(ours) == tokens(plain) and ours.stats.guide_nfe == plain.stats.guide_nfe
    assert wrapped.replays == ours.stats.guide_nfe


def test_graphs_are_met_again_though_loop_and_hook_hold_each_other():
    lm, wrapped = graphed(tiny_lm()), GraphedForward(tiny_decoder(1))
    sizes = []
    for _ in range(3):
        lm.generate(input_ids=[prompt(5)], max_new_tokens=30, cache="block", guide=guide(wrapped, accept="topk"))
        sizes.append((len(lm.model.graphs.built), len(wrapped.graphs.built)))
    assert sizes[0] == sizes[1] == sizes[2]


def test_rows_that_leave_the_batch_take_the_eager_forward_and_change_nothing():
    lm = tiny_lm()
    fast = graphed(lm)
    rows = padded([prompt(3), prompt(9), prompt(6)])
    stop = tokens(lm.generate(**rows, cache="block", max_new_tokens=24, eos_token_id=()), 1)[10]
    plain, ours = (m.generate(**rows, cache="block", max_new_tokens=24, eos_token_id=stop) for m in (lm, fast))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert fast.model.eager > 0


def test_a_second_call_meets_the_graphs_of_the_first_and_two_stores_never_share_numbers():
    lm = graphed(tiny_lm())
    lm.generate(input_ids=[prompt(5)], cache="block", max_new_tokens=20)
    built = len(lm.model.graphs.built)
    lm.generate(input_ids=[prompt(7)], cache="block", max_new_tokens=20)
    assert len(lm.model.graphs.built) == built
    first, second = lm.model.new_store(1, 30), lm.model.new_store(1, 30)
    assert first.data.data_ptr() != second.data.data_ptr()
    assert first.capacity == 256


def test_padding_is_seen_by_nobody_whatever_the_buffers_held_before():
    decoder = tiny_decoder()
    model = GraphedForward(decoder)
    for count in (70, 66, 3, 70):
        ids = torch.tensor([prompt(count)])
        at = torch.arange(count)[None]
        expected = decoder(ids, at, None, Attend.causal(at))
        torch.testing.assert_close(model(ids, at, None, Attend.causal(at)), expected, atol=1e-5, rtol=1e-5)
    assert [row_bucket(n) for n in (1, 16, 17, 128, 129)] == [16, 16, 32, 128, 256]
