"""The row statistics' kernels against their reference in fp32."""

import math
from typing import Any

import pytest
import torch

from dllm.kernels.row_stats import (
    Split,
    row_numbers_triton,
    row_stats,
    row_stats_reference,
    row_stats_triton,
    top_k,
    top_k_reference,
)
from tests.kernels.devices import DEVICES, interpreted, poison

ALL = frozenset({"top1", "entropy", "margin"})
# Every input type is summed in fp32 from the same numbers, so the truth is the reference on the rounded input, and one tolerance serves:
# a few hundred roundings of fp32 in a sum over the vocabulary, and the device's exp.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: dict(rtol=2e-5, atol=2e-6),
    torch.bfloat16: dict(rtol=2e-5, atol=2e-6),
    torch.float16: dict(rtol=2e-5, atol=2e-6),
}
BORDER = 1e-5


def logits_of(
    seed: int, vocab: int, batch: int = 1, slots: int = 2, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return (torch.randn(batch, slots, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def assert_equal_stats(got: Any, expected: Any, tolerance: dict[str, Any]) -> None:
    assert torch.equal(got.token.cpu(), expected.token)
    for name in ("confidence", "entropy", "margin", "log_total"):
        a, b = getattr(got, name), getattr(expected, name)
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a.cpu(), b, **tolerance)


def border_distance(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Distance of each number [B, S] to the nearest border of the cumulative law of logits [B, S, V]."""
    return (law.double().softmax(-1).cumsum(-1) - uniform.double()[..., None]).abs().amin(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocab", "dtype", "banned"),
    [
        (63, torch.float32, False),
        (63, torch.bfloat16, True),
        (257, torch.bfloat16, False),
        (257, torch.float16, True),
        (1000, torch.float32, True),
        (5000, torch.bfloat16, True),
    ],
)
def test_every_statistic_is_the_references(
    monkeypatch: pytest.MonkeyPatch, device: str, vocab: int, dtype: torch.dtype, banned: bool
) -> None:
    logits = logits_of(vocab, vocab, dtype=dtype)
    ban = None
    if banned:
        ban = torch.zeros(vocab, dtype=torch.bool)
        ban[logits[0].argmax(-1)] = True
    expected = row_stats_reference(logits, ALL, ban)
    poison(monkeypatch)
    assert_equal_stats(row_stats_triton(on(device, logits), ALL, on(device, ban)), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_one_id_is_certain(device: str) -> None:
    stats = row_stats_triton(torch.full((2, 1, 1), 3.0, device=device), frozenset({"entropy"}))
    assert stats.token.flatten().tolist() == [0, 0]
    # A GPU divides to the last bit but one.
    assert stats.confidence.flatten().tolist() == pytest.approx([1, 1], abs=2**-22)
    assert stats.entropy is not None
    assert stats.entropy.abs().max() < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_vocabulary_in_several_tiles_a_split(device: str) -> None:
    logits = logits_of(0, 126464, dtype=torch.bfloat16)
    # Few programs, since the interpreter pays by the program; on the device also as it splits by itself.
    splits: list[Any] = [Split(16384, 4, 32768, 8)] + ([] if device == "cpu" else [None])
    uniform = torch.tensor([[0.3, 0.9]])
    for split in splits:
        got = row_numbers_triton(on(device, logits), ALL, split=split)
        assert_equal_stats(got, row_stats_reference(logits, ALL), TOLERANCE[torch.bfloat16])
        token = row_numbers_triton(on(device, logits), uniform=on(device, uniform), temperature=0.8, split=split).token
        assert border_distance(logits / 0.8, uniform).min() > BORDER
        assert torch.equal(token.cpu(), row_stats_reference(logits, uniform=uniform, temperature=0.8).token)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["transposed", "strided vocabulary", "slice"])
def test_any_strides_are_read_in_place(device: str, kind: str) -> None:
    logits = logits_of(1, 130, batch=2, slots=2)
    wide = torch.full((2, 5, 300), math.nan)
    if kind == "transposed":
        view = logits.transpose(0, 1).contiguous().to(device).transpose(0, 1)
    elif kind == "strided vocabulary":
        wide[:, :2, 1:261:2] = logits
        view = wide.to(device)[:, :2, 1:261:2]
    else:
        wide[:, 3:, 7:137] = logits
        view = wide.to(device)[:, 3:, 7:137]
    assert not view.is_contiguous()
    assert_equal_stats(row_stats_triton(view, ALL), row_stats_reference(logits, ALL), TOLERANCE[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lowest_id_across_threads_tiles_and_splits(device: str) -> None:
    logits = torch.zeros(1, 2, 9000)
    logits[0, 0, [8500, 4100, 2050]] = 2.0
    logits[0, 1, [4095, 17]] = 1.0
    stats = row_stats_triton(on(device, logits), ALL)
    assert stats.token.tolist() == [[2050, 17]]
    assert stats.margin is not None
    assert stats.margin.tolist() == [[0, 0]]


# The interpreter computes with NumPy, which warns of infinity minus infinity.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_log_total_is_not_finite_exactly_where_logits_are_no_law(device: str, value: float) -> None:
    logits = logits_of(3, 2100, batch=2)
    everywhere = value == -math.inf
    logits[1, 1, slice(None) if everywhere else 2070] = value
    logits[0, 0, 5:900] = -math.inf
    stats = row_stats_triton(on(device, logits), ALL)
    assert stats.log_total is not None
    assert (~stats.log_total.isfinite()).nonzero().tolist() == [[1, 1]]
    assert 0 <= stats.token.min() <= stats.token.max() < 2100
    expected = row_stats_reference(logits, ALL)
    # The first row is a law all the same.
    for name, got in vars(stats).items():
        if got is not None:
            torch.testing.assert_close(got[:1].cpu(), vars(expected)[name][:1], **TOLERANCE[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
def test_ids_may_be_banned_slot_by_slot_and_all_of_them(device: str) -> None:
    logits = logits_of(4, 300)
    banned = torch.rand(1, 2, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    banned[0, 1] = True
    expected = row_stats_reference(logits, frozenset(), banned)
    got = row_stats_triton(on(device, logits), frozenset(), on(device, banned))
    assert torch.equal(got.token.cpu(), expected.token)
    torch.testing.assert_close(got.confidence[0, 0].cpu(), expected.confidence[0, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["raw", "processed", "law", "processed law"])
def test_a_drawn_token_is_the_references_unless_its_number_lies_at_a_border(
    monkeypatch: pytest.MonkeyPatch, device: str, way: str
) -> None:
    logits = logits_of(5, 5000, slots=3)
    uniform = torch.rand(1, 3, generator=torch.Generator().manual_seed(1))
    banned = torch.zeros(5000, dtype=torch.bool)
    banned[logits[0].argmax(-1)] = True
    law = (logits / 0.7).masked_fill(banned, -math.inf)
    keep: dict[str, Any] = dict(temperature=0.7, processed_confidence="processed" in way)
    expected = row_stats_reference(logits, ALL, banned, uniform, law=law if "law" in way else None, **keep)
    assert border_distance(law, uniform).min() > BORDER
    poison(monkeypatch)
    device_law = on(device, law) if "law" in way else None
    got = row_stats_triton(on(device, logits), ALL, on(device, banned), on(device, uniform), law=device_law, **keep)
    assert_equal_stats(got, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
def test_an_id_without_mass_is_never_drawn_not_even_at_the_ends(device: str) -> None:
    logits = torch.full((1, 3, 4500), -math.inf)
    logits[..., [7, 2100, 4200]] = 0.0
    uniform = torch.tensor([[2**-24, 0.5, 1 - 2**-24]])
    drawn = row_stats_triton(on(device, logits), uniform=on(device, uniform), temperature=1.0)
    assert drawn.token.tolist() == [[7, 2100, 4200]]


@pytest.mark.parametrize("device", DEVICES)
def test_the_best_ids_and_their_mass_are_the_references(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    # Few different values, so that most ranks are ties.
    logits = logits_of(6, 4500).round()
    banned = torch.rand(4500, generator=torch.Generator().manual_seed(2)) < 0.3
    expected = top_k_reference(logits, 5, banned)
    poison(monkeypatch)
    got = row_numbers_triton(on(device, logits), banned=on(device, banned), top_k=5).top
    assert got is not None
    assert torch.equal(got.ids.cpu(), expected.ids)
    assert torch.equal(got.values.cpu(), expected.values)
    torch.testing.assert_close(got.mass.cpu(), expected.mass)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "vocab"), [(1, 49152), (32, 126464), (300, 126464), (33, 151643)])
def test_real_sizes_on_the_device(dtype: torch.dtype, slots: int, vocab: int) -> None:
    logits = logits_of(slots, vocab, slots=slots, dtype=dtype)
    uniform = torch.rand(1, slots, generator=torch.Generator().manual_seed(3))
    cuda = logits.cuda()
    assert_equal_stats(row_stats(cuda, ALL), row_stats_reference(logits, ALL), TOLERANCE[dtype])
    drawn = row_stats(cuda, uniform=uniform.cuda(), temperature=1.0).token.cpu()
    differs = drawn != row_stats_reference(logits, uniform=uniform, temperature=1.0).token
    assert (border_distance(logits, uniform)[differs] < BORDER).all()
    got, expected = top_k(cuda, 4), top_k_reference(logits, 4)
    assert torch.equal(got.ids.cpu(), expected.ids)


@pytest.mark.gpu
def test_the_reference_can_be_asked_for_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(7, 1000).cuda()
    expected = row_stats_reference(logits, ALL)
    monkeypatch.setenv("DLLM_KERNELS", "reference")
    got = row_stats(logits, ALL)
    assert all(
        a is b is None or torch.equal(a, b) for a, b in zip(vars(got).values(), vars(expected).values(), strict=True)
    )


@interpreted
def test_no_rows_give_no_numbers() -> None:
    stats = row_stats_triton(torch.zeros(0, 3, 10), ALL)
    assert stats.token.shape == (0, 3)
    assert stats.entropy is not None
    assert stats.entropy.shape == (0, 3)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[B, S, V\]"):
        row_stats(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="k must be in 1"):
        top_k(torch.zeros(1, 1, 5), 6)
