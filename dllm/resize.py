"""Gaps that change their length while they are filled (DreamOn, Wu et al. 2025): one token doubles a mask, another removes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.canvas import Canvas
from dllm.types import LOWEST_GROUP, DecodeSpec
from dllm.walk import BlockWalk


@dataclass(frozen=True)
class Resize:
    """How far the masked slots of a row may grow.

    max_gap_length: most slots, filled ones included, that were not given. expand_budget: most expansions of a row, so that expanding
    and deleting cannot alternate for ever. delete_to_right: a deletion takes the masks right after it along.
    """

    max_gap_length: int
    expand_budget: int = 64
    delete_to_right: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_gap_length", 1), ("expand_budget", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an int >= {low}: got {value!r}")
        if not isinstance(self.delete_to_right, bool):
            raise ValueError(f"delete_to_right must be a bool: got {self.delete_to_right!r}")

    def widen(self, canvas: Canvas, spec: DecodeSpec) -> Canvas:
        """The canvas with room for the longest gaps. Raises ValueError for a model without the two tokens, or gaps that are too long."""
        if spec.expand_token_id is None or spec.delete_token_id is None:
            raise ValueError("resize needs a model with an expand and a delete token: this one has none")
        masks = canvas.masked.sum(-1)
        if int(masks.max()) > self.max_gap_length:
            raise ValueError(
                f"max_gap_length must be >= the number of masks {int(masks.max())}: got {self.max_gap_length}"
            )
        length = int((canvas.lengths + self.max_gap_length - masks).max())
        if length > spec.max_positions:
            raise ValueError(f"text and gap must fit in {spec.max_positions} positions: they may need {length}")
        more = (0, length - canvas.ids.shape[1])
        return replace(
            canvas,
            ids=F.pad(canvas.ids, more),
            masked=F.pad(canvas.masked, more),
            valid=F.pad(canvas.valid, more),
            position=torch.arange(length, device=canvas.ids.device).repeat(len(canvas.ids), 1),
            group=F.pad(canvas.group, more),
            low=F.pad(canvas.low, more, value=LOWEST_GROUP),
        )


class Resizer:
    """Book-keeping of one call: what each row may still expand, and the moves themselves. Rows are named by their place in the call."""

    def __init__(self, resize: Resize, canvas: Canvas, spec: DecodeSpec) -> None:
        assert spec.expand_token_id is not None and spec.delete_token_id is not None, "Resize.widen checks the model"
        self.resize, self.expand, self.delete = resize, spec.expand_token_id, spec.delete_token_id
        self.budget = [resize.expand_budget] * len(canvas.regions)
        self.room = (resize.max_gap_length - canvas.masked.sum(-1)).tolist()

    def bar(self, logits: Tensor, walk: BlockWalk) -> Tensor:
        """logits [B, S, V] without the expand token in rows that may not grow."""
        full = torch.tensor([not self._may_grow(row.index) for row in walk.rows], device=logits.device)
        barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        barred[self.expand] = True
        return logits.masked_fill(full[:, None, None] & barred, float("-inf"))

    def pending(self, tokens: Tensor, transfer: Tensor, slots: Tensor) -> dict[int, list[tuple[int, int]]]:
        """Row -> its (slot, token) of this step that change the length, last slot first."""
        moves = transfer & ((tokens == self.expand) | (tokens == self.delete))
        out: dict[int, list[tuple[int, int]]] = {}
        for b, s in moves.nonzero().flip(0).tolist():
            out.setdefault(b, []).append((int(slots[b, s]), int(tokens[b, s])))
        return out

    def apply(self, walk: BlockWalk, given: Tensor, b: int, moves: list[tuple[int, int]]) -> None:
        """Make room or close it in row b, and go on where no mask of its block is left; mutates the walk, its state and given [B, L]."""
        row, state = walk.rows[b], walk.state
        for slot, token in moves:
            if token == self.expand:
                state.masked[b, slot] = True
                # Several slots may ask at once for the last place.
                if self._may_grow(row.index):
                    self.budget[row.index] -= 1
                    self._shift(walk, given, b, slot + 1, 1)
            else:
                count = 1
                while self.resize.delete_to_right and slot + count < row.end and bool(state.masked[b, slot + count]):
                    count += 1
                self._shift(walk, given, b, slot, -count)
        if not bool(state.masked[b, row.begin : row.end].any()):
            walk.finish(b, "length", row.end)
        elif not bool(state.masked[b, row.lo : row.hi].any()):
            walk.advance(b)

    def _may_grow(self, index: int) -> bool:
        return self.budget[index] > 0 and self.room[index] > 0

    def _shift(self, walk: BlockWalk, given: Tensor, b: int, slot: int, by: int) -> None:
        """Move row b's slots from ``slot`` on: one to the right, leaving a mask there, or to the left over what is deleted."""
        row, state = walk.rows[b], walk.state
        # What is deleted may reach beyond the open block.
        of_block = max(by, slot - row.hi)
        total = int(state.valid[b].sum())
        for table, fill in ((state.canvas, 0), (state.masked, True), (given, False)):
            if by > 0:
                table[b, slot + 1 : total + 1] = table[b, slot:total].clone()
                table[b, slot] = fill
            else:
                table[b, slot : total + by] = table[b, slot - by : total].clone()
                table[b, total + by : total] = False
        state.valid[b] = torch.arange(state.valid.shape[1], device=state.valid.device) < total + by
        start, stop = row.regions[-1]
        row.regions[-1] = (start, stop + by)
        row.hi += of_block
        self.room[row.index] -= by
        state.hi[b] += of_block
        state.end[b] += by
