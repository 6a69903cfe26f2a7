"""Capture and its fallback, the shape buckets, and the flag that is read late."""

from __future__ import annotations

import logging

import pytest
import torch

from dllm import graphs
from dllm.graphs import KEY_STEP, Buckets, Poll, capture, key_bucket

CPU = torch.device("cpu")


def test_key_buckets_hold_their_keys_and_are_few():
    for keys in (0, 1, KEY_STEP, KEY_STEP + 1, 5 * KEY_STEP - 1):
        assert key_bucket(keys) >= max(keys, 1)
        assert key_bucket(keys) - keys <= KEY_STEP
        assert key_bucket(keys) % KEY_STEP == 0
    assert len({key_bucket(n) for n in range(1, 1 + 4 * KEY_STEP)}) == 4
    with pytest.raises(ValueError, match="keys must be >= 0: got -1"):
        key_bucket(-1)


def test_off_cuda_a_step_runs_eagerly_and_says_so_once(caplog):
    graphs._said.clear()
    value = torch.zeros(1)
    with caplog.at_level(logging.INFO, logger="dllm.graphs"):
        for _ in range(3):
            captured = capture(lambda: value.add_(1), CPU, name="counting")
    assert captured.reason == "counting: no CUDA graph on cpu, steps run eagerly"
    assert [record.message for record in caplog.records] == [captured.reason]
    assert value.item() == 0, "an eager step must not run before it is asked for"
    assert captured.replay().item() == 1
    assert captured.replay().item() == 2


def test_a_steps_own_error_is_not_taken_for_a_failed_capture():
    def wrong():
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        capture(wrong, CPU).replay()


def test_buckets_build_once_and_give_the_least_used_back():
    built = []

    def build(key):
        def make():
            built.append(key)
            return key

        return make

    buckets: Buckets[int] = Buckets(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert buckets.get(key, build(key)) == key
    assert built == [1, 2, 3, 2]
    with pytest.raises(ValueError, match="capacity must be >= 1: got 0"):
        Buckets(0)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_poll_shows_the_flag_as_it_was_some_posts_ago(lag):
    flag = torch.zeros(2, dtype=torch.int32)
    poll = Poll(flag, lag)
    for round_ in range(2):
        seen = []
        for value in range(6):
            flag.fill_(value + 10 * round_)
            poll.post()
            seen.append(poll.read())
        assert seen[:lag] == [None] * lag
        assert seen[lag:] == [[value + 10 * round_] * 2 for value in range(6 - lag)]
        poll.reset()
        assert poll.read() is None
    with pytest.raises(ValueError, match="lag must be >= 0: got -1"):
        Poll(flag, -1)


@pytest.mark.gpu
def test_on_the_gpu_a_replay_equals_the_eager_step_and_follows_its_inputs():
    device = torch.device("cuda")
    x = torch.randn(64, 64, device=device)
    captured = capture(lambda: (x @ x).relu().sum(0), device, owned=(x,))
    assert captured.graph is not None
    for _ in range(3):
        x.copy_(torch.randn(64, 64, device=device))
        assert torch.equal(captured.replay(), (x @ x).relu().sum(0))


@pytest.mark.gpu
def test_on_the_gpu_a_step_that_asks_the_host_falls_back_with_one_line(caplog):
    graphs._said.clear()
    device = torch.device("cuda")
    x = torch.ones(3, device=device)
    with caplog.at_level(logging.INFO, logger="dllm.graphs"):
        captured = capture(lambda: x * x.sum().item(), device, name="asking")
    assert captured.graph is None
    assert len(caplog.records) == 1
    assert "asking: no CUDA graph, steps run eagerly" in caplog.records[0].message
    assert captured.replay().tolist() == [3.0, 3.0, 3.0]
    assert torch.equal(torch.ones(2, device=device) + 1, torch.full((2,), 2.0, device=device))
