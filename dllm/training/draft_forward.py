"""The forwards of drafter training: the frozen target over packed documents, and every block of a batch in one pass of the drafter.

Rule of the drafter: slots of anchor a see the target's features of their own document before a (inside the layer's window), and the
slots of their own block (the earlier ones where the layer is causal); blocks do not see one another. It equals, block by block, what
``Drafter.block`` computes after ``feed`` with the tokens before the anchor. Letters as in ``draft_batches.py``; D width, F width of taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dllm.drafters.drafter import Drafter, context_keys
from dllm.model.decoder import Decoder, DecoderConfig, inverse_frequencies
from dllm.training.draft_batches import DraftBatch
from dllm.training.forward import Kernel, dense_layer, flex_layer

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(sequence, head, query, key) indices -> bool: may the query see the key."""


class TargetReader:
    """Taps and final-normed states of the frozen target over packed documents."""

    def __init__(self, decoder: Decoder, layer_ids: Sequence[int], kernel: Kernel, compiled: bool) -> None:
        self.decoder, self.layer_ids, self.kernel = decoder, list(layer_ids), kernel
        plain: Callable[..., Tensor] = dense_layer if kernel == "sdpa" else flex_layer
        self.layer = torch.compile(plain, dynamic=False) if compiled else plain

    @torch.no_grad()
    def read(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """-> (taps side by side [B, L, F], hidden states after the final norm [B, L, D])."""
        decoder, document = self.decoder, batch.document

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (document[b, q] == document[b, k]) & (k <= q)

        mask = make_mask(rule, self.kernel, len(document), (document.shape[1],) * 2, decoder.dtype, document.device)
        x = decoder.embed(batch.ids)
        cos, sin = decoder.rotary(batch.position)
        found = {}
        for index, layer in enumerate(decoder.layers):
            x = self.layer(layer, x, cos, sin, mask)
            if index in self.layer_ids:
                found[index] = x
        return torch.cat([found[i] for i in self.layer_ids], dim=-1), decoder.norm(x)


class DraftForward:
    """Final hidden states of all blocks of a batch, by the drafter's own parameters."""

    def __init__(self, drafter: Drafter, kernel: Kernel, compiled: bool) -> None:
        if drafter.config.kind not in ("dflash", "dfly"):
            raise ValueError(f"kind must be dflash or dfly to be trained: got {drafter.config.kind!r}")
        if drafter.config.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size must be the target's to be trained: got {drafter.config.draft_vocab_size}"
            )
        self.drafter, self.kernel = drafter, kernel
        self.fuse: Callable[[Tensor], list[Tensor]] = drafter.fuse
        self.layer: Callable[..., Tensor] = draft_layer_dense if kernel == "sdpa" else draft_layer_flex
        self.correct: Callable[..., Tensor] | None = getattr(drafter, "hidden_correction", None)
        self.frequencies = inverse_frequencies(drafter.config.body).to(drafter.device)
        if compiled:
            self.fuse = torch.compile(self.fuse, dynamic=False)
            self.layer = torch.compile(self.layer, dynamic=False)
            self.correct = None if self.correct is None else torch.compile(self.correct, dynamic=False)

    def hidden(self, batch: DraftBatch, features: Tensor) -> Tensor:
        """features [B, L, F] -> states after the drafter's final norm [B, A, S - 1, D], without the anchor's slot."""
        drafter, config, slots = self.drafter, self.drafter.config, batch.num_slots
        batches, anchors = batch.anchor.shape
        start = batch.ids.gather(1, batch.anchor)[..., None]
        tokens = F.pad(start, (0, slots - 1), value=config.mask_token_id).flatten(1)
        steps = torch.arange(slots, device=tokens.device)
        position = (batch.position.gather(1, batch.anchor)[..., None] + steps).flatten(1)
        cos, sin = self._rotary(position)
        context_cos, context_sin = self._rotary(batch.position)
        x = drafter.embed(tokens)
        masks: dict[tuple[int | None, bool], Any] = {}
        for index, (layer, fused) in enumerate(zip(drafter.layers, self.fuse(features.to(drafter.dtype)), strict=True)):
            window, causal = config.windows[index], config.causal[index]
            if (window, causal) not in masks:
                rule = block_rule(batch, position, window, causal)
                sizes = (anchors * slots, batch.ids.shape[1] + anchors * slots)
                masks[window, causal] = make_mask(rule, self.kernel, batches, sizes, x.dtype, x.device)
            x = self.layer(layer, x, fused, (cos, sin), (context_cos, context_sin), masks[window, causal])
        return drafter.norm(x).unflatten(1, (anchors, slots))[:, :, 1:]

    def corrected(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Teacher forcing: hidden [..., D], previous int64 [...]: the text's token before the slot -> what the head reads."""
        if self.correct is None:
            return hidden
        rows = self.drafter.target.embed(previous).to(self.drafter.dtype)
        return self.correct(hidden, rows)

    def _rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """position [B, Q] -> cos, sin [B, 1, Q, head_dim]; angles in fp32."""
        angles = position[:, None, :, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.drafter.dtype), angles.sin().to(self.drafter.dtype)


def block_rule(batch: DraftBatch, position: Tensor, window: int | None, causal: bool) -> Rule:
    """The rule of the module's docstring over keys [context; blocks]; position [B, A * S] of the block rows."""
    slots, (batches, anchors) = batch.num_slots, batch.anchor.shape
    block = torch.arange(anchors, device=position.device, dtype=torch.int32).repeat_interleave(slots)
    nowhere = torch.full_like(position, -2, dtype=torch.int32)
    # Of each key: its document and index in the text, or (for block rows) its block; position for both.
    key_document = torch.cat([batch.document, nowhere], dim=1)
    key_block = torch.cat([torch.full_like(batch.document, -1), block.expand(batches, -1)], dim=1)
    key_position = torch.cat([batch.position, position.to(torch.int32)], dim=1)
    anchor = batch.anchor.repeat_interleave(slots, dim=1)
    document = batch.document.gather(1, anchor)
    query_position = position.to(torch.int32)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = query_position[b, q] - key_position[b, k]
        before = (key_document[b, k] == document[b, q]) & (k < anchor[b, q])
        own = key_block[b, k] == block[q]
        if causal:
            own = own & (distance >= 0)
        seen = before | own
        return seen if window is None else seen & (distance.abs() < window)

    return rule


def make_mask(
    rule: Rule, kernel: Kernel, batches: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A rule over [queries, keys] in the form that the kernel takes: additive [B, 1, Q, K], or FlexAttention's tiles."""
    if kernel == "flex":
        return create_block_mask(rule, batches, None, *sizes, device=device)
    b, q, k = (torch.arange(n, device=device) for n in (batches, *sizes))
    seen = rule(b[:, None, None], b, q[:, None], k)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))[:, None]


