"""A drafter's pass on the kernels, in fixed shapes and few launches: context write, block, and the walk of DFly's correction.

The weights are the drafter's own (``dllm/drafters/drafter.py`` stays the truth), but for two products that are folded where they are
linear: DFly's fusion ``W_fc [taps] + sum_l w_il tap_l`` is one matrix a layer, and its normed embedding rows are a table. Greedy drafts
only. The store is this pass's own, so that a captured round keeps its addresses whatever the drafter is used for meanwhile.

Letters: B rows, C context tokens, n drafts, Q = n + 1 slots, D width, F = taps * D, L layers, K candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.drafters.dflash import DFlash
from dllm.drafters.dfly import DFly, HiddenCorrection
from dllm.drafters.drafter import Drafter
from dllm.kernels._launch import use_triton
from dllm.kernels.attention import TilePlan, attention, plan_tiles
from dllm.kernels.linear_table import current_table
from dllm.kernels.lm_head_stats import lm_head_stats
from dllm.kernels.norm_rope_kv import rms_norm, rope_write
from dllm.model.decoder import Attention, DecoderLayer, SwiGLU
from dllm.model.fast_decoder import add_product, gated, linear, parts, splits
from dllm.model.kv_store import KVStore
from dllm.types import LOWEST_GROUP, Attend, pack_bits

TABLE_BYTES = 2**28
"""Largest table of normed embedding rows; above it they are normed one by one."""


def unfit(drafter: Any) -> str | None:
    """Why this drafter cannot run here, or None."""
    if type(drafter) not in (DFlash, DFly):
        return f"a drafter of type {type(drafter).__name__}"
    config, target = drafter.config, drafter.target
    if not target.is_own or drafter.device != target.device or drafter.dtype != target.dtype:
        return "a drafter whose target is no Decoder of its device and dtype"
    if any(window is not None for window in config.windows):
        return "a drafter with a window"
    if drafter.lm_head is not None:
        return "a drafter with a head of its own"
    if config.final_logit_softcapping is not None:
        # Strictly monotonic on paper, but not in fp32, where it makes ties.
        return "a drafter with a soft cap"
    if any(not isinstance(layer.mlp, SwiGLU) for layer in drafter.layers):
        return "a drafter whose feed-forward is no SwiGLU"
    return None


class FastDrafter:
    """Context and block of one bucket of ``batch`` rows, ``capacity`` columns and ``num_drafts`` drafts.

    Raises ValueError for a drafter that ``unfit`` names.
    """

    def __init__(self, drafter: Drafter, batch: int, capacity: int, num_drafts: int) -> None:
        reason = unfit(drafter)
        if reason is not None:
            raise ValueError(f"drafter must be one that runs on the kernels: got {reason}")
        body, device = drafter.config.body, drafter.device
        self.drafter, self.eps, self.num_drafts = drafter, body.rms_norm_eps, num_drafts
        self.store = KVStore(body.num_layers, batch, body.num_kv_heads, capacity, body.head_dim, drafter.dtype, device)
        self.layers: list[DecoderLayer] = list(drafter.layers)  # type: ignore[arg-type]
        self.fusion = fusion_weight(drafter)
        slots = num_drafts + 1
        self.ids = torch.full((batch, slots), drafter.config.mask_token_id, device=device)
        self.group = torch.zeros(batch, slots, dtype=torch.int32, device=device)
        self.low = torch.full_like(self.group, LOWEST_GROUP)
        self.bits = {causal: block_bits(num_drafts, causal, device) for causal in set(drafter.config.causal)}
        self.correction: HiddenCorrection | None = getattr(drafter, "hidden_correction", None)
        self.table: Tensor | None = None
        embeddings = drafter.target.embed_weight
        if self.correction is not None:
            self.both = torch.zeros(num_drafts, batch, 2 * body.hidden_size, dtype=drafter.dtype, device=device)
            if embeddings.numel() * embeddings.element_size() <= TABLE_BYTES:
                self.table = rms_norm(embeddings.detach(), self.correction.embed_norm.weight, self.eps)

    @torch.no_grad()
    def feed(self, features: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, valid: Tensor) -> None:
        """Write the context of tokens at rows [B, C] where valid [B, C]: features [B, C, F], cos, sin [B, C, head_dim / 2] fp32."""
        mixed = current_table(features.device).linear(features, self.fusion)
        context = rms_norm(
            mixed.unflatten(-1, (-1, self.drafter.fc.out_features)), self.drafter.hidden_norm.weight, self.eps
        )
        for index, layer in enumerate(self.layers):
            module = layer.attention
            skip = module.heads * module.head_dim
            bias = None if module.qkv.bias is None else module.qkv.bias[skip:]
            kv = current_table(features.device).linear(
                context[:, :, index % context.shape[2]], module.qkv.weight[skip:], bias
            )
            norm = None if module.k_norm is None else module.k_norm.weight
            rope_write(
                kv, cos, sin, 0, module.kv_heads, q_weight=norm, k_weight=norm, eps=self.eps, rows=rows, valid=valid,
                keys=self.store.data[index, 0], values=self.store.data[index, 1],
            )  # fmt: skip

    @torch.no_grad()
    def propose(self, anchor: Tensor, limits: Tensor, key_group: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Drafts [B, n] int64 behind anchor [B] int64.

        limits [B] int64: drafts of each row that count; key_group [B, columns] int32: 0 where the row's context is stored; cos, sin [B,
        Q, head_dim / 2] fp32 of the slots' positions.
        """
        self.ids[:, 0].copy_(anchor)
        return self.choose(self.block(limits, key_group, cos, sin), anchor)

    def block(self, limits: Tensor, key_group: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Final hidden states of the slots, the anchor's included: [B, Q, D]."""
        drafter = self.drafter
        x = drafter.embed(self.ids)
        rules = {
            causal: Attend(key_group, self.low, self.group, bits.index_select(0, limits))
            for causal, bits in self.bits.items()
        }
        # The rules differ among the new rows only, so one list of key tiles serves all.
        tiles = plan_tiles(next(iter(rules.values()))) if use_triton(x) else None
        normed = rms_norm(x, self.layers[0].attention_norm.weight, self.eps)
        for index, layer in enumerate(self.layers):
            mixed = self._mix(index, layer.attention, normed, cos, sin, rules[drafter.config.causal[index]], tiles)
            x, normed = add_product(mixed, layer.attention.out, x, layer.mlp_norm.weight, self.eps)
            mlp: SwiGLU = layer.mlp  # type: ignore[assignment]
            last = index + 1 == len(self.layers)
            following = drafter.norm if last else self.layers[index + 1].attention_norm
            x, normed = add_product(gated(normed, mlp.gate_up), mlp.down, x, following.weight, self.eps)
        return normed

    def choose(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """Tokens [B, n] of the slots behind the anchor's."""
        head = self._head()
        if self.correction is None:
            return lm_head_stats(hidden[:, 1:], head).token
        width = hidden.shape[-1]
        slots = hidden[:, 1:].transpose(0, 1).contiguous()
        self.both[..., :width].copy_(rms_norm(slots, self.correction.hidden_norm.weight, self.eps))
        count = self.drafter.num_candidates if isinstance(self.drafter, DFly) else None
        ids = rows = None
        if count is not None:
            # One head product for all slots; each slot then decides among its own candidates only.
            ids = F.linear(slots, head).float().topk(count, dim=-1).indices
            rows = F.embedding(ids, head)
        previous, tokens = anchor, []
        for k in range(self.num_drafts):
            corrected = self._correct(k, slots[k], previous)
            if ids is None or rows is None:
                previous = lm_head_stats(corrected, head).token
            else:
                place = torch.matmul(rows[k], corrected[..., None]).argmax(dim=1)
                previous = ids[k].gather(1, place)[:, 0]
            tokens.append(previous)
        return torch.stack(tokens, dim=1)

    def _correct(self, k: int, hidden: Tensor, previous: Tensor) -> Tensor:
        """Slot k's hidden state [B, D] given the token [B] before it."""
        assert self.correction is not None, "no correction"
        both, table = self.both[k], current_table(hidden.device)
        width = hidden.shape[-1]
        if self.table is not None:
            torch.index_select(self.table, 0, previous, out=both[:, width:])
        else:
            rows = rms_norm(self.drafter.target.embed(previous), self.correction.embed_norm.weight, self.eps)
            both[:, width:].copy_(rows)
        inner = table.swiglu(both, self.correction.gate_proj.weight, self.correction.up_proj.weight)
        return table.linear(inner, self.correction.down_proj.weight, None, hidden)

    def _mix(
        self,
        index: int,
        module: Attention,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        tiles: TilePlan | None,
    ) -> Tensor:
        """normed [B, Q, D] -> heads' outputs [B, Q, H * head_dim] over context and block; nothing is stored."""
        partial = splits(normed, module.qkv)
        q, k, v = rope_write(
            parts(normed, module.qkv) if partial else linear(normed, module.qkv),
            cos, sin, module.heads, module.kv_heads,
            q_weight=None if module.q_norm is None else module.q_norm.weight,
            k_weight=None if module.k_norm is None else module.k_norm.weight,
            eps=self.eps, partial=partial, dtype=normed.dtype,
        )  # fmt: skip
        keys, values = self.store.view(index)
        return attention(q, k, v, attend, keys, values, plan=tiles)

    def _head(self) -> Tensor:
        head = self.drafter.target.head_weight
        assert head is not None, "a Decoder has a head"
        return head


def fusion_weight(drafter: Drafter) -> Tensor:
    """The matrix [D, F], or [L * D, F] for DFly, that makes every layer's context (before its norm) from the taps side by side."""
    shared = drafter.fc.weight.detach()
    if not isinstance(drafter, DFly):
        return shared
    mix = drafter.layer_fusion_weights.detach().float().softmax(dim=-1)
    eye = torch.eye(shared.shape[0], device=shared.device)
    # [L, D, taps, D]: each tap's own feature, times its weight, beside the shared product.
    own = torch.einsum("lt,de->ldte", mix, eye).flatten(2)
    return (shared.float() + own).flatten(0, 1).to(shared.dtype)


def block_bits(num_drafts: int, causal: bool, device: torch.device) -> Tensor:
    """Who sees whom in a block, by the number of its drafts that count: int64 [n + 1, Q, 1], see ``Attend.bits``."""
    slots = torch.arange(num_drafts + 1, device=device)
    seen = (
        slots[:, None] >= slots
        if causal
        else torch.ones(num_drafts + 1, num_drafts + 1, dtype=torch.bool, device=device)
    )
    counts = slots <= slots[:, None]
    # A slot that does not count sees itself, so that its softmax stays finite.
    eye = torch.eye(num_drafts + 1, dtype=torch.bool, device=device)
    return pack_bits((seen & counts[:, None, :]) | eye)
