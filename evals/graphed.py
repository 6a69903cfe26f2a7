"""A model whose forwards are CUDA graphs, for loops on the host: guides, verifiers, and caches whose rows change from step to step.

The device loop (``dllm/device_loop.py``) captures whole steps, where a step has one shape. The other methods ask the host between their
forwards, so only the forward is captured: its rows are rounded up to a few sizes, its stored keys to the store's capacity, and what is
padding is seen by nobody. What is computed is the same; on the CPU the same padded step runs without a graph.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.graphs import Buckets, Captured, capture, key_bucket
from dllm.model.kv_store import KVStore
from dllm.types import LOWEST_GROUP, PADDING_GROUP, Attend

ROW_BUCKETS = (16, 32, 64, 128)
"""Rows of a captured forward; above the last one, multiples of it. Few, because every size compiles kernels of its own."""
MAX_GRAPHS = 96


def row_bucket(rows: int) -> int:
    """The least captured size that holds ``rows``."""
    return next((size for size in ROW_BUCKETS if rows <= size), -(-rows // ROW_BUCKETS[-1]) * ROW_BUCKETS[-1])


class GraphedForward:
    """The interface of ``model`` (a ``FastDecoder`` or ``Decoder``), with captured forwards; other attributes are the model's.

    Give it to ``DiffusionLM.model`` or ``ARGuide`` in place of the decoder. Stores come from a pool, so that calls of one size meet the
    graphs of the call before. A store that lost rows of its batch is none of the pool, and its forwards run eagerly; ``eager`` counts
    those, ``replays`` the others.
    """

    def __init__(self, model: Any) -> None:
        self.decoder = model
        self.graphs: Buckets[_Forward] = Buckets(MAX_GRAPHS)
        self.free: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.pooled: set[int] = set()
        self.replays = self.eager = 0

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here; "decoder" itself is missing while a copy is being made.
        if name == "decoder":
            raise AttributeError(name)
        inner = self.decoder
        return getattr(inner, name) if hasattr(inner, name) else getattr(inner.decoder, name)

    def new_store(self, batch: int, capacity: int) -> KVStore:
        """An empty store of at least ``capacity`` rows, at an address that an earlier call has used if there is one."""
        capacity = key_bucket(capacity)
        store = self.decoder.new_store(batch, capacity)
        if self.pooled and not self.free[batch, capacity]:
            # A loop and its hook hold each other, so that the last call's store waits for the collector.
            gc.collect()
        data = self.free[batch, capacity].pop() if self.free[batch, capacity] else store.data
        # What nobody may read still takes part in products, where a stale NaN would spread.
        store.data = data.zero_()
        self.pooled.add(data.data_ptr())
        weakref.finalize(store, self.free[batch, capacity].append, data)
        return store

    def __call__(
        self,
        ids: Tensor | None,
        positions: Tensor,
        kv: KVStore | None,
        attend: Attend | Tensor,
        taps: Sequence[int] = (),
        *,
        embeds: Tensor | None = None,
        rows: Tensor | None = None,
        write: Tensor | None = None,
    ) -> Any:
        """As ``Decoder.forward``; hidden states [B, Q, E] are a copy of the graph's own."""
        plain = not isinstance(attend, Attend) or attend.window is not None or len(taps) > 0
        if plain or (kv is not None and kv.data.data_ptr() not in self.pooled):
            self.eager += 1
            return self.decoder(ids, positions, kv, attend, taps, embeds=embeds, rows=rows, write=write)
        assert isinstance(attend, Attend), "told apart above"
        x = self.decoder.embed(ids) if embeds is None else embeds
        batch, queries = positions.shape
        size = row_bucket(queries)
        writes = kv is not None and write is not None
        key = (batch, size, None if kv is None else kv.data.data_ptr(), writes)
        forward = self.graphs.get(key, lambda: _Forward(self.decoder, x, size, kv, writes))
        self.replays += 1
        return forward(x, positions, attend, rows, write)


class _Forward:
    """Input buffers of one size and the captured forward over them."""

    def __init__(self, model: Any, x: Tensor, size: int, kv: KVStore | None, writes: bool) -> None:
        batch, device = x.shape[0], x.device
        self.model, self.size, self.writes = model, size, writes

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        self.embeds = buffer(size, x.shape[-1], dtype=x.dtype)
        self.positions, self.rows = buffer(size), buffer(size)
        self.write = buffer(size, dtype=torch.bool)
        self.group, self.low = buffer(size, dtype=torch.int32), buffer(size, dtype=torch.int32)
        self.words = -(-size // 64)
        number = torch.arange(size, device=device)
        own = torch.ones_like(number) << (number % 64)
        # A padded row sees itself, so that its softmax stays finite.
        self.own = torch.where(number[:, None] // 64 == torch.arange(self.words, device=device), own[:, None], 0)
        self.bits = self.own.expand(batch, -1, -1).clone()
        self.key_group = buffer(0 if kv is None else kv.capacity, dtype=torch.int32)
        self.key_group.fill_(PADDING_GROUP)
        self.store: KVStore | None = None
        if kv is not None:
            # The same numbers under another head, so that the caller's store can come and go.
            self.store = object.__new__(KVStore)
            self.store.data, self.store.stored, self.store.capacity = kv.data, kv.stored, kv.capacity
            self.store.extent = kv.capacity
        self.captured: Captured | None = None

    def __call__(
        self, x: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None, write: Tensor | None
    ) -> Tensor:
        queries = positions.shape[1]
        self.embeds[:, :queries].copy_(x)
        self.positions[:, :queries].copy_(positions)
        self.group[:, :queries].copy_(attend.group)
        self.low.fill_(LOWEST_GROUP)
        self.low[:, :queries].copy_(attend.low)
        self.bits.copy_(self.own.expand_as(self.bits))
        self.bits[:, :queries].copy_(F.pad(attend.bits, (0, self.words - attend.bits.shape[-1])))
        keys = attend.key_group.shape[1]
        if self.store is not None:
            self.key_group[:, :keys].copy_(attend.key_group)
            self.key_group[:, keys:].fill_(PADDING_GROUP)
        if self.writes:
            assert rows is not None and write is not None, "write needs rows"
            self.rows[:, :queries].copy_(rows)
            self.write.zero_()
            self.write[:, :queries].copy_(write)
        if self.captured is None:
            # Running it more than once is harmless: it reads none of the rows that it writes.
            owned = (self.model, self.store)
            self.captured = capture(self.step, x.device, owned=owned, warmup=1, name="forward")
        return self.captured.replay()[:, :queries].clone()

    @torch.no_grad()
    def step(self) -> Tensor:
        """The forward over the buffers."""
        attend = Attend(self.key_group, self.low, self.group, self.bits)
        rows, write = (self.rows, self.write) if self.writes else (None, None)
        return self.model(None, self.positions, self.store, attend, embeds=self.embeds, rows=rows, write=write)
