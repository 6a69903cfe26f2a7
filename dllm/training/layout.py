"""The rows of one training document and who may look at whom among them.

Block-causal (bd8): one clean copy of the document beside noisy copies of its answer or gap blocks (the layout of Arriola et al. 2025,
arXiv:2503.09573), with shifted logits and with infilling by rank: prefix < suffix < gap blocks, whatever their order in the text.
Bidirectional: one copy, every row of the document sees every row.

Letters: R rows of a document, M slots that are trained, S block length. A *row* is computed; a *slot* is a position whose token is
predicted. Logits are shifted: the law of slot i stands in row i - 1, in the noisy copy if both lie in one block, else in the clean one.

The rule, for rows q and k of one document (``copy`` 0 is clean, 1, 2, ... are noisy):
    clean q:   copy[k] = 0 and low[q] <= group[k] <= group[q]
    noisy q:   copy[k] = 0 and low[q] <= group[k] < group[q],  or  copy[k] = copy[q] and group[k] = group[q]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm.types import LOWEST_GROUP

FIRST_BLOCK_GROUP = 1024
"""Group of the first answer or gap block; prefix groups are negative, the suffix after gap j has group j."""

GENERATION, INFILL, BOUNDARY = 0, 1, 2
"""Kinds of slots: an answer's, a gap's, and the first token after a gap."""
KIND_NAMES = ("generation", "infill", "boundary")


class Region(NamedTuple):
    """Rows [start, stop) of the text that are decoded block by block; known: leading rows whose token is given.

    An answer has known = 0; a gap has known = 1, the last token before it: with shifted logits the gap's first token would
    otherwise be predicted by a row that cannot see the suffix.
    """

    start: int
    stop: int
    known: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows and slots of one document; numpy arrays.

    ids, position, group, low, copy int32 [R]; masked bool [R] (the row's input is the mask).
    slot_row int32 [M]: row whose logits predict the slot; slot_token int32, slot_weight float32, slot_kind int8 [M].
    """

    ids: np.ndarray
    position: np.ndarray
    group: np.ndarray
    low: np.ndarray
    copy: np.ndarray
    masked: np.ndarray
    slot_row: np.ndarray
    slot_token: np.ndarray
    slot_weight: np.ndarray
    slot_kind: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def sees(
    document: tuple[Tensor, Tensor], copy: tuple[Tensor, Tensor], group: tuple[Tensor, Tensor], low: Tensor
) -> Tensor:
    """The rule of the module's docstring; each pair is (query's, key's), broadcast against each other; low is the query's -> bool."""
    (dq, dk), (cq, ck), (gq, gk) = document, copy, group
    clean_key = (ck == 0) & (gk >= low) & ((gk < gq) | ((gk == gq) & (cq == 0)))
    own_block = (cq != 0) & (ck == cq) & (gk == gq)
    return (dq == dk) & (clean_key | own_block)


def training_mask(document: Tensor, copy: Tensor, group: Tensor, low: Tensor) -> Tensor:
    """All [B, R] integers -> bool [B, R, R], True = row q may look at row k."""

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :, None], x[:, None, :]

    return sees(pair(document), pair(copy), pair(group), low[:, :, None])


