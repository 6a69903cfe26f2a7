"""Grouped routing against a search in plain Python, and the grouped products against one expert after another."""

import pytest
import torch
import torch.nn.functional as F

from dllm.model.moe import MoEConfig, SparseMoE, experts_grouped, experts_reference, route

CONFIG = MoEConfig(
    num_experts=12,
    experts_per_token=3,
    intermediate_size=16,
    num_shared=1,
    num_groups=4,
    groups_per_token=2,
    scaling=2.5,
)


def slow_route(logits, bias, config):
    """One token at a time, from the rule's words."""
    out = []
    size = config.num_experts // config.num_groups
    for row in logits.sigmoid().tolist():
        biased = [s + b for s, b in zip(row, bias.tolist(), strict=True)]
        groups = sorted(range(config.num_groups), key=lambda g: -sum(sorted(biased[g * size : (g + 1) * size])[-2:]))
        open_experts = [e for g in groups[: config.groups_per_token] for e in range(g * size, (g + 1) * size)]
        best = sorted(open_experts, key=lambda e: -biased[e])[: config.experts_per_token]
        total = sum(row[e] for e in best)
        out.append({e: row[e] / total * config.scaling for e in best})
    return out


def test_routing_equals_a_plain_search():
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 12, generator=generator), torch.randn(12, generator=generator)
    experts, weights = route(logits, bias, CONFIG)
    for found, e, w in zip(slow_route(logits, bias, CONFIG), experts.tolist(), weights.tolist(), strict=True):
        assert set(found) == set(e)
        assert [found[i] for i in e] == pytest.approx(w, rel=1e-5)


def test_the_bias_moves_the_choice_and_not_the_weights():
    logits = torch.zeros(1, 12)
    logits[0, :3] = 1.0
    bias = torch.zeros(12)
    bias[[9, 10, 11]] = 5.0
    experts, weights = route(logits, bias, CONFIG)
    assert set(experts[0].tolist()) == {9, 10, 11}
    assert weights[0].tolist() == pytest.approx([2.5 / 3] * 3)


def test_without_groups_or_normalisation_the_k_best_scores_are_the_weights():
    config = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=4, normalize=False)
    logits = torch.tensor([[0.0, 3.0, -1.0, 2.0, 1.0, 0.5]])
    experts, weights = route(logits, torch.zeros(6), config)
    assert experts.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, logits[:, [1, 3]].sigmoid())


def expert_inputs(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 32, generator=generator)
    gate_up, down = torch.randn(12, 32, 32, generator=generator) / 6, torch.randn(12, 32, 16, generator=generator) / 4
    logits = torch.randn(37, 12, generator=generator)
    # Experts 0 and 5 get no token at all.
    logits[:, [0, 5]] = -20.0
    experts, weights = route(logits, torch.zeros(12), CONFIG)
    return [
        t.to(device, dtype) if t.is_floating_point() and t is not weights else t.to(device)
        for t in (x, experts, weights, gate_up, down)
    ]


def test_the_reference_equals_the_sum_over_experts():
    x, experts, weights, gate_up, down = expert_inputs(torch.float32)
    want = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            want[t] += w * (down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(experts_reference(x, experts, weights, gate_up, down), want, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_grouped_products_equal_the_reference_on_the_cpu():
    inputs = expert_inputs(torch.float32)
    torch.testing.assert_close(experts_grouped(*inputs), experts_reference(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_grouped_products_equal_the_reference_on_the_gpu():
    """bf16 rounds each product to 8 bits; both sum in fp32."""
    inputs = expert_inputs(torch.bfloat16, "cuda")
    torch.testing.assert_close(experts_grouped(*inputs), experts_reference(*inputs), atol=2e-2, rtol=2e-2)


def test_shared_experts_see_every_token():
    moe = SparseMoE(32, CONFIG).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        routed_and_shared = moe(x)
        assert moe.shared is not None
        shared, moe.shared = moe.shared(x), None
        torch.testing.assert_close(moe(x) + shared, routed_and_shared)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_groups": 5}, "num_experts must be a multiple of num_groups 5"),
        ({"experts_per_token": 7}, "experts_per_token must be <= 6"),
        ({"groups_per_token": 5}, "groups_per_token <= num_groups 4"),
        ({"num_experts": 0}, "num_experts must be >= 1: got 0"),
    ],
)
def test_an_impossible_config_is_named(change, match):
    values = dict(num_experts=12, experts_per_token=3, intermediate_size=8, num_groups=4, groups_per_token=2) | change
    with pytest.raises(ValueError, match=match):
        MoEConfig(**values)


def test_the_first_layers_are_dense():
    config = MoEConfig(num_experts=4, experts_per_token=1, intermediate_size=8, first_dense=2)
    assert [config.is_sparse(i) for i in range(4)] == [False, False, True, True]
