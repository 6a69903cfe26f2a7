"""Draft wide, verify narrow: commits that may be revoked (WINO, Hong et al. 2025, arXiv:2507.18578)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import number, whole
from dllm.types import Noise, Revision, RowState, RowStats, Step

START = 30
"""Commits that the published code assumes before a block's first step."""


@dataclass(frozen=True)
class Wino:
    """Sampler and reviser: commit masked slots with confidence > threshold, revoke earlier ones that their shadow finds unlikely.

    A step commits at most A = clip(int(0.7 m), low, high) of m masks, and at least the surest. If it commits more than one, slots of
    the block committed before it go back to the mask where the shadow row, which sees everything but the slot itself, gives their token
    a probability < verify_threshold; at most one less than the step before committed, the least likely first. So a block of S slots
    ends within S steps. verify_threshold 0 revokes nothing. The leave-one-out holds for one attention hop only.
    """

    threshold: float = 0.6
    verify_threshold: float = 0.9
    low: int = 5
    high: int = 20

    needs = frozenset({"top1"})
    shadow = True

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        number("verify_threshold", self.verify_threshold, 0)
        whole("low", self.low, 1)
        whole("high", self.high, self.low)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool -> Step. Keeps its counts in state.history["wino"], [B, 2]."""
        cap = (masked.sum(-1) * 0.7).long().clamp(self.low, self.high)
        sure = masked & (rows.confidence > self.threshold)
        chosen = (sure & best(rows.confidence, masked, cap)) | best(rows.confidence, masked, torch.ones_like(cap))
        past = state.history.get("wino")
        before = torch.full_like(cap, START) if past is None else past[:, 1]
        before = torch.where(state.step == 0, torch.full_like(cap, START), before)
        state.history["wino"] = torch.stack([before, chosen.sum(-1)], dim=-1)
        return Step(rows.token, chosen)

    def revise(self, rows: RowStats, canvas: Tensor, committed: Tensor, state: RowState, noise: Noise) -> Revision:
        """rows.confidence [B, S]: the shadow's probability of the token that stands in each slot; committed [B, S] bool -> Revision."""
        before, now = state.history["wino"].unbind(-1)
        doubted = committed & (rows.confidence < self.verify_threshold) & (now > 1)[:, None]
        most = torch.where(doubted.sum(-1) >= before, before - 1, doubted.sum(-1))
        remask = best(-rows.confidence, doubted, most)
        nothing = torch.zeros_like(remask)
        return Revision(canvas, nothing, remask, ~remask.any(-1))
