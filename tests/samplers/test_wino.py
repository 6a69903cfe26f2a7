"""WINO: shadow rows that never disturb the block, revocation within its bounds, blocks that end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dllm.cache.none import NoCache
from dllm.noise import CounterNoise
from dllm.samplers.wino import Wino
from dllm.shadow import with_shadow
from dllm.types import Attend, RowState, RowStats
from tests.spy import Spy
from tests.tiny import MASK, tiny_lm

RULES = ["bidirectional", "block_causal"]
PROMPT = [5, 9, 13, 21, 4]


def lm_of(rule, **changes):
    return tiny_lm(rule, logits_shift=0, eos_token_ids=(), block_origin="prompt", **changes)


def run(lm, sampler, **options):
    return lm.generate(input_ids=[PROMPT], max_new_tokens=20, sampler=sampler, output_history=True, **options)


def test_a_shadow_sees_all_but_its_own_slot_and_is_seen_by_shadows_only():
    rows = torch.arange(6)[None]
    valid = torch.ones(1, 6, dtype=torch.bool)
    attend = with_shadow(
        Attend.bidirectional(valid), rows, valid, torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.bool)
    )
    mask = attend.mask()[0]
    assert mask.shape == (8, 8)
    assert mask[:6, :6].all() and not mask[:6, 6:].any()
    assert mask[6].tolist() == [True, True, True, False, True, True, True, True]
    assert mask[7].tolist() == [True, True, True, True, False, True, True, True]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_without_revocation_it_is_a_threshold_with_a_cap(rule, cache):
    lm = lm_of(rule)
    wide = run(lm, Wino(0.6, 0.0, low=20, high=20), cache=cache)
    plain = run(lm, "threshold", threshold=0.6000001, cache=cache)
    assert wide.sequences.tolist() == plain.sequences.tolist()
    assert wide.stats.nfe == plain.stats.nfe
    # The shadow rows are counted: one for each slot of the open block and step.
    assert wide.stats.positions > plain.stats.positions
    assert wide.stats.positions <= plain.stats.positions + 8 * wide.stats.nfe


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verify", [0.3, 0.9, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_block_ends_within_as_many_steps_as_slots_however_much_is_revoked(rule, verify, seed):
    spy = Spy(NoCache())
    out = run(tiny_lm(rule, seed, logits_shift=0, eos_token_ids=()), Wino(0.1, verify), cache=spy)
    assert MASK not in out.sequences[0].tolist()
    assert max(forward.step[0] for forward in spy.forwards) < 8
    masks = [sum(frame.masked) for frame in out.history[0]]
    assert masks[-1] == 0


def test_something_is_revoked_at_all_and_never_what_was_given():
    revoked = 0
    for seed in range(6):
        out = run(tiny_lm("bidirectional", seed, logits_shift=0, eos_token_ids=()), Wino(0.1, 1.5), cache="none")
        frames = out.history[0]
        for before, after in pairwise(frames):
            revoked += sum(b is False and a is True for b, a in zip(before.masked, after.masked, strict=True))
    assert revoked > 0


def test_revocation_leaves_one_of_what_the_step_before_committed():
    sampler, silent = Wino(0.6, 0.9), CounterNoise.for_rows(0, 1)
    history: dict[str, torch.Tensor] = {}

    def state(step):
        return RowState(torch.tensor([step]), torch.tensor([100]), torch.tensor([6]), torch.arange(6)[None], history)

    canvas = torch.zeros(1, 6, dtype=torch.int64)
    sure = RowStats(canvas, torch.full((1, 6), 0.95))
    first = sampler.step(sure, canvas, torch.ones(1, 6, dtype=torch.bool), state(0), silent)
    assert first.transfer_index.sum() == 5
    doubt = RowStats(canvas, torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.95]]))
    assert not sampler.revise(doubt, canvas, torch.zeros(1, 6, dtype=torch.bool), state(0), silent).remask.any()
    history["wino"] = torch.tensor([[3, 2]])
    back = sampler.revise(doubt, canvas, torch.ones(1, 6, dtype=torch.bool), state(1), silent)
    assert back.remask.tolist() == [[True, True, False, False, False, False]]
    history["wino"] = torch.tensor([[3, 1]])
    # A step that committed one token never revokes.
    assert not sampler.revise(doubt, canvas, torch.ones(1, 6, dtype=torch.bool), state(2), silent).remask.any()


def test_a_row_of_a_batch_equals_its_single_run():
    lm = lm_of("bidirectional")
    options: dict[str, Any] = {"max_new_tokens": 20, "sampler": Wino(0.2, 0.9), "cache": "none"}
    other = [8, 3, 7]
    both = lm.generate(input_ids=[PROMPT, [0, 0, *other]], attention_mask=[[1] * 5, [0, 0, 1, 1, 1]], **options)
    for b, row in enumerate((PROMPT, other)):
        assert both.sequences[b].tolist() == lm.generate(input_ids=[row], **options).sequences[0].tolist()


def test_models_whose_rows_predict_the_next_slot_are_refused():
    with pytest.raises(ValueError, match="Wino needs a masked model without shift"):
        tiny_lm("bidirectional").generate(input_ids=[PROMPT], max_new_tokens=8, sampler="wino")
