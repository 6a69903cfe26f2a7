"""The commit kernel equals its reference on random situations, and the samplers' own rules."""

from typing import Any

import pytest
import torch

from dllm.kernels.commit import Commit, commit, commit_reference, commit_triton
from dllm.samplers.low_confidence import UNLIMITED, LowConfidence
from dllm.samplers.threshold import Threshold
from dllm.types import RowState, RowStats
from tests.kernels.devices import DEVICES

VOCAB = 20


def situation(seed: int, batch: int = 5, slots: int = 8, width: int = 30, optional: bool = True) -> dict[str, Any]:
    """A random moment of a decoding loop: ragged blocks, some full, some with stops, some rows that wait."""
    draw = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    def coin(chance: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw) < chance

    lo = integers(0, width - 1, batch)
    masked = coin(0.6, batch, width)
    # Scores of few values, so that ties are common.
    confidence = integers(1, 9, batch, slots) / 8
    out: dict[str, Any] = dict(
        token=integers(0, VOCAB, batch, slots),
        confidence=confidence,
        canvas=integers(0, VOCAB, batch, width),
        masked=masked,
        lo=lo,
        hi=torch.minimum(lo + integers(1, slots + 1, batch), torch.tensor(width)),
        stop_ids=torch.tensor([3, 7]),
    )
    if optional:
        log_total = torch.randn(batch, slots, generator=draw)
        log_total[0, 0] = float("nan")
        log_total[1, -1] = float("inf")
        out |= dict(
            given=~masked & coin(0.3, batch, width),
            decode=coin(0.8, batch),
            first_only=coin(0.2, batch),
            settled_first=coin(0.4, batch),
            step=integers(0, 4, batch),
            steps=torch.where(coin(0.5, batch), integers(1, 6, batch), torch.tensor(UNLIMITED)),
            log_total=log_total,
            banned=coin(0.1, VOCAB),
        )
    return out


def run(
    function: Any, moment: dict[str, Any], device: str = "cpu", **rule: Any
) -> tuple[Commit, torch.Tensor, torch.Tensor]:
    moved = {name: value.clone().to(device) for name, value in moment.items()}
    rule = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in rule.items()}
    out = function(**moved, **rule)
    return Commit(*(value.cpu() for value in out)), moved["canvas"].cpu(), moved["masked"].cpu()


def assert_same(first: Any, second: Any) -> None:
    for name, a, b in zip(Commit._fields, first[0], second[0], strict=True):
        if name == "log_confidence":
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b), name
    assert torch.equal(first[1], second[1]), "canvas"
    assert torch.equal(first[2], second[2]), "masked"


RULES: list[dict[str, Any]] = [
    dict(rule="threshold", threshold=0.6),
    dict(rule="threshold", threshold=2.0),
    dict(rule="threshold", threshold=0.0),
    dict(rule="low_confidence", k=1),
    dict(rule="low_confidence", k=3),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [1, 8, 63])
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "everything"])
def test_the_kernel_does_what_the_reference_does(device: str, slots: int, optional: bool) -> None:
    for seed in range(2):
        moment = situation(seed, batch=4, slots=slots, width=70, optional=optional)
        for rule in RULES:
            assert_same(run(commit_triton, moment, device, **rule), run(commit_reference, moment, **rule))


@pytest.mark.parametrize("device", DEVICES)
def test_a_given_choice_is_committed_where_it_is_offered(device: str) -> None:
    for seed in range(3):
        moment = situation(seed)
        choice = torch.rand(5, 8, generator=torch.Generator().manual_seed(seed)) < 0.5
        results = [
            run(f, moment, d, rule="given", transfer=choice)
            for f, d in ((commit_triton, device), (commit_reference, "cpu"))
        ]
        assert_same(*results)
        assert not (
            results[1][0].transfer
            & ~choice
            & (moment["step"] + 1 < moment["steps"])[:, None]
            & ~moment["first_only"][:, None]
        ).any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_block_ranks_as_a_small_one_does(device: str) -> None:
    moment = situation(1, batch=2, slots=128, width=200)
    for rule in (RULES[0], RULES[4]):
        assert_same(run(commit_triton, moment, device, **rule), run(commit_reference, moment, **rule))


@pytest.mark.parametrize("sampler", [Threshold(0.6), Threshold(1.5), LowConfidence(2)], ids=repr)
def test_the_rules_are_those_of_the_samplers(sampler: Any) -> None:
    rule: dict[str, Any] = (
        dict(rule="threshold", threshold=sampler.threshold)
        if isinstance(sampler, Threshold)
        else dict(rule="low_confidence", k=sampler.k)
    )
    for seed in range(20):
        moment = situation(seed, optional=False)
        moment["stop_ids"] = torch.tensor([VOCAB])
        moment["step"] = torch.randint(0, 3, (5,), generator=torch.Generator().manual_seed(seed))
        moment["steps"] = torch.tensor([4, 5, UNLIMITED, 9, 6])
        slots = moment["lo"][:, None] + torch.arange(8)
        offered = moment["masked"].gather(1, slots.clamp(max=29)) & (slots < moment["hi"][:, None])
        state = RowState(moment["step"], moment["steps"], moment["hi"] - moment["lo"], slots)
        expected = sampler.step(
            RowStats(moment["token"], moment["confidence"]), moment["canvas"], offered, state, None
        ).transfer_index
        out, _, _ = run(commit_reference, moment, **rule)
        last = (moment["step"] + 1 >= moment["steps"])[:, None]
        assert torch.equal(out.transfer, (expected | last) & offered)


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_wider_canvas_are_written_in_place(device: str) -> None:
    moment = situation(2)
    expected = run(commit_reference, moment, rule="threshold")
    wide_canvas = torch.full((5, 40), -1, device=device)
    wide_masked = torch.ones(5, 40, dtype=torch.bool, device=device)
    wide_canvas[:, :30], wide_masked[:, :30] = moment["canvas"].to(device), moment["masked"].to(device)
    rest = {name: value.to(device) for name, value in moment.items() if name not in ("canvas", "masked")}
    commit_triton(**rest, canvas=wide_canvas[:, :30], masked=wide_masked[:, :30])
    assert torch.equal(wide_canvas[:, :30].cpu(), expected[1])
    assert torch.equal(wide_masked[:, :30].cpu(), expected[2])
    assert (wide_canvas[:, 30:] == -1).all()
    assert wide_masked[:, 30:].all()


def test_a_stop_before_every_mask_finishes_and_a_full_block_goes_on() -> None:
    moment = situation(0, batch=2, slots=3, width=6, optional=False)
    moment |= dict(
        canvas=torch.tensor([[1, 3, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]),
        masked=torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]).bool(),
        lo=torch.tensor([0, 0]),
        hi=torch.tensor([3, 3]),
        token=torch.full((2, 3), 5),
    )
    out, canvas, _ = run(commit, moment)
    assert out.finished.tolist() == [True, False]
    assert out.full.tolist() == [False, True]
    assert out.stop.tolist() == [1, 6]
    # Nothing is committed after a stop.
    assert canvas[:, 2].tolist() == [0, 5]
    assert out.num_committed.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rule="best"), "rule must be one of"),
        (dict(rule="given"), "transfer must be given"),
        (dict(confidence=torch.zeros(5, 3)), "token and confidence must be"),
        (dict(masked=torch.zeros(5, 30)), "canvas and masked must be"),
        (dict(lo=torch.zeros(5)), "lo must be int64"),
        (dict(decode=torch.zeros(5)), "decode must be bool"),
        (dict(steps=torch.zeros(4).long()), "steps must be"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        commit(**situation(0, optional=False) | change)
