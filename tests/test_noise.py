"""Philox4x32-10 against its published vectors; uniform numbers that depend on (seed, position, step, stream) and on nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.noise import STREAM_ACCEPT, STREAM_POSITION, STREAM_RESIDUAL, STREAM_TOKEN, CounterNoise, philox, to_uniform

ONES = 0xFFFFFFFF
PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = 0x299F31D0A4093822


def signed(value):
    """A 64-bit pattern as the int64 that holds it."""
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (ONES,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI_KEY, PI_COUNTER, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(key, counter, expected):
    words = philox(torch.tensor(signed(key)), *(torch.tensor(c) for c in counter))
    assert " ".join(f"{int(w):08x}" for w in words) == expected


def test_uniform_is_the_first_word_of_the_documented_counter():
    noise = CounterNoise(torch.tensor([7, -5]))
    positions, step = torch.tensor([[3, 4], [5, 6]]), torch.tensor([2, 9])
    drawn = noise.uniform(positions, step, STREAM_ACCEPT)
    for b in range(2):
        for s in range(2):
            word, *_ = philox(noise.seeds[b], positions[b, s], step[b], torch.tensor(STREAM_ACCEPT), torch.tensor(0))
            assert drawn[b, s] == to_uniform(word)


def test_uniform_numbers_never_reach_zero_or_one():
    edges = to_uniform(torch.tensor([0, ONES]))
    assert edges.dtype == torch.float32
    assert 0 < edges[0] < 1e-6
    assert 1 - 1e-6 < edges[1] < 1


def test_uniform_numbers_are_uniform_and_uncorrelated():
    noise = CounterNoise(torch.arange(50))
    u = noise.uniform(torch.arange(400).expand(50, -1), torch.zeros(50, dtype=torch.int64)).double()
    counts = torch.histc(u, 64, 0, 1)
    expected = u.numel() / 64
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; fixed seeds, so this is no lottery.
    assert abs(chi_squared - 63) < 4 * math.sqrt(2 * 63)
    assert abs(u.mean().item() - 0.5) < 4 / math.sqrt(12 * u.numel())
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 4 / math.sqrt(a.numel())


@given(st.integers(-(2**62), 2**62), st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 3))
def test_a_number_does_not_depend_on_its_neighbours(seed, position, step, stream):
    alone = CounterNoise(torch.tensor([seed])).uniform(torch.tensor([[position]]), torch.tensor([step]), stream)
    crowd = CounterNoise(torch.tensor([1, seed, 2])).uniform(
        torch.tensor([[0, 9], [8, position], [1, 1]]), torch.tensor([5, step, 6]), stream
    )
    assert alone[0, 0] == crowd[1, 1]


def test_seed_position_step_stream_and_lane_all_change_the_number():
    noise = CounterNoise(torch.tensor([1, 2, 1 + 2**32]))
    position, zero = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    position[:, 1] = 1
    numbers = [
        noise.uniform(position, zero + s, k) for s in (0, 1) for k in (STREAM_TOKEN, STREAM_POSITION, STREAM_RESIDUAL)
    ]
    numbers += [noise.uniform_lanes(position, zero, 4, STREAM_TOKEN)[..., lane] for lane in range(4)]
    flat = torch.cat([n.flatten() for n in numbers])
    assert len(flat.unique()) == len(flat)


def test_lanes_are_keyed_like_the_rest_and_keep_their_numbers_when_there_are_more():
    noise, positions, step = CounterNoise(torch.tensor([3])), torch.tensor([[4, 5]]), torch.tensor([6])
    few, many = noise.uniform_lanes(positions, step, 3), noise.uniform_lanes(positions, step, 7)
    assert few.shape == (1, 2, 3)
    assert torch.equal(few, many[..., :3])


def test_an_int_seed_counts_up_by_row_and_a_list_gives_one_a_row():
    assert CounterNoise.for_rows(5, 3).seeds.tolist() == [5, 6, 7]
    assert CounterNoise.for_rows([9, 1, 9], 3).seeds.tolist() == [9, 1, 9]
    assert CounterNoise.for_rows(5, 3).select(torch.tensor([2, 0])).seeds.tolist() == [7, 5]


def test_no_seed_draws_a_fresh_one():
    assert CounterNoise.for_rows(None, 2).seeds.tolist() != CounterNoise.for_rows(None, 2).seeds.tolist()


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        ([1, 2], ValueError, "one int a row \\(3\\): got 2"),
        (2**63 - 2, ValueError, "64 bits"),
        (-(2**63) - 1, ValueError, "64 bits"),
        (True, TypeError, "seed must be an int"),
        (1.5, TypeError, "seed must be an int"),
        ([1, 2.5, 3], TypeError, "seed must be an int"),
        ("123", TypeError, "seed must be an int"),
    ],
)
def test_a_seed_that_is_no_integer_or_does_not_fit_raises(seed, error, message):
    with pytest.raises(error, match=message):
        CounterNoise.for_rows(seed, 3)
