"""Draft and edit (LLaDA2.1, 2026, arXiv:2602.08676): masked slots become tokens while committed ones may still be changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.dynamic import Dynamic
from dllm.samplers.quota import number, whole
from dllm.types import Noise, Revision, RowState, RowStats, Step


@dataclass(frozen=True)
class TokenEditing:
    """Sampler and reviser: ``Dynamic`` for masks; a committed slot takes another token of confidence > editing_threshold.

    Only slots of the open block that this call has filled are edited, never given ones; both happen in the same step. The block stays
    open until nothing is edited or max_post_steps steps have passed since its last mask. editing_threshold: above 1 edits nothing,
    which equals ``Dynamic``. k: fallback quota of a step without a step limit.
    """

    threshold: float = 0.7
    editing_threshold: float = 0.5
    max_post_steps: int = 16
    k: int = 1

    needs = frozenset({"top1"})

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        number("editing_threshold", self.editing_threshold, 0)
        whole("max_post_steps", self.max_post_steps, 0)
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """As ``Dynamic``."""
        return Dynamic(self.threshold, self.k).step(rows, canvas, masked, state, noise)

    def revise(self, rows: RowStats, canvas: Tensor, committed: Tensor, state: RowState, noise: Noise) -> Revision:
        """rows.token, rows.confidence, canvas [B, S]; committed [B, S] bool: filled before this step -> Revision.

        state.post_steps [B] int64: steps of this block that began without a mask, this one included.
        """
        edit = edits(rows, canvas, committed, self.editing_threshold)
        after = torch.zeros_like(state.step) if state.post_steps is None else state.post_steps
        # The step that fills the last mask says nothing about that token: only a step without masks can find the block settled.
        settled = ((after >= 1) & ~edit.any(-1)) | (after >= self.max_post_steps)
        if self.editing_threshold >= 1:
            settled = torch.ones_like(settled)
        return Revision(rows.token, edit, torch.zeros_like(edit), settled)


def edits(rows: RowStats, canvas: Tensor, committed: Tensor, threshold: float) -> Tensor:
    """Committed slots [B, S] whose proposed token is another one of confidence > threshold."""
    return committed & (rows.token != canvas) & (rows.confidence > threshold)
