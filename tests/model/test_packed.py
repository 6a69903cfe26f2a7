"""Packed products: the numbers of ``F.linear``, for few rows on a CPU and nowhere else."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from dllm.model import packed
from dllm.model.packed import MAX_ROWS, Linear, linear, pack_linears

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


@pytest.fixture
def emulated_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_multiplies_bfloat16", lambda: False)


@needs_packing
@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
@pytest.mark.parametrize("rows", [1, 4, 129])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_rows_are_multiplied_in_float32_and_rounded_once(
    rows: int, with_bias: bool, engine: str, emulated_bfloat16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this PyTorch has no {engine}")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        assert packed._holds_float16() == (engine == "x86")
        x, weight = numbers(rows, 48, dtype=torch.bfloat16), numbers(40, 48, dtype=torch.bfloat16, seed=1)
        bias = numbers(40, dtype=torch.bfloat16, seed=2) if with_bias else None
        found = linear(x, weight, bias)
    finally:
        torch.backends.quantized.engine = before
    assert found.dtype == torch.bfloat16
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a unit in the last of bfloat16's 8 digits, and the float32 sum's own error.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    monkeypatch.setattr(packed, "_multiplies_bfloat16", lambda: True)
    assert not packed._fits(x, weight)


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_processor_multiplies_bfloat16_by_its_instructions_not_by_onednns_word(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    packed._multiplies_bfloat16.cache_clear()
    assert packed._multiplies_bfloat16() == (avx512 or amx)
    packed._multiplies_bfloat16.cache_clear()


@needs_packing
@pytest.mark.parametrize("exponent", [-90, -40, -10, 0, 10, 40, 100])
def test_bfloat16_weights_of_any_size_are_held_without_loss(exponent: int, emulated_bfloat16: None) -> None:
    spread = 2.0 ** torch.arange(exponent - 31, exponent + 1).double()
    weight = (numbers(40, 32, seed=1).sign().double() * spread * 1.9921875).to(torch.bfloat16)
    assert torch.equal(weight.double().abs().amax(0), spread * 1.9921875)
    # One column at a time: nothing is summed, so each product is exact or the weight was not.
    found = linear(torch.eye(32, dtype=torch.bfloat16), weight)
    assert torch.equal(found.double(), weight.double().T)
    copy_of = packed._packed(weight)
    assert copy_of is not None and copy_of.factor is not None and copy_of.num_bytes == 2 * 40 * 32


@needs_packing
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_bfloat16_weights_that_are_no_numbers_stay_so(bad: float, emulated_bfloat16: None) -> None:
    weight = numbers(40, 48, dtype=torch.bfloat16, seed=1)
    weight[3, 5] = bad
    found = linear(torch.ones(2, 48, dtype=torch.bfloat16), weight)
    assert not torch.isfinite(found[:, 3]).any()
    kept = torch.arange(40) != 3
    assert torch.isfinite(found[:, kept]).all()
    zero = torch.zeros(40, 48, dtype=torch.bfloat16)
    assert torch.equal(linear(torch.ones(2, 48, dtype=torch.bfloat16), zero), torch.zeros(2, 40, dtype=torch.bfloat16))


@needs_packing
def test_a_weight_changed_in_place_is_packed_again_and_a_dead_one_leaves() -> None:
    layer, x = Linear(48, 40, bias=False), numbers(3, 48)
    before = layer(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before, rtol=1e-5, atol=1e-4)
    gc.collect()
    kept = len(packed._kept)
    del layer
    gc.collect()
    assert len(packed._kept) == kept - 1


@needs_packing
def test_a_layer_that_changes_its_type_is_packed_again(emulated_bfloat16: None) -> None:
    layer, x = Linear(48, 40), numbers(3, 48)
    layer(x)
    layer.to(torch.bfloat16)
    found = layer(x.bfloat16())
    layer.float()
    exact = F.linear(x.bfloat16().float(), layer.weight, layer.bias)
    assert torch.equal(found, exact.bfloat16())
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-4)


@needs_packing
def test_copies_stop_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(packed, "MAX_BYTES", sum(copy.num_bytes for copy in packed._kept.values()) + 4 * 40 * 48)
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
    assert not packed._fits(numbers(2, 48, dtype=torch.float16), weight.half())
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


@needs_packing
def test_a_foreign_model_keeps_its_parameters_and_reads_packed_ones() -> None:
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(48, 40), torch.nn.ReLU(), Other(40, 48, bias=False))
    x, before = numbers(3, 48), {name: p.data_ptr() for name, p in model.named_parameters()}
    out, hooked = model(x), []
    model[0].register_forward_hook(lambda *given: hooked.append(given))
    pack_linears(model)
    assert type(model[0]) is Linear and type(model[2]) is Other
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    torch.testing.assert_close(model(x), out, rtol=1e-5, atol=1e-4)
    assert len(hooked) == 1 and packed._kept.get(model[0].weight) is not None
