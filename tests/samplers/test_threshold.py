"""Confidence-threshold unmasking as properties: progress, monotony in the threshold, limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.noise import CounterNoise
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.threshold import Threshold
from dllm.types import RowState, RowStats


@st.composite
def situations(draw):
    """Confidences and masks of two rows with seven slots."""
    confidence = torch.tensor(draw(st.lists(st.floats(0, 1, width=32), min_size=14, max_size=14))).view(2, 7)
    masked = torch.tensor(draw(st.lists(st.booleans(), min_size=14, max_size=14))).view(2, 7)
    return confidence, masked


def committed(threshold, confidence, masked, done=0, steps=UNLIMITED):
    batch, slots = masked.shape
    rows = RowStats(token=torch.full((batch, slots), 5), confidence=confidence)
    state = RowState(
        step=torch.full((batch,), done),
        steps=torch.full((batch,), steps),
        masks_at_start=masked.sum(-1),
        slots=torch.arange(slots).expand(batch, -1),
    )
    noise = CounterNoise.for_rows(0, batch)
    return (
        Threshold(threshold)
        .step(rows, torch.zeros(batch, slots, dtype=torch.int64), masked, state, noise)
        .transfer_index
    )


@given(situations(), st.floats(0, 1.5))
def test_every_row_with_a_mask_commits_and_only_masked_slots_are_committed(situation, threshold):
    confidence, masked = situation
    chosen = committed(threshold, confidence, masked)
    assert not (chosen & ~masked).any()
    assert torch.equal(chosen.any(-1), masked.any(-1))


@given(situations(), st.floats(0, 1.2), st.floats(0, 1.2))
def test_a_lower_threshold_commits_a_superset(situation, a, b):
    confidence, masked = situation
    strict, loose = (committed(t, confidence, masked) for t in sorted((a, b), reverse=True))
    assert not (strict & ~loose).any()


@given(situations())
def test_above_one_it_commits_the_single_surest_slot_and_at_zero_the_whole_block(situation):
    confidence, masked = situation
    one = committed(1.01, confidence, masked)
    assert (one.sum(-1) <= 1).all()
    for b in range(2):
        if masked[b].any():
            assert one[b].nonzero().item() == confidence[b].masked_fill(~masked[b], -1).argmax().item()
    assert torch.equal(committed(0, confidence, masked), masked)


def test_the_threshold_itself_is_sure_enough_and_ties_for_the_surest_go_to_the_lowest_slot():
    masked = torch.ones(1, 3, dtype=torch.bool)
    assert committed(0.5, torch.tensor([[0.5, 0.4, 0.5]]), masked).tolist() == [[True, False, True]]
    assert committed(0.9, torch.tensor([[0.4, 0.5, 0.5]]), masked).tolist() == [[False, True, False]]


@given(situations(), st.integers(1, 7))
def test_a_step_limit_is_kept(situation, steps):
    confidence, masked = situation
    for done in range(steps):
        masked = masked & ~committed(2.0, confidence, masked, done, steps)
    assert not masked.any()


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), True, "0.9", None])
def test_the_threshold_must_be_a_number_of_at_least_zero(threshold):
    with pytest.raises(ValueError, match="threshold must be a number >= 0"):
        Threshold(threshold)
