"""Vicinity refresh: the open block with a margin on both sides (dInfer, Ma et al. 2025, arXiv:2510.08666)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm.cache.dual import check_interval
from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class VicinityCache:
    """Recompute the rows [lo - before, hi + after) in every step; all others stay as the last full pass left them.

    before, after: tokens (16 and 16 published). warmup_steps: forwards of the call that are full passes (4 published). Full passes also
    at a block's first step, and every refresh_interval steps inside a block (None: never). Approximates a bidirectional model (stale
    rows: those outside the window); exact for block-causal attention. Without margins and warm-up it is ``DualCache``; margins as long
    as the canvas, or refresh_interval 1, equal no cache.
    """

    before: int = 16
    after: int = 16
    warmup_steps: int = 4
    refresh_interval: int | None = None

    uses_store = True

    def __post_init__(self) -> None:
        for name in ("before", "after", "warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int >= 0: got {value!r}")
        check_interval(self.refresh_interval)

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do; the class docstring says where it is exact."""

    def plan(self, state: DenoiseState) -> Plan:
        """All rows or the window; all written."""
        shift = state.shift if state.spec.attention == "bidirectional" else 0
        whole = (state.step == 0) | (state.forwards < self.warmup_steps)
        if self.refresh_interval is not None:
            whole = whole | (state.step % self.refresh_interval == 0)
        total = state.valid.sum(-1)
        start = torch.where(whole, torch.zeros_like(total), (state.row_lo - shift - self.before).clamp(min=0))
        near = torch.maximum(state.hi - shift + self.after, start + 1)
        stop = torch.where(whole, total, torch.minimum(near, total))
        return Plan.of_ranges(start, torch.where(state.active, stop, start), state.valid.shape[1], state.active)
