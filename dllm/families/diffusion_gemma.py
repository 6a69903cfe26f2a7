"""DiffusionGemma (Google 2026): transformers' own class and weights behind the decoder's contract.

A causal *encoder* pass stores keys; a bidirectional *canvas* pass reads them. Both have the same weights except one
scalar a layer, and differ only row by row: so one forward here takes rows of both kinds, and a finished block can be
stored in the same forward that denoises the next one. There is no mask token: a canvas starts as uniform random
tokens, and each step is conditioned on the laws of the step before (``soft_embed``).

Letters: B batch, Q new rows, N stored keys, H heads, K key heads, D head width, E model width, C canvas length, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.families import Family
from dllm.families.special_ids import eos_ids
from dllm.model.decoder import rotate
from dllm.model.kv_store import KVStore
from dllm.types import Attend, DecodeSpec


def gemma_classes() -> tuple[Any, Any]:
    """transformers' config and model class; raises ImportError saying what to install where this version lacks them."""
    import transformers

    try:
        return transformers.DiffusionGemmaConfig, transformers.DiffusionGemmaForBlockDiffusion
    except AttributeError as error:
        raise ImportError(
            "family 'diffusion_gemma' needs a transformers release with DiffusionGemmaForBlockDiffusion (5.24 has it): "
            f"got transformers {transformers.__version__}"
        ) from error


