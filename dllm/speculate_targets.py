"""The target's side of the draft-and-verify loop: prefill, verify rows, forget what was rejected.

Letters: B batch, P prompt, Q = n + 1 verified rows (the anchor, then n drafts), V vocabulary, F width of the taps, N
stored columns. Two kinds: our ``Decoder``, whose rows stand at their text position in a ``KVStore`` (rejected ones are
simply written over; fixed shapes, nothing leaves the device), and any Hugging Face causal LM with its own cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dllm.drafters.target import Target
from dllm.model.kv_store import KVStore
from dllm.types import PADDING_GROUP, Attend

PREFILL_ROWS = 1024
"""Prompt rows of one forward of our decoder: its mask is B * rows * columns."""
COLUMN_BUCKET = 256
"""On CUDA the stored columns that a pass reads are a multiple of this, so that few shapes occur."""
SPARE_COLUMNS = 64
"""Rejected columns that a Hugging Face cache may hold before they are gathered away."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """logits [B, V] behind each prompt; hidden [B, D] that they came from, or None if not asked for; features [B, P, F]
    of the tapped layers (None without taps); valid [B, P] bool.
    """

    logits: Tensor
    hidden: Tensor | None
    features: Tensor | None
    valid: Tensor


class TargetRows(Protocol):
    """Rows of one request.

    capacity: most stored rows of a cache of fixed size (None: no limit); follows_host: whether ``commit`` waits for the
    device, so that the loop may just as well look after every pass.
    """

    capacity: int | None
    follows_host: bool

    def prefill(self, prompts: Sequence[Sequence[int]], want_hidden: bool) -> Prefill: ...

    def verify(self, tokens: Tensor, lengths: Tensor, valid: Tensor, bound: int) -> tuple[Tensor, Tensor | None]:
        """tokens [B, Q] at positions lengths [B] and on; valid [B, Q] -> (logits [B, Q, V], features [B, Q, F]).

        bound: no row holds more than so many committed tokens.
        """
        ...

    def commit(self, count: Tensor) -> None:
        """Keep the first count [B] of the rows verified last."""
        ...

    def tidy(self, bound: int) -> None: ...

    def select(self, keep: Tensor) -> None:
        """Go on with the rows keep [B'] only."""
        ...


def open_rows(target: Target, taps: Sequence[int], capacity: int, cache: Any = None) -> TargetRows:
    """Rows of the target's kind. capacity: tokens of the longest row, prompt included; cache: an empty Hugging Face
    cache to use.
    """
    return DecoderRows(target, taps, capacity) if target.is_own else HuggingFaceRows(target, taps, cache)


class DecoderRows:
    """Our decoder: the key of position p stands in row p of the store, so nothing has to be removed or moved."""

    follows_host = False

    def __init__(self, target: Target, taps: Sequence[int], capacity: int) -> None:
        self.target, self.tap_ids, self.num_columns = target, tuple(taps), capacity
        # No row drafts beyond its own end, and writes of rows that do not count go nowhere.
        self.capacity: int | None = None
        self.store: KVStore | None = None

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], want_hidden: bool) -> Prefill:
        """One causal pass over right-padded prompts, ``PREFILL_ROWS`` rows at a time."""
        device = self.target.device
        self.store = self.target.model.new_store(len(prompts), self.num_columns)
        counts = torch.tensor([len(row) for row in prompts], device=device)
        width = max(len(row) for row in prompts)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in prompts], device=device)
        valid = torch.arange(width, device=device) < counts[:, None]
        hidden, features = [], []
        for start in range(0, width, PREFILL_ROWS):
            piece = slice(start, start + PREFILL_ROWS)
            out, taps = self._forward(ids[:, piece], torch.full_like(counts, start), valid[:, piece], start)
            hidden.append(out)
            features.append(taps)
        states = torch.cat(hidden, dim=1)
        last = states.gather(1, (counts - 1)[:, None, None].expand(-1, 1, states.shape[-1]))
        tapped = torch.cat(features, dim=1) if self.tap_ids else None  # type: ignore[arg-type]
        return Prefill(self.target.head(last)[:, 0], last[:, 0] if want_hidden else None, tapped, valid)

    def verify(self, tokens: Tensor, lengths: Tensor, valid: Tensor, bound: int) -> tuple[Tensor, Tensor | None]:
        if tokens.device.type == "cuda":
            bound = -(-bound // COLUMN_BUCKET) * COLUMN_BUCKET
        hidden, features = self._forward(tokens, lengths, valid, min(bound, self.num_columns))
        return self.target.head(hidden), features

    def commit(self, count: Tensor) -> None:
        """The loop's lengths say how much of the store is read."""

    def tidy(self, bound: int) -> None:
        """Nothing to do."""

    def select(self, keep: Tensor) -> None:
        assert self.store is not None, "select before prefill"
        self.store = self.store.select(keep)

    def _forward(self, ids: Tensor, start: Tensor, valid: Tensor, extent: int) -> tuple[Tensor, Tensor | None]:
        """ids [B, Q] behind the first start [B] rows -> (hidden [B, Q, D], features or None); writes valid rows."""
        store = self.store
        assert store is not None, "verify before prefill"
        store.extent = extent
        column = torch.arange(extent, device=ids.device)
        stored = torch.where(column < start[:, None], column, PADDING_GROUP)
        positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        attend = Attend.by_group(positions, None, valid, stored)
        with self.target.taps(self.tap_ids) as found:
            hidden = self.target.model(ids, positions, store, attend, rows=positions, write=valid)
        return hidden, _side_by_side(found, self.tap_ids, ids.device)


class HuggingFaceRows:
    """A Hugging Face causal LM.

    One row: rejected rows are cropped off its cache (any cache that can be cropped). More rows: they stay in the cache
    as holes of the attention mask, positions are given explicitly, and once there are many holes each row's columns are
    gathered to the right; this needs plain dynamic layers, as a window or a fixed size would count the holes.

    cache: an empty cache of the model (None: a ``DynamicCache`` for its config). Raises ValueError, naming the layer's
    class, for a cache that cannot take rows back.
    """

    follows_host = True

    def __init__(self, target: Target, taps: Sequence[int], cache: Any = None) -> None:
        from transformers import DynamicCache

        self.target, self.tap_ids = target, tuple(taps)
        model = target.model
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"model must not be recurrent: {type(model).__name__} cannot go back to an earlier state")
        # transformers 5.24 calls it cache, 5.17 past_key_values.
        self.arguments = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in self.arguments else "past_key_values"
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True)) if cache is None else cache
        if self.cache.get_seq_length() != 0:
            raise ValueError(
                f"{self.cache_name} must be empty, as the taps of its tokens are gone: got {int(self.cache.get_seq_length())} tokens"
            )
        self.capacity: int | None = None
        self.mask: Tensor | None = None
        self.num_new = 0

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], want_hidden: bool) -> Prefill:
        device = self.target.device
        width = max(len(row) for row in prompts)
        # Padding on the left, so that every prompt ends in the last column.
        ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in prompts], device=device)
        counts = torch.tensor([len(row) for row in prompts], device=device)
        valid = torch.arange(width, device=device) >= width - counts[:, None]
        if len(prompts) > 1:
            self.mask = valid.long()
            self._check_batch()
        positions = (valid.long().cumsum(dim=1) - 1).clamp(min=0)
        options = {"logits_to_keep": 1} if "logits_to_keep" in self.arguments else {}
        seen: list[Tensor] = []
        head = self.target.head_module
        assert head is not None, "a Hugging Face target has a head"

        def repack(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if inputs[0].dim() != 3:
                return None
            # The last row of a long sequence keeps its batch stride, and with it a bf16 head on the CPU is copied as a
            # whole before it is used (SmolLM2: 180 ms instead of 12).
            packed = inputs[0].flatten(0, 1).unflatten(0, inputs[0].shape[:2])
            seen.append(packed[:, -1])
            return (packed, *inputs[1:])

        handle = head.register_forward_pre_hook(repack)
        try:
            logits, features = self._forward(ids, positions, self.mask, **options)
        finally:
            handle.remove()
        self._check_cache()
        if self.mask is None:
            # Only now: while the prompt is read, sliding layers may drop what is behind their window.
            self.cache.activate_past_recording()
            self.cache.crop(0)
        return Prefill(logits[:, -1], seen[0] if want_hidden and seen else None, features, valid)

    def verify(self, tokens: Tensor, lengths: Tensor, valid: Tensor, bound: int) -> tuple[Tensor, Tensor | None]:
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, valid.long()], dim=1)
        self.num_new = tokens.shape[1]
        return self._forward(tokens, positions, self.mask)

    def commit(self, count: Tensor) -> None:
        if self.mask is None:
            # A negative number means "take off so many" in every version; 0 lets sliding layers forget.
            self.cache.crop(int(count) - self.num_new)
            return
        new = torch.arange(self.num_new, device=count.device) < count[:, None]
        self.mask[:, -self.num_new :] *= new

    def tidy(self, bound: int) -> None:
        """Gather the stored columns of each row to the right once too many are holes."""
        if self.mask is None or self.mask.shape[1] - bound <= max(SPARE_COLUMNS, bound // 4):
            return
        # Stable: holes first, then the tokens in text order.
        order = self.mask.sort(dim=1, stable=True).indices[:, -bound:]
        self.mask = self.mask.gather(1, order)
        for layer in self.cache.layers:
            if layer.is_initialized:
                index = order[:, None, :, None].to(layer.keys.device)
                layer.keys = layer.keys.gather(2, index.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
                layer.values = layer.values.gather(
                    2, index.expand(-1, layer.values.shape[1], -1, layer.values.shape[3])
                )

    def select(self, keep: Tensor) -> None:
        assert self.mask is not None, "one row cannot be divided"
        self.cache.batch_select_indices(keep)
        self.mask = self.mask[keep]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
        arguments: dict[str, Any] = {"use_cache": True, "return_dict": True, self.cache_name: self.cache, **options}
        if "position_ids" in self.arguments:
            arguments["position_ids"] = positions
        if mask is not None:
            arguments["attention_mask"] = mask
        with self.target.taps(self.tap_ids) as found:
            logits = self.target.model(input_ids=ids, **arguments).logits
        return logits.to(ids.device), _side_by_side(found, self.tap_ids, ids.device)

    def _check_batch(self) -> None:
        """What rows of unequal progress need."""
        from transformers.cache_utils import DynamicLayer

        model = type(self.target.model).__name__
        if "position_ids" not in self.arguments:
            raise ValueError(f"batch must be 1 for {model}, whose forward takes no position_ids: got more rows")
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"batch must be 1 for {model}: layer {index} of its cache is a {type(layer).__name__}, and only a "
                    "DynamicLayer keeps rejected rows as holes"
                )

    def _check_cache(self) -> None:
        """After the first forward, when lazy layers exist and know what they are."""
        if self.mask is not None:
            self._check_batch()
            return
        from transformers.cache_utils import QuantizedLayer

        for index, layer in enumerate(self.cache.layers):
            # A quantised layer of 5.17 says that it can, and crops only what is not quantised yet.
            if not layer.is_croppable or isinstance(layer, QuantizedLayer):
                raise ValueError(
                    f"cache must be one that rows can be taken off again: layer {index} is a {type(layer).__name__}, "
                    "which cannot"
                )
            if hasattr(layer, "max_cache_len"):
                self.capacity = min(layer.max_cache_len, self.capacity or layer.max_cache_len)


def _side_by_side(found: dict[int, Tensor], tap_ids: Sequence[int], device: torch.device) -> Tensor | None:
    """Taps in the order of their ids: [B, Q, F], or None without taps."""
    return torch.cat([found[i].to(device) for i in tap_ids], dim=-1) if tap_ids else None
