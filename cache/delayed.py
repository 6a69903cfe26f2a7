"""Delayed caching: a token is recomputed once after it was decoded and only then frozen (dKV-Cache, Ma et al. 2025, arXiv:2505.15781)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dllm.cache.dual import check_interval
from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class DelayedCache:
    """Recompute every row that was still a mask one step ago; freeze a row once it was computed from its token.

    No frozen row was ever computed from a mask. refresh_interval: all rows every n forwards (8 published for LLaDA, 4 or 16 for
    Dream; None: never); the first two forwards are full; 1 equals no cache. Approximates any model (stale rows: decoded two steps ago or
    more, until the next refresh). Rows: the masks, and the tokens decoded in the step before. In a shifted model the row before a mask,
    which predicts it, is recomputed too. An open block without masks is recomputed whole: a reviser has yet to settle it.
    """

    refresh_interval: int | None = 8

    uses_store = True

    def __post_init__(self) -> None:
        check_interval(self.refresh_interval)

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do."""

    def plan(self, state: DenoiseState) -> Plan:
        """Rows that are not frozen; those that hold a token are written."""
        compute = ~state.stored | state.masked
        columns = torch.arange(state.valid.shape[1], device=state.lo.device)
        filled = ~(state.masked & (columns >= state.lo[:, None]) & (columns < state.hi[:, None])).any(-1)
        judged = (columns >= (state.lo - state.shift)[:, None]) & (columns < state.hi[:, None])
        compute = compute | (judged & filled[:, None])
        if state.shift:
            compute = compute | F.pad(state.masked[:, 1:], (0, 1))
        whole = state.forwards < 2
        if self.refresh_interval is not None:
            whole = whole | (state.forwards % self.refresh_interval == 0)
        compute = (compute | whole[:, None]) & state.valid & state.active[:, None]
        return Plan.of_mask(compute, state.active, write=~state.masked)
