"""Dual cache: one full pass at a block's start, then only the block's rows (Fast-dLLM, Wu et al. 2025, arXiv:2505.22618, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class DualCache:
    """Rows before and after the open block stay as its first step left them; the block's own rows are replaced in place each step.

    Approximates a bidirectional model (stale rows: everything outside the block, until the next block starts); exact for block-causal
    attention. Rows: P + G in a block's first step, which already decodes, then S. In a shifted bidirectional model the S rows are
    [lo - 1, hi - 1), which predict the block's slots; row hi - 1 then stays as the block's first step left it.
    A family that commits a block's first token from the full pass (Dream) commits nothing else there; its rows are [lo, hi).
    refresh_interval: a full pass every n steps inside a block too; None never, 1 equals no cache.
    """

    refresh_interval: int | None = None

    uses_store = True

    def __post_init__(self) -> None:
        check_interval(self.refresh_interval)

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do; the class docstring says where it is exact."""

    def plan(self, state: DenoiseState) -> Plan:
        """All rows at a block's first step, else the block's; all written."""
        first = first_only(state, self.refresh_interval)
        shift = state.shift if state.spec.attention == "bidirectional" and first is None else 0
        whole = state.step == 0
        if self.refresh_interval is not None:
            whole = whole | (state.step % self.refresh_interval == 0)
        start = torch.where(whole, torch.zeros_like(state.lo), (state.row_lo - shift).clamp(min=0))
        stop = torch.where(whole, state.valid.sum(-1), torch.maximum(state.hi - shift, start + 1))
        return Plan.of_ranges(
            start, torch.where(state.active, stop, start), state.valid.shape[1], state.active, first_only=first
        )


def first_only(state: DenoiseState, refresh_interval: int | None) -> Tensor | None:
    """Rows [B] bool whose step is the full pass that commits a block's first token and nothing else; None if the family has no such rule.

    With a refresh in every step there is no cached pass that would need it.
    """
    if state.spec.first_slot != "commit_full_pass" or refresh_interval == 1:
        return None
    return (state.step == 0) & (state.lo >= state.shift)


def check_interval(value: object) -> None:
    """Raise ValueError unless value is None or an int >= 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"refresh_interval must be an int >= 1 or None: got {value!r}")
