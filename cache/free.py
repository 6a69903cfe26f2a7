"""FreeCache: keys and values of clean tokens are frozen and never refreshed (FlashDLM, Hu et al. 2025, arXiv:2505.21467, section 3.1).

Approximates a bidirectional model: a frozen row keeps what it was when it was last computed, although later rows have changed since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.types import DecodeSpec, DenoiseState, Plan

POLICIES = ("active", "prompt", "aligned", "aggressive", "sliding")


@dataclass(frozen=True)
class FreeCache:
    """Recompute the open block and everything after it, freeze everything before it; or freeze by another rule of the released code.

    policy: what is frozen, where n is the last known slot before the masks that end the gap:
      "active", the published algorithm: rows before the open block. Rows: P + G - lo.
      "prompt" (the guided code's default): the prompt only. Rows: G. One block over the whole generation does the same.
      "aligned" (its ``block``): rows before the last multiple of freeze_block (tokens, 32 published; counted from the text's start) that is
      <= n + 1. Rows: those from there on.
      "aggressive": rows before n. Rows: those from n on.
      "sliding": rows before n - freeze_window (512 in one published file, 128 in another); masks from n + freeze_window on are neither
      computed nor seen until the window reaches them. Rows: about 2 freeze_window.
      The last three take the slots as filled from left to right, as an AR guide fills them; where another sampler leaves masks before n,
      the window opens at the open block's first mask.
    freeze_delay: 0 as published: a row freezes as it was in its last step, when a token committed by that step was still a mask at the
    input (stale rows: those). 1: no row freezes before it was computed from its token: a finished block once more, in the next block's
    first step ("active"), or every row in the step after its commit (the others).
    refresh_interval: recompute all rows every n forwards; None never (as published), 1 equals no cache.
    The first forward computes everything (P + G rows; "sliding": the given rows and the window) and already decodes. In a shifted
    bidirectional model the window begins one row to the left, so that its first slot is predicted by a fresh row; the canvas's last row,
    which predicts nothing, stays as the first forward left it. With block-causal attention "active" with freeze_delay 1 is exact.
    """

    freeze_delay: int = 0
    refresh_interval: int | None = None
    policy: str = "active"
    freeze_block: int = 32
    freeze_window: int = 512

    uses_store = True

    def __post_init__(self) -> None:
        if self.freeze_delay not in (0, 1):
            raise ValueError(f"freeze_delay must be 0 or 1: got {self.freeze_delay!r}")
        if self.refresh_interval is not None and (
            not isinstance(self.refresh_interval, int) or self.refresh_interval < 1
        ):
            raise ValueError(f"refresh_interval must be an int >= 1 or None: got {self.refresh_interval!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}: got {self.policy!r}")
        for name in ("freeze_block", "freeze_window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int >= 1: got {value!r}")

    def check(self, spec: DecodeSpec) -> None:
        """Raises ValueError for a policy that would leave rows of an open block behind."""
        if self.policy != "active" and spec.attention != "bidirectional":
            raise ValueError(
                f"policy {self.policy!r} of cache 'free' is for bidirectional models: got {spec.attention}, where 'active' with "
                "freeze_delay 1 is exact"
            )

    def plan(self, state: DenoiseState) -> Plan:
        """A contiguous range of rows behind the frozen ones."""
        if self.policy != "active":
            return self._window(state)
        shift = state.shift if state.spec.attention == "bidirectional" else 0
        total = state.valid.sum(-1)
        start = (state.row_lo - shift).clamp(min=0)
        if self.freeze_delay:
            delayed = (state.prev_lo - shift).clamp(min=0)
            start = torch.where(state.step == 0, torch.minimum(start, delayed), start)
        stop = state.end - shift
        whole = self._whole(state)
        start = torch.where(whole, torch.zeros_like(start), start)
        stop = torch.where(whole, total, torch.maximum(stop, start + 1))
        return Plan.of_ranges(start, torch.where(state.active, stop, start), state.valid.shape[1], state.active)

    def _whole(self, state: DenoiseState) -> Tensor:
        """Rows [B] bool of the batch whose forward is a full pass."""
        whole = state.forwards == 0
        if self.refresh_interval is not None:
            whole = whole | (state.forwards % self.refresh_interval == 0)
        return whole

    def _window(self, state: DenoiseState) -> Plan:
        """The policies that follow the last known slot."""
        width = state.valid.shape[1]
        columns = torch.arange(width, device=state.lo.device)
        gap = (columns >= state.begin[:, None]) & (columns < state.end[:, None])
        last = torch.where(gap & ~state.masked, columns, -1).amax(-1)
        last = torch.maximum(last, state.begin - 1)
        first_mask = torch.where(gap & state.masked, columns, width).amin(-1)
        stop = state.end - state.shift
        if self.policy == "prompt":
            start = state.begin
        elif self.policy == "aligned":
            start = (last + 1) // self.freeze_block * self.freeze_block
        elif self.policy == "aggressive":
            start = last
        else:
            start = last - self.freeze_window
            stop = torch.minimum(stop, torch.maximum(last + self.freeze_window, state.hi - state.shift))
        start = torch.minimum(start, first_mask)
        # In the shifted model a slot is predicted by the row before it.
        start = start - state.shift
        if self.freeze_delay:
            # Only rows that hold a token are kept, so what is not kept has yet to be computed from its token.
            waiting = F.pad(~state.stored & gap, (0, 1), value=True).long().argmax(-1)
            start = torch.minimum(start, waiting)
        start = start.clamp(min=0)
        stop = torch.maximum(stop, start + 1)
        compute = (columns >= start[:, None]) & (columns < stop[:, None])
        whole = self._whole(state)[:, None]
        # A full pass also holds the last row, which predicts nothing but is seen.
        reach = columns < (stop + state.shift)[:, None] if self.policy == "sliding" else torch.ones_like(gap)
        everything = reach | ~state.masked
        compute = torch.where(whole, everything, compute) & state.valid & state.active[:, None]
        return Plan.of_mask(compute, state.active, write=~state.masked if self.freeze_delay else None)
