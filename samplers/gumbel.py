"""Draws by the Gumbel-max trick from given uniform numbers, one a vocabulary entry (LLaDA, MDLM and BD3-LM draw so)."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel_max(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """arg-max of exp(logits) / (-ln uniform)^temperature over the last dimension: a draw from softmax(logits / temperature).

    logits, uniform [..., V], uniform in (0, 1) -> int64 [...]. fp64 inside, in the logarithm; temperature 0 is the arg-max.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0: got {temperature}")
    if temperature == 0:
        return logits.argmax(-1)
    return (logits.double() - temperature * torch.log(-torch.log(uniform.double()))).argmax(-1)


def gumbel_draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """arg-max of mass / (1e-10 - ln(uniform + 1e-10)): a draw from unnormalised mass [..., V], in its own dtype -> int64 [...].

    The tiny terms are the published ones, which keep a uniform number of 0 or 1 finite.
    """
    return (mass / (1e-10 - torch.log(uniform.to(mass.dtype) + 1e-10))).argmax(-1)
