"""Several documents in one training sequence: fixed shapes for the compiler, no row wasted on padding that could hold a document.

B sequences of R rows; a document never crosses a sequence. M trained slots, padded to a multiple of ``SLOT_MULTIPLE`` with weight 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dllm.training.corruption import CorruptionConfig, corrupt
from dllm.training.data import Documents
from dllm.training.layout import Layout

SLOT_MULTIPLE = 256


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of B packed sequences and the slots trained on them.

    ids int64 [B, R]; position, document, group, low, copy int32 [B, R] (padding: document -1); masked bool [B, R].
    slot_row int64 [M]: index into the flattened rows; slot_token int64, slot_weight fp32, slot_kind int64 [M].
    """

    ids: Tensor
    position: Tensor
    document: Tensor
    group: Tensor
    low: Tensor
    copy: Tensor
    masked: Tensor
    slot_row: Tensor
    slot_token: Tensor
    slot_weight: Tensor
    slot_kind: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device; from pinned memory the copies overlap with the device's work."""
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def pin_memory(self) -> Batch:
        """Called by the loader's pinning thread."""
        return Batch(*(getattr(self, f.name).pin_memory() for f in fields(self)))


def pack(sequences: Sequence[Sequence[Layout]], rows: int) -> Batch:
    """Put the layouts of each sequence one after another into ``rows`` rows; raises ValueError where they do not fit."""
    names = {"ids": "ids", "position": "position", "group": "group", "low": "low", "copy": "copy"}
    arrays = {name: np.zeros((len(sequences), rows), np.int32) for name in [*names, "document"]}
    arrays["document"][:] = -1
    masked = np.zeros((len(sequences), rows), bool)
    slots: dict[str, list[np.ndarray]] = {"row": [], "token": [], "weight": [], "kind": []}
    for b, sequence in enumerate(sequences):
        at = 0
        for number, layout in enumerate(sequence):
            stop = at + layout.num_rows
            if stop > rows:
                raise ValueError(
                    f"rows must hold the documents of sequence {b}: they need {stop} or more, rows is {rows}"
                )
            for name in names:
                arrays[name][b, at:stop] = getattr(layout, name)
            arrays["document"][b, at:stop] = number
            masked[b, at:stop] = layout.masked
            slots["row"].append(layout.slot_row.astype(np.int64) + (b * rows + at))
            slots["token"].append(layout.slot_token.astype(np.int64))
            slots["weight"].append(layout.slot_weight)
            slots["kind"].append(layout.slot_kind.astype(np.int64))
            at = stop
    count = sum(len(x) for x in slots["row"])
    padding = -count % SLOT_MULTIPLE
    flat = {name: np.pad(np.concatenate(x), (0, padding)) for name, x in slots.items()}
    return Batch(
        ids=torch.from_numpy(arrays["ids"].astype(np.int64)),
        **{name: torch.from_numpy(arrays[name]) for name in ("position", "document", "group", "low", "copy")},
        masked=torch.from_numpy(masked),
        **{f"slot_{name}": torch.from_numpy(x) for name, x in flat.items()},
    )


class PackedBatches(IterableDataset):  # type: ignore[type-arg]
    """An endless stream of batches; every loader worker draws documents and masks of its own from (seed, worker).

    sources: collections of documents with the share of each; batch: sequences; rows: rows of a sequence.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Documents, float]],
        config: CorruptionConfig,
        batch: int,
        rows: int,
        seed: int,
        infill: bool | None = None,
    ) -> None:
        super().__init__()
        if not sources or any(len(documents) == 0 or share < 0 for documents, share in sources):
            raise ValueError("sources must hold collections of at least one document with shares >= 0")
        if config.max_rows > rows:
            raise ValueError(f"max_rows must be <= rows {rows}: got {config.max_rows}")
        self.sources, self.config, self.batch, self.rows, self.seed = list(sources), config, batch, rows, seed
        self.infill = infill

    def layouts(self, rng: np.random.Generator, part: tuple[int, int] = (0, 1)) -> Iterator[Layout]:
        """Documents in shuffled epochs of each source, corrupted anew each time.

        part (i, n): only every n-th document from the i-th on, so that n workers together see each document once an epoch.
        """
        shares = np.array([share for _, share in self.sources], np.float64)
        shares /= shares.sum()
        orders: list[Iterator[int]] = [iter(()) for _ in self.sources]
        while True:
            which = int(rng.choice(len(shares), p=shares))
            documents = self.sources[which][0]
            index = next(orders[which], None)
            if index is None:
                own = np.arange(part[0], len(documents), part[1])
                # A source smaller than the number of workers is shared by all of them.
                orders[which] = iter(rng.permutation(own if len(own) else np.arange(len(documents))))
                index = next(orders[which])
            tokens, prompt_length = documents[int(index)]
            yield corrupt(tokens, prompt_length, self.config, rng, documents.sentence_ends, self.infill)

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        part = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rng = np.random.default_rng([self.seed, part[0]])
        stream = self.layouts(rng, part)
        waiting: list[Layout] = []
        while True:
            sequences: list[list[Layout]] = [[] for _ in range(self.batch)]
            free = np.full(self.batch, self.rows)
            # Best fit: the fullest sequence that still holds the document. What fits nowhere waits for the next batch; it stops when
            # several in a row found no place.
            refused = 0
            kept: list[Layout] = []
            while refused < 8:
                layout = waiting.pop() if waiting else next(stream)
                room = np.where(free >= layout.num_rows, free, self.rows + 1)
                best = int(room.argmin())
                if room[best] > self.rows:
                    kept.append(layout)
                    refused += 1
                    continue
                sequences[best].append(layout)
                free[best] -= layout.num_rows
            waiting = kept + waiting
            yield pack(sequences, self.rows)


def batch_loader(dataset: PackedBatches, workers: int, pin: bool) -> DataLoader:  # type: ignore[type-arg]
    """A loader whose batches are built in ``workers`` processes (0: in this one)."""
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_leave_signals_to_parent,
    )


def _leave_signals_to_parent(worker: int) -> None:
    """Ctrl-C and a job manager's SIGTERM reach the whole process group; a worker that dies would take the run with it unsaved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