Angles = tuple[Tensor, Tensor]


def _block_rows(layer: Any, x: Tensor, fused: Tensor, angles: Angles, context_angles: Angles) -> tuple[Tensor, ...]:
    """Queries of the block rows; keys and values of [context; block rows]."""
    q, k, v = layer.attention.project(layer.attention_norm(x), *angles)
    context_k, context_v = context_keys(layer.attention, fused, *context_angles)
    return q, torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)


def draft_layer_dense(
    layer: nn.Module, x: Tensor, fused: Tensor, angles: Angles, context_angles: Angles, bias: Tensor
) -> Tensor:
    """One layer over block rows x [B, A * S, D] with context features fused [B, L, D] and an additive mask."""
    attention: Any = layer.attention
    q, k, v = _block_rows(layer, x, fused, angles, context_angles)
    repeats = attention.heads // attention.kv_heads
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    x = x + attention.out(rearrange(mixed, "b h r d -> b r (h d)"))
    return x + layer.mlp(layer.mlp_norm(x))  # type: ignore[operator]


def draft_layer_flex(
    layer: nn.Module, x: Tensor, fused: Tensor, angles: Angles, context_angles: Angles, mask: Any
) -> Tensor:
    """The same with FlexAttention, which skips tiles in which nobody sees anybody."""
    attention: Any = layer.attention
    q, k, v = _block_rows(layer, x, fused, angles, context_angles)
    mixed = flex_attention(q, k, v, block_mask=mask, enable_gqa=attention.heads != attention.kv_heads)
    x = x + attention.out(rearrange(mixed, "b h r d -> b r (h d)"))  # type: ignore[arg-type]
    return x + layer.mlp(layer.mlp_norm(x))  # type: ignore[operator]


def fused_splits(config: DecoderConfig) -> dict[str, list[int]]:
    """Rows of the matrices inside the fused products of a layer, by the end of the parameter's name."""
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"attention.qkv.weight": [heads, keys, keys], "mlp.gate_up.weight": [config.intermediate_size] * 2}
