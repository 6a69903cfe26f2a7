"""The drafter's common part: decoder layers that read the target's taps through a key-value store of their own, one
pass per block.

Letters: B batch, C context tokens, n drafts, Q = n + 1 slots (the anchor first), D width, F = taps * target width, V
vocabulary. A drafter proposes only; judging drafts is ``dllm/samplers/verify.py``. It holds no embedding and no head:
both are the target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dllm.drafters.config import DraftConfig, Layout
from dllm.drafters.target import Target
from dllm.model.decoder import Attention, DecoderLayer, RMSNorm, grouped_mask, inverse_frequencies, rotate
from dllm.model.kv_store import KVStore
from dllm.model.packed import Linear
from dllm.noise import STREAM_TOKEN
from dllm.samplers.verify import sample_law
from dllm.types import LOWEST_GROUP, PADDING_GROUP, Attend, Draft, Noise, pack_bits

if TYPE_CHECKING:
    from dllm.bridge.huggingface import CustomGenerate
    from dllm.drafters.check import Report


@dataclass(frozen=True, eq=False)
class Context:
    """Newly committed tokens as the target saw them, each token fed once, in text order.

    features [B, C, F]: outputs of the tapped layers side by side; valid [B, C] bool: padding and rejected rows are
    False.
    """

    features: Tensor
    valid: Tensor


class Drafter(nn.Module, ABC):
    """Base of the drafters. State: a store of context keys and values and ``lengths`` [B], how many tokens of each row
    it holds.

    The anchor is the last committed token; its taps do not exist yet, so its position equals ``lengths`` and the drafts
    follow it. ``reset`` opens a request, ``propose`` (or ``feed``) mutates the state, ``crop`` shortens it.
    """

    def __init__(self, config: DraftConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        # In a tuple, so that the target's weights do not become parameters of the drafter.
        self._target = (Target.of(target),)
        body = config.body
        self.fc = Linear(config.feature_width, body.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(body.num_layers))
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        rows = config.draft_vocab_size
        self.lm_head = None if rows is None else Linear(body.hidden_size, rows, bias=False)
        self.register_buffer("d2t", None if rows is None else torch.zeros(rows, dtype=torch.int64))
        self._frequencies: Tensor | None = None
        self.store: KVStore | None = None
        self.lengths = torch.zeros(0, dtype=torch.int64)

    def make_layer(self, index: int) -> nn.Module:
        """One decoder layer; called while the module is built."""
        return DecoderLayer(self.config.body, index)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        target: Any,
        strict: bool = True,
        dtype: torch.dtype | Literal["auto"] = "auto",
        device: torch.device | str = "auto",
        revision: str | None = None,
        head_candidates: int | Literal["auto"] | None = "auto",
    ) -> Drafter:
        """A drafter of any supported kind and layout, bound to its target; eval mode, no gradients.

        path: a shipped name, a folder or a hub id. target: the AR model it drafts for, a Hugging Face causal LM (as
        ``load_target`` gives) or a ``Decoder``; it is held, not copied. strict: False turns into warnings what may be
        wrong, but can run. dtype, device "auto": the target's. head_candidates: of a DFly head, see ``DFly``.

        Raises FileNotFoundError if there is nothing at path; TypeError for a target that is neither; ValueError for a
        drafter that does not fit the target, a damaged folder, the shipped name of another kind of model, and a drafter
        that is no ``cls``.
        """
        from dllm.drafters.loading import load_drafter

        drafter = load_drafter(path, target, strict, dtype, device, revision, head_candidates)
        if not isinstance(drafter, cls):
            raise ValueError(f"path must hold a {cls.__name__}: got a {type(drafter).__name__}")
        return drafter

    def save_pretrained(
        self, folder: str | Path, layout: Layout | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Write config and weights in a published layout (None: the one of its kind); see
        ``dllm.drafters.export.save_drafter``.
        """
        from dllm.drafters.export import save_drafter

        save_drafter(self, folder, layout, dtype)

    def check(self, prompt_ids: Tensor | None = None, tokenizer: Any = None, num_tokens: int = 48) -> Report:
        """What was loaded and how well it drafts a probe text; see ``dllm.drafters.check.check_drafter``."""
        from dllm.drafters.check import check_drafter

        return check_drafter(self, prompt_ids, tokenizer, num_tokens)

    def as_custom_generate(self, **settings: Any) -> CustomGenerate:
        """A callable for ``model.generate(**inputs, custom_generate=...)``, where model is this drafter's target.

        settings: num_drafts or block_length, verifier, draft_temperature, cost_table, seed, stop_strings, tokenizer;
        see ``dllm.bridge.huggingface.CustomGenerate``, whose ``stats`` hold what the last call cost. Raises TypeError
        for another name; ``generate`` then raises ValueError for another model, and for an argument that cannot be
        honoured with a drafter (num_beams, ...).
        """
        from dllm.bridge.huggingface import CustomGenerate

        return CustomGenerate(self, **settings)

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def max_drafts(self) -> int:
        """Most drafts of one pass: a drafter may draft fewer than it was trained for, never more."""
        return self.config.block_length - 1

    # Context

    def reset(self, batch: int, capacity: int) -> None:
        """Forget everything; room for ``batch`` rows of at most ``capacity`` committed tokens. Buffers of the same size
        are kept.
        """
        body = self.config.body
        same = self.store is not None and (self.store.batch, self.store.capacity) == (batch, capacity)
        if (
            not same
            or self.store is None
            or self.store.data.device != self.device
            or self.store.data.dtype != self.dtype
        ):
            self.store = KVStore(
                body.num_layers, batch, body.num_kv_heads, capacity, body.head_dim, self.dtype, self.device
            )
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.lengths.zero_()
        self.store.extent = 0 if self.device.type == "cpu" else capacity

    def crop(self, lengths: Tensor) -> None:
        """Keep the first lengths [B] tokens of each row; mutates ``lengths`` in place."""
        self.lengths.copy_(torch.minimum(self.lengths, lengths.to(self.lengths)))

    def select(self, keep: Tensor) -> None:
        """Go on with the rows keep [B'] int64 only; the store is copied."""
        self.store = self._opened(self.lengths.shape[0]).select(keep)
        self.lengths = self.lengths[keep]

    @abstractmethod
    def fuse(self, features: Tensor) -> list[Tensor]:
        """features [B, C, F] -> what each layer reads as context, one [B, C, D] a layer."""

    @torch.no_grad()
    def feed(self, context: Context) -> None:
        """Store keys and values of newly committed tokens behind those already there; mutates the store and
        ``lengths``.

        Raises ValueError before ``reset``, for a wrong width or batch and (on the CPU) where ``capacity`` is too small.
        """
        store = self._opened(context.features.shape[0])
        if context.features.shape[-1] != self.config.feature_width:
            raise ValueError(
                f"context.features must be {self.config.feature_width} wide ({len(self.config.target_layer_ids)} taps of "
                f"{self.config.target_hidden_size}): got {context.features.shape[-1]}"
            )
        valid = context.valid
        rows = self.lengths[:, None] + valid.cumsum(dim=1) - 1
        # Padding before the first token would point at row -1; it is not written.
        rows = rows.clamp(min=0)
        cos, sin = self._rotary(rows)
        for index, (layer, fused) in enumerate(
            zip(self.layers, self.fuse(context.features.to(self.dtype)), strict=True)
        ):
            store.write(index, rows, valid, *context_keys(layer.attention, fused, cos, sin))  # type: ignore[arg-type]
        self.lengths += valid.sum(dim=1)
        if self.device.type == "cpu":
            longest = int(self.lengths.max())
            if longest > store.capacity:
                raise ValueError(f"capacity must hold every committed token, {longest}: got {store.capacity}")
            store.extent = longest

    # Drafting

    @torch.no_grad()
    def propose(
        self,
        context: Context | None,
        anchor: Tensor,
        length: int,
        temperature: float = 0.0,
        noise: Noise | None = None,
        lengths: Tensor | None = None,
    ) -> Draft:
        """Draft ``length`` tokens behind the anchor.

        context: tokens committed since the last call (None: fed already); anchor [B] int64; length in 1..max_drafts;
        temperature 0: argmax, else tokens are drawn from the drafter's law at that temperature, and the law is kept in
        ``Draft.probs``; noise: needed for that, keyed by the token's position and, as step, the anchor's. lengths [B]:
        drafts of each row that count (None: all); a row's drafts are those it would make alone with ``length =
        lengths[b]``, what stands behind them is arbitrary.
        """
        if not 1 <= length <= self.max_drafts:
            raise ValueError(
                f"length must be in [1, {self.max_drafts}] (block_size {self.config.block_length}): got {length}"
            )
        if not temperature >= 0:
            raise ValueError(f"temperature must be >= 0: got {temperature}")
        if context is not None:
            self.feed(context)
        self._opened(anchor.shape[0])
        uniform = None
        if temperature > 0:
            if noise is None:
                raise ValueError("noise must be given to draft at a temperature > 0: got None")
            positions = self.lengths[:, None] + torch.arange(1, length + 1, device=self.device)
            uniform = noise.uniform(positions, self.lengths, STREAM_TOKEN)
        slots = self.block(anchor, length + 1, lengths)[:, 1:]
        # A linear layer copies its whole weight where the batch stride is not the packed one, even at batch 1.
        hidden = slots.flatten(0, 1).unflatten(0, slots.shape[:2])
        return self.choose(hidden, anchor, temperature, uniform)

    @abstractmethod
    def choose(self, hidden: Tensor, anchor: Tensor, temperature: float, uniform: Tensor | None) -> Draft:
        """Tokens from the slots' final hidden states [B, n, D]; uniform [B, n] where temperature > 0."""

    @torch.no_grad()
    def block(self, anchor: Tensor, num_slots: int, lengths: Tensor | None = None) -> Tensor:
        """Final hidden states of the block [anchor, MASK, ...]: anchor [B] -> [B, num_slots, D]; slot k is the token k
        behind it.
        """
        store = self._opened(anchor.shape[0])
        masks = torch.full((anchor.shape[0], num_slots - 1), self.config.mask_token_id, device=anchor.device)
        x = self.embed(torch.cat([anchor[:, None], masks], dim=1))
        slots = torch.arange(num_slots, device=self.device)
        cos, sin = self._rotary(self.lengths[:, None] + slots)
        groups = self.config.body.num_heads // self.config.body.num_kv_heads
        masks_of: dict[tuple[int | None, bool], Tensor] = {}
        for index, layer in enumerate(self.layers):
            rule = (self.config.windows[index], self.config.causal[index])
            if rule not in masks_of:
                masks_of[rule] = grouped_mask(self._attend(num_slots, *rule, lengths).mask(), groups)
            x, _, _ = layer(x, cos, sin, masks_of[rule], store.view(index))
        return self.norm(x)

    def embed(self, ids: Tensor) -> Tensor:
        """Input rows [..., D] of block tokens: the target's raw embedding rows, scaled as the checkpoint says."""
        rows = self.target.embed(ids).to(self.dtype)
        return rows if self.config.input_embedding_scale == 1 else rows * self.config.input_embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> fp32 logits [..., V] over the target's vocabulary (-inf where an own, reduced head has no
        row).
        """
        if self.lm_head is None:
            return self.finish_logits(self.target.head(hidden))
        own = self.finish_logits(self.lm_head(hidden))
        full = own.new_full((*own.shape[:-1], self.config.body.vocab_size), -torch.inf)
        return full.index_copy(-1, self.vocab_map(), own)

    def vocab_map(self) -> Tensor:
        """Target id of each row of an own, reduced head: row + d2t[row]."""
        offsets = self.d2t
        assert isinstance(offsets, Tensor), "vocab_map without a reduced head"
        return torch.arange(offsets.shape[0], device=offsets.device) + offsets

    def finish_logits(self, raw: Tensor) -> Tensor:
        """Multiplier and soft cap of the checkpoint, in fp32."""
        logits = raw.float()
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _opened(self, batch: int) -> KVStore:
        if self.store is None:
            raise ValueError("reset(batch, capacity) must open a request before tokens are fed or drafted")
        if batch != self.store.batch:
            raise ValueError(f"batch must be {self.store.batch}, as reset() opened it: got {batch}")
        return self.store

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] -> cos, sin [B, 1, Q, head_dim]; angles in fp32 whatever the weights' dtype."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(self.config.body).to(positions.device)
        angles = positions[:, None, :, None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _attend(self, num_slots: int, window: int | None, causal: bool, lengths: Tensor | None) -> Attend:
        """Slots see the row's context (inside the window) and, in the block, every slot or the earlier ones."""
        assert self.store is not None, "no store"
        batch = self.lengths.shape[0]
        rows = torch.arange(self.store.extent, device=self.device).expand(batch, -1)
        key_group = torch.where(rows < self.lengths[:, None], 0, PADDING_GROUP).to(torch.int32)
        slots = torch.arange(num_slots, device=self.device)
        distance = slots[:, None] - slots
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        seen = seen.expand(batch, -1, -1)
        if lengths is not None:
            # A row with fewer drafts must not see the slots behind them; each slot sees itself, so that its softmax
            # stays finite.
            seen = (seen & (slots <= lengths[:, None])[:, None, :]) | torch.eye(
                num_slots, dtype=torch.bool, device=self.device
            )
        group = torch.zeros(batch, num_slots, dtype=torch.int32, device=self.device)
        low = torch.full_like(group, LOWEST_GROUP)
        position = self.lengths[:, None] + slots
        return Attend(key_group, low, group, pack_bits(seen), window, rows, position)


