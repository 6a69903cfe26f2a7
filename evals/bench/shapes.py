"""Shapes of the benchmarked models and what a step over them must move and multiply at least.

Letters: B batch, T new rows, N stored keys, L layers, E model width, F feed-forward width, H heads, K key heads, D head width,
V vocabulary. A floor is max(bytes / measured copy rate, FLOPs / measured matrix rate): no program on that device can be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. ``tied``: the head is the embedding; ``qk_norm``, ``qkv_bias``: as in the family's layers."""

    name: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10000.0

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.width
        return attention + 3 * self.width * self.ffn

    @property
    def weights(self) -> int:
        """Numbers that every step reads: all layers and the head (the embedding is read by row, see ``step_bytes``)."""
        return self.layers * self.layer_weights + self.vocab * self.width

    @property
    def resident_bytes(self) -> int:
        """bf16 bytes that the model takes on the device."""
        return 2 * (self.weights + (0 if self.tied else self.vocab * self.width))

    def kv_bytes(self, batch: int, keys: int) -> int:
        """bf16 bytes of the stored keys and values of all layers."""
        return 2 * self.layers * 2 * batch * self.kv_heads * keys * self.head_dim

    def step_bytes(self, batch: int, rows: int, keys: int) -> int:
        """Least bytes of one step: each weight once, stored keys and values once, the new rows' embeddings, keys and values."""
        return 2 * self.weights + self.kv_bytes(batch, keys + rows) + 2 * batch * rows * self.width

    def step_flops(self, batch: int, rows: int, keys: int) -> int:
        """Multiply-adds of one step, counted as two each."""
        attention = 4 * batch * rows * (keys + rows) * self.heads * self.head_dim * self.layers
        return 2 * batch * rows * self.weights + attention


def floor_ms(bytes_moved: float, flops: float, copy_rate: float, matmul_rate: float) -> float:
    """Milliseconds below which nothing can go: copy_rate in bytes/s (read + write), matmul_rate in FLOP/s, both measured."""
    for name, value in (("copy_rate", copy_rate), ("matmul_rate", matmul_rate)):
        if not value > 0:
            raise ValueError(f"{name} must be > 0: got {value}")
    return 1e3 * max(bytes_moved / copy_rate, flops / matmul_rate)


_QWEN3_4B = dict(layers=36, width=2560, ffn=9728, heads=32, kv_heads=8, head_dim=128, vocab=151936, qk_norm=True)
_QWEN3_8B = dict(width=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, qk_norm=True)

SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("llada-8b", 32, 4096, 12288, 32, 32, 128, 126464, rope_theta=5e5),
        Shape("sdar-4b", **_QWEN3_4B, rope_theta=1e6),  # type: ignore[arg-type]
        Shape("qwen3-4b", **_QWEN3_4B, tied=True, rope_theta=1e6),  # type: ignore[arg-type]
        Shape("qwen3-8b", layers=36, **_QWEN3_8B, rope_theta=1e6),  # type: ignore[arg-type]
        # A block drafter of the Qwen3-8B: five layers of its width, and the target's embedding and head.
        Shape("qwen3-8b-drafter", layers=5, **_QWEN3_8B, rope_theta=1e6),  # type: ignore[arg-type]
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True, rope_theta=1e5),
        Shape("dream-7b", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True, rope_theta=1e6),
        Shape("tiny", 2, 64, 96, 4, 2, 16, 257, tied=True, qk_norm=True, qkv_bias=True),
    )
}
"""Public configs of the models, and ``tiny`` for tests."""
