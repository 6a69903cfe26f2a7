"""The optimiser of drafters: Muon on matrices, AdamW on the rest, fp32 masters behind low-precision weights."""

from typing import Any

import pytest
import torch
from torch import nn

from dllm.training.muon import MasterOptimiser, orthogonalise


def module(dtype=torch.float32) -> Any:
    torch.manual_seed(0)
    m = nn.ModuleDict({"a": nn.Linear(24, 40), "b": nn.Linear(24, 40, bias=False), "c": nn.Linear(40, 24, bias=False)})
    return m.to(dtype)


def give_gradients(m: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in m.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * 0.01).to(p.dtype)


def test_matrices_move_as_with_torch_muon_and_the_rest_as_with_adamw() -> None:
    ours, theirs = module(), module()
    optimiser = MasterOptimiser(ours, "muon", decay=0.1, clip=1e9)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([theirs["a"].bias], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(4):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimiser.step(1e-2)
        muon.step()
        adamw.step()
    start = module()
    for (name, p), q, s in zip(ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True):
        # Newton-Schulz runs in bf16, and products of a batch round otherwise than single ones.
        moved = (q - s).norm()
        assert float(((p - q).norm() / moved).detach()) < 0.03, name
        assert p.grad is None and float(moved.detach()) > 0


def test_an_orthogonalised_matrix_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 30, 50)).float())
    assert values.min() > 0.4 and values.max() < 1.4


def test_fused_matrices_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    fused, parts = nn.Linear(20, 60, bias=False), [nn.Linear(20, 30, bias=False) for _ in range(2)]
    with torch.no_grad():
        for part, rows in zip(parts, fused.weight.split(30), strict=True):
            part.weight.copy_(rows)
    apart = nn.ModuleList(parts)
    one = MasterOptimiser(nn.ModuleDict({"x": fused}), splits={"x.weight": [30, 30]}, clip=1e9)
    two = MasterOptimiser(apart, clip=1e9)
    grad = torch.randn(60, 20)
    fused.weight.grad = grad.clone()
    for part, rows in zip(parts, grad.split(30), strict=True):
        part.weight.grad = rows.clone()
    one.step(0.1)
    two.step(0.1)
    torch.testing.assert_close(fused.weight, torch.cat([p.weight for p in parts]))


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_steps_below_the_precision_of_the_weights_add_up_in_the_masters(matrices) -> None:
    m = module(torch.bfloat16)
    before = m["b"].weight.detach().clone()
    optimiser = MasterOptimiser(m, matrices, decay=0.0)
    for _ in range(60):
        give_gradients(m, 7)
        # One such step is far below half a unit in the last place of most weights.
        optimiser.step(5e-5)
    moved = (m["b"].weight - before).abs().float().mean()
    assert moved > 2e-4 and m["b"].weight.dtype == torch.bfloat16


def test_the_gradient_is_clipped_by_the_norm_of_all() -> None:
    free, held = module(), module()
    a, b = MasterOptimiser(free, "adamw", clip=1e9), MasterOptimiser(held, "adamw", clip=1e-12)
    give_gradients(free, 0)
    give_gradients(held, 0)
    whole = torch.cat([p.grad.flatten() for p in free.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(a.step(0.0), whole)
    b.step(1e-2)
    # AdamW divides by the root of the mean square plus 1e-8: a gradient of 1e-12 in all moves next to nothing.
    assert (held["b"].weight - module()["b"].weight * (1 - 1e-3)).abs().max() < 1e-4


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_a_scaled_matrix_moves_as_the_unscaled_one_does_on_scaled_inputs(matrices) -> None:
    torch.manual_seed(0)
    scale, x = torch.linspace(0.01, 3.0, 20), torch.randn(50, 20)
    plain: Any = nn.ModuleDict({"fc": nn.Linear(20, 30, bias=False)})
    scaled: Any = nn.ModuleDict({"fc": nn.Linear(20, 30, bias=False)})
    with torch.no_grad():
        scaled["fc"].weight.copy_(plain["fc"].weight * scale)
    one, two = MasterOptimiser(plain, matrices), MasterOptimiser(scaled, matrices, scales={"fc.weight": scale})
    start = scaled["fc"](x).detach()
    for _ in range(3):
        for model, inputs, optimiser in ((plain, x * scale, one), (scaled, x, two)):
            model["fc"](inputs).square().mean().backward()
            optimiser.step(0.02)
    assert (scaled["fc"](x) - start).norm() > 0.05 * start.norm()
    torch.testing.assert_close(scaled["fc"].weight, plain["fc"].weight * scale, atol=2e-4, rtol=1e-3)
    with pytest.raises(ValueError, match=r"scales must name trained parameters: got \['x'\]"):
        MasterOptimiser(plain, scales={"x": scale})


def test_an_unknown_optimiser_is_named() -> None:
    with pytest.raises(ValueError, match="matrices must be muon or adamw: got 'sgd'"):
        MasterOptimiser(module(), "sgd")  # type: ignore[arg-type]
