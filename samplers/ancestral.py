"""Ancestral sampling of masked diffusion in T steps (MDLM, Sahoo et al. 2024, arXiv:2406.07524, equation 7; BD3-LM, 2503.09573)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.noise import STREAM_TOKEN
from dllm.samplers.first_hitting import subs_law
from dllm.samplers.gumbel import gumbel_draw
from dllm.samplers.quota import number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Ancestral:
    """Every masked slot draws from (m_t - m_s) * law at the tokens and m_s at "stay a mask", m being the share of masks at a time.

    num_steps: T; times run from 1 to eps in T equal steps with m_t = scale * t. endpoint: as BD3-LM's code, whose T times include eps
    itself while its step stays (1 - eps) / T, so that it is done a little earlier. A slot is committed where the draw is a token, so that
    a step may commit nothing; from step T on every slot takes its arg-max (noise removal). Tokens are drawn here; ``temperature`` stays
    0. ``noise`` needs uniform_lanes.
    """

    num_steps: int = 64
    eps: float = 1e-5
    scale: float = 1.0
    endpoint: bool = False

    needs = frozenset({"top1", "logits"})
    may_wait = True

    def __post_init__(self) -> None:
        whole("num_steps", self.num_steps, 1)
        number("eps", self.eps, 0)
        number("scale", self.scale, 0)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.logits [B, S, V]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        law = subs_law(rows, state)
        size = (1 - self.eps) / self.num_steps
        spacing = (1 - self.eps) / max(self.num_steps - 1, 1) if self.endpoint else size
        now = 1 - state.step.to(law.dtype) * spacing
        before, after = (self.scale * now)[:, None, None], (self.scale * (now - size))[:, None, None]
        mass = torch.cat([law * (before - after), after.clamp(min=0).expand(*law.shape[:2], 1)], dim=-1)
        lanes = noise.uniform_lanes(state.slots, state.step, law.shape[-1] + 1, STREAM_TOKEN)  # type: ignore[attr-defined]
        drawn = gumbel_draw(mass, lanes)
        over = (state.step >= self.num_steps)[:, None]
        hit = masked & (over | (drawn < law.shape[-1]))
        return Step(torch.where(over | ~hit, rows.token, drawn), hit)
