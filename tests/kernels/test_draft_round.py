"""The end of a round in one launch: equal to the tensor operations, bit for bit, and those to the host's loop."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.kernels.draft_round import RoundBuffers, commit_round, commit_round_reference, commit_round_triton
from tests.kernels.devices import DEVICES


def filled(batch, slots, seed, device="cpu", columns=64, most=40):
    """Rows in the middle of a request; few ids, so that drafts are accepted and stops come."""
    g = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=g).to(device)

    state = RoundBuffers.idle(batch, slots, columns, most, seed % 3, device)
    produced = ints(1, 10, batch)
    state.lengths.copy_(produced + ints(0, 9, batch))
    state.produced.copy_(produced)
    state.passes.copy_(ints(0, 5, batch))
    state.drafted.copy_(state.passes)
    state.remaining.copy_(ints(1, 2 * slots + 1, batch))
    state.active.copy_(ints(0, 4, batch) > 0)
    state.eos.copy_(ints(0, 3, state.eos.numel()))
    state.aim()
    target, tokens = ints(0, 3, batch, slots), ints(0, 3, batch, slots)
    tokens[:, 1:] = torch.where(ints(0, 4, batch, slots - 1) > 0, target[:, :-1], tokens[:, 1:])
    log_total = torch.rand(batch, slots, generator=g).to(device)
    log_total[ints(0, 12, batch, slots) == 0] = (float("nan"), float("inf"))[seed % 2]
    return state, target, log_total, tokens


def equal(a, b):
    for f in fields(RoundBuffers):
        left, right = getattr(a, f.name), getattr(b, f.name)
        if f.name in ("out", "log"):
            # The last column takes what is masked out.
            left, right = left[:, :-1], right[:, :-1]
        assert torch.equal(left, right), f.name


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 5), slots=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_the_launch_equals_the_tensor_operations(device, batch, slots, seed):
    ours, truth = filled(batch, slots, seed, device), filled(batch, slots, seed, device)
    for _ in range(2):
        commit_round_triton(ours[0], *ours[1:])
        commit_round_reference(truth[0], *truth[1:])
        equal(ours[0], truth[0])


def test_rows_that_are_over_stay_as_they_are():
    state, *laws = filled(4, 5, 3)
    state.active.zero_()
    state.aim()
    before = {f.name: getattr(state, f.name).clone() for f in fields(RoundBuffers)}
    commit_round(state, *laws)
    for name, value in before.items():
        now = getattr(state, name)
        assert torch.equal(now[:, :-1], value[:, :-1]) if name in ("out", "log") else torch.equal(now, value), name


def test_shapes_and_types_that_do_not_fit_are_named():
    state, target, log_total, tokens = filled(2, 3, 0)
    with pytest.raises(ValueError, match=r"target_tokens must be torch.int64 \[2, 3\]"):
        commit_round(state, target[:, :2], log_total, tokens)
    with pytest.raises(ValueError, match="log_total must be torch.float32"):
        commit_round(state, target, log_total.double(), tokens)
    with pytest.raises(ValueError, match="at most 128 slots"):
        commit_round(RoundBuffers.idle(1, 129, 8, 8, 0, "cpu"), target, log_total, tokens)
