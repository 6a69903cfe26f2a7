"""DiffusionGemma's canvas sampler: uniform corruption under an entropy bound (Google 2026; Ben-Hamu et al. 2025, arXiv:2505.24857)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.kernels.row_stats import sample_by_inversion
from dllm.noise import STREAM_CANVAS, STREAM_TOKEN
from dllm.samplers.entropy_bound import bounded_count
from dllm.samplers.low_confidence import UNLIMITED, best
from dllm.samplers.quota import number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class UniformCanvas:
    """All slots stay open until the block ends; each step keeps the tokens of lowest entropy and puts random ones into the rest.

    Step i of N has the temperature t_min + (t_max - t_min) (N - i) / N, i = 0, 1, ...; entropies, draws and the next step's
    conditioning use that law. Kept are the k slots of lowest entropy with sum(H) - max(H) <= bound (nats). The block ends, with the
    arg-max of the last law, after N steps, or earlier when that arg-max was the same in the stability_threshold steps before and the
    mean entropy is below confidence_threshold (nats). num_steps: N without a step limit. sample: draw kept tokens, or take arg-maxes.
    """

    bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    num_steps: int = 48
    sample: bool = True

    needs = frozenset({"top1", "logits"})
    uniform_corruption = True
    may_wait = True

    def __post_init__(self) -> None:
        for name in ("bound", "confidence_threshold"):
            number(name, getattr(self, name), 0)
        for name in ("t_min", "t_max"):
            number(name, getattr(self, name), 1e-10)
        whole("stability_threshold", self.stability_threshold, 0)
        whole("num_steps", self.num_steps, 1)
        if not isinstance(self.sample, bool):
            raise ValueError(f"sample must be a bool: got {self.sample!r}")

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token [B, S], rows.logits [B, S, V]; masked [B, S] bool: open -> Step with canvas [B, S] and conditioning [B, S, V].

        Keeps the arg-maxes of the last steps in state.history["uniform_canvas"], [B, S, stability_threshold].
        """
        assert rows.logits is not None, "row_stats must give what needs names"
        total = torch.where(state.steps >= UNLIMITED, torch.full_like(state.steps, self.num_steps), state.steps)
        left = (total - state.step).clamp(min=1) / total
        law = rows.logits.float() / (self.t_min + (self.t_max - self.t_min) * left)[:, None, None]
        logs = law.log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp(min=-1e4)).sum(-1)
        tokens = rows.token
        if self.sample:
            drawn = law if state.banned is None else law.masked_fill(state.banned, float("-inf"))
            tokens = sample_by_inversion(drawn, noise.uniform(state.slots, state.step, STREAM_TOKEN))
        kept = best(-entropy, masked, bounded_count(entropy, -entropy, masked, self.bound))
        random = noise.uniform(state.slots, state.step, STREAM_CANVAS) * law.shape[-1]
        stable = self._stable(rows.token, masked, state)
        mean = (entropy * masked).sum(-1) / masked.sum(-1).clamp(min=1)
        ends = (stable & (mean < self.confidence_threshold)) | (state.step + 1 >= total)
        return Step(rows.token, masked & ends[:, None], torch.where(kept, tokens, random.long()), law)

    def _stable(self, tokens: Tensor, masked: Tensor, state: RowState) -> Tensor:
        """Rows [B] whose arg-maxes are those of the steps before."""
        slots, depth = tokens.shape[1], self.stability_threshold
        if depth == 0:
            return state.step >= 0
        past = state.history.get("uniform_canvas")
        if past is None:
            past = tokens.new_full((*tokens.shape, depth), -1)
        past = F.pad(past[:, :slots], (0, 0, 0, max(0, slots - past.shape[1])), value=-1)
        past = torch.where((state.step > 0)[:, None, None], past, -1)
        state.history["uniform_canvas"] = torch.cat([past[..., 1:], tokens[..., None]], dim=-1)
        return ((past == tokens[..., None]) | ~masked[..., None]).flatten(1).all(-1)
