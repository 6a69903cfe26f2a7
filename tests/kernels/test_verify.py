"""The verify kernels equal their references, and those the pure functions of the samplers."""

from typing import Any

import pytest
import torch

from dllm.kernels.verify import (
    Verified,
    verify_greedy,
    verify_greedy_reference,
    verify_greedy_triton,
    verify_sampled,
    verify_sampled_reference,
    verify_sampled_triton,
)
from dllm.samplers import verify as rules
from dllm.types import Draft
from tests.kernels.devices import DEVICES

Round = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


def round_of(seed: int, batch: int, count: int, vocab: int, drafted: bool, ragged: bool) -> Round:
    """target_probs, draft_tokens, draft_probs, uniform, lengths; drafts that are often accepted."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, count + 1, vocab, generator=draw) * 2
    target = logits.softmax(-1)
    probs = (logits[:, :count] + torch.randn(batch, count, vocab, generator=draw) * 0.5).softmax(-1)
    if count:
        tokens = torch.multinomial(probs.reshape(-1, vocab), 1, generator=draw).view(batch, count)
    else:
        tokens = torch.zeros(batch, 0, dtype=torch.int64)
    if not drafted and count:
        tokens = torch.where(torch.rand(batch, count, generator=draw) < 0.8, target[:, :count].argmax(-1), tokens)
    lengths = torch.randint(0, count + 1, (batch,), generator=draw) if ragged else None
    return target, tokens, probs if drafted else None, torch.rand(batch, count + 1, generator=draw), lengths


def moved(values: tuple[Any, ...], device: str) -> Any:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def assert_same(got: Verified, expected: Verified, message: str = "") -> None:
    for name, a, b in zip(Verified._fields, got, expected, strict=True):
        assert torch.equal(a.cpu(), b), f"{name} {message}"


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("drafted", [True, False], ids=["laws", "one-hot"])
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
def test_the_reference_is_the_samplers_rule(block: bool, drafted: bool, ragged: bool) -> None:
    for seed in range(40):
        target, tokens, probs, uniform, lengths = round_of(seed, 3, seed % 6, 9, drafted, ragged)
        rule = rules.block_verification if block else rules.chain_rejection
        verdict = rule(target, Draft(tokens, probs), uniform, lengths)
        out = verify_sampled_reference(target, tokens, probs, uniform, lengths, block)
        assert_same(out, Verified(verdict.accepted, verdict.next_token, verdict.tokens(tokens)), f"seed {seed}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("drafted", [True, False], ids=["laws", "one-hot"])
def test_the_sampling_kernels_do_what_the_reference_does(device: str, block: bool, drafted: bool) -> None:
    for seed, (count, vocab) in enumerate([(0, 5), (1, 1), (3, 63), (7, 257), (16, 1000), (5, 5000)]):
        values = round_of(seed, 2, count, vocab, drafted, ragged=seed % 2 == 0)
        expected = verify_sampled_reference(*values, block=block)
        assert_same(verify_sampled_triton(*moved((*values, block), device)), expected, f"count {count}, vocab {vocab}")


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_wider_tensor_and_other_strides_are_read_in_place(device: str) -> None:
    target, tokens, probs, uniform, lengths = round_of(3, 2, 4, 100, True, True)
    assert probs is not None
    wide = torch.full((2, 9, 130), float("nan"))
    wide[:, :5, :100], wide[:, 5:, :100] = target, probs
    wide = wide.to(device)
    tokens_t = torch.empty(4, 2, dtype=torch.int64).copy_(tokens.t()).t()
    rest = moved((tokens_t, uniform, lengths), device)
    out = verify_sampled_triton(wide[:, :5, :100], rest[0], wide[:, 5:, :100], rest[1], rest[2])
    assert_same(out, verify_sampled_reference(target, tokens, probs, uniform, lengths))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_laws_accept_everything_and_a_draw_from_nothing_left_takes_the_target(device: str) -> None:
    target, tokens, _, uniform, _ = round_of(1, 4, 3, 50, True, False)
    values = (target, tokens, target[:, :3].clone(), uniform)
    for block in (False, True):
        out = verify_sampled_triton(*moved((*values, None, block), device))
        assert out.accepted.tolist() == [3] * 4
        assert_same(out, verify_sampled_reference(*values, block=block))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 7, 63])
def test_the_greedy_kernel_does_what_the_rule_does(device: str, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    target = torch.randint(0, 3, (6, count + 1), generator=draw)
    tokens = torch.where(torch.rand(6, count, generator=draw) < 0.8, target[:, :count], 1)
    for lengths in (None, torch.randint(0, count + 1, (6,), generator=draw)):
        verdict = rules.match(target, tokens, lengths)
        expected = Verified(verdict.accepted, verdict.next_token, verdict.tokens(tokens))
        assert_same(verify_greedy_reference(target, tokens, lengths), expected)
        assert_same(verify_greedy_triton(*moved((target, tokens, lengths), device)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_a_whole_vocabulary_is_verified_on_the_device(block: bool) -> None:
    for seed in range(8):
        values = round_of(seed, 4, 15, 151936, True, True)
        expected = verify_sampled_reference(*values, block=block)
        out = verify_sampled_triton(*moved((*values, block), "cuda"))
        assert torch.equal(out.accepted.cpu(), expected.accepted)
        # A draw may differ where the number lies within rounding of a border; that is rare among so few.
        assert (out.next_token.cpu() == expected.next_token).float().mean() >= 0.75


def test_arguments_that_do_not_fit_are_named() -> None:
    target, tokens, probs, uniform, _ = round_of(0, 2, 3, 9, True, False)
    with pytest.raises(ValueError, match=r"target_probs must be \[2, 4, V\]"):
        verify_sampled(target[:, :3], tokens, probs, uniform)
    with pytest.raises(ValueError, match="draft_probs must be"):
        verify_sampled(target, tokens, target, uniform)
    with pytest.raises(ValueError, match="uniform must be"):
        verify_sampled(target, tokens, probs, uniform[:, :3])
    with pytest.raises(ValueError, match="lengths must be int64"):
        verify_sampled(target, tokens, probs, uniform, torch.ones(2))
    with pytest.raises(ValueError, match="target_tokens must be"):
        verify_greedy(tokens, tokens)
