"""Samplers that draw their tokens themselves, as laws: first-hitting, ancestral, Gumbel, and the canvas of uniform corruption."""

from __future__ import annotations

import torch

from dllm.kernels.row_stats import row_stats
from dllm.noise import CounterNoise
from dllm.samplers.ancestral import Ancestral
from dllm.samplers.first_hitting import FirstHitting
from dllm.samplers.gumbel import gumbel_draw, gumbel_max
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.uniform_canvas import UniformCanvas
from dllm.types import RowState
from tests.samplers.situations import EVERYTHING

LAW = torch.tensor([0.5, 0.3, 0.2, 0.0])
N = 6000


def decide(sampler, logits, masked, step=0, steps=UNLIMITED, history=None, banned=None):
    batch, slots = masked.shape
    state = RowState(
        step=torch.full((batch,), step),
        steps=torch.full((batch,), steps),
        masks_at_start=torch.full((batch,), slots),
        slots=torch.arange(slots).expand(batch, -1),
        history={} if history is None else history,
        banned=banned,
    )
    rows = row_stats(logits, EVERYTHING, banned, previous=torch.zeros_like(logits))
    canvas = torch.zeros(batch, slots, dtype=torch.int64)
    return sampler.step(rows, canvas, masked, state, CounterNoise.for_rows(5, batch))


def share(flags):
    return flags.double().mean().item()


def near(found, expected):
    return abs(found - expected) < 4.5 * (max(expected * (1 - expected), 1e-4) / N) ** 0.5


def test_the_gumbel_trick_draws_from_the_law_and_is_the_arg_max_at_zero():
    uniform = CounterNoise.for_rows(0, N).uniform_lanes(torch.zeros(N, 1).long(), torch.zeros(N).long(), 4)[:, 0]
    logits = LAW.log().expand(N, -1)
    for drawn in (gumbel_max(logits, uniform, 1.0), gumbel_draw(LAW.expand(N, -1), uniform)):
        assert all(near(share(drawn == i), LAW[i].item()) for i in range(4))
    assert (gumbel_max(logits, uniform, 0.0) == 0).all()
    cooled = (LAW**2 / (LAW**2).sum())[0].item()
    assert near(share(gumbel_max(logits, uniform, 0.5) == 0), cooled)


def test_first_hitting_takes_one_slot_uniformly_with_a_token_of_its_law_and_never_the_banned_one():
    logits = torch.tensor([0.5, 0.3, 0.2, 5.0]).log().expand(N, 3, -1)
    banned = torch.tensor([False, False, False, True])
    masked = torch.tensor([True, False, True]).expand(N, -1)
    chosen = decide(FirstHitting(), logits, masked, banned=banned)
    assert (chosen.transfer_index.sum(-1) == 1).all()
    assert near(share(chosen.transfer_index[:, 0]), 0.5)
    tokens = chosen.tokens[chosen.transfer_index]
    assert all(near(share(tokens == i), LAW[i].item()) for i in range(4))


def test_an_ancestral_step_commits_each_slot_with_its_share_and_the_step_after_the_last_takes_all():
    logits, masked = LAW.log().expand(N, 1, -1), torch.ones(N, 1, dtype=torch.bool)
    sampler = Ancestral(num_steps=4, eps=0.0)
    for step, chance in enumerate((1 / 4, 1 / 3, 1 / 2, 1.0)):
        # A slot still masked at time t leaves with probability (t - s) / t.
        chosen = decide(sampler, logits, masked, step)
        assert near(share(chosen.transfer_index), chance)
        assert near(share(chosen.tokens[chosen.transfer_index] == 0), 0.5) or step == 0
    last = decide(Ancestral(num_steps=4, eps=0.9), logits, masked, 4)
    assert last.transfer_index.all() and (last.tokens == 0).all()


def test_a_canvas_keeps_sure_slots_renews_the_others_and_commits_nothing_before_the_end():
    sure, flat = torch.tensor([30.0, 0, 0, 0]), torch.zeros(4)
    logits, masked = torch.stack([sure, flat]).expand(N, 2, -1), torch.ones(N, 2, dtype=torch.bool)
    chosen = decide(UniformCanvas(bound=0.0, sample=False), logits, masked, 0, 8)
    assert not chosen.transfer_index.any()
    assert (chosen.canvas[:, 0] == 0).all()
    # Bound 0 still admits one slot at a time: the flat one comes on top of a slot without entropy.
    both = decide(UniformCanvas(bound=0.0, sample=False), flat.expand(N, 2, -1), masked, 0, 8)
    assert near(share(both.canvas[:, 1] == 0), 0.25)
    assert decide(UniformCanvas(), logits, masked, 7, 8).transfer_index.all()
    assert torch.equal(chosen.conditioning, logits / 0.8)


def test_a_canvas_ends_early_once_it_is_stable_and_sure():
    sure = torch.tensor([30.0, 0, 0, 0]).expand(1, 2, -1)
    masked = torch.ones(1, 2, dtype=torch.bool)
    history: dict[str, torch.Tensor] = {}
    sampler = UniformCanvas(stability_threshold=2, confidence_threshold=0.01)
    ends = [bool(decide(sampler, sure, masked, i, 20, history).transfer_index.all()) for i in range(4)]
    assert ends == [False, False, True, True]
    unsure = UniformCanvas(stability_threshold=0, confidence_threshold=0.0)
    assert not decide(unsure, sure, masked, 5, 20).transfer_index.any()
