"""Preallocated keys and values of one decoder, addressed by row.

The store knows nothing about time or text: a cache decides which rows are written and which may be read. Keys are stored rotated.
Validity is the bool tensor ``stored``, never a comparison with a value.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


class KVStore:
    """Keys and values ``[layers, 2, B, K, N + 1, D]``; the last row is a bin for writes that are masked out.

    capacity: rows N per sequence. ``extent`` (rows, a host integer) bounds what ``view`` returns, so that short sequences stay cheap.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_layers, batch, num_kv_heads, capacity, head_dim) < 1:
            raise ValueError(
                f"KVStore sizes must be >= 1: got layers {num_layers}, batch {batch}, heads {num_kv_heads}, capacity {capacity}, "
                f"head_dim {head_dim}"
            )
        self.data = torch.zeros(num_layers, 2, batch, num_kv_heads, capacity + 1, head_dim, dtype=dtype, device=device)
        self.stored = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.capacity = capacity
        self.extent = capacity

    @property
    def batch(self) -> int:
        return self.data.shape[2]

    def write(self, layer: int, rows: Tensor, valid: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k, v [B, K, Q, D] at rows [B, Q] int64 where valid [B, Q]; mutates the store, marks nothing (see ``mark``)."""
        target = torch.where(valid, rows, torch.full_like(rows, self.capacity))
        if self.batch == 1 and self.data.device.type == "cpu":  # whole rows; a scatter goes number by number there
            self.data[layer, 0, 0].index_copy_(1, target[0], k[0].to(self.data.dtype))
            self.data[layer, 1, 0].index_copy_(1, target[0], v[0].to(self.data.dtype))
            return
        index = target[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        self.data[layer, 0].scatter_(2, index, k.to(self.data.dtype))
        self.data[layer, 1].scatter_(2, index, v.to(self.data.dtype))

    def mark(self, rows: Tensor, valid: Tensor) -> None:
        """Declare rows [B, Q] where valid as stored."""
        wide = torch.nn.functional.pad(self.stored, (0, 1))
        wide.scatter_(1, torch.where(valid, rows, torch.full_like(rows, self.capacity)), True)
        self.stored = wide[:, :-1].contiguous()

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, extent, D] of a layer; views, valid until the next ``compact``."""
        return self.data[layer, 0, :, :, : self.extent], self.data[layer, 1, :, :, : self.extent]

    def crop(self, lengths: Tensor) -> None:
        """Forget rows at index >= lengths [B]; the numbers stay, unread."""
        self.stored = self.stored & (torch.arange(self.capacity, device=self.stored.device) < lengths[:, None])

    def compact(self, index: Tensor) -> None:
        """Row i becomes old row index[b, i] (index [B, n] int64, n <= N; -1 = an empty row); later rows are forgotten."""
        if index.shape[1] > self.capacity:
            raise ValueError(f"index must have at most {self.capacity} columns: got {index.shape[1]}")
        kept = index >= 0
        source = index.clamp(min=0)
        wide = source[None, None, :, None, :, None].expand(
            self.data.shape[0], 2, -1, self.data.shape[3], -1, self.data.shape[5]
        )
        self.data[..., : index.shape[1], :] = self.data.gather(4, wide)
        stored = torch.zeros_like(self.stored)
        stored[:, : index.shape[1]] = self.stored.gather(1, source) & kept
        self.stored = stored

    def select(self, keep: Tensor) -> KVStore:
        """A store of the sequences keep [B'] int64 only (a copy); used when rows leave the batch or one prefill serves many."""
        other = object.__new__(KVStore)
        other.data = self.data.index_select(2, keep)
        other.stored = self.stored.index_select(0, keep)
        other.capacity, other.extent = self.capacity, self.extent
        return other

    def rotate(self, rows: Tensor, valid: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Move stored keys at rows [B, Q] by the rotation (cos, sin [B, Q, rotary_dim]): rotations add, so this equals a fresh key."""
        width = cos.shape[-1]
        index = rows[:, None, :, None].expand(-1, self.data.shape[3], -1, self.data.shape[5])
        for layer in range(self.data.shape[0]):
            keys = self.data[layer, 0].gather(2, index).float()
            turned, rest = keys[..., :width], keys[..., width:]
            first, second = turned.chunk(2, dim=-1)
            rotated = turned * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
            moved = torch.cat([rotated, rest], dim=-1)
            target = torch.where(valid, rows, torch.full_like(rows, self.capacity))
            where = rearrange(target, "b q -> b 1 q 1").expand_as(index)
            self.data[layer, 0].scatter_(2, where, moved.to(self.data.dtype))