class LayeredStore:
    """A ``KVStore`` for layers of several shapes: one store for each (key heads, head width), addressed by layer."""

    def __init__(self, shapes: Sequence[tuple[int, int]], batch: int, capacity: int, dtype: Any, device: Any) -> None:
        counts: dict[tuple[int, int], int] = {}
        self.place: list[tuple[tuple[int, int], int]] = []
        for shape in shapes:
            self.place.append((shape, counts.get(shape, 0)))
            counts[shape] = counts.get(shape, 0) + 1
        self.stores = {
            shape: KVStore(count, batch, shape[0], capacity, shape[1], dtype, device) for shape, count in counts.items()
        }

    @property
    def first(self) -> KVStore:
        return next(iter(self.stores.values()))

    @property
    def capacity(self) -> int:
        return self.first.capacity

    @property
    def batch(self) -> int:
        return self.first.batch

    @property
    def stored(self) -> Tensor:
        """bool [B, capacity], the same in every store."""
        return self.first.stored

    @property
    def extent(self) -> int:
        """Rows that ``view`` returns."""
        return self.first.extent

    @extent.setter
    def extent(self, rows: int) -> None:
        for store in self.stores.values():
            store.extent = rows

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, extent, D] of a layer."""
        shape, index = self.place[layer]
        return self.stores[shape].view(index)

    def write(self, layer: int, rows: Tensor, valid: Tensor, k: Tensor, v: Tensor) -> None:
        """As ``KVStore.write``."""
        shape, index = self.place[layer]
        self.stores[shape].write(index, rows, valid, k, v)

    def mark(self, rows: Tensor, valid: Tensor) -> None:
        """As ``KVStore.mark``."""
        for store in self.stores.values():
            store.mark(rows, valid)

    def crop(self, lengths: Tensor) -> None:
        """As ``KVStore.crop``."""
        for store in self.stores.values():
            store.crop(lengths)

    def compact(self, index: Tensor) -> None:
        """As ``KVStore.compact``."""
        for store in self.stores.values():
            store.compact(index)

    def select(self, keep: Tensor) -> LayeredStore:
        """As ``KVStore.select``."""
        other = object.__new__(LayeredStore)
        other.place = self.place
        other.stores = {shape: store.select(keep) for shape, store in self.stores.items()}
        return other


class DiffusionGemma(nn.Module):
    """``embed``, ``forward``, ``head`` and ``new_store`` over the modules of ``DiffusionGemmaForBlockDiffusion``."""

    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.text = wrapped.config.text_config
        if self.text.use_bidirectional_attention == "all":
            raise ValueError("text_config use_bidirectional_attention must leave text causal: got 'all'")

    @property
    def decoder(self) -> Any:
        """The canvas model, which owns every weight of the text part."""
        return self.wrapped.model.decoder

    @property
    def device(self) -> torch.device:
        return self.decoder.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.weight.dtype

    def new_store(self, batch: int, capacity: int) -> LayeredStore:
        """An empty store for ``batch`` sequences of at most ``capacity`` rows."""
        shapes = []
        for layer in self.decoder.layers:
            attention = layer.self_attn
            shapes.append((attention.k_proj.out_features // attention.head_dim, attention.head_dim))
        return LayeredStore(shapes, batch, capacity, self.dtype, self.device)

    def embed(self, ids: Tensor, masked: Tensor | None = None, mask_token_id: int | None = None) -> Tensor:
        """ids [B, Q] int64 -> [B, Q, E]. There is no mask row: masked and mask_token_id change nothing here."""
        return self.decoder.embed_tokens(ids)

    def soft_embed(self, logits: Tensor) -> Tensor:
        """Conditioning signal of a step: the mean embedding under the law of logits [B, C, V] -> [B, C, E]."""
        table = self.decoder.embed_tokens
        law = logits.softmax(-1, dtype=torch.float32).to(table.weight.dtype)
        return (law @ table.weight) * table.embed_scale.to(table.weight.dtype)

    def forward(
        self,
        ids: Tensor | None,
        positions: Tensor,
        kv: LayeredStore | None,
        attend: Attend | Tensor,
        taps: Sequence[int] = (),
        *,
        embeds: Tensor | None = None,
        rows: Tensor | None = None,
        write: Tensor | None = None,
        canvas: Tensor | None = None,
        soft: Tensor | None = None,
    ) -> Any:
        """Hidden states of the new rows after the final norm, [B, Q, E]; with taps: (hidden, [tapped layers]).

        As ``Decoder.forward``, and: canvas [B, Q] bool says which rows are canvas (None: those that are not written);
        soft [B, Q, E] = ``soft_embed`` of the step before at canvas rows, zero in a first step (None: zero). ``attend``
        gives what the blocks allow; encoder rows are made causal among each other and sliding layers get their window
        here. A stored key's position is its row in the store.
        """
        if (ids is None) == (embeds is None):
            raise ValueError("exactly one of ids and embeds must be given")
        x = self.embed(ids) if embeds is None else embeds  # type: ignore[arg-type]
        if canvas is None:
            canvas = torch.ones_like(positions, dtype=torch.bool) if write is None else ~write
        conditioned = self.decoder.self_conditioning(x, torch.zeros_like(x) if soft is None else soft)
        x = torch.where(canvas[..., None], conditioned, x)
        masks = self._masks(attend.mask() if isinstance(attend, Attend) else attend, positions, canvas)
        kinds = self.text.layer_types
        tables = {kind: self.decoder.rotary_emb(x, positions, kind) for kind in set(kinds)}
        tapped = []
        for index, kind in enumerate(kinds):
            cos, sin = (table[:, None] for table in tables[kind])
            past = None if kv is None else kv.view(index)
            x, k, v = self._layer(index, x, cos, sin, masks[kind], past, canvas)
            if kv is not None and write is not None:
                assert rows is not None, "write needs rows"
                kv.write(index, rows, write, k, v)
            if index in taps:
                tapped.append(x)
        hidden = self.decoder.norm(x)
        return (hidden, tapped) if taps else hidden

    def _masks(self, mask: Tensor, positions: Tensor, canvas: Tensor) -> dict[str, Tensor]:
        """Block rule [B, Q, N + Q] -> {layer kind: bool [B, 1, Q, N + Q]}."""
        queries = positions.shape[1]
        stored = torch.arange(mask.shape[-1] - queries, device=mask.device).expand(mask.shape[0], -1)
        key = torch.cat([stored, positions], dim=1)[:, None, :]
        key_in_canvas = torch.cat([torch.zeros_like(stored, dtype=torch.bool), canvas], dim=1)[:, None, :]
        query = positions[:, :, None]
        mask = mask & (canvas[..., None] | (key <= query) & ~key_in_canvas | (key == query))
        # An encoder row looks back from itself; all rows of a canvas look back from the canvas's first position.
        start = torch.where(canvas, positions, torch.full_like(positions, 2**30)).amin(1)[:, None, None]
        back_from = torch.where(canvas[..., None], start, query)
        near = (back_from - key < self.text.sliding_window) | (canvas[..., None] & key_in_canvas)
        return {"full_attention": mask[:, None], "sliding_attention": (mask & near)[:, None]}

    def _layer(
        self,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None,
        canvas: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer over rows of both kinds -> (x, rotated keys, values [B, K, Q, D])."""
        layer = self.decoder.layers[index]
        attention = layer.self_attn
        h = layer.input_layernorm(x)
        heads = (*h.shape[:2], -1, attention.head_dim)
        q = attention.q_norm(attention.q_proj(h).view(heads)).transpose(1, 2)
        raw = attention.k_proj(h).view(heads)
        k = rotate(attention.k_norm(raw).transpose(1, 2), cos, sin)
        # Layers with full attention have no value projection: values are the un-normed keys under the value norm.
        v = attention.v_norm(raw if attention.v_proj is None else attention.v_proj(h).view(heads)).transpose(1, 2)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2))
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), keys, values, attn_mask=mask, scale=attention.scaling, enable_gqa=True
        )
        x = x + layer.post_attention_layernorm(attention.o_proj(mixed.transpose(1, 2).flatten(2)))
        dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(x)))
        flat = x.reshape(-1, x.shape[-1])
        _, weights, chosen = layer.router(flat)
        sparse = layer.experts(layer.pre_feedforward_layernorm_2(flat), chosen, weights).view_as(x)
        x = x + layer.post_feedforward_layernorm(dense + layer.post_feedforward_layernorm_2(sparse))
        encoder = self.wrapped.model.encoder.language_model.layers[index]
        return x * torch.where(canvas[..., None], layer.layer_scalar, encoder.layer_scalar), k, v

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> fp32 logits [..., V], soft-capped: cap * tanh(logits / cap)."""
        cap = self.wrapped.final_logit_softcapping
        return torch.tanh(self.wrapped.lm_head(hidden).float() / cap) * cap


def _build(config: Mapping[str, Any]) -> nn.Module:
    config_class, model_class = gemma_classes()
    return DiffusionGemma(model_class(config_class.from_dict(dict(config))))


def _load(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Read by transformers, which ties encoder and decoder; its own count of tensors has to come out even."""
    _, model_class = gemma_classes()
    wrapped, info = model_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    counts = [("missing", "missing_keys"), ("unknown", "unexpected_keys"), ("misshapen", "mismatched_keys")]
    found = [f"{len(info[key])} {what}: {sorted(map(str, info[key]))[:8]}" for what, key in counts if info.get(key)]
    if found:
        raise ValueError(
            f"tensors of {folder} do not fit family 'diffusion_gemma' with its config.json: {'; '.join(found)}"
        )
    return DiffusionGemma(wrapped.to(device))


def diffusion_gemma_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Canvases of ``canvas_length`` after the prompt; no mask token."""
    text = config["text_config"]
    vocab_size = text.get("vocab_size", 262_144)
    return DecodeSpec(
        mask_token_id=None,
        eos_token_ids=eos_ids({"eos_token_id": text.get("eos_token_id", 1)}, (), vocab_size),
        logits_shift=0,
        attention="block_causal",
        block_length=config.get("canvas_length") or 256,
        max_positions=text.get("max_position_embeddings", 131_072),
        vocab_size=vocab_size,
        first_slot="free",
        confidence="processed",
        block_origin="prompt",
        default_sampler="uniform_canvas",
        default_cache="block",
    )


FAMILY = Family(
    name="diffusion_gemma",
    matches=lambda config: config.get("model_type") == "diffusion_gemma",
    build=_build,
    spec=diffusion_gemma_spec,
    load=_load,
)
