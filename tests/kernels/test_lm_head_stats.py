"""The fused head against the product and the row statistics in fp32."""

from typing import Any

import pytest
import torch

from dllm.kernels.lm_head_stats import (
    HeadStats,
    HeadTiles,
    lm_head_stats,
    lm_head_stats_reference,
    lm_head_stats_triton,
)
from dllm.kernels.row_stats import row_stats_reference
from tests.kernels.devices import DEVICES, interpreted, poison

ALL = frozenset({"top1", "entropy", "margin"})
# The truth is the reference on the same rounded inputs, in fp32: products of bf16 are exact there, so what is left is the order of D
# additions, and the tolerance is that of fp32 for every input type.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: dict(rtol=1e-4, atol=2e-5),
    torch.bfloat16: dict(rtol=1e-4, atol=2e-5),
    torch.float16: dict(rtol=1e-4, atol=2e-5),
}
SMALL = HeadTiles(16, 64, 32, num_warps=4, num_stages=2)


def head(
    seed: int, rows: int, vocab: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=draw) * (3 / width**0.5)
    return torch.randn(rows, width, generator=draw).to(dtype), weight.to(dtype)


def on(device: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def assert_same(got: HeadStats, expected: HeadStats, tolerance: dict[str, Any]) -> None:
    for name, a, b in zip(HeadStats._fields, got, expected, strict=True):
        if a is None or b is None:
            assert a is b, name
        elif b.dtype == torch.int64:
            assert torch.equal(a.cpu(), b), name
        else:
            torch.testing.assert_close(a.cpu(), b, **tolerance)


def border_distance(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, uniform: torch.Tensor, banned: Any
) -> torch.Tensor:
    law = torch.nn.functional.linear(hidden.double(), weight.double()) / temperature
    law = law if banned is None else law.masked_fill(banned, float("-inf"))
    return (law.softmax(-1).cumsum(-1) - uniform.double()[..., None]).abs().amin(-1)


def extras(seed: int, rows: int, vocab: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return dict(
        banned=torch.rand(vocab, generator=draw) < 0.2,
        ids=torch.randint(0, vocab, (rows, 3), generator=draw),
        candidates=min(4, vocab),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "vocab", "width", "dtype"),
    [
        (1, 63, 64, torch.float32),
        (3, 257, 100, torch.bfloat16),
        (17, 130, 63, torch.float16),
        (33, 65, 40, torch.bfloat16),
        (2, 1000, 31, torch.float32),
        (70, 64, 16, torch.float32),
    ],
)
def test_every_number_is_the_references(
    monkeypatch: pytest.MonkeyPatch, device: str, rows: int, vocab: int, width: int, dtype: torch.dtype
) -> None:
    hidden, weight = head(rows, rows, vocab, width, dtype)
    plain: dict[str, Any] = dict(hidden=hidden, weight=weight, needs=ALL)
    rich = extras(rows, rows, vocab)
    expected = [lm_head_stats_reference(**plain), lm_head_stats_reference(**plain, **rich)]
    poison(monkeypatch)
    assert_same(lm_head_stats_triton(**on(device, plain)), expected[0], TOLERANCE[dtype])
    assert_same(lm_head_stats_triton(**on(device, plain | rich)), expected[1], TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("banned", [False, True])
def test_a_drawn_token_is_the_references_unless_its_number_lies_at_a_border(
    monkeypatch: pytest.MonkeyPatch, device: str, processed: bool, banned: bool
) -> None:
    hidden, weight = head(5, 9, 300, 48)
    uniform = torch.rand(9, generator=torch.Generator().manual_seed(4))
    ban = extras(1, 9, 300)["banned"] if banned else None
    arguments: dict[str, Any] = dict(
        hidden=hidden,
        weight=weight,
        needs=ALL,
        banned=ban,
        uniform=uniform,
        temperature=0.7,
        processed_confidence=processed,
    )
    assert border_distance(hidden, weight, 0.7, uniform, ban).min() > 1e-5
    expected = lm_head_stats_reference(**arguments)
    poison(monkeypatch)
    assert_same(lm_head_stats_triton(**on(device, arguments), tiles=SMALL), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_banned_ids_can_lose_their_mass_too(monkeypatch: pytest.MonkeyPatch, device: str, temperature: float) -> None:
    hidden, weight = head(7, 9, 300, 48)
    # The likeliest ids are banned, and with them all ids of the first tile.
    banned = torch.zeros(300, dtype=torch.bool)
    banned[:64] = True
    banned[torch.nn.functional.linear(hidden, weight).argmax(-1)] = True
    kept = (~banned).nonzero()[:, 0]
    uniform = torch.rand(9, generator=torch.Generator().manual_seed(4))
    values: dict[str, Any] = dict(uniform=uniform, temperature=temperature) if temperature else {}
    truth = lm_head_stats_reference(hidden, weight[kept], ALL, **values)
    poison(monkeypatch)
    arguments: dict[str, Any] = dict(hidden=hidden, weight=weight, needs=ALL, banned=banned, drop_banned=True, **values)
    arguments["ids"] = torch.arange(weight.shape[0]).expand(hidden.shape[0], -1)
    for got in (lm_head_stats_reference(**arguments), lm_head_stats_triton(**on(device, arguments), tiles=SMALL)):
        assert torch.equal(kept[truth.token], got.token.cpu())
        for name in ("confidence", "log_total", "entropy", "margin"):
            a, b = getattr(got, name).cpu(), getattr(truth, name)
            torch.testing.assert_close(a, b, **TOLERANCE[torch.float32])
        assert got.log_probs is not None
        assert (got.log_probs.cpu().exp()[:, banned] == 0).all()
        torch.testing.assert_close(got.log_probs.cpu().exp().sum(-1), torch.ones(hidden.shape[0]))


@pytest.mark.parametrize("device", DEVICES)
def test_leading_shapes_and_strides_are_kept(device: str) -> None:
    hidden, weight = head(6, 6, 70, 32)
    wide_hidden, wide_weight = torch.full((2, 3, 50), float("nan")), torch.full((140, 40), float("nan"))
    wide_hidden[..., 9:41], wide_weight[::2, 3:35] = hidden.view(2, 3, 32), weight
    views = (wide_hidden.to(device)[..., 9:41], wide_weight.to(device)[::2, 3:35])
    got = lm_head_stats_triton(*views, ALL, candidates=2)
    assert got.token.shape == (2, 3)
    assert_same(
        got, lm_head_stats_reference(hidden.view(2, 3, 32), weight, ALL, candidates=2), TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lowest_id_and_rounding_makes_them(device: str) -> None:
    hidden = torch.ones(1, 16, dtype=torch.bfloat16)
    weight = torch.zeros(200, 16, dtype=torch.bfloat16)
    weight[[150, 70, 90], 0] = 1.0
    # Equal to one in bf16, a little more before rounding.
    weight[150, 1] = 2**-10
    values: dict[str, Any] = dict(hidden=hidden, weight=weight, candidates=3)
    exact = lm_head_stats_triton(**on(device, values))
    rounded = lm_head_stats_triton(**on(device, values), round_logits=True)
    assert (exact.token.item(), rounded.token.item()) == (150, 70)
    assert exact.top_ids is not None
    assert rounded.top_ids is not None
    assert exact.top_ids.tolist() == [[150, 70, 90]]
    assert rounded.top_ids.tolist() == [[70, 90, 150]]


# The interpreter computes with NumPy, which warns of slices without a number.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_log_total_is_not_finite_where_hidden_is_not(device: str) -> None:
    hidden, weight = head(7, 3, 100, 16)
    hidden[1, 4] = float("nan")
    log_total = lm_head_stats_triton(hidden.to(device), weight.to(device)).log_total
    assert log_total.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_vocabulary_is_one_law(device: str) -> None:
    hidden, weight = head(8, 2, 126464, 16)
    tiles = HeadTiles(16, 8192, 16, num_warps=8, num_stages=2) if device == "cpu" else None
    arguments: dict[str, Any] = dict(hidden=hidden, weight=weight, needs=ALL, candidates=2)
    assert_same(
        lm_head_stats_triton(**on(device, arguments), tiles=tiles),
        lm_head_stats_reference(**arguments),
        TOLERANCE[torch.float32],
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [(1, 49152, 576), (32, 49152, 576), (32, 126464, 4096), (64, 126464, 4096), (65, 151936, 2560)],
)
def test_real_heads_on_the_device(rows: int, vocab: int, width: int) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    weight = (torch.randn(vocab, width, generator=draw, device="cuda") * (3 / width**0.5)).bfloat16()
    hidden = torch.randn(rows, width, generator=draw, device="cuda").bfloat16()
    uniform = torch.rand(rows, generator=draw, device="cuda")
    banned = torch.zeros(vocab, dtype=torch.bool, device="cuda")
    banned[:7] = True
    # fp64 is the truth here: a product in fp32 on the device may be computed in TF32.
    logits = torch.nn.functional.linear(hidden.double(), weight.double()).float()
    expected = row_stats_reference(logits[None], ALL, banned)
    got = lm_head_stats(hidden, weight, ALL, banned, candidates=4)
    top = logits.masked_fill(banned, float("-inf")).topk(4)
    close = top.values[:, 0] - top.values[:, 1] < 1e-4
    assert ((got.token == expected.token[0]) | close).all()
    for name in ("confidence", "entropy", "margin", "log_total"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name)[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.top_values, top.values, rtol=1e-4, atol=1e-4)
    drawn = lm_head_stats(hidden, weight, banned=banned, uniform=uniform, temperature=0.8)
    truth = row_stats_reference(logits[None], banned=banned, uniform=uniform[None], temperature=0.8).token[0]
    differs = drawn.token != truth
    assert (border_distance(hidden, weight, 0.8, uniform, banned)[differs] < 1e-4).all()


@interpreted
def test_no_rows_give_no_numbers() -> None:
    out = lm_head_stats_triton(torch.zeros(0, 8), torch.zeros(5, 8), ALL, candidates=2)
    assert out.token.shape == (0,)
    assert out.top_ids is not None
    assert out.top_ids.shape == (0, 2)


def test_the_numbers_are_handed_on_as_row_statistics() -> None:
    hidden, weight = head(9, 3, 20, 8)
    out = lm_head_stats(hidden, weight, ALL)
    rows = out.row_stats()
    assert rows.token is out.token
    assert rows.margin is out.margin
    assert rows.log_total is out.log_total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.zeros(5, 7)), r"weight must be \[V, D\]"),
        (dict(weight=torch.zeros(5, 8).half()), "of one float dtype"),
        (dict(needs=frozenset({"logits"})), "needs must be among"),
        (dict(banned=torch.zeros(4, dtype=torch.bool)), "banned must be bool"),
        (dict(temperature=1.0), "uniform must be"),
        (dict(candidates=6), "candidates must be in 0"),
        (dict(ids=torch.zeros(2, 1)), "ids must be int64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm_head_stats(**dict(hidden=torch.zeros(2, 8), weight=torch.zeros(5, 8)) | change)
