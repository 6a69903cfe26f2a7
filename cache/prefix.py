"""Prefix cache: one full pass at a block's start, then the block and everything after it (Fast-dLLM, arXiv:2505.22618, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm.cache.dual import check_interval, first_only
from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class PrefixCache:
    """Rows before the open block stay as its first step left them; the block and all rows after it are recomputed in every step.

    Approximates a bidirectional model (stale rows: everything before the block, until the next block starts); exact for block-causal
    attention. Rows: P + G in a block's first step, which already decodes, then P + G - lo. In a shifted bidirectional model the window
    is [lo - 1, P + G - 1), unless the family commits a block's first token from the full pass: then [lo, P + G), as published.
    refresh_interval: a full pass every n steps inside a block too; None never (as published), 1 equals no cache.
    """

    refresh_interval: int | None = None

    uses_store = True

    def __post_init__(self) -> None:
        check_interval(self.refresh_interval)

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do; the class docstring says where it is exact."""

    def plan(self, state: DenoiseState) -> Plan:
        """All rows at a block's first step, else those from the block on; all written."""
        first = first_only(state, self.refresh_interval)
        shift = state.shift if state.spec.attention == "bidirectional" and first is None else 0
        whole = state.step == 0
        if self.refresh_interval is not None:
            whole = whole | (state.step % self.refresh_interval == 0)
        start = torch.where(whole, torch.zeros_like(state.lo), (state.row_lo - shift).clamp(min=0))
        total = state.valid.sum(-1)
        stop = torch.where(whole, total, torch.maximum(total - shift, start + 1))
        return Plan.of_ranges(
            start, torch.where(state.active, stop, start), state.valid.shape[1], state.active, first_only=first
        )
