"""What counts of a trace cost in milliseconds on a machine: rounds of a drafter by block length, forwards of a diffusion model by rows."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dllm.draft_cost import CostTable, measure_costs
from dllm.drafters.drafter import Drafter
from dllm.training.block_pilot_traces import LengthCounts, PromptTrace

logger = logging.getLogger(__name__)


class Costs(Protocol):
    """Milliseconds of decoding by counts."""

    def ms(self, length: int, counts: LengthCounts) -> float: ...


@dataclass(frozen=True)
class RoundCosts:
    """Draft and verify: round_ms[length] is one round of blocks of that length, anchor included (1: a plain pass, no draft)."""

    round_ms: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.round_ms or any(length < 1 or not ms > 0 for length, ms in self.round_ms.items()):
            raise ValueError(f"round_ms must map lengths >= 1 to milliseconds > 0: got {dict(self.round_ms)}")

    def ms(self, length: int, counts: LengthCounts) -> float:
        """Raises ValueError for a length that the table does not have."""
        if length not in self.round_ms:
            raise ValueError(f"round_ms must have block length {length}: got {sorted(self.round_ms)}")
        return counts.passes * self.round_ms[length]

    @classmethod
    def of_tables(cls, tables: Sequence[CostTable], lengths: Sequence[int], batch: int = 1) -> RoundCosts:
        """From tables measured at one or more draft counts; a length between two of them gets a time between theirs.

        Below the smallest measured block a draft pass is taken to cost what it costs there. Raises ValueError where a length has more rows
        than any table: what more rows cost than were measured is not known.
        """
        if not tables:
            raise ValueError("tables must hold one CostTable at least: got none")
        by_length = {t.num_drafts + 1: t for t in tables}
        if max(lengths) > max(by_length):
            raise ValueError(
                f"tables must reach {max(lengths)} rows, the longest block: got tables up to {max(by_length)}"
            )
        plain = statistics.fmean(_at(t.plain_ms, batch) for t in tables)
        rows = sorted(by_length)
        draft = [_at(by_length[n].draft_ms, batch) for n in rows]
        verify = [plain, *(_at(by_length[n].verify_ms, batch) for n in rows)]
        return cls(
            {
                n: plain if n == 1 else float(np.interp(n, [1, *rows], verify) + np.interp(n, rows, draft))
                for n in lengths
            }
        )


def _at(times: Mapping[int, float], batch: int) -> float:
    """Interpolated between measured batch sizes, clamped outside them, as ``CostTable`` does."""
    sizes = sorted(times)
    return float(np.interp(batch, sizes, [times[size] for size in sizes]))


@dataclass(frozen=True)
class ForwardCosts:
    """A diffusion model: a forward takes forward_ms, and row_ms more for every row that it computes."""

    forward_ms: float
    row_ms: float

    def __post_init__(self) -> None:
        if not (self.forward_ms >= 0 and self.row_ms >= 0 and self.forward_ms + self.row_ms > 0):
            raise ValueError(
                f"forward_ms and row_ms must be >= 0 and not both 0: got {self.forward_ms} and {self.row_ms}"
            )

    def ms(self, length: int, counts: LengthCounts) -> float:
        return counts.passes * self.forward_ms + counts.positions * self.row_ms


def milliseconds(traces: Sequence[PromptTrace], lengths: Sequence[int], costs: Costs) -> np.ndarray:
    """[N, C] decoding time of every prompt at every length."""
    return np.array([[costs.ms(n, t.counts[n]) for n in lengths] for t in traces])


def useful_tokens(traces: Sequence[PromptTrace], lengths: Sequence[int]) -> np.ndarray:
    """[N, C]."""
    return np.array([[t.counts[n].tokens for n in lengths] for t in traces], dtype=np.float64)


def measured_tables(
    drafter: Drafter, traces: Sequence[PromptTrace], lengths: Sequence[int], folder: Path, batch: int = 1
) -> list[CostTable]:
    """A table for every length above 1, measured on this machine and kept in ``folder``; one that is there is not measured again.

    Measure on an otherwise idle machine. Raises ValueError where lengths holds no block with drafts.
    """
    drafted = [length for length in lengths if length > 1]
    if not drafted:
        raise ValueError(f"lengths must hold one above 1: got {list(lengths)}")
    tables = []
    for length in drafted:
        path = folder / f"length_{length}_batch_{batch}.json"
        if not path.is_file():
            accepted = [n for t in traces for n in t.counts[length].accept_lengths]
            table = measure_costs(
                drafter, (batch,), length - 1, accept_length=float(np.mean(accepted or [1])), save=False
            )
            table.save(path)
            logger.info(
                "length %d: verify %.2f ms, draft %.2f ms", length, table.verify_ms[batch], table.draft_ms[batch]
            )
        tables.append(CostTable.load(path))
    return tables


@torch.no_grad()
def measured_forward(lm: Any, rows: tuple[int, int] = (16, 256), repeats: int = 9) -> ForwardCosts:
    """Forwards of two sizes, the median of ``repeats`` each, and the line through them. Rows pay for their share of the head too."""
    if not 1 <= rows[0] < rows[1] or repeats < 1:
        raise ValueError(f"rows must be two ascending counts and repeats >= 1: got {rows} and {repeats}")
    times = []
    for count in rows:
        ids = torch.arange(count, device=lm.device)[None] * 7919 % lm.spec.vocab_size
        spans = []
        for _ in range(repeats + 2):
            begin = _now(lm.device)
            lm.forward(ids)
            spans.append(_now(lm.device) - begin)
        # The first two warm up.
        times.append(1000 * statistics.median(spans[2:]))
    row_ms = max(times[1] - times[0], 0.0) / (rows[1] - rows[0])
    return ForwardCosts(max(times[0] - rows[0] * row_ms, 0.0), row_ms)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