def block_groups(length: int, regions: Sequence[Region], block_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups and lows, int32 [length], of the clean copy of a text whose ``regions`` are decoded in blocks.

    Before the first region: blocks counted backwards from it, negative. Region rows: FIRST_BLOCK_GROUP + c, c counting blocks over all
    regions. Text after region j (j = 1, 2, ...): group j and low j, so that it sees only itself.
    """
    if block_length < 1:
        raise ValueError(f"block_length must be >= 1: got {block_length}")
    if not regions:
        raise ValueError("regions must hold at least one region: got none")
    group = np.empty(length, np.int32)
    low = np.full(length, LOWEST_GROUP, np.int32)
    first = regions[0].start
    group[:first] = (np.arange(first) - first) // block_length
    counter, end = FIRST_BLOCK_GROUP, first
    for number, region in enumerate(regions):
        if not end <= region.start < region.stop <= length:
            raise ValueError(f"regions must be ordered, not empty and inside {length} rows: got {list(regions)}")
        group[end : region.start] = low[end : region.start] = number
        blocks = np.arange(region.stop - region.start) // block_length
        group[region.start : region.stop] = counter + blocks
        counter += int(blocks[-1]) + 1
        end = region.stop
    group[end:] = low[end:] = len(regions)
    low[:first] = LOWEST_GROUP
    return group, low


def block_causal_layout(
    tokens: np.ndarray,
    regions: Sequence[Region],
    masks: np.ndarray,
    block_length: int,
    weights: np.ndarray,
    boundary_weight: float = 0.0,
) -> Layout:
    """Clean copy and noisy copies of one document.

    tokens int [n]: the document, text before the first answer slot included; masks bool [copies, n]: masked slots of each noisy copy,
    False outside the regions and on known rows; weights float [n] or [copies, n]: loss weight of each slot. boundary_weight > 0: the last
    row of each gap, in the clean copy, also predicts the first token after it.
    """
    n, copies = len(tokens), len(masks)
    group, low = block_groups(n, regions, block_length)
    in_region = np.zeros(n, bool)
    slots = np.zeros(n, bool)
    for region in regions:
        in_region[region.start : region.stop] = True
        slots[region.start + region.known : region.stop] = True
    if masks.shape[1:] != (n,) or (masks & ~slots).any():
        raise ValueError(f"masks must be [copies, {n}] and True at slots of the regions only: got shape {masks.shape}")
    if slots[0]:
        raise ValueError("the first slot must have a row before it: put a document-start token in front")

    rows = np.flatnonzero(in_region)
    copy_of = np.repeat(np.arange(copies + 1, dtype=np.int32), [n] + [len(rows)] * copies)
    text_row = np.concatenate([np.arange(n), np.tile(rows, copies)])
    masked = np.concatenate([np.zeros(n, bool), masks[:, rows].ravel()])

    # Where text row i of noisy copy c stands among all rows.
    index_in_region = np.cumsum(in_region) - 1
    which, slot = np.nonzero(masks)
    same_block = in_region[slot - 1] & (group[slot - 1] == group[slot])
    noisy_row = n + which * len(rows) + index_in_region[slot - 1]
    slot_row = np.where(same_block, noisy_row, slot - 1)
    slot_token, slot_weight = tokens[slot], np.broadcast_to(weights, masks.shape)[which, slot]
    slot_kind = np.full(len(slot), INFILL if regions[0].known else GENERATION, np.int8)
    if boundary_weight > 0:
        ends = np.array([r.stop for r in regions if r.known and r.stop < n], np.int64)
        slot_row = np.concatenate([slot_row, ends - 1])
        slot_token = np.concatenate([slot_token, tokens[ends]])
        slot_weight = np.concatenate([slot_weight, np.full(len(ends), boundary_weight)])
        slot_kind = np.concatenate([slot_kind, np.full(len(ends), BOUNDARY, np.int8)])
    return Layout(
        ids=tokens[text_row].astype(np.int32),
        position=text_row.astype(np.int32),
        group=group[text_row],
        low=low[text_row],
        copy=copy_of,
        masked=masked,
        slot_row=slot_row.astype(np.int32),
        slot_token=slot_token.astype(np.int32),
        slot_weight=slot_weight.astype(np.float32),
        slot_kind=slot_kind,
    )


def bidirectional_layout(tokens: np.ndarray, masked: np.ndarray, weights: np.ndarray, kinds: np.ndarray) -> Layout:
    """One copy in which every row sees every row.

    tokens int [n]; masked bool [n]; weights float [n]: loss weight of each slot, 0 where it is not trained; kinds int8 [n].
    """
    n = len(tokens)
    slot = np.flatnonzero(weights > 0)
    if masked[0] or (len(slot) and slot[0] == 0):
        raise ValueError("the first token cannot be a slot: put a document-start token in front")
    zeros = np.zeros(n, np.int32)
    return Layout(
        ids=tokens.astype(np.int32),
        position=np.arange(n, dtype=np.int32),
        group=zeros,
        low=np.full(n, LOWEST_GROUP, np.int32),
        copy=zeros,
        masked=masked,
        slot_row=(slot - 1).astype(np.int32),
        slot_token=tokens[slot].astype(np.int32),
        slot_weight=weights[slot].astype(np.float32),
        slot_kind=kinds[slot].astype(np.int8),
    )


def dense_mask(layout: Layout) -> Tensor:
    """The rule for one document as bool [1, R, R] (tests, pictures)."""
    group, low, copy = (torch.from_numpy(x)[None] for x in (layout.group, layout.low, layout.copy))
    return training_mask(torch.zeros_like(group), copy, group, low)
