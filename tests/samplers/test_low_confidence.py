"""Static low-confidence remasking: quotas, order and ties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.noise import CounterNoise
from dllm.samplers.low_confidence import UNLIMITED, LowConfidence, best, least_quota
from dllm.types import RowState, RowStats


def rows(confidence):
    confidence = torch.as_tensor(confidence, dtype=torch.float32)
    return RowStats(token=torch.arange(confidence.numel()).view(confidence.shape), confidence=confidence)


def state(step, steps, masks, slots=8):
    batch = len(masks)
    return RowState(
        step=torch.full((batch,), step),
        steps=torch.full((batch,), steps),
        masks_at_start=torch.tensor(masks),
        slots=torch.arange(slots).expand(batch, -1),
    )


def step(sampler, confidence, masked, where):
    masked = torch.as_tensor(masked)
    noise = CounterNoise.for_rows(0, masked.shape[0])
    return sampler.step(rows(confidence), torch.zeros_like(masked, dtype=torch.int64), masked, where, noise)


@given(st.integers(1, 12), st.integers(1, 16))
def test_the_schedule_commits_every_mask_in_exactly_the_given_steps(masks, steps):
    left = torch.ones(1, masks, dtype=torch.bool)
    confidence = torch.rand(1, masks)
    sizes = []
    for i in range(steps):
        chosen = step(LowConfidence(), confidence, left, state(i, steps, [masks])).transfer_index
        sizes.append(int(chosen.sum()))
        assert not (chosen & ~left).any()
        left = left & ~chosen
    assert not left.any()
    # The published schedule: as even as it can be, the larger quotas first.
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 10), st.lists(st.floats(0, 1, width=32), min_size=1, max_size=10), st.data())
def test_without_a_limit_the_k_surest_masked_slots_are_committed(k, confidence, data):
    masked = data.draw(st.lists(st.booleans(), min_size=len(confidence), max_size=len(confidence)))
    chosen = step(LowConfidence(k), [confidence], [masked], state(0, UNLIMITED, [len(confidence)])).transfer_index[0]
    order = sorted((i for i, m in enumerate(masked) if m), key=lambda i: (-confidence[i], i))
    assert set(chosen.nonzero().flatten().tolist()) == set(order[:k])


def test_ties_go_to_the_lowest_slot():
    chosen = best(torch.tensor([[0.5, 0.7, 0.7, 0.7]]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([2]))
    assert chosen.tolist() == [[False, True, True, False]]


def test_quotas_are_per_row():
    masked = torch.ones(2, 4, dtype=torch.bool)
    assert best(torch.rand(2, 4), masked, torch.tensor([1, 3])).sum(-1).tolist() == [1, 3]


def test_a_row_without_masks_commits_nothing():
    assert not step(LowConfidence(2), [[0.9, 0.9]], [[False, False]], state(0, UNLIMITED, [2])).transfer_index.any()


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 8))
def test_the_least_quota_keeps_a_step_limit_within_reach(done, steps, masks):
    masked = torch.zeros(1, 8, dtype=torch.bool)
    masked[0, :masks] = True
    quota = least_quota(masked, state(done, steps, [8])).item()
    left = max(steps - done, 1)
    assert quota >= 1
    assert quota * left >= masks
    assert (quota - 1) * left < max(masks, 1)


@pytest.mark.parametrize("k", [0, -1, 1.0, True, "2"])
def test_k_must_be_a_positive_int(k):
    with pytest.raises(ValueError, match="k must be an int >= 1"):
        LowConfidence(k)
