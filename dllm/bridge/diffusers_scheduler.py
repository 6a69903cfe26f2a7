"""Our samplers behind diffusers' scheduler interface: ``set_timesteps``, ``step``, a config that is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from torch import Tensor

from dllm.kernels.row_stats import row_stats
from dllm.noise import STREAM_TOKEN, CounterNoise
from dllm.registry import SAMPLERS, resolve_sampler
from dllm.samplers.processors import process_logits
from dllm.types import RowState


@dataclass
class SamplerSchedulerOutput(BaseOutput):
    """prev_sample, sampled_tokens [B, S] int64: the block after the step, the proposals; transfer_index, editing_transfer_index [B, S]
    bool: committed, and changed after an earlier commit; sampled_probs [B, S] fp32; pred_logits [B, S, V]: what the next step of a
    self-conditioned model is given."""

    prev_sample: Tensor
    transfer_index: Tensor
    editing_transfer_index: Tensor
    sampled_tokens: Tensor
    sampled_probs: Tensor
    pred_logits: Tensor


@dataclass
class _Block:
    """What a block's steps hand on: masks at its start [B], slots still open [B, S], the laws of the step before, steps without a mask
    [B], and the sampler's own."""

    at_start: Tensor | None = None
    open: Tensor | None = None
    previous: Tensor | None = None
    post_steps: Tensor | int = 0
    history: dict[str, Tensor] = field(default_factory=dict)


