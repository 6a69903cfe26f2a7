"""How each row of a batch walks through its gaps, block by block; rows that are done leave the batch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.canvas import GAP_GROUP, UNOPENED_GROUP, Canvas
from dllm.output import HistoryFrame, Stats
from dllm.types import BlockPolicy, DecodeSpec, DenoiseState

WIDE = ("canvas", "masked", "stored")
"""Fields of the state that have a bin column at the end, into which masked writes go."""


@dataclass
class RowWalk:
    """Host-side book-keeping of one row.

    index: its place in the call's batch; regions, anchors: its gaps, see ``Canvas``; region: number of the open gap; counter: blocks
    opened so far; lo, hi: first slot of the open block and one past its last; pending: a policy has yet to say how long the open block
    is, and hi is a guess; useful, reason, stop_text: how it ended.
    """

    index: int
    regions: list[tuple[int, int]]
    anchors: list[int]
    region: int = 0
    counter: int = 0
    lo: int = 0
    hi: int = 0
    pending: bool = False
    done: bool = False
    useful: int = 0
    reason: str = "length"
    stop_text: str | None = None
    stats: Stats = field(default_factory=Stats)
    history: list[HistoryFrame] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """First slot of the first gap."""
        return self.regions[0][0]

    @property
    def end(self) -> int:
        """One past the last slot of the last gap."""
        return self.regions[-1][1]


class BlockWalk:
    """The batch's ``DenoiseState`` and, beside it on the host, one ``RowWalk`` for each row that is still there.

    wide: the tensors behind the state's ``WIDE`` fields, with their bin column.
    """

    def __init__(self, canvas: Canvas, spec: DecodeSpec, block_length: int | BlockPolicy) -> None:
        self.spec, self.block_length = spec, block_length
        self.rows = [RowWalk(i, *gaps) for i, gaps in enumerate(zip(canvas.regions, canvas.anchors, strict=True))]
        device = canvas.ids.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        zeros = [0] * len(self.rows)
        self.state = DenoiseState(
            canvas=canvas.ids,
            masked=canvas.masked,
            valid=canvas.valid,
            group=canvas.group.clone(),
            low=canvas.low,
            position=canvas.position,
            stored=torch.zeros_like(canvas.masked),
            lo=column(zeros),
            hi=column(zeros),
            row_lo=column(zeros),
            prev_lo=column(zeros),
            begin=column([row.begin if row.regions else 0 for row in self.rows]),
            end=column([row.end if row.regions else 0 for row in self.rows]),
            step=column(zeros),
            block=column(zeros),
            forwards=column(zeros),
            active=torch.ones(len(self.rows), dtype=torch.bool, device=device),
            spec=spec,
        )
        self.wide = {name: F.pad(getattr(self.state, name), (0, 1)) for name in WIDE}
        self._bind()
        for b, row in enumerate(self.rows):
            if row.regions:
                self._open(b, row.begin)
            else:
                self.finish(b, "length", 0)

    def advance(self, b: int) -> None:
        """Row b's block is full: open the next one, in this gap or the next, or finish."""
        row = self.rows[b]
        slot = row.hi
        if slot == row.regions[row.region][1]:
            row.region += 1
            if row.region == len(row.regions):
                self.finish(b, "length", slot)
                return
            slot = row.regions[row.region][0]
        self.state.prev_lo[b] = self.state.row_lo[b]
        self._open(b, slot)

    def finish(self, b: int, reason: str, stop_slot: int) -> None:
        """Row b is done; its useful tokens are those before ``stop_slot``."""
        row = self.rows[b]
        row.reason, row.done = reason, True
        row.useful = sum(max(0, min(stop, stop_slot) - start) for start, stop in row.regions)
        self.state.active[b] = False

    def keep(self, rows: list[int]) -> Tensor:
        """Let only these rows stay; mutates the walk and its state; the indices [B'] int64 on the device."""
        self.rows = [self.rows[b] for b in rows]
        keep = torch.tensor(rows, dtype=torch.int64, device=self.state.lo.device)
        for entry in fields(self.state):
            value = getattr(self.state, entry.name)
            if isinstance(value, Tensor) and entry.name not in WIDE:
                setattr(self.state, entry.name, value[keep])
        self.wide = {name: value[keep] for name, value in self.wide.items()}
        self._bind()
        return keep

    def _open(self, b: int, slot: int) -> None:
        """Open row b's block at ``slot`` of its current gap; the block's rows get the next attention group."""
        row, state = self.rows[b], self.state
        start = row.regions[row.region][0]
        row_lo = row.anchors[row.region] if slot == start else slot
        state.lo[b], state.row_lo[b] = slot, row_lo
        row.lo = slot
        if row.counter == 0:
            state.prev_lo[b] = row_lo
        state.block[b] = row.counter
        row.counter += 1
        state.step[b] = 0
        row.pending = not isinstance(self.block_length, int)
        self.set_length(b, self.block_length if isinstance(self.block_length, int) else self.spec.block_length)

    def set_length(self, b: int, length: int) -> None:
        """Let row b's open block have ``length`` rows, as far as its gap has them, and one slot at least."""
        row, state = self.rows[b], self.state
        end = row.regions[row.region][1]
        row_lo, before = int(state.row_lo[b]), row.hi
        row.hi = min(max(row_lo + length, row.lo + 1), end)
        state.hi[b] = row.hi
        if self.spec.attention != "bidirectional":
            # What a longer guess had claimed goes back to the slots that wait.
            if before > row.hi:
                state.group[b, row.hi : before] = UNOPENED_GROUP
            state.group[b, row_lo : row.hi] = GAP_GROUP + row.counter - 1
        state.row_bucket = max(state.row_bucket, row.hi - min(int(state.prev_lo[b]), row_lo))

    def _bind(self) -> None:
        """Let the state see the wide tensors without their bin column."""
        for name, value in self.wide.items():
            setattr(self.state, name, value[:, :-1])
