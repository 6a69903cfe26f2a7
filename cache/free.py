"""FreeCache: keys and values of clean tokens are frozen and never refreshed (FlashDLM, Hu et al. 2025, arXiv:2505.21467, section 3.1).

Approximates a bidirectional model: a frozen row keeps what it was when it was last computed, although later rows have changed since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class FreeCache:
    """Recompute the open block and everything after it, freeze everything before it.

    freeze_delay: 0 as published: a block's rows freeze as they were in its last step, when the tokens committed by that step were
    still masks at the input (stale rows: those). 1: they are computed once more, on clean ids, in the next block's first step.
    refresh_interval: recompute all rows every n forwards; None never (as published), 1 equals no cache.
    Rows: P + G in the first forward, which already decodes; then P + G - lo. In a shifted bidirectional model the window is one row to
    the left, [lo - 1, P + G - 1), so that slot lo is predicted by a fresh row; the canvas's last row, which predicts nothing, stays as
    the first forward left it. With block-causal attention and freeze_delay 1 the cache is exact.
    """

    freeze_delay: int = 0
    refresh_interval: int | None = None

    uses_store = True

    def __post_init__(self) -> None:
        if self.freeze_delay not in (0, 1):
            raise ValueError(f"freeze_delay must be 0 or 1: got {self.freeze_delay!r}")
        if self.refresh_interval is not None and (
            not isinstance(self.refresh_interval, int) or self.refresh_interval < 1
        ):
            raise ValueError(f"refresh_interval must be an int >= 1 or None: got {self.refresh_interval!r}")

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do; the class docstring says where it is exact."""

    def plan(self, state: DenoiseState) -> Plan:
        """A contiguous range of rows, all written."""
        shift = state.shift if state.spec.attention == "bidirectional" else 0
        total = state.valid.sum(-1)
        start = (state.row_lo - shift).clamp(min=0)
        if self.freeze_delay:
            delayed = (state.prev_lo - shift).clamp(min=0)
            start = torch.where(state.step == 0, torch.minimum(start, delayed), start)
        stop = state.end - shift
        whole = state.forwards == 0
        if self.refresh_interval is not None:
            whole = whole | (state.forwards % self.refresh_interval == 0)
        start = torch.where(whole, torch.zeros_like(start), start)
        stop = torch.where(whole, total, torch.maximum(stop, start + 1))
        return Plan.of_ranges(start, torch.where(state.active, stop, start), state.valid.shape[1], state.active)
