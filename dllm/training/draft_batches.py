"""Batches for drafters: whole documents packed into sequences, and the anchors whose blocks are drafted.

Letters: B sequences, L tokens of a sequence, A anchors of a sequence, S block length (the anchor and S - 1 drafts). A document never
crosses a sequence. An anchor is a token of an answer; its block may reach beyond the end of the document, as it does when a text is
written, but only slots inside the document have a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dllm.training.data import Documents

REFUSED_AT_MOST = 8
"""Documents in a row that found no room before a batch is closed."""


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """ids int64 [B, L]; position, document int32 [B, L] (padding: document -1); anchor int64 [B, A]: index in the sequence; labelled
    bool [B, A, S - 1]: slot k + 1 lies inside the anchor's document (False everywhere: the anchor is padding).
    """

    ids: Tensor
    position: Tensor
    document: Tensor
    anchor: Tensor
    labelled: Tensor

    def to(self, device: torch.device | str) -> DraftBatch:
        """The batch on another device; from pinned memory the copies overlap with the device's work."""
        return DraftBatch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def pin_memory(self) -> DraftBatch:
        """Called by the loader's pinning thread."""
        return DraftBatch(*(getattr(self, f.name).pin_memory() for f in fields(self)))

    @property
    def num_slots(self) -> int:
        """S, the anchor included."""
        return self.labelled.shape[-1] + 1

    def slots(self) -> Tensor:
        """Index of each label in its sequence, [B, A, S - 1] int64; where nothing is labelled, some index inside the sequence."""
        steps = torch.arange(1, self.num_slots, device=self.anchor.device)
        return (self.anchor[..., None] + steps).clamp(max=self.ids.shape[1] - 1)


