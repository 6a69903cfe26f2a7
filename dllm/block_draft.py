"""Who drafts a block for SimSD: a diffusion model with its own exact block store, or a causal model from left to right.

Letters: B batch, S slots of the open block, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dllm.hooks import CausalRun, account, law_of
from dllm.kernels.row_stats import row_stats
from dllm.noise import STREAM_TOKEN
from dllm.samplers.processors import process_logits
from dllm.samplers.verify import sample_law
from dllm.types import PADDING_GROUP, Attend, RowState
from dllm.uniform_corruption import spread


@dataclass(eq=False)
class BlockDraft:
    """A drafted block: tokens [B, S] int64; order [B, S] int64, the step that filled each slot, from 0; drafted [B, S] bool; probs
    [B, S, V], the law that each token was drawn from (None: greedy)."""

    tokens: Tensor
    order: Tensor
    drafted: Tensor
    probs: Tensor | None


def first_layers(model: Any, layers: int) -> Any:
    """The decoder cut after its first ``layers`` layers, with its own norm and head; tensors are shared. Raises ValueError for too many."""
    if hasattr(model, "decoder"):
        # A decoder on its kernels, or in graphs: so is what is cut from it, once.
        cuts = model.__dict__.setdefault("cuts", {})
        if layers not in cuts:
            cuts[layers] = type(model)(first_layers(model.decoder, layers))
        return cuts[layers]
    if layers > len(model.layers):
        raise ValueError(f"draft must be at most the target's {len(model.layers)} layers: got {layers}")
    cut = copy.copy(model)
    cut._modules = dict(model._modules)
    cut.layers = nn.ModuleList(list(model.layers)[:layers])
    cut.config = replace(model.config, num_layers=layers)
    return cut


class DiffusionDrafter:
    """Ordinary block diffusion on the loop's blocks: prefix rows are stored from final tokens, the open block is computed each step."""

    def __init__(self, loop: Any, model: Any, spec: Any) -> None:
        if spec.vocab_size != loop.spec.vocab_size:
            raise ValueError(f"draft must share the target's {loop.spec.vocab_size} ids: got {spec.vocab_size}")
        if spec.attention != loop.spec.attention:
            raise ValueError(f"draft must have the target's {loop.spec.attention} attention: got {spec.attention}")
        self.loop, self.model, self.spec = loop, model, spec
        batch, width = loop.state.canvas.shape
        self.store = model.new_store(batch, width)
        self.stored = torch.zeros(batch, width, dtype=torch.bool, device=loop.device)
        self.hidden: Tensor | None = None

    def select(self, keep: Tensor) -> None:
        self.store, self.stored = self.store.select(keep), self.stored[keep]
        self.hidden = None if self.hidden is None else self.hidden[keep]

    @torch.no_grad()
    def draft(self, slots: Tensor, drafted: Tensor) -> BlockDraft:
        """Fill the slots drafted [B, S] bool; at least one a step and row, as the call's sampler says."""
        loop, state, request = self.loop, self.loop.state, self.loop.request
        width = state.canvas.shape[1]
        canvas, masked = loop.walk.wide["canvas"].clone(), loop.walk.wide["masked"].clone()
        active, banned = drafted.any(-1), loop._banned(slots)
        tokens, order = canvas.gather(1, slots), torch.full_like(slots, -1)
        probs: Tensor | None = None
        left, number = drafted.clone(), 0
        columns = loop.columns
        block = (columns >= state.row_lo[:, None]) & (columns < state.hi[:, None])
        before = state.valid & (state.group < state.group.gather(1, state.row_lo[:, None]))
        while bool(left.any()):
            fresh = before & ~self.stored
            compute = (fresh | block) & (left.any(-1))[:, None]
            self._forward(canvas[:, :-1], masked[:, :-1], compute, fresh)
            account(loop, "draft_nfe", left.any(-1))
            source = (slots - self.spec.logits_shift).clamp(min=0)
            assert self.hidden is not None
            logits = self.model.head(self.hidden.gather(1, spread(source, self.hidden)))
            uniform = law = None
            if request.temperature > 0:
                # A slot is filled once in a round, so position and round make a key of their own.
                uniform = loop.noise.uniform(slots, loop.decode_steps, STREAM_TOKEN)
                law = process_logits(
                    logits,
                    temperature=request.temperature,
                    top_k=request.top_k,
                    top_p=request.top_p,
                    min_p=request.min_p,
                    banned=banned,
                )
            laws = row_stats(logits, request.sampler.needs, banned, uniform, request.temperature, law)
            row_state = RowState(
                step=torch.full_like(state.step, number),
                steps=loop.limit,
                masks_at_start=drafted.sum(-1),
                slots=slots,
                block_start=state.row_lo,
                block_length=state.hi - state.row_lo,
                banned=banned,
            )
            ranked = loop._ranked(laws, slots)
            choice = request.sampler.step(ranked, canvas.gather(1, slots), left, row_state, loop.noise)
            filled = choice.transfer_index & left
            tokens = torch.where(filled, choice.tokens, tokens)
            order = torch.where(filled, number, order)
            if law is not None:
                now = law.softmax(-1)
                probs = now if probs is None else torch.where(filled[..., None], now, probs)
            target = torch.where(filled, slots, width)
            canvas.scatter_(1, target, choice.tokens)
            masked.scatter_(1, target, False)
            if not bool((filled.any(-1) | ~left.any(-1)).all()):
                raise RuntimeError(f"sampler {type(request.sampler).__name__} drafted nothing: the draft would not end")
            left, number = left & ~filled, number + 1
        return BlockDraft(tokens, order, drafted & active[:, None], probs)

    def _forward(self, ids: Tensor, masked: Tensor, compute: Tensor, write: Tensor) -> None:
        state, width = self.loop.state, ids.shape[1]
        count = int(compute.sum(-1).max())
        rows = torch.sort((~compute).to(torch.int8), dim=1, stable=True).indices[:, :count]
        valid = compute.gather(1, rows)
        readable = self.stored & ~compute
        ends = readable.any(0).nonzero()
        self.store.extent = int(ends[-1]) + 1 if len(ends) else 0
        key_group = torch.where(readable, state.group, PADDING_GROUP)[:, : self.store.extent]
        attend = Attend.by_group(state.group.gather(1, rows), state.low.gather(1, rows), valid, key_group)
        embeds = self.model.embed(ids.gather(1, rows), masked.gather(1, rows), self.spec.mask_token_id)
        keep = write.gather(1, rows) & valid
        hidden = self.model(
            None, state.position.gather(1, rows), self.store, attend, embeds=embeds, rows=rows, write=keep
        )
        self.stored = self.stored | (write & compute)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(hidden.shape[0], width + 1, hidden.shape[-1])
        self.hidden.scatter_(1, spread(torch.where(valid, rows, width), hidden), hidden)


