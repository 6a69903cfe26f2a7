"""S2D2 in the loop: one more forward of the same model over the open block, from left to right.

Letters: B batch, S slots, n rows of the view, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm.hooks import Decision, Proposal, account_accepts, law_of, refuse, refuse_common, until_stop
from dllm.noise import STREAM_ACCEPT, STREAM_RESIDUAL
from dllm.samplers.guided import leading
from dllm.samplers.s2d2 import S2D2, first_run, view_mask
from dllm.samplers.verify import chain_acceptance, sample_law
from dllm.types import PADDING_GROUP, Attend, Draft, pack_bits
from dllm.uniform_corruption import spread


def view_forward(loop: Any, columns: Tensor, ids: Tensor, masked: Tensor, among: Tensor, valid: Tensor) -> Tensor:
    """One more forward of the main model over rows of the open block that see each other as ``among`` says: hidden [B, n, D].

    columns, ids [B, n] int64, masked, valid [B, n] bool, among [B, n, n] bool. The rows see everything that is known before the block:
    as stored, or computed again where nothing is. Nothing is stored. Counted as a forward of the main model.
    """
    state, model = loop.state, loop.model
    if not bool(valid.any()):
        # A first slot alone is read from the row before the block: nothing to run, nothing to count.
        assert loop.hidden is not None
        return loop.hidden.new_zeros(*columns.shape, loop.hidden.shape[-1])
    width = state.canvas.shape[1]
    block = state.group.gather(1, state.row_lo.clamp(max=width - 1)[:, None])
    known = state.valid & (state.group < block)
    stored = known & state.stored if loop.store is not None else known & False
    needed = known & ~stored & valid.any(-1)[:, None]
    context = int(needed.sum(-1).max())
    before = torch.sort((~needed).to(torch.int8), dim=1, stable=True).indices[:, :context]
    real = needed.gather(1, before)
    key_group = None
    if loop.store is not None:
        ends = stored.any(0).nonzero()
        loop.store.extent = int(ends[-1]) + 1 if len(ends) else 0
        key_group = torch.where(stored, state.group, PADDING_GROUP)[:, : loop.store.extent]
    rows = torch.cat([before, columns], dim=1)
    group = torch.cat([state.group.gather(1, before), block.expand_as(columns)], dim=1)
    low = state.low.gather(1, rows)
    everything = Attend.by_group(group, low, torch.cat([real, valid], dim=1), key_group)
    mask = everything.new_mask.clone()
    own = torch.eye(columns.shape[1], dtype=torch.bool, device=columns.device)
    mask[:, context:, context:] = (among & valid[:, None, :]) | own
    attend = Attend(everything.key_group, everything.low, everything.group, pack_bits(mask))
    embeds = torch.cat(
        [
            model.embed(state.canvas.gather(1, before), state.masked.gather(1, before), loop.spec.mask_token_id),
            model.embed(ids, masked, loop.spec.mask_token_id),
        ],
        dim=1,
    )
    hidden = model(None, state.position.gather(1, rows), loop.store, attend, embeds=embeds)
    computed = real.sum(-1) + valid.sum(-1)
    loop.stats.nfe += 1
    for row, count in zip(loop.rows, computed.tolist(), strict=True):
        loop.stats.positions += count
        row.stats.positions += count
        row.stats.nfe += int(count > 0)
    return hidden[:, context:]


class S2D2Hook:
    """The draft's first run, judged by the model's own left-to-right view."""

    extends = False
    needs = frozenset({"top1", "entropy"})

    def __init__(self, loop: Any, rule: S2D2) -> None:
        request = loop.request
        refuse_common(loop, "verifier S2D2")
        refuse(
            "verifier S2D2",
            attention=(
                loop.spec.attention == "bidirectional",
                "rows before the block would have to see it, so there is no left-to-right view of a bidirectional model",
            ),
            cfg_scale=(request.cfg_scale > 0, "the left-to-right view has no unguided copy"),
            logits_processor=(
                request.logits_processor is not None,
                "it would have to know which of the two laws it gets",
            ),
        )
        self.loop, self.rule = loop, rule
        self.verified = torch.zeros_like(loop.state.active)

    def select(self, keep: Tensor) -> None:
        self.verified = self.verified[keep]

    def decide(self, proposal: Proposal) -> Decision:
        """Verified rows commit the accepted prefix and the view's own token; the others take the sampler's step."""
        loop, rule = self.loop, self.rule
        slots, draft = proposal.slots, proposal.laws.token
        run = first_run(proposal.offered)
        plain = Decision(proposal.tokens, proposal.transfer_index, proposal.laws.confidence)
        assert proposal.laws.entropy is not None, "the hook needs entropies"
        would = proposal.transfer_index.sum(-1)
        route = rule.routes(proposal.laws.entropy, run, would, self.verified, loop.spec.vocab_size)
        route = route & run.any(-1) & proposal.decode
        self.verified = torch.where(proposal.decode, route, self.verified)
        if not bool(route.any()):
            return plain
        run = run & route[:, None]
        count, offset = run.sum(-1), run.long().argmax(-1)
        banned = loop._banned(slots)
        law = law_of(loop.request, self.view(slots, run, draft), banned)
        column = torch.arange(slots.shape[1], device=slots.device)
        at = column - offset[:, None]
        if loop.request.temperature > 0:
            drafted = law_of(loop.request, loop._logits((slots - loop.state.shift).clamp(min=0), slots), banned)
            own, kept = reject(loop, law, drafted, draft, run, at)
        else:
            own = law.argmax(-1)
            kept = leading(draft == own, run)
        tokens = torch.where(at == kept[:, None], own, draft)
        committed = until_stop(tokens, torch.minimum(kept + 1, count), offset, loop.eos)
        transfer = (at >= 0) & (at < committed[:, None]) & run
        account_accepts(loop, committed, route)
        chance = law.gather(-1, tokens[..., None])[..., 0]
        return Decision(
            torch.where(route[:, None], tokens, plain.tokens),
            torch.where(route[:, None], transfer, plain.transfer_index),
            torch.where(route[:, None], chance, plain.confidence),
        )

    def view(self, slots: Tensor, run: Tensor, draft: Tensor) -> Tensor:
        """Logits [B, S, V] of the slots of a run [B, S] under the left-to-right view of draft [B, S]."""
        loop, state = self.loop, self.loop.state
        width = state.canvas.shape[1]
        text = loop.walk.wide["canvas"].scatter(1, torch.where(run, slots, width), draft)[:, :-1]
        stop = torch.where(run, slots, -1).amax(-1)
        length = max(int((torch.where(run.any(-1), stop - state.row_lo, 0)).max()), 1)
        data = state.row_lo[:, None] + torch.arange(length, device=slots.device)
        # The last slot of the run is judged by what stands before it.
        real = data < stop[:, None]
        data = data.clamp(max=width - 1)
        if state.shift:
            hidden = view_forward(loop, data, text.gather(1, data), torch.zeros_like(real), view_mask(data, None), real)
            place = slots - 1 - state.row_lo[:, None]
            inner = hidden.gather(1, spread(place.clamp(0, length - 1), hidden))
            outer = loop.hidden.gather(1, spread((slots - 1).clamp(min=0), loop.hidden))
            # The row before the block never sees it: its law is that of its last computation.
            return loop.model.head(torch.where((place >= 0)[..., None], inner, outer))
        rows = torch.cat([data, slots], dim=1)
        masks = torch.cat([torch.zeros_like(real), torch.ones_like(run)], dim=1)
        valid = torch.cat([real, run], dim=1)
        hidden = view_forward(loop, rows, text.gather(1, rows), masks, view_mask(data, slots), valid)
        return loop.model.head(hidden[:, length:])


def reject(loop: Any, law: Tensor, drafted: Tensor, draft: Tensor, run: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Chain rejection in a run: (tokens [B, S] to stand at the first rejected place, accepted [B]).

    law, drafted [B, S, V]: the verifier's laws and those that draft [B, S] was drawn from; at [B, S]: a slot's number in the run.
    """
    uniform = loop.noise.uniform
    test = chain_acceptance(torch.cat([law, law[:, -1:]], dim=1), Draft(draft, drafted))
    slots = loop.state.lo[:, None] + torch.arange(draft.shape[1], device=draft.device)
    kept = leading(uniform(slots, loop.decode_steps, STREAM_ACCEPT) < test, run)
    rest = (law - drafted).clamp(min=0)
    # No mass left is rounding: then both laws agree.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, law)
    return sample_law(rest, uniform(slots, loop.decode_steps, STREAM_RESIDUAL)), kept
