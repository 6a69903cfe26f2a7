"""Invented laws and masks of a few rows, and one call of a sampler on them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dllm.kernels.row_stats import row_stats
from dllm.noise import CounterNoise
from dllm.samplers.low_confidence import UNLIMITED
from dllm.types import RowState, RowStats

EVERYTHING = frozenset({"top1", "entropy", "margin", "logits", "previous"})


@st.composite
def laws(draw: Any, batch: int = 2, slots: int = 6, vocab: int = 5) -> tuple[RowStats, Tensor]:
    """Statistics of random laws, from flat to sure, and a mask."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from([0.0, 0.5, 2.0, 8.0]))
    logits = torch.randn(batch, slots, vocab, generator=generator) * scale
    previous = logits + torch.randn(batch, slots, vocab, generator=generator) * draw(st.sampled_from([0.0, 0.1, 2.0]))
    masked = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * slots, max_size=batch * slots)))
    return row_stats(logits, EVERYTHING, previous=previous), masked.view(batch, slots)


def confidences(values: Tensor) -> RowStats:
    """Rows of nothing but these confidences [B, S]."""
    return RowStats(token=torch.full(values.shape, 3), confidence=values, entropy=1 - values, margin=values)


def call(
    sampler: Any,
    rows: RowStats,
    masked: Tensor,
    step: int = 0,
    steps: int = UNLIMITED,
    history: Any = None,
    **more: Any,
) -> Tensor:
    """The slots [B, S] that the sampler commits."""
    batch, slots = masked.shape
    state = RowState(
        step=torch.full((batch,), step),
        steps=torch.full((batch,), steps),
        masks_at_start=torch.full((batch,), slots),
        slots=torch.arange(slots).expand(batch, -1),
        history={} if history is None else history,
        **more,
    )
    canvas = torch.zeros(batch, slots, dtype=torch.int64)
    return sampler.step(rows, canvas, masked, state, CounterNoise.for_rows(0, batch)).transfer_index


def surest(rows: RowStats, masked: Tensor) -> Tensor:
    """The vanilla greedy choice: the masked slot of highest confidence, the lowest of equals."""
    best = rows.confidence.masked_fill(~masked, -1.0).argmax(-1, keepdim=True)
    return torch.zeros_like(masked).scatter_(1, best, True) & masked