class CausalDrafter:
    """An AR model drafts the open block from left to right, one forward a token, over keys of its own."""

    def __init__(self, loop: Any, model: Any) -> None:
        if model.head_weight.shape[0] != loop.spec.vocab_size:
            raise ValueError(
                f"draft must share the target's {loop.spec.vocab_size} ids: got {model.head_weight.shape[0]}"
            )
        self.loop = loop
        batch, width = loop.state.canvas.shape
        self.run = CausalRun(model, batch, width)
        # What its keys were computed from; -1: none.
        self.fed = torch.full((batch, width), -1, dtype=torch.int64, device=loop.device)

    def select(self, keep: Tensor) -> None:
        self.run.select(keep)
        self.fed = self.fed[keep]

    @torch.no_grad()
    def draft(self, slots: Tensor, drafted: Tensor) -> BlockDraft:
        """Fill the slots drafted [B, S], one run that ends with the block."""
        loop, request = self.loop, self.loop.request
        width = loop.state.canvas.shape[1]
        text = loop.walk.wide["canvas"].clone()
        first = torch.where(drafted, slots, width).amin(-1)
        count, banned = drafted.sum(-1), loop._banned(slots)
        same = (self.fed == text[:, :-1]) & (loop.columns < first[:, None])
        cached = torch.minimum(same.long().cumprod(-1).sum(-1), first - 1)
        number = slots - first[:, None]
        order = torch.where(drafted, number, -1)
        probs: Tensor | None = None
        for step in range(int(count.max())):
            here = count > step
            stop = torch.where(here, first + step, cached)
            length = int((stop - cached).max())
            at = cached[:, None] + torch.arange(length, device=slots.device)
            valid = at < stop[:, None]
            at = at.clamp(max=width - 1)
            ids = text.gather(1, at)
            hidden = self.run.forward(ids, cached, valid)
            account(loop, "draft_nfe", here)
            self.fed = _put(self.fed, torch.where(valid, at, width), ids)
            last = (stop - 1 - cached).clamp(min=0)[:, None]
            logits = self.run.model.head(hidden.gather(1, spread(last, hidden)))
            place = (first + step).clamp(max=width - 1)[:, None]
            inner = (first + step - slots[:, 0]).clamp(0, slots.shape[1] - 1)
            shut = (
                banned if banned.dim() == 1 else banned[torch.arange(len(inner), device=slots.device), inner][:, None]
            )
            law = law_of(request, logits, shut)
            token = law.argmax(-1)
            if request.temperature > 0:
                token = sample_law(law, loop.noise.uniform(place, loop.decode_steps, STREAM_TOKEN))
                mine = (number == step) & drafted
                probs = (
                    law.expand(-1, slots.shape[1], -1).clone()
                    if probs is None
                    else torch.where(mine[..., None], law, probs)
                )
            text.scatter_(1, torch.where(here[:, None], place, width), token)
            cached = stop
        return BlockDraft(text.gather(1, slots), order, drafted, probs)


def _put(wide: Tensor, target: Tensor, values: Tensor) -> Tensor:
    """wide [B, L] with values at columns target [B, n]; column L is nowhere."""
    return torch.nn.functional.pad(wide, (0, 1)).scatter(1, target, values)[:, :-1]
