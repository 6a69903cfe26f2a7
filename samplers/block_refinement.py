"""Block refinement of uniformly corrupted text (diffusers' BlockRefinementScheduler without a mask token; LLaDA2, arXiv:2512.15745)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.noise import STREAM_CANVAS
from dllm.samplers.low_confidence import UNLIMITED, best
from dllm.samplers.quota import number, whole
from dllm.samplers.token_editing import edits
from dllm.types import Noise, Revision, RowState, RowStats, Step


@dataclass(frozen=True)
class BlockRefinement:
    """Commit what the steps so far owe, ceil((i + 1) S / T) slots of S after step i, and every slot with confidence > threshold.

    For models without a mask token: slots not yet committed get random tokens after each step. Sampler and reviser: a committed slot
    takes another token of confidence > editing_threshold (None: never) in the same steps. num_steps: T without a step limit.
    """

    threshold: float = 0.95
    editing_threshold: float | None = None
    num_steps: int = 32

    needs = frozenset({"top1", "logits"})
    uniform_corruption = True
    may_wait = True

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        if self.editing_threshold is not None:
            number("editing_threshold", self.editing_threshold, 0)
        whole("num_steps", self.num_steps, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S]; masked [B, S] bool: open -> Step with canvas [B, S] and the laws as conditioning."""
        assert rows.logits is not None, "row_stats must give what needs names"
        length = state.masks_at_start
        total = torch.where(state.steps >= UNLIMITED, torch.full_like(state.steps, self.num_steps), state.steps)
        owed = ((state.step + 1) * length + total - 1) // total - (length - masked.sum(-1))
        chosen = best(rows.confidence, masked, owed.clamp(min=0)) | (masked & (rows.confidence > self.threshold))
        vocab_size = rows.logits.shape[-1]
        random = (noise.uniform(state.slots, state.step, STREAM_CANVAS) * vocab_size).long()
        return Step(rows.token, chosen, random, rows.logits)

    def revise(self, rows: RowStats, canvas: Tensor, committed: Tensor, state: RowState, noise: Noise) -> Revision:
        """canvas, rows.token [B, S]; committed [B, S] bool: filled before this step. A block is settled with its last slot."""
        nothing = torch.zeros_like(committed)
        changed = nothing if self.editing_threshold is None else edits(rows, canvas, committed, self.editing_threshold)
        return Revision(rows.token, changed, nothing, torch.ones_like(state.step, dtype=torch.bool))
