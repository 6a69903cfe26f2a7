"""DFly as a drafter model of vLLM: its DFlash class with a context for each layer and walked logits.

Imported by vLLM only (``vllm_plugin.register`` hands it the name). Written against vllm 0.32.0. The proposer there calls
``combine_hidden_states`` (one [C, D] per context token may come out), ``precompute_and_store_context_kv`` on the same rows,
``forward`` on [anchor, MASK, ...] of each request, and ``compute_logits`` on the mask slots. So what differs between layers
goes around the proposer in a buffer of the model's own, and the anchors are kept from ``forward``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import _custom_ops as ops  # type: ignore[import-not-found]
from vllm.config import VllmConfig  # type: ignore[import-not-found]
from vllm.model_executor.models.qwen3_dflash import (  # type: ignore[import-not-found]
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from dllm.bridge.vllm_plugin import DFlyExtras

for _name in ("_project_context_kv", "_normalize_context_k"):
    if not hasattr(DFlashQwen3Model, _name):
        raise ImportError(f"this vllm has no DFlashQwen3Model.{_name}: the DFly plugin was written for vllm 0.32.0")


class DFlyQwen3Model(DFlashQwen3Model):
    """The body: keys and values of the context come from one input per layer."""

    def _project_context_kv(
        self, context_states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """context_states [C, N, D] -> keys and values [N, C, num_kv_heads, head_dim], the keys not normed yet."""
        width = context_states.shape[-1]
        # Layer-major, so that each layer's rows are contiguous.
        context = context_states.transpose(0, 1).reshape(num_layers * num_ctx, width)
        normed = torch.empty_like(context)
        ops.rms_norm(normed, context, self._hidden_norm_weight, self._rms_norm_eps)
        rows = normed.view(num_layers, num_ctx, width)
        # The projections' own weights may have been packed away by now; the fused ones are plain copies of their k and v rows.
        if self._fused_kv_weight is not None:
            weights = self._fused_kv_weight.chunk(num_layers)
            biases = [None] * num_layers if self._fused_kv_bias is None else self._fused_kv_bias.chunk(num_layers)
            both = [F.linear(*parts) for parts in zip(rows, weights, biases, strict=True)]
        else:  # quantised: only the projection itself can read its weight
            pairs = zip(self._context_qkv_projs, rows, self._context_q_sizes, strict=True)
            both = [projection(x)[0][:, skip:] for projection, x, skip in pairs]
        kv = torch.stack(both).view(num_layers, num_ctx, 2, num_kv_heads, head_dim)
        return kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous()

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        """all_k [N, C, num_kv_heads, head_dim] -> the same, normed by each layer's own weight."""
        # The CPU kernel of 0.32.0 norms every layer with the first row of a two-dimensional weight.
        out = torch.empty_like(all_k)
        for index, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[index], all_k[index], weight, self._rms_norm_eps)
        return out


class DFlyQwen3ForCausalLM(DFlashQwen3ForCausalLM):
    """What the DFlash proposer drives. State between its calls: the layers' contexts, and the ids of the last block."""

    model_cls = DFlyQwen3Model
    contexts: Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative, config = vllm_config.speculative_config, self.config
        self.num_drafts = int(speculative.num_speculative_tokens)
        _check(speculative, config, self.draft_id_to_target_id)
        self.extras = DFlyExtras.of_config(config)
        # Between the two calls the proposer may copy the rows or replay a graph, so they lie at a fixed address.
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        shape = (rows, config.num_hidden_layers, config.hidden_size)
        self.register_buffer("contexts", torch.zeros(shape, dtype=vllm_config.model_config.dtype), persistent=False)
        self.block_ids: Tensor | None = None

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Taps [C, T * D] -> their shared projection [C, D]; the layers' contexts are kept for the next call."""
        shared = super().combine_hidden_states(hidden_states)
        count = shared.shape[0]
        if count > self.contexts.shape[0]:
            raise ValueError(f"hidden_states must hold at most {self.contexts.shape[0]} tokens: got {count}")
        self.contexts[:count] = self.extras.contexts(hidden_states, shared)
        return shared

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | list[Tensor | None] | None = None,
    ) -> None:
        """Write keys and values of the rows that were combined last; context_states [C, D] says only which rows."""
        # The rows are a slice of what combine_hidden_states returned, or of a buffer that it was copied to from row 0.
        start = context_states.storage_offset() // context_states.stride(0)
        own = self.contexts[start : start + context_states.shape[0]]
        if own.shape[0] != context_states.shape[0]:
            raise ValueError(f"context_states must be rows below {self.contexts.shape[0]}: got {start} on")
        self.model.precompute_and_store_context_kv(own, context_positions, context_slot_mapping)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        # A view of the proposer's own buffer: it stays right where a replayed graph skips this line.
        self.block_ids = input_ids
        return super().forward(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [R * K, D] of the mask slots -> logits [R * K, V], walked from left to right."""
        if self.block_ids is None or hidden_states.shape[0] % self.num_drafts:
            raise ValueError(f"hidden_states must hold {self.num_drafts} slots a request: got {hidden_states.shape[0]}")
        requests = hidden_states.shape[0] // self.num_drafts
        anchors = self.block_ids[:: self.num_drafts + 1][:requests]
        return self.extras.walk(hidden_states, anchors, self.model.embed_tokens, super().compute_logits)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """Greedy drafts, for ``use_local_argmax_reduction``: the correction needs whole rows, so nothing is reduced."""
        return self.compute_logits(hidden_states).argmax(dim=-1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        return super().load_weights(self.extras.take_weights(weights))


def _check(speculative: Any, config: Any, id_map: Tensor | None) -> None:
    """Refuse what would draft wrongly without an error."""
    block = getattr(config, "block_size", None)
    if block is not None and speculative.num_speculative_tokens > block - 1:
        raise ValueError(
            f"num_speculative_tokens must be at most {block - 1} (block_size {block}): got {speculative.num_speculative_tokens}"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        raise NotImplementedError(
            "num_speculative_tokens_per_batch_size: the walk needs one number of drafts, a block each"
        )
    if id_map is not None:
        raise NotImplementedError("draft_vocab_size: a DFly drafts over the target's whole vocabulary")
