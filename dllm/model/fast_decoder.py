"""The decoder's forward on the kernels: each weight read once, no launch that another one could have done.

A layer is: fused QKV product; norm, rotation and store write in one launch; attention over the store by the two rules; output product;
residual + RMSNorm; gate and up product with its SwiGLU; down product; residual + the next layer's RMSNorm. It shares its weights with
a ``Decoder``, which stays the truth and takes what does not fit here: more new rows than ``MAX_ROWS`` a sequence, masks that are no
rule, mixtures of experts, layers on several devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dllm.kernels._launch import use_triton
from dllm.kernels.attention import TilePlan, attention, plan_tiles
from dllm.kernels.linear_table import LinearShape, current_table
from dllm.kernels.lm_head_stats import lm_head_stats
from dllm.kernels.norm_rope_kv import add_rms_norm, rms_norm, rope_write, swiglu
from dllm.kernels.skinny_linear import MAX_ROWS as SKINNY_ROWS
from dllm.model.decoder import Attention, Decoder, DecoderLayer, SwiGLU
from dllm.model.kv_store import KVStore
from dllm.types import Attend, RowStats

MAX_ROWS = 256
"""New rows of one sequence that the attention kernel takes; a longer forward (a prefill) is bound by arithmetic, not by memory."""


def unfit(decoder: Any) -> str | None:
    """Why this decoder cannot run here, or None."""
    if type(decoder) is not Decoder:
        return f"{type(decoder).__name__} is no plain Decoder"
    if any(not isinstance(layer.mlp, SwiGLU) for layer in decoder.layers):
        return "a layer's feed-forward is no SwiGLU"
    if len({p.device for p in decoder.parameters()}) > 1:
        return "layers lie on several devices"
    if any(layer._forward_pre_hooks or layer._forward_hooks for layer in decoder.modules()):
        return "modules have hooks"
    return None


class FastDecoder:
    """``Decoder``'s interface on the kernels; the weights are the decoder's own."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises ValueError for a decoder that ``unfit`` names."""
        reason = unfit(decoder)
        if reason is not None:
            raise ValueError(f"decoder must be a dense Decoder on one device: got one where {reason}")
        self.decoder, self.config = decoder, decoder.config

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        """The shared weights."""
        return self.decoder.parameters()

    def new_store(self, batch: int, capacity: int) -> KVStore:
        """As ``Decoder.new_store``."""
        return self.decoder.new_store(batch, capacity)

    def embed(self, ids: Tensor, masked: Tensor | None = None, mask_token_id: int | None = None) -> Tensor:
        """As ``Decoder.embed``."""
        return self.decoder.embed(ids, masked, mask_token_id)

    def head(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.head``: logits [..., V], for whoever needs all of them."""
        return self.decoder.head(hidden)

    def head_stats(
        self,
        hidden: Tensor,
        needs: frozenset[str],
        banned: Tensor | None = None,
        uniform: Tensor | None = None,
        temperature: float = 0.0,
        processed_confidence: bool = False,
    ) -> RowStats:
        """``row_stats`` of the laws of hidden [B, S, E] without their logits: head product and statistics in one read of the head."""
        numbers = lm_head_stats(
            hidden,
            self.decoder.head_weight,
            needs,
            banned,
            uniform,
            temperature,
            processed_confidence=processed_confidence,
        )
        return numbers.row_stats()

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
        """As ``Decoder.forward``; mutates kv where rows are written."""
        if not isinstance(attend, Attend) or positions.shape[1] > MAX_ROWS:
            return self.decoder(ids, positions, kv, attend, taps, embeds=embeds, rows=rows, write=write)
        if (ids is None) == (embeds is None):
            raise ValueError("exactly one of ids and embeds must be given")
        x = self.embed(ids) if embeds is None else embeds  # type: ignore[arg-type]
        cos, sin = self._angles(positions)
        # One list of key tiles serves all layers; the reference reads the mask instead.
        tiles = plan_tiles(attend) if kv is not None and use_triton(x) else None
        layers: list[DecoderLayer] = list(self.decoder.layers)  # type: ignore[arg-type]
        tapped = []
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, layers[0].attention_norm.weight, eps)
        for index, layer in enumerate(layers):
            store = None if kv is None else (kv.data[index, 0], kv.data[index, 1], kv.extent)
            mixed = self._mix(layer.attention, normed, cos, sin, attend, tiles, store, rows, write)
            x, normed = add_product(mixed, layer.attention.out, x, layer.mlp_norm.weight, eps)
            mlp: SwiGLU = layer.mlp  # type: ignore[assignment]
            last = index + 1 == len(layers)
            following = self.decoder.norm if last else layers[index + 1].attention_norm
            x, normed = add_product(gated(normed, mlp.gate_up), mlp.down, x, following.weight, eps)
            if index in taps:
                tapped.append(x)
        return (normed, tapped) if taps else normed

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] -> cos, sin [B, Q, rotary_dim / 2] fp32 (``Decoder.rotary`` rounds them to the model's dtype)."""
        angles = positions[..., None] * self.decoder.inv_freq
        return angles.cos(), angles.sin()

    def _mix(
        self,
        module: Attention,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        tiles: TilePlan | None,
        store: tuple[Tensor, Tensor, int] | None,
        rows: Tensor | None,
        write: Tensor | None,
    ) -> Tensor:
        """normed [B, Q, E] -> heads' outputs [B, Q, H * D]; writes the new keys and values where asked."""
        writes = store is not None and write is not None
        partial = splits(normed, module.qkv)
        q, k, v = rope_write(
            parts(normed, module.qkv) if partial else linear(normed, module.qkv),
            cos,
            sin,
            module.heads,
            module.kv_heads,
            q_weight=None if module.q_norm is None else module.q_norm.weight,
            k_weight=None if module.k_norm is None else module.k_norm.weight,
            eps=self.config.rms_norm_eps,
            rows=rows if writes else None,
            valid=write if writes else None,
            keys=store[0] if store is not None and writes else None,
            values=store[1] if store is not None and writes else None,
            partial=partial,
            dtype=normed.dtype,
        )
        if store is None:
            return attention(q, k, v, attend)
        keys, values, extent = store
        return attention(q, k, v, attend, keys[:, :, :extent], values[:, :, :extent], plan=tiles)


def few(x: Tensor) -> bool:
    """Whether the rows of x [B, Q, E] are few enough for the skinny products."""
    return x.shape[:-1].numel() <= SKINNY_ROWS


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """x [B, Q, I] -> [B, Q, O]."""
    return current_table(x.device).linear(x, module.weight, module.bias)


def splits(x: Tensor, module: nn.Linear) -> bool:
    """Whether the product is best left unsummed for the next launch: few rows, no bias, and not faster by cuBLAS."""
    if not few(x) or module.bias is not None:
        return False
    rows, (outputs, inputs) = x.shape[:-1].numel(), module.weight.shape
    choice = current_table(x.device).choose(LinearShape("linear", rows, outputs, inputs, x.dtype))
    return choice.config is not None


def parts(x: Tensor, module: nn.Linear) -> Tensor:
    """x [B, Q, I] -> unsummed parts of its product, fp32 [S, B * Q, O]."""
    return current_table(x.device).partial(x, module.weight)


def gated(x: Tensor, module: nn.Linear) -> Tensor:
    """x [B, Q, E] -> silu(gate(x)) * up(x) [B, Q, F], gate and up the halves of one weight."""
    if not few(x):
        return swiglu(linear(x, module))
    gate, up = module.weight.chunk(2)
    gate_bias, up_bias = (None, None) if module.bias is None else module.bias.chunk(2)
    return current_table(x.device).swiglu(x, gate, up, gate_bias, up_bias)


def add_product(x: Tensor, module: nn.Linear, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(module(x) + residual, its RMSNorm with weight [E]), both [B, Q, E]; a split product is summed by the norm's launch."""
    if splits(x, module):
        return add_rms_norm(parts(x, module), residual, weight, eps, partial=True)
    return add_rms_norm(linear(x, module), residual, weight, eps)
