"""Diffusers' token schedulers as samplers of our loop: ``BlockRefinementScheduler`` and ``EntropyBoundScheduler``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import BlockRefinementScheduler, EntropyBoundScheduler
from torch import Tensor

from dllm.noise import STREAM_CANVAS
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.quota import whole
from dllm.types import Noise, Revision, RowState, RowStats, Step


@dataclass(frozen=True, eq=False)
class SchedulerSampler:
    """A scheduler with its config, as a sampler, and as a reviser where it edits.

    scheduler: a ``BlockRefinementScheduler`` (its masked mode where mask_token_id is given, which must then be the model's; else its
    uniform mode) or an ``EntropyBoundScheduler`` (uniform corruption; its canvas stays open until the last step, which commits the
    arg-maxes). The object itself is not touched: every call works on a fresh one of the same config, one row at a time, since its
    steps and random numbers are those of a call; so a step reads numbers back to the host and cannot be captured. Its generator is
    seeded from the row's noise. Without a step limit a block has the scheduler's own num_inference_steps for its quotas. temperature,
    top_p, top_k, sampling_method: as its ``step`` takes them. max_post_steps: most steps of a block after its last mask, where the
    scheduler edits.

    Raises TypeError for another scheduler.
    """

    scheduler: Any
    mask_token_id: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    sampling_method: str = "auto"
    max_post_steps: int = 16

    needs = frozenset({"top1", "logits"})
    may_wait = True

    def __post_init__(self) -> None:
        if not isinstance(self.scheduler, (BlockRefinementScheduler, EntropyBoundScheduler)):
            raise TypeError(
                "scheduler must be a diffusers BlockRefinementScheduler or EntropyBoundScheduler: "
                f"got {type(self.scheduler).__name__}"
            )
        whole("max_post_steps", self.max_post_steps, 0)
        if self.bound and (self.mask_token_id is not None or self.temperature or self.top_p or self.top_k):
            raise ValueError(
                "mask_token_id, temperature, top_p and top_k must not be given with EntropyBoundScheduler: it has no mask token and "
                "anneals its own temperature"
            )

    @cached_property
    def bound(self) -> bool:
        """Whether the scheduler is an ``EntropyBoundScheduler``."""
        return isinstance(self.scheduler, EntropyBoundScheduler)

    @property
    def uniform_corruption(self) -> bool:
        """Whether it is for models without a mask token."""
        return self.mask_token_id is None

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token [B, S], rows.logits [B, S, V]; masked [B, S] bool -> Step; under uniform corruption with canvas and conditioning."""
        found = self._run(rows, canvas, masked, state, noise)
        transfer = torch.stack([out.accepted_index if self.bound else out.transfer_index for out in found]) & masked
        tokens = torch.stack([out.sampled_tokens for out in found])
        if not self.uniform_corruption:
            return Step(tokens, transfer)
        after = torch.stack([out.prev_sample for out in found])
        laws = torch.stack([out.pred_logits for out in found])
        if self.bound:
            # Accepted slots are kept for the next step only; the last step commits the arg-max of its law.
            ends = state.step + 1 >= self._total(state)
            return Step(rows.token, masked & ends[:, None], after, laws)
        return Step(tokens, transfer, after, laws)

    def revise(self, rows: RowStats, canvas: Tensor, committed: Tensor, state: RowState, noise: Noise) -> Revision:
        """committed [B, S] bool: filled before this step -> Revision, from the same call of the scheduler as this step's commits."""
        nothing = torch.zeros_like(committed)
        threshold = None if self.bound else self.scheduler.config.editing_threshold
        settled = torch.ones_like(state.step, dtype=torch.bool)
        if threshold is None or threshold <= 0:
            return Revision(canvas, nothing, nothing, settled)
        found = self._run(rows, canvas, ~committed & self._within(state, canvas), state, noise)
        edit = torch.stack([out.editing_transfer_index for out in found]) & committed
        tokens = torch.stack([out.sampled_tokens for out in found])
        if not self.uniform_corruption and threshold < 1:
            after = torch.zeros_like(state.step) if state.post_steps is None else state.post_steps
            settled = ((after >= 1) & ~edit.any(-1)) | (after >= self.max_post_steps)
        return Revision(tokens, edit, nothing, settled)

    def _within(self, state: RowState, canvas: Tensor) -> Tensor:
        """Slots [B, S] of the open block; a batch's narrower blocks have columns behind their end."""
        return state.slots < (state.slots[:, :1] + state.masks_at_start[:, None])

    def _total(self, state: RowState) -> Tensor:
        """Steps of each row's block, [B] int64."""
        own = torch.full_like(state.steps, self.scheduler.num_inference_steps)
        return torch.where(state.steps >= UNLIMITED, own, state.steps)

    def _run(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> list[Any]:
        """The scheduler's output for each row, without the batch dimension; columns behind a row's block hold zeros."""
        assert rows.logits is not None, "row_stats must give what needs names"
        seeds = (noise.uniform(state.slots[:, :1], state.step, STREAM_CANVAS)[:, 0].double() * 2**23).long().tolist()
        lengths = state.masks_at_start if state.block_length is None else state.block_length
        counts = state.masks_at_start.clamp(max=canvas.shape[1])
        table = torch.stack([state.step, self._total(state), lengths, counts], 1).tolist()
        out = []
        for b, (step, total, length, count) in enumerate(table):
            run = _Run(self, seeds[b], step, total, length)
            banned = (
                None if state.banned is None else state.banned if state.banned.dim() == 1 else state.banned[b, :count]
            )
            found = run(rows.logits[b, :count], canvas[b, :count], masked[b, :count], banned)
            out.append(_widened(found, canvas.shape[1] - count))
        return out


@dataclass(frozen=True, eq=False)
class _Run:
    """One step of one row: its generator's seed, the step and the steps of its block, the block's length."""

    rule: SchedulerSampler
    seed: int
    step: int
    total: int
    length: int

    def __call__(self, logits: Tensor, canvas: Tensor, masked: Tensor, banned: Tensor | None) -> Any:
        """logits [S, V], canvas [S], masked [S], banned [V] or [S, V] -> the scheduler's output with a batch of one."""
        found = self._call(logits, canvas, masked)
        if banned is None:
            return found
        tokens = found.sampled_tokens[0]
        illegal = banned[tokens] if banned.dim() == 1 else banned.gather(-1, tokens[:, None])[:, 0]
        if not bool(illegal.any()):
            return found
        # Only where an id that may not be committed wins does the scheduler get a law without such ids.
        return self._call(logits.masked_fill(banned, torch.finfo(logits.dtype).min), canvas, masked)

    def _call(self, logits: Tensor, canvas: Tensor, masked: Tensor) -> Any:
        rule = self.rule
        scheduler = type(rule.scheduler).from_config(rule.scheduler.config)
        generator = torch.Generator(logits.device).manual_seed(self.seed)
        if rule.bound:
            scheduler.set_timesteps(self.total, logits.device)
            return scheduler.step(logits[None], self.step, canvas[None], generator=generator)
        scheduler.set_timesteps(self.total, logits.device, self.length)
        options: dict[str, Any] = {}
        sample = canvas
        if rule.mask_token_id is None:
            # What earlier steps have committed, which the fresh object has not seen.
            scheduler._committed = ~masked[None]
        else:
            mask = rule.mask_token_id
            # A typed mask id is an ordinary token: here another id stands for it, which nobody reads.
            sample = torch.where(canvas == mask, (mask + 1) % logits.shape[-1], canvas)
            sample = torch.where(masked, mask, sample)
            options = {"mask_token_id": mask}
        return scheduler.step(
            logits[None],
            self.step,
            sample[None],
            temperature=rule.temperature,
            top_p=rule.top_p,
            top_k=rule.top_k,
            sampling_method=rule.sampling_method,
            generator=generator,
            **options,
        )


def _widened(found: Any, columns: int) -> Any:
    """The output of one row without its batch dimension, with zeros in so many more columns."""
    wide = {}
    for name, value in found.items():
        flat = value[0]
        wide[name] = F.pad(flat, (0, columns) if flat.dim() == 1 else (0, 0, 0, columns))
    return type(found)(**wide)
