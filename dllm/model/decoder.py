"""One transformer for all families: RMSNorm, rotary positions, grouped-query attention, optional QKV bias and QK-norm, SwiGLU or MoE.

Letters: B batch, Q new rows, N stored keys, H heads, K key heads, G = H / K, D head width, E model width, V vocabulary.
The head is apart from ``forward``, so that a kernel can fuse the head product with row statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dllm.model.kv_store import KVStore
from dllm.model.packed import Linear, linear
from dllm.types import Attend


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Lengths in tokens, widths in features.

    rotary_dim: leading features of each head that are rotated (None: all). rope_scaling: a Hugging Face rope dictionary of type
    "default", "linear" or "llama3". qk_norm: RMSNorm per head before the rotation. moe: see ``dllm/model/moe.py`` (None: dense).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    rotary_dim: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    moe: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}: got {self.num_heads}")


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Rotary frequencies fp32 [rotary_dim / 2] (Su et al. 2021), with linear or llama3 scaling where the config asks for it."""
    width = config.rotary_dim or config.head_dim
    inv = 1.0 / (config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaling = dict(config.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv
    if kind == "linear":
        return inv / float(scaling["factor"])
    if kind == "llama3":
        factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        old = float(scaling["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inv
        smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inv / factor + smooth * inv
    raise ValueError(f"rope_scaling type must be default, linear or llama3: got {kind!r}")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, Q, D], cos, sin [B, 1, Q, rotary_dim] -> x with its leading rotary_dim features rotated (halves convention)."""
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if rest is None else torch.cat([turned, rest], dim=-1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention of new rows over stored keys and themselves; q, k, v come from one fused product."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, E] -> q [B, H, Q, D], k, v [B, K, Q, D], q and k normed and rotated."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turning = self.heads + self.kv_heads
        if self.q_norm is None or self.k_norm is None:
            # One rotation of both: on a CPU a step of one row is mostly calls.
            q, k = rotate(heads[:, :turning], cos, sin).split([self.heads, self.kv_heads], dim=1)
        else:
            q = rotate(self.q_norm(heads[:, : self.heads]), cos, sin)
            k = rotate(self.k_norm(heads[:, self.heads : turning]), cos, sin)
        return q, k, heads[:, turning:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, Q, D] over k, v [B, K, M, D] with mask [B, 1, G * Q, M] (G-fold, see ``grouped_mask``) -> [B, Q, H * D]."""
        grouped = rearrange(q, "b (k g) q d -> b k (g q) d", k=self.kv_heads)
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        return rearrange(mixed, "b k (g q) d -> b q (k g d)", q=q.shape[2])


def grouped_mask(mask: Tensor, groups: int) -> Tensor:
    """mask [B, Q, M] bool -> [B, 1, groups * Q, M]: the queries of a key head's group lie one after another."""
    return mask.repeat(1, groups, 1)[:, None]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up from one fused product."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module
        if config.moe is not None and config.moe.is_sparse(index):
            from dllm.model.moe import SparseMoE

            self.mlp = SparseMoE(config.hidden_size, config.moe)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """x [B, Q, E] -> (x, k, v): the new residual stream and the new rows' rotated keys and values [B, K, Q, D]."""
        q, k, v = self.attention.project(self.attention_norm(x), cos, sin)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2))
        x = x + self.attention.out(self.attention.attend(q, keys, values, mask))
        return x + self.mlp(self.mlp_norm(x)), k, v


class Decoder(nn.Module):
    """Embedding, layers, final norm; and apart from them the head.

    mask_embedding: an input row of its own for masked positions, fp [E]; None where [MASK] is an ordinary row of the embedding.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mask_embedding: nn.Parameter | None = None
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, E]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_store(self, batch: int, capacity: int) -> KVStore:
        """An empty store for ``batch`` sequences of at most ``capacity`` rows, in this decoder's dtype and device."""
        c = self.config
        return KVStore(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, self.dtype, self.device)

    def embed(self, ids: Tensor, masked: Tensor | None = None, mask_token_id: int | None = None) -> Tensor:
        """ids [B, Q] int64 -> [B, Q, E]; rows where masked [B, Q] take the mask's input row, whatever their id says."""
        if masked is None:
            return self.embed_tokens(ids)
        if self.mask_embedding is not None:
            return torch.where(masked[..., None], self.mask_embedding.to(self.dtype), self.embed_tokens(ids))
        if mask_token_id is None:
            raise ValueError("mask_token_id must be given for a model without a mask embedding of its own: got None")
        return self.embed_tokens(ids.masked_fill(masked, mask_token_id))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] -> cos, sin [B, 1, Q, rotary_dim] in the decoder's dtype; angles in fp32."""
        angles = positions[:, None, :, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def forward(
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
        """Hidden states of the new rows after the final norm, [B, Q, E]; with taps: (hidden, [output of each tapped layer]).

        ids [B, Q] int64, or embeds [B, Q, E]; positions [B, Q] rotary positions; kv: the store whose view the rows read; attend: the
        two rules, or their bool mask [B, Q, N + Q]; rows [B, Q] and write [B, Q]: where the new keys go in the store, and which of
        them do. Mutates kv (values of written rows), not its ``stored`` marks.
        """
        if (ids is None) == (embeds is None):
            raise ValueError("exactly one of ids and embeds must be given")
        x = self.embed(ids) if embeds is None else embeds  # type: ignore[arg-type]
        mask = attend.mask() if isinstance(attend, Attend) else attend
        grouped = grouped_mask(mask, self.config.num_heads // self.config.num_kv_heads)
        cos, sin = self.rotary(positions)
        tapped = []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(x, cos, sin, grouped, None if kv is None else kv.view(index))
            if kv is not None and write is not None:
                assert rows is not None, "write needs rows"
                kv.write(index, rows, write, k, v)
            if index in taps:
                tapped.append(x)
        hidden = self.norm(x)
        return (hidden, tapped) if taps else hidden

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> logits [..., V] in the decoder's dtype."""
        return linear(hidden, self.head_weight)
