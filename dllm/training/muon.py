"""An optimiser for matrices that live in a low-precision module: fp32 masters, Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024; the scale of Liu et al. 2025, arXiv:2502.16982): the momentum of a matrix is replaced by the nearest
orthogonal one, found by five Newton-Schulz steps, and scaled by 0.2 sqrt(max(rows, columns)), so that AdamW's learning rates and decay
carry over. Matrices of one shape are handled in one batch of products: a drafter has a dozen small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step; they trade an exact limit for a steep slope at 0."""


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """matrices [n, r, c] -> bf16 [n, r, c] with all singular values near 1 (between about 0.5 and 1.5)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Matrices:
    """Masters and momenta of matrices of one shape, one stack."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.masters = torch.stack([v.float() for v in views])
        self.momenta = torch.zeros_like(self.masters)

    def step(self, grads: Tensor, rate: float, decay: float) -> None:
        self.momenta.lerp_(grads, 1 - MOMENTUM)
        update = orthogonalise(grads.lerp(self.momenta, MOMENTUM))
        scale = 0.2 * max(self.masters.shape[-2:]) ** 0.5
        self.masters.mul_(1 - rate * decay).add_(update.float(), alpha=-rate * scale)


class MasterOptimiser:
    """Trains all parameters of ``module`` that want gradients.

    matrices: "muon", or "adamw" for these too. splits: end of a parameter's name -> rows of the matrices fused in it. scales: name of a
    matrix -> fp32 [columns] that its master is multiplied by, so that inputs of very different size are learnt from alike; the parameter
    itself does not change at first. ``step`` takes the learning rate; decay is for matrices only.
    """

    def __init__(
        self,
        module: nn.Module,
        matrices: Literal["muon", "adamw"] = "muon",
        decay: float = 0.1,
        clip: float = 1.0,
        splits: Mapping[str, Sequence[int]] | None = None,
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        if matrices not in ("muon", "adamw"):
            raise ValueError(f"matrices must be muon or adamw: got {matrices!r}")
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.decay, self.clip = decay, clip
        by_shape: dict[tuple[int, ...], list[tuple[int, slice]]] = {}
        self.plain: list[int] = []
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.scales: list[Tensor | None] = [(scales or {}).get(name) for name in names]
        unknown = sorted(set(scales or {}) - set(names))
        if unknown:
            raise ValueError(f"scales must name trained parameters: got {unknown}")
        for index, (name, parameter) in enumerate(zip(names, self.parameters, strict=True)):
            # A few numbers in two dimensions (mixing weights) are no map between spaces.
            if matrices == "adamw" or parameter.dim() != 2 or min(parameter.shape) < 16:
                self.plain.append(index)
                continue
            rows = next((r for end, r in (splits or {}).items() if name.endswith(end)), [parameter.shape[0]])
            at = 0
            for count in rows:
                by_shape.setdefault((count, parameter.shape[1]), []).append((index, slice(at, at + count)))
                at += count
        self.places = list(by_shape.values())
        self.stacks = [_Matrices([self._master(i)[s] for i, s in places]) for places in self.places]
        self.masters = [nn.Parameter(self._master(i)) for i in self.plain]
        thick = [m for m in self.masters if m.dim() > 1 and min(m.shape) >= 16]
        thin = [m for m in self.masters if m.dim() < 2 or min(m.shape) < 16]
        groups = [{"params": thick, "weight_decay": decay}, {"params": thin, "weight_decay": 0.0}]
        on_gpu = bool(self.masters) and self.masters[0].is_cuda
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]] or [{"params": [nn.Parameter(torch.zeros(1))]}],
            lr=0.0,
            betas=(0.9, 0.95),
            fused=on_gpu,
        )

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """One step with the gradients that lie in the parameters, clipped by their common norm; clears them; returns the norm."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        wide = [g.float() if s is None else g.float() * s for g, s in zip(grads, self.scales, strict=True)]
        norm = torch.stack(torch._foreach_norm(wide)).norm()
        torch._foreach_mul_(wide, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        for places, stack in zip(self.places, self.stacks, strict=True):
            stack.step(torch.stack([wide[i][s] for i, s in places]), rate, self.decay)
            self._write([(i, self.parameters[i].data[s]) for i, s in places], list(stack.masters.unbind()))
        if self.masters:
            for master, index in zip(self.masters, self.plain, strict=True):
                master.grad = wide[index]
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            self._write([(i, self.parameters[i].data) for i in self.plain], [m.data for m in self.masters])
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def _master(self, index: int) -> Tensor:
        """fp32 copy of a parameter, without its scale."""
        value, scale = self.parameters[index].detach().float().clone(), self.scales[index]
        return value if scale is None else value / scale

    def _write(self, places: Sequence[tuple[int, Tensor]], masters: Sequence[Tensor]) -> None:
        """Masters into (rows of) the parameters."""
        scales = [self.scales[i] for i, _ in places]
        scaled = [m if s is None else m * s for s, m in zip(scales, masters, strict=True)]
        torch._foreach_copy_([view for _, view in places], scaled)
