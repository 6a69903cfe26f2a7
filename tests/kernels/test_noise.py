"""The counter noise in Triton equals ``dllm.noise`` bit for bit."""

from typing import Any

import pytest
import torch

from dllm.kernels.noise import counter_uniform, counter_uniform_triton
from dllm.noise import CounterNoise
from tests.kernels.devices import DEVICES, interpreted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [1, 63, 257])
@pytest.mark.parametrize("seed", [0, 7, -1, 2**62 + 12345, -(2**63)])
def test_numbers_are_bit_equal_for_any_seed_and_position(device: str, slots: int, seed: int) -> None:
    noise = CounterNoise.for_rows([seed, seed + 1, 3], 3)
    positions = torch.randint(0, 2**31, (3, slots), generator=torch.Generator().manual_seed(slots))
    step = torch.tensor([0, 5, 2**31])
    expected = noise.uniform(positions, step, stream=4)
    out = counter_uniform_triton(noise.seeds.to(device), positions.to(device), step.to(device), stream=4)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lanes", [1, 63, 1000])
def test_lanes_are_bit_equal_and_share_no_number_with_the_slot(device: str, lanes: int) -> None:
    noise = CounterNoise.for_rows(11, 2)
    positions, step = torch.arange(6).view(2, 3), torch.tensor([2, 9])
    out = counter_uniform_triton(noise.seeds.to(device), positions.to(device), step.to(device), lanes=lanes).cpu()
    assert torch.equal(out, noise.uniform_lanes(positions, step, lanes))
    assert not (out == noise.uniform(positions, step)[..., None]).any()


@interpreted
def test_a_view_with_strides_gives_the_numbers_of_its_values() -> None:
    noise = CounterNoise.for_rows(3, 2)
    positions = torch.arange(20).view(5, 4).t()[:2]
    step = torch.tensor([1, 1])
    assert torch.equal(counter_uniform_triton(noise.seeds, positions, step), noise.uniform(positions, step))


def test_the_public_function_checks_shapes_and_types() -> None:
    good: dict[str, Any] = dict(
        seeds=torch.zeros(2).long(), positions=torch.zeros(2, 3).long(), step=torch.zeros(2).long()
    )
    assert torch.equal(counter_uniform(**good), CounterNoise(good["seeds"]).uniform(good["positions"], good["step"]))
    with pytest.raises(ValueError, match="seeds and step"):
        counter_uniform(**good | {"seeds": torch.zeros(3).long()})
    with pytest.raises(ValueError, match="step must be int64"):
        counter_uniform(**good | {"step": torch.zeros(2)})
    with pytest.raises(ValueError, match="lanes must be >= 0"):
        counter_uniform(**good, lanes=-1)