def context_keys(attention: Attention, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (normed, rotated) and values [B, K, C, head_dim] of context [B, C, D]: the layer's own k and v rows, nothing
    else of it.
    """
    skip = attention.heads * attention.head_dim
    bias = None if attention.qkv.bias is None else attention.qkv.bias[skip:]
    k, v = F.linear(context, attention.qkv.weight[skip:], bias).chunk(2, dim=-1)
    k = rearrange(k, "b c (h d) -> b h c d", d=attention.head_dim)
    v = rearrange(v, "b c (h d) -> b h c d", d=attention.head_dim)
    return rotate(k if attention.k_norm is None else attention.k_norm(k), cos, sin), v


def pick(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """One choice per slot: fp32 logits [..., V], uniform [...] -> (index, its law or None at temperature 0,
    confidence).

    confidence: largest probability at temperature 1, known before the choice.
    """
    confidence = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
    if temperature == 0:
        return logits.argmax(dim=-1), None, confidence
    assert uniform is not None, "a draw needs a uniform"
    law = (logits / temperature).softmax(dim=-1)
    return sample_law(law, uniform), law, confidence


def spread(law: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """A law over candidates [..., k] with ids [..., k] -> over the vocabulary [..., V], zero elsewhere."""
    return law.new_zeros(*law.shape[:-1], vocab_size).scatter_add(-1, ids, law)


def stack_draft(tokens: Sequence[Tensor], laws: Sequence[Tensor | None], confidence: Sequence[Tensor]) -> Draft:
    """A draft from the choices of slots walked one after another: lists of [B], [B, V] or None, [B]."""
    kept = [law for law in laws if law is not None]
    return Draft(torch.stack(list(tokens), 1), torch.stack(kept, 1) if kept else None, torch.stack(list(confidence), 1))
