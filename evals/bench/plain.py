"""The frozen baseline: one step of T new rows over an N-key cache in plain PyTorch, eager, in a CUDA graph, and compiled.

What a careful user writes without a kernel: separate q, k, v and gate, up products, RMSNorm, rotary positions, scaled dot product
attention over a preallocated cache, the head's product over all rows, softmax and maximum over the vocabulary. Random weights, made
on the device. The compiled twin compiles the layer and the head (one graph each, reused by all layers), and is captured as well.
Nothing here imports the runtime, and nothing here is tuned later: every figure of the project stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.evals.bench.shapes import Shape

Weights = dict[str, Tensor]


def random_layer(shape: Shape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Matrices of one layer [out, in], norms of ones, small biases where the family has them."""

    def matrix(out: int, into: int) -> Tensor:
        return torch.empty(out, into, device=device, dtype=dtype).normal_(0, into**-0.5)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "norm1": torch.ones(shape.width, device=device, dtype=dtype),
        "norm2": torch.ones(shape.width, device=device, dtype=dtype),
        "q": matrix(q, shape.width),
        "k": matrix(kv, shape.width),
        "v": matrix(kv, shape.width),
        "o": matrix(shape.width, q),
        "gate": matrix(shape.ffn, shape.width),
        "up": matrix(shape.ffn, shape.width),
        "down": matrix(shape.width, shape.ffn),
    }
    if shape.qk_norm:
        layer["q_norm"] = torch.ones(shape.head_dim, device=device, dtype=dtype)
        layer["k_norm"] = torch.ones(shape.head_dim, device=device, dtype=dtype)
    if shape.qkv_bias:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            layer[f"{name}_bias"] = torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02)
    return layer


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) * weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves convention; x [B, heads, T, D], cos, sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def plain_layer(
    shape: Shape, w: Weights, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int
) -> Tensor:
    """x [B, T, E] -> x; the new rows' keys and values go into keys, values [B, K, N + T, D] at ``start``."""
    batch, rows, _ = x.shape
    h = rms_norm(x, w["norm1"])

    def heads(name: str) -> Tensor:
        product = F.linear(h, w[name], w.get(f"{name}_bias"))
        return product.view(batch, rows, -1, shape.head_dim).transpose(1, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    if shape.qk_norm:
        q, k = rms_norm(q, w["q_norm"]), rms_norm(k, w["k_norm"])
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    keys[:, :, start : start + rows] = k
    values[:, :, start : start + rows] = v
    stop = start + rows
    mixed = F.scaled_dot_product_attention(
        q, keys[:, :, :stop], values[:, :, :stop], enable_gqa=shape.heads != shape.kv_heads
    )
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, rows, -1), w["o"])
    h = rms_norm(x, w["norm2"])
    return x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])


def plain_head(x: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, E] -> (probability fp32 [B, T], token int64 [B, T]) of each row's likeliest token."""
    logits = F.linear(rms_norm(x, norm), head)
    confidence, token = logits.float().softmax(-1).max(-1)
    return confidence, token


class PlainStep:
    """Weights and one step of a shape; ``step(ids [B, T])`` reads the caches' first ``keys`` rows and writes the T after them.

    compiled: run layer and head through ``torch.compile``. The caches hold random numbers: their values do not change the cost.
    """

    def __init__(
        self, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> None:
        self.shape, self.device, self.dtype = shape, torch.device(device), dtype
        torch.manual_seed(seed)
        self.embedding = torch.empty(shape.vocab, shape.width, device=device, dtype=dtype).normal_(0, 0.02)
        self.layers = [random_layer(shape, self.device, dtype) for _ in range(shape.layers)]
        self.norm = torch.ones(shape.width, device=device, dtype=dtype)
        self.head = self.embedding
        if not shape.tied:
            self.head = torch.empty(shape.vocab, shape.width, device=device, dtype=dtype).normal_(0, shape.width**-0.5)
        self._layer: Callable[..., Tensor] = plain_layer
        self._head: Callable[..., tuple[Tensor, Tensor]] = plain_head
        self.prepare(1, 1, 0)

    def prepare(self, batch: int, rows: int, keys: int, capacity: int | None = None) -> None:
        """Fresh caches and inputs for ``rows`` new rows over ``keys`` stored ones; the caches before are given back first."""
        shape = self.shape
        self.kv = self.ids = torch.empty(0)
        size = max(keys + rows, capacity or 0)
        self.kv = torch.empty(
            shape.layers, 2, batch, shape.kv_heads, size, shape.head_dim, device=self.device, dtype=self.dtype
        ).normal_(0, 1)
        self.ids = torch.arange(batch * rows, device=self.device).view(batch, rows) % shape.vocab
        half = torch.arange(0, shape.head_dim, 2, device=self.device, dtype=torch.float32) / shape.head_dim
        position = torch.arange(keys, keys + rows, device=self.device, dtype=torch.float32)
        angles = position[:, None] * shape.rope_theta**-half
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin, self.keys = angles.cos().to(self.dtype), angles.sin().to(self.dtype), keys

    def compile(self) -> None:
        """From now on steps run through ``torch.compile``d layers and head."""
        self._layer = torch.compile(plain_layer, dynamic=False)
        self._head = torch.compile(plain_head, dynamic=False)

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor]:
        """One forward of the prepared rows -> (confidence [B, T], token [B, T])."""
        x = F.embedding(self.ids, self.embedding)
        for index, weights in enumerate(self.layers):
            keys, values = self.kv[index, 0], self.kv[index, 1]
            x = self._layer(self.shape, weights, x, self.cos, self.sin, keys, values, self.keys)
        return self._head(x, self.norm, self.head)


def captured(step: Callable[[], Any], warmup: int = 3) -> tuple[Callable[[], None], Any]:
    """``step`` as a CUDA graph: (replay, its outputs, which each replay overwrites). The caller keeps what it reads alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph.replay, outputs
