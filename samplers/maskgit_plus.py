"""Dream's algorithm ``maskgit_plus``: positions by the probability of the token (Ye et al. 2025, arXiv:2508.15487)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm.samplers.dream_schedule import dream_choice
from dllm.samplers.quota import number
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class MaskgitPlus:
    """Commit the schedule's quota of masked slots by the probability of the token.

    alg_temp: temperature of the choice of positions; None or 0 takes the best, ties to the lowest slot. eps: end of the schedule's
    time. Needs a step limit for the published schedule, whose first step may commit nothing; without one it commits one a step.
    """

    alg_temp: float | None = None
    eps: float = 1e-3

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        if self.alg_temp is not None:
            number("alg_temp", self.alg_temp, 0)
        number("eps", self.eps, 0)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        return Step(rows.token, dream_choice(rows.confidence, masked, state, noise, self.alg_temp, self.eps))