@dataclass(frozen=True, eq=False)
class PackedText:
    """A batch without anchors, in numpy; anchors: for each sequence (indices that may be anchors, last index of their document).

    placed: for each sequence (number of the document in its collection, offset, prompt length, tokens).
    """

    ids: np.ndarray
    position: np.ndarray
    document: np.ndarray
    placed: list[list[tuple[int, int, int, int]]]

    def eligible(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """(indices of the answer tokens that have a token after them, last index of their document)."""
        # The first token of all has no context, so that it is no anchor even where there is no prompt.
        spans = [(at + max(prompt, 1), at + count - 1) for _, at, prompt, count in self.placed[sequence]]
        starts = [np.arange(first, last) for first, last in spans]
        ends = [np.full(len(s), last) for s, (_, last) in zip(starts, spans, strict=True)]
        return (np.concatenate(starts), np.concatenate(ends)) if starts else (np.zeros(0, int), np.zeros(0, int))

    def with_anchors(
        self, chosen: Sequence[tuple[np.ndarray, np.ndarray]], anchors: int, block_length: int
    ) -> DraftBatch:
        """The batch with (anchor indices, last indices) of each sequence, padded to ``anchors``."""
        anchor = np.zeros((len(self.ids), anchors), np.int64)
        labelled = np.zeros((len(self.ids), anchors, block_length - 1), bool)
        for b, (indices, ends) in enumerate(chosen):
            anchor[b, : len(indices)] = indices
            labelled[b, : len(indices)] = indices[:, None] + np.arange(1, block_length) <= ends[:, None]
        arrays = (self.ids.astype(np.int64), self.position, self.document, anchor, labelled)
        return DraftBatch(*(torch.from_numpy(x) for x in arrays))


def pack_texts(documents: Iterator[tuple[int, np.ndarray, int]], batch: int, length: int) -> Iterator[PackedText]:
    """(number, tokens, prompt length) -> packed batches; longer documents are cut at ``length``; the last batch may hold empty
    sequences. Best fit: the fullest sequence that still holds the document; what fits nowhere waits for the next batch.
    """
    waiting: list[tuple[int, np.ndarray, int]] = []
    ended = False
    while not ended or waiting:
        arrays = [np.zeros((batch, length), np.int32) for _ in range(2)]
        owner = np.full((batch, length), -1, np.int32)
        placed: list[list[tuple[int, int, int, int]]] = [[] for _ in range(batch)]
        used = np.zeros(batch, np.int64)
        kept: list[tuple[int, np.ndarray, int]] = []
        while len(kept) < REFUSED_AT_MOST:
            item = waiting.pop() if waiting else next(documents, None)
            if item is None:
                ended = True
                break
            number, tokens, prompt = item
            tokens = tokens[:length]
            room = np.where(used + len(tokens) <= length, length - used, length + 1)
            best = int(room.argmin())
            if room[best] > length:
                kept.append(item)
                continue
            at, stop = int(used[best]), int(used[best]) + len(tokens)
            arrays[0][best, at:stop] = tokens
            arrays[1][best, at:stop] = np.arange(len(tokens))
            owner[best, at:stop] = len(placed[best])
            placed[best].append((number, at, prompt, len(tokens)))
            used[best] = stop
        waiting = kept + waiting
        if used.any():
            yield PackedText(arrays[0], arrays[1], owner, placed)


class DraftBatches(IterableDataset):  # type: ignore[type-arg]
    """An endless stream of batches with anchors drawn anew each time; every loader worker draws its own from (seed, worker).

    sources: collections of documents with the share of each.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Documents, float]],
        batch: int,
        length: int,
        anchors: int,
        block_length: int,
        seed: int,
    ) -> None:
        super().__init__()
        if not sources or any(len(documents) == 0 or share < 0 for documents, share in sources):
            raise ValueError("sources must hold collections of at least one document with shares >= 0")
        if sum(share for _, share in sources) <= 0:
            raise ValueError("sources must hold a share > 0: all are 0")
        self.sources, self.batch, self.length, self.anchors = list(sources), batch, length, anchors
        self.block_length, self.seed = block_length, seed

    def _documents(self, rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray, int]]:
        """Documents in shuffled epochs of each source."""
        shares = np.array([share for _, share in self.sources], np.float64)
        shares /= shares.sum()
        orders: list[Iterator[int]] = [iter(()) for _ in self.sources]
        while True:
            which = int(rng.choice(len(shares), p=shares))
            documents = self.sources[which][0]
            index = next(orders[which], None)
            if index is None:
                orders[which] = iter(rng.permutation(len(documents)))
                index = next(orders[which])
            tokens, prompt = documents[int(index)]
            yield int(index), tokens, prompt

    def __iter__(self) -> Iterator[DraftBatch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([self.seed, 0 if worker is None else worker.id])
        for text in pack_texts(self._documents(rng), self.batch, self.length):
            chosen = []
            for b in range(self.batch):
                indices, ends = text.eligible(b)
                # In order, so that neighbouring blocks read neighbouring context and whole tiles of the mask are empty.
                pick = np.sort(rng.permutation(len(indices))[: self.anchors])
                chosen.append((indices[pick], ends[pick]))
            yield text.with_anchors(chosen, self.anchors, self.block_length)


def draft_loader(dataset: DraftBatches, workers: int, pin: bool) -> DataLoader:  # type: ignore[type-arg]
    """A loader whose batches are built in ``workers`` processes (0: in this one)."""
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=4 if workers else None
    )


def every_anchor(documents: Documents, batch: int, length: int, anchors: int, block_length: int) -> list[EveryAnchor]:
    """All anchors of all documents, in batches of the same shapes as those of training."""
    numbered = ((i, *documents[i]) for i in range(len(documents)))
    found = []
    for text in pack_texts(numbered, batch, length):
        spots = [text.eligible(b) for b in range(batch)]
        pieces = range(0, max((len(indices) for indices, _ in spots), default=0), anchors)
        parts = [
            text.with_anchors([(i[at : at + anchors], e[at : at + anchors]) for i, e in spots], anchors, block_length)
            for at in pieces
        ]
        if parts:
            found.append(EveryAnchor(parts, text.placed))
    return found


@dataclass(frozen=True, eq=False)
class EveryAnchor:
    """One packed text several times, each with other anchors; placed: as in ``PackedText``."""

    parts: list[DraftBatch]
    placed: list[list[tuple[int, int, int, int]]]

    def to(self, device: torch.device | str) -> EveryAnchor:
        """On another device; the text is copied once."""
        first = self.parts[0].to(device)
        shared = [replace(first, anchor=p.anchor.to(device), labelled=p.labelled.to(device)) for p in self.parts]
        return EveryAnchor(shared, self.placed)
