"""Dream's time schedule and its tempered choice of positions (Ye et al. 2025, arXiv:2508.15487, ``diffusion_generate``)."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm.noise import STREAM_POSITION
from dllm.samplers.low_confidence import UNLIMITED, best
from dllm.types import Noise, RowState


def dream_quota(masks: Tensor, step: Tensor, steps: Tensor, eps: float = 1e-3) -> Tensor:
    """Slots of a step, [B] int64: int(masks * (1 - s / t)) in fp32 with t, s neighbours in linspace(1, eps, steps + 1).

    masks, step, steps [B] int64. The last step takes the rest. The first step may take nothing. Without a step limit: one.
    """
    # torch.linspace fills its second half from the far end; so does this, bit for bit.
    width = torch.where(steps >= UNLIMITED, torch.ones_like(steps), steps).float()
    size = (torch.tensor(eps, device=masks.device) - 1.0) / width

    def time(index: Tensor) -> Tensor:
        near, far = 1.0 + size * index, eps - size * (width - index)
        return torch.where(index < (width + 1) // 2, near, far)

    t, s = time(step.float()), time(step.float() + 1)
    scheduled = (masks.float() * (1 - s / t)).long()
    scheduled = torch.where(step + 1 >= steps, masks, scheduled)
    return torch.where(steps >= UNLIMITED, masks.clamp(max=1), scheduled)


def dream_choice(
    score: Tensor, masked: Tensor, state: RowState, noise: Noise, alg_temp: float | None, eps: float
) -> Tensor:
    """The step's quota of masked slots, bool [B, S]: the best by score [B, S], or drawn from softmax(score / alg_temp) without return.

    The draw is the Gumbel top-k of one uniform number a slot and step (Kool et al. 2019, arXiv:1903.06059).
    """
    quota = dream_quota(masked.sum(-1), state.step, state.steps, eps)
    if alg_temp:
        uniform = noise.uniform(state.slots, state.step, STREAM_POSITION).double()
        score = score.double() / alg_temp - torch.log(-torch.log(uniform))
    return best(score, masked, quota)