class SamplerScheduler(SchedulerMixin, ConfigMixin):
    """One of our samplers as a diffusers scheduler of one block at a time.

    sampler: a name of ``dllm.registry.SAMPLERS``; numbers: its numbers, say {"threshold": 0.8}; num_inference_steps: steps of a block,
    the last of which takes whatever is left; mask_token_id: of the model, None under uniform corruption. Whatever a block's steps hand
    on (masks at its start, the laws of the step before) is kept from timestep 0 on, so blocks must not be interleaved. Arguments are
    named, since diffusers' configs take what is given by place for a default.

    Raises ValueError for a sampler whose rule needs rows of its own in the forward (WINO), and for unknown names.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        *,
        sampler: str = "threshold",
        numbers: Mapping[str, Any] | None = None,
        num_inference_steps: int = 32,
        mask_token_id: int | None = None,
    ) -> None:
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in (numbers or {}).items()}
        self.sampler = resolve_sampler(sampler, options, {})
        if options:
            known = sorted(f.name for f in fields(self.sampler))
            raise ValueError(f"numbers of sampler {sampler!r} must be among {known}: got {sorted(options)}")
        if getattr(self.sampler, "shadow", False):
            raise ValueError(
                f"sampler {sampler!r} needs shadow rows in the forward, which a scheduler has no part in: use generate"
            )
        self.uniform = bool(getattr(self.sampler, "uniform_corruption", False))
        self.set_timesteps(num_inference_steps)

    @classmethod
    def of(cls, sampler: Any, num_inference_steps: int = 32, mask_token_id: int | None = None) -> SamplerScheduler:
        """From a sampler object of ours. Raises ValueError for a class that is not in ``dllm.registry.SAMPLERS``."""
        place = f"{type(sampler).__module__}:{type(sampler).__name__}"
        names = [name for name, known in SAMPLERS.items() if known == place]
        if not names:
            raise ValueError(f"sampler must be one of {sorted(SAMPLERS)}, so that it can be loaded again: got {place}")
        numbers = {f.name: getattr(sampler, f.name) for f in fields(sampler)}
        return cls(
            sampler=names[0], numbers=numbers, num_inference_steps=num_inference_steps, mask_token_id=mask_token_id
        )

    def set_timesteps(self, num_inference_steps: int, device: Any = None, block_length: int | None = None) -> None:
        """Steps of each block, 0 .. n - 1 in ``timesteps``; block_length is what the sample has, and is only checked here."""
        for name, value in (("num_inference_steps", num_inference_steps), ("block_length", block_length)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an int >= 1: got {value!r}")
        self.num_inference_steps = num_inference_steps
        self.timesteps = torch.arange(num_inference_steps, device=device)
        self._forget()

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        masked: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        positions: Tensor | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        banned: Tensor | None = None,
        seed: int | list[int] | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> SamplerSchedulerOutput | tuple[Tensor, ...]:
        """One step of one block.

        model_output [B, S, V]: logits aligned to the slots (shifted already where the model shifts); timestep: number of the step in
        its block, from 0; sample [B, S] int64. masked [B, S] bool: open slots; None: where sample is the mask token (a typed mask id
        cannot be told apart), or under uniform corruption what earlier steps have left open. prompt_mask [S] or [B, S] bool: given
        tokens. positions [B, S] int64: text positions, which key the random numbers with the row's seed; None: 0 .. S - 1. banned [V]
        bool: ids never committed beside the mask token. seed: as in ``generate``; or a generator, from which one seed a row is taken.

        Raises ValueError for shapes that disagree, a missing mask token, a step past the last one, logits that are not finite.
        """
        if model_output.dim() != 3 or sample.shape != model_output.shape[:2]:
            shapes = tuple(model_output.shape), tuple(sample.shape)
            raise ValueError(f"model_output must be [B, S, V] and sample [B, S]: got {shapes[0]} and {shapes[1]}")
        index = int(timestep)
        if not 0 <= index < self.num_inference_steps:
            raise ValueError(f"timestep must be in [0, {self.num_inference_steps}): got {index}")
        if index == 0:
            self._forget()
        batch, device = len(sample), sample.device
        mask_id = self.config["mask_token_id"] if mask_token_id is None else mask_token_id
        given = torch.zeros_like(sample, dtype=torch.bool)
        if prompt_mask is not None:
            given = given | prompt_mask.to(device=device, dtype=torch.bool)
        masked = self._open_slots(sample, masked, mask_id) & ~given
        if self._block.at_start is None:
            self._block.at_start = masked.sum(-1)
        forbidden = torch.zeros(model_output.shape[-1], dtype=torch.bool, device=device)
        if banned is not None:
            forbidden = forbidden | banned.to(device)
        if mask_id is not None:
            forbidden[mask_id] = True
        noise = self._noise(batch, seed, generator, device)
        own = torch.arange(sample.shape[1], device=device).expand(batch, -1)
        slots, step = own if positions is None else positions, torch.full((batch,), index, device=device)

        needs, law, uniform, previous = self.sampler.needs, None, None, None
        if temperature > 0:
            uniform = noise.uniform(slots, step, STREAM_TOKEN)
            law = process_logits(
                model_output, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, banned=forbidden
            )
        elif any(value is not None for value in (top_p, top_k, min_p)):
            raise ValueError("top_p, top_k and min_p need temperature > 0: got temperature 0 (greedy)")
        if "previous" in needs:
            previous = (
                torch.zeros_like(model_output, dtype=torch.float32)
                if self._block.previous is None
                else self._block.previous
            )
        rows = row_stats(model_output, needs, forbidden, uniform, temperature, law, False, previous)
        assert rows.log_total is not None, "row_stats must give log_total"
        if not bool(rows.log_total.isfinite().all()):
            raise ValueError(f"model_output must be finite: got NaN or infinity at timestep {index}")
        self._block.previous = rows.logits if "previous" in needs else None
        post_steps = (self._block.post_steps + ~masked.any(-1)) if index else torch.zeros_like(step)
        self._block.post_steps = post_steps
        state = RowState(
            step=step,
            steps=torch.full_like(step, self.num_inference_steps),
            masks_at_start=self._block.at_start,
            slots=slots,
            history=self._block.history,
            block_length=torch.full_like(step, sample.shape[1]),
            post_steps=post_steps,
            banned=forbidden,
        )
        choice = self.sampler.step(rows, sample, masked, state, noise)
        transfer = (choice.transfer_index | (step + 1 >= self.num_inference_steps)[:, None]) & masked
        after = torch.where(transfer, choice.tokens, sample)
        edit = torch.zeros_like(transfer)
        if hasattr(self.sampler, "revise"):
            committed = ~masked & ~given
            revision = self.sampler.revise(rows, sample, committed, state, noise)
            edit = revision.edit & committed
            after = torch.where(edit, revision.tokens, after)
        if self.uniform:
            self._block.open = masked & ~transfer
            assert choice.canvas is not None, "uniform corruption fills open slots"
            after = torch.where(self._block.open, choice.canvas, after)
        logits = model_output if choice.conditioning is None else choice.conditioning
        found = (after, transfer, edit, choice.tokens, rows.confidence, logits)
        return SamplerSchedulerOutput(*found) if return_dict else found

    def _forget(self) -> None:
        """Nothing is known of a block that begins."""
        self._block = _Block()

    def _open_slots(self, sample: Tensor, masked: Tensor | None, mask_id: int | None) -> Tensor:
        if masked is not None:
            if masked.shape != sample.shape:
                raise ValueError(f"masked must be {tuple(sample.shape)}: got {tuple(masked.shape)}")
            return masked.to(device=sample.device, dtype=torch.bool)
        if self.uniform:
            return torch.ones_like(sample, dtype=torch.bool) if self._block.open is None else self._block.open
        if mask_id is None:
            raise ValueError("mask_token_id must be given, to the scheduler or to step: got None")
        return sample == mask_id

    @staticmethod
    def _noise(batch: int, seed: Any, generator: torch.Generator | None, device: torch.device) -> CounterNoise:
        if generator is None:
            return CounterNoise.for_rows(0 if seed is None else seed, batch, device)
        if seed is not None:
            raise ValueError("seed and generator must not both be given")
        drawn = torch.randint(0, 2**62, (batch,), generator=generator, device=generator.device)
        return CounterNoise.for_rows(drawn.tolist(), batch, device)
