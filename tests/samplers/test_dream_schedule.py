"""Dream's schedule against the reference's table, and its tempered choice of positions."""

from __future__ import annotations

import json

import pytest
import torch

from dllm.samplers.dream_entropy import DreamEntropy
from dllm.samplers.dream_schedule import dream_quota
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.maskgit_plus import MaskgitPlus
from dllm.samplers.topk_margin import TopkMargin
from tests.families.golden import GOLDEN
from tests.samplers.situations import call, confidences

TABLE = json.loads((GOLDEN / "dream" / "unit.json").read_text())["schedule"]


def per_step(masked, steps, eps):
    left, counts = masked, []
    for step in range(steps):
        took = int(dream_quota(torch.tensor([left]), torch.tensor([step]), torch.tensor([steps]), eps))
        counts.append(took)
        left -= took
    return counts


@pytest.mark.parametrize("case", TABLE, ids=lambda c: f"{c['masked']}-{c['steps']}-{c['eps']}")
def test_the_schedule_is_the_references(case):
    assert per_step(case["masked"], case["steps"], case["eps"]) == case["per_step"]


def test_time_is_torchs_linspace_bit_for_bit():
    for steps in (1, 2, 5, 7, 64, 512):
        times = torch.linspace(1, 1e-3, steps + 1)
        expected = [int(1000 * (1 - times[i + 1] / times[i])) for i in range(steps - 1)] + [1000]
        steps_t = torch.full((steps,), steps)
        assert dream_quota(torch.full((steps,), 1000), torch.arange(steps), steps_t).tolist() == expected


def test_without_a_step_limit_one_slot_a_step_is_taken():
    quota = dream_quota(torch.tensor([5, 0]), torch.tensor([3, 3]), torch.full((2,), UNLIMITED))
    assert quota.tolist() == [1, 0]


@pytest.mark.parametrize("sampler", [MaskgitPlus, TopkMargin, DreamEntropy])
def test_alg_temp_zero_takes_the_best_and_a_high_one_draws(sampler):
    rows, masked = confidences(torch.linspace(0.1, 0.9, 8)[None]), torch.ones(1, 8, dtype=torch.bool)
    assert call(sampler(alg_temp=0.0), rows, masked, 1, 4).tolist() == call(sampler(), rows, masked, 1, 4).tolist()
    best = call(sampler(), rows, masked, 1, 4)
    drawn = [call(sampler(alg_temp=100.0), rows, masked, step, 4) for step in range(1, 3)]
    assert all(d.sum() >= 1 for d in drawn)
    assert any(not torch.equal(d, best) for d in drawn)


def test_the_draw_follows_the_tempered_scores():
    # Two slots of scores 1 and 0 at temperature 1: the first goes first with probability e / (e + 1).
    rows, masked = confidences(torch.tensor([[1.0, 0.0]]).expand(4000, -1)), torch.ones(4000, 2, dtype=torch.bool)
    first = call(MaskgitPlus(alg_temp=1.0), rows, masked)[:, 0].double().mean().item()
    assert abs(first - 0.731) < 4 * (0.731 * 0.269 / 4000) ** 0.5
