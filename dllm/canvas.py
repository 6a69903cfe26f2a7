"""The canvas of a request: given tokens and slots to fill, in text order, with the attention groups that a family's rule gives them.

A batch is stored left-aligned whatever side its padding came from, so that row index, text position and store index are one number;
padding is a mask, never a token value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.types import LOWEST_GROUP, DecodeSpec

GAP_GROUP = 2**20
"""First group of generated blocks: above every prompt and suffix group."""
UNOPENED_GROUP = 2**29
"""Group of slots whose block is not open yet: they see everything and are seen only by their like."""


@dataclass(eq=False)
class Canvas:
    """ids, position [B, L] int64; masked, valid [B, L] bool; group, low [B, L] int32.

    regions: for each row its gaps as (first slot, one past the last), in decode order; anchors: for each gap the first row of its
    first block (one before the gap where a given token must be computed together with the gap).
    """

    ids: Tensor
    masked: Tensor
    valid: Tensor
    position: Tensor
    group: Tensor
    low: Tensor
    regions: list[list[tuple[int, int]]]
    anchors: list[list[int]]

    @property
    def lengths(self) -> Tensor:
        """Canvas length of each row, [B] int64."""
        return self.valid.sum(-1)


def generation_canvas(
    prompts: Sequence[Sequence[int]], gen_lengths: Sequence[int], spec: DecodeSpec, device: torch.device | str
) -> Canvas:
    """Prompt followed by gen_lengths[b] masked slots. Blocks count from the prompt's end or from 0, as ``spec.block_origin`` says.

    Given tokens stand in blocks of ``spec.block_length``.
    """
    rows: list[list[tuple[list[int], int | None]]] = [
        [(list(prompt), None), ([], length)] for prompt, length in zip(prompts, gen_lengths, strict=True)
    ]
    return _assemble(rows, spec, device, rank=False)


def pin(canvas: Canvas, masked: Sequence[Sequence[bool]], spec: DecodeSpec) -> Canvas:
    """Open the slots masked[b] of each row's prompt too; the given tokens after the first of them stay. Mutates the canvas.

    The row's one gap then begins at its first masked slot. Raises ValueError for a model whose attention is not bidirectional, where
    the order of blocks would hide what follows a slot.
    """
    if spec.attention != "bidirectional":
        raise ValueError(f"masked needs bidirectional attention: got {spec.attention}; use infill")
    for b, flags in enumerate(masked):
        if not any(flags):
            continue
        first = list(flags).index(True)
        _anchor(first, spec, rank=False, row_index=b)
        canvas.masked[b, : len(flags)] |= torch.tensor(list(flags), dtype=torch.bool, device=canvas.masked.device)
        canvas.regions[b], canvas.anchors[b] = [(first, int(canvas.valid[b].sum()))], [first]
    return canvas


def infill_canvas(
    parts: Sequence[Sequence[Sequence[int]]],
    gaps: Sequence[Sequence[int]],
    spec: DecodeSpec,
    device: torch.device | str,
) -> Canvas:
    """parts[b][0], gap of gaps[b][0] slots, parts[b][1], gap, ... parts[b][-1]: one more part than gaps in each row.

    With ``spec.infill == "rank"`` visibility goes by rank (prefix < later parts, each seeing only itself < gap blocks in order) at true
    text positions, and the last token before a gap is row 0 of the gap's first block; a gap without any token before it raises.
    """
    pieces = []
    for row, lengths in zip(parts, gaps, strict=True):
        if len(row) != len(lengths) + 1:
            raise ValueError(f"a row with {len(lengths)} gaps needs {len(lengths) + 1} parts: got {len(row)}")
        piece: list[tuple[list[int], int | None]] = []
        for index, part in enumerate(row):
            if index:
                piece.append(([], lengths[index - 1]))
            piece.append((list(part), None))
        pieces.append(piece)
    return _assemble(pieces, spec, device, rank=spec.infill == "rank")


def _assemble(
    pieces: list[list[tuple[list[int], int | None]]], spec: DecodeSpec, device: torch.device | str, rank: bool
) -> Canvas:
    batch = len(pieces)
    totals = [sum(len(ids) if gap is None else gap for ids, gap in row) for row in pieces]
    width = max(totals)
    ids = torch.zeros(batch, width, dtype=torch.int64)
    masked = torch.zeros(batch, width, dtype=torch.bool)
    valid = torch.zeros(batch, width, dtype=torch.bool)
    group = torch.zeros(batch, width, dtype=torch.int32)
    low = torch.full((batch, width), LOWEST_GROUP, dtype=torch.int32)
    regions: list[list[tuple[int, int]]] = []
    anchors: list[list[int]] = []
    for b, row in enumerate(pieces):
        at, part_number = 0, 0
        regions.append([])
        anchors.append([])
        for part, gap in row:
            stop = at + (len(part) if gap is None else gap)
            valid[b, at:stop] = True
            if gap is None:
                ids[b, at:stop] = torch.tensor(part, dtype=torch.int64)
                if part_number and rank:
                    group[b, at:stop] = part_number
                    low[b, at:stop] = part_number
            else:
                masked[b, at:stop] = True
                if stop > at:
                    regions[b].append((at, stop))
                    anchors[b].append(_anchor(at, spec, rank, row_index=b))
                    # A gap of no length joins its neighbours: they are one part.
                    part_number += 1
            at = stop
        if spec.attention != "bidirectional":
            _causal_groups(group[b], low[b], regions[b], anchors[b], totals[b], spec)
    position = torch.arange(width).expand(batch, -1).contiguous()
    return Canvas(
        ids=ids.to(device),
        masked=masked.to(device),
        valid=valid.to(device),
        position=position.to(device),
        group=group.to(device),
        low=low.to(device),
        regions=regions,
        anchors=anchors,
    )


def _anchor(slot: int, spec: DecodeSpec, rank: bool, row_index: int) -> int:
    """First row of the block that opens a gap starting at ``slot``."""
    if slot < spec.logits_shift:
        raise ValueError(f"row {row_index}: a gap needs at least one given token before it: got an empty prefix")
    if spec.attention == "bidirectional":
        return slot
    if rank:
        return slot - spec.logits_shift
    return slot if spec.block_origin == "prompt" else slot // spec.block_length * spec.block_length


def _causal_groups(
    group: Tensor, low: Tensor, regions: list[tuple[int, int]], anchors: list[int], total: int, spec: DecodeSpec
) -> None:
    """Groups of the given rows (prefix blocks counted back from the first anchor) and of slots whose block is not open yet."""
    first = anchors[0] if anchors else total
    # The prefix counts back from the first anchor (negative groups); an absolute grid only differs by a constant.
    prefix = torch.div(torch.arange(first) - first, spec.block_length, rounding_mode="floor").to(torch.int32)
    group[:first] = prefix
    for (start, stop), anchor in zip(regions, anchors, strict=True):
        group[start:stop] = UNOPENED_GROUP
        # Given rows of the gap's first block wait for it; their ``low`` is the gap's, not their part's.
        group[anchor:start] = UNOPENED_GROUP
        low[anchor:stop] = LOWEST_GROUP
