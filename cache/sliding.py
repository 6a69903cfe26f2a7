"""Sliding window around the frontier (FlashDLM, Hu et al. 2025, arXiv:2505.21467, the ``sliding`` policy of its guided decoding)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class SlidingCache:
    """Recompute the rows [n - W, n + W) around n, the last known slot of the open block; freeze what lies before, ignore masks beyond.

    window: W, in tokens (128 in one published file, 512 in another). Approximates a model of any attention. Stale rows: those before
    n - W, never refreshed. Unseen: masked rows from n + W on, until the window reaches them; given rows there (a suffix) are read as the
    first forward left them. The window is widened where the open block needs it. W >= P + G equals no cache.
    """

    window: int = 128

    uses_store = True

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be an int >= 1: got {self.window!r}")

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do."""

    def plan(self, state: DenoiseState) -> Plan:
        """The given rows and the window in the first forward, afterwards the window; all written."""
        columns = torch.arange(state.valid.shape[1], device=state.lo.device)
        known = ~state.masked & (columns >= state.lo[:, None]) & (columns < state.hi[:, None])
        frontier = torch.maximum(torch.where(known, columns, -1).amax(-1), state.lo - 1)
        start = torch.minimum(frontier - self.window, state.row_lo - state.shift)
        stop = torch.maximum(frontier + self.window, state.hi)
        compute = (columns >= start[:, None]) & (columns < stop[:, None])
        opening = (state.forwards == 0)[:, None] & ~state.masked
        compute = (compute | opening) & state.valid & state.active[:, None]
        return Plan.of_mask(compute, state.active)
