"""Packed products: the numbers of ``F.linear``, for few rows on a CPU and nowhere else."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from dllm.model import packed
from dllm.model.packed import MAX_ROWS, Linear, linear

needs_packing = pytest.mark.skipif(not packed._packs(), reason="this processor or PyTorch has no packed products")


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "MIN_NUMEL", 64)
    monkeypatch.delenv("DLLM_PACKED", raising=False)
    with torch.no_grad():
        yield


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 7, 63, MAX_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(rows: int, with_bias: bool) -> None:
    x, weight = numbers(rows, 48), numbers(40, 48, seed=1)
    bias = numbers(40, seed=2) if with_bias else None
    assert packed._fits(x, weight)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@needs_packing
def test_more_dimensions_and_strides_are_kept() -> None:
    x, weight = numbers(5, 3, 48).transpose(0, 1), numbers(40, 48, seed=1)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    columns = numbers(48, 40, seed=1).t()
    torch.testing.assert_close(linear(x, columns), F.linear(x, columns), rtol=1e-5, atol=1e-4)


@needs_packing
def test_bfloat16_rows_are_multiplied_in_float32_and_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_multiplies_bfloat16", lambda: False)
    x, weight = numbers(4, 48, dtype=torch.bfloat16), numbers(40, 48, dtype=torch.bfloat16, seed=1)
    found = linear(x, weight)
    assert found.dtype == torch.bfloat16
    exact = F.linear(x.double(), weight.double())
    assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert not packed._fits(x[:1], weight)
    monkeypatch.setattr(packed, "_multiplies_bfloat16", lambda: True)
    assert not packed._fits(x, weight)


@needs_packing
def test_a_weight_changed_in_place_is_packed_again_and_a_dead_one_leaves() -> None:
    layer, x = Linear(48, 40, bias=False), numbers(3, 48)
    before = layer(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before, rtol=1e-5, atol=1e-4)
    kept = len(packed._kept)
    del layer
    gc.collect()
    assert len(packed._kept) == kept - 1


@needs_packing
def test_copies_stop_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(packed, "MAX_BYTES", sum(4 * k.numel() for k in packed._kept) + 4 * 40 * 48)
    x, first, second = numbers(3, 48), numbers(40, 48, seed=1), numbers(40, 48, seed=2)
    for weight in (first, second):
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert packed._packed(first) is not None and packed._packed(second) is None


def test_gradients_long_inputs_other_types_and_the_switch_take_the_plain_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = numbers(40, 48, seed=1)
    assert not packed._fits(numbers(MAX_ROWS + 1, 48), weight)
    assert not packed._fits(numbers(0, 48), weight)
    assert not packed._fits(numbers(2, 48, dtype=torch.float64), weight.double())
    assert not packed._fits(numbers(2, 48, dtype=torch.bfloat16), weight)
    assert not packed._fits(numbers(2, 4), numbers(4, 4))
    with torch.enable_grad():
        x = numbers(2, 48).requires_grad_()
        linear(x, weight).sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1))
    monkeypatch.setenv("DLLM_PACKED", "0")
    assert not packed._fits(numbers(2, 48), weight)
    monkeypatch.setenv("DLLM_PACKED", "yes")
    with pytest.raises(ValueError, match="DLLM_PACKED must be one of 1, 0: got 'yes'"):
        packed._fits(numbers(2, 48), weight)


def test_a_layer_with_a_packed_weight_can_be_copied_and_saved() -> None:
    layer, x = Linear(48, 40), numbers(3, 48)
    out = layer(x)
    other = copy.deepcopy(layer)
    assert set(layer.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(other(x), out)
