"""SimSD in the loop: the open block is drafted before the forward, its tokens and masks ride in it, and it is judged afterwards.

Letters: B batch, S slots, n drafted slots, r known tokens of the open block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.block_draft import BlockDraft, CausalDrafter, DiffusionDrafter, first_layers
from dllm.hooks import Decision, Proposal, account_accepts, law_of, refuse, refuse_common, until_stop
from dllm.hooks_s2d2 import reject
from dllm.samplers.guided import leading
from dllm.samplers.s2d2 import view_mask
from dllm.samplers.simsd import SimSD, gate_stop, temporal_mask
from dllm.types import Attend, Plan, pack_bits
from dllm.uniform_corruption import spread


class SimSDHook:
    """One draft, one forward and one verdict a round."""

    extends = True
    needs = frozenset({"top1"})

    def __init__(self, loop: Any, rule: SimSD) -> None:
        request = loop.request
        refuse_common(loop, "verifier SimSD")
        refuse(
            "verifier SimSD",
            attention=(
                loop.spec.attention == "bidirectional",
                "its layout needs a prefix that does not see the open block",
            ),
            cfg_scale=(request.cfg_scale > 0, "neither draft nor layout has an unguided copy"),
            logits_processor=(request.logits_processor is not None, "it would have to know whose law it gets"),
            sampler=(
                "previous" in request.sampler.needs or getattr(request.sampler, "may_wait", False),
                f"{type(request.sampler).__name__} needs the steps of one block in a row, and a draft begins anew in each round",
            ),
        )
        self.loop, self.rule = loop, rule
        self.drafter: Any
        if isinstance(rule.draft, int):
            self.drafter = DiffusionDrafter(loop, first_layers(loop.model, rule.draft), loop.spec)
        elif hasattr(rule.draft, "spec"):
            self.drafter = DiffusionDrafter(loop, rule.draft.model, rule.draft.spec)
        else:
            self.drafter = CausalDrafter(loop, rule.draft.model)
        self.counts: Tensor | int = 0
        self.draft: BlockDraft | None = None
        self.hidden: Tensor | None = None

    def select(self, keep: Tensor) -> None:
        self.drafter.select(keep)
        self.draft = self.hidden = None

    def extend(
        self, plan: Plan, rows: Tensor, attend: Attend, embeds: Tensor, positions: Tensor, write: Tensor | None
    ) -> tuple[Tensor, Attend, Tensor, Tensor, Tensor | None]:
        """(rows, attend, embeds, positions, write) of the forward with the layout's rows, of which none is stored."""
        loop, state = self.loop, self.loop.state
        self.draft, self.hidden, self.counts = None, None, 0
        width = state.canvas.shape[1]
        slots = state.lo[:, None] + loop.columns[: max(row.hi - row.lo for row in loop.rows)]
        inside = (slots < state.hi[:, None]) & plan.decode[:, None]
        slots = slots.clamp(max=width - 1)
        drafted = state.masked.gather(1, slots) & inside
        if not bool(drafted.any()):
            return rows, attend, embeds, positions, write
        draft = self.draft = self.drafter.draft(slots, drafted)
        columns, ids, masked, among, valid = self._layout(slots, draft)
        block = state.group.gather(1, state.row_lo.clamp(max=width - 1)[:, None]).to(torch.int32)
        before = (attend.group < block) & plan.valid
        size, queries = columns.shape[1], rows.shape[1]
        own = torch.eye(size, dtype=torch.bool, device=rows.device)
        among = (among & valid[:, None, :]) | (own & ~valid[:, None])
        left = before[:, None, :].expand(-1, size, -1) & valid[..., None]
        mask = torch.cat([F.pad(attend.new_mask, (0, size)), torch.cat([left, among], dim=2)], dim=1)
        group = torch.cat([attend.group, block.expand(-1, size)], dim=1)
        low = torch.cat([attend.low, state.low.gather(1, columns).to(torch.int32)], dim=1)
        self.counts, self.queries = valid.sum(-1), queries
        return (
            torch.cat([rows, columns], dim=1),
            Attend(attend.key_group, low, group, pack_bits(mask)),
            torch.cat([embeds, loop.model.embed(ids, masked, loop.spec.mask_token_id)], dim=1),
            torch.cat([positions, state.position.gather(1, columns)], dim=1),
            None if write is None else F.pad(write, (0, size)),
        )

    def split(self, hidden: Tensor, queries: int) -> Tensor:
        """The hidden states of the forward's own rows [B, Q, D]; keeps the layout's."""
        self.hidden = hidden[:, queries:] if hidden.shape[1] > queries else None
        return hidden[:, :queries]

    def _layout(self, slots: Tensor, draft: BlockDraft) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Columns, ids, masked [B, Q], who sees whom [B, Q, Q] and valid [B, Q] of [known | DATA | MASK | query]."""
        state, width = self.loop.state, self.loop.state.canvas.shape[1]
        shift, exact = state.shift, self.rule.exact
        first = torch.where(draft.drafted, slots, width).amin(-1)
        count = draft.drafted.sum(-1)
        n, r = int(count.max()), int(torch.where(count > 0, first - state.row_lo, 0).max())
        number = torch.arange(n, device=slots.device)
        known = state.row_lo[:, None] + torch.arange(r, device=slots.device)
        is_known = (known < first[:, None]) & (count > 0)[:, None]
        data = first[:, None] + number
        is_data = number < count[:, None]
        # The slots' place in the draft, which begins at lo.
        place = (data - state.lo[:, None]).clamp(0, slots.shape[1] - 1)
        tokens, order = draft.tokens.gather(1, place), draft.order.gather(1, place)
        times = torch.where(order >= 0, order, order.amax(-1, keepdim=True) + 1) + 1
        known, data = known.clamp(max=width - 1), data.clamp(max=width - 1)
        past = state.canvas.gather(1, known)
        self.first, self.r, self.n = first, r, n
        if exact:
            rows, flags, ids = [known, data], [is_known, is_data], [past, tokens]
            among = view_mask(torch.cat([known, data], dim=1), None if shift else data)
            masked = [is_known & False, is_data & False]
            if not shift:
                rows, flags, ids = [*rows, data], [*flags, is_data], [*ids, tokens]
                masked = [*masked, is_data]
        else:
            rows, flags, ids = [known, data, data], [is_known, is_data, is_data], [past, tokens, tokens]
            masked = [is_known & False, is_data & False, is_data]
            among = temporal_mask(times, is_data, is_known, queries=bool(shift))
            if shift:
                # Slot i is read from the row before it, which holds its token if that was revealed earlier.
                prior = (data - 1).clamp(min=0)
                inner = prior >= state.row_lo[:, None]
                earlier = torch.cat([torch.ones_like(is_data[:, :1]), times[:, :-1] < times[:, 1:]], dim=1)
                before = torch.cat([state.canvas.gather(1, prior[:, :1]), tokens[:, :-1]], dim=1)
                rows, flags, ids = [*rows, prior], [*flags, is_data & inner], [*ids, before]
                masked = [*masked, is_data & ~earlier]
        valid = torch.cat(flags, dim=1)
        return torch.cat(rows, dim=1), torch.cat(ids, dim=1), torch.cat(masked, dim=1), among, valid

    def laws(self, slots: Tensor) -> Tensor:
        """Logits [B, S, V] of the drafted slots after the forward."""
        loop, state = self.loop, self.loop.state
        assert self.hidden is not None and loop.hidden is not None
        number = (slots - self.first[:, None]).clamp(0, self.n - 1)
        if self.rule.exact and state.shift:
            # The row before slot first + k is known token r - 1 or drafted token k - 1, wherever padding stands between them.
            count = (self.first - state.row_lo)[:, None]
            place = torch.where(number > 0, self.r + number - 1, (count - 1).clamp(min=0))
        else:
            place = number + self.r + self.n * (1 + (state.shift and not self.rule.exact))
        hidden = self.hidden.gather(1, spread(place.expand_as(slots), self.hidden))
        if state.shift:
            # The row before the block never sees it: its law is that of its last computation.
            outer = loop.hidden.gather(1, spread((slots - 1).clamp(min=0), loop.hidden))
            hidden = torch.where((slots == state.row_lo[:, None])[..., None], outer, hidden)
        return loop.model.head(hidden)

    def decide(self, proposal: Proposal) -> Decision:
        """The accepted prefix in position order, the target's token, and what ``after_reject`` adds."""
        loop, rule, slots, draft = self.loop, self.rule, proposal.slots, self.draft
        run = proposal.offered
        if draft is None or not bool(run.any()):
            return Decision(proposal.tokens, proposal.transfer_index & False, proposal.laws.confidence)
        banned = loop._banned(slots)
        logits = self.laws(slots)
        if not bool((logits.isfinite().any(-1) & ~logits.isnan().any(-1) | ~run).all()):
            raise ValueError("the verifier's logits must be finite: got NaN or infinity")
        law = law_of(loop.request, logits, banned)
        count, offset = run.sum(-1), run.long().argmax(-1)
        at = torch.arange(slots.shape[1], device=slots.device) - offset[:, None]
        if draft.probs is not None:
            own, kept = reject(loop, law, draft.probs, draft.tokens, run, at)
        else:
            own = law.argmax(-1)
            kept = leading(draft.tokens == own, run)
        own = gate_stop(own, law, loop.eos, rule.eos_min_prob)
        behind = law.argmax(-1) if rule.after_reject == "target_argmax" else draft.tokens
        tokens = torch.where(at == kept[:, None], own, torch.where(at > kept[:, None], behind, draft.tokens))
        committed = torch.minimum(kept + 1, count) if rule.after_reject == "truncate" else count
        committed = until_stop(tokens, committed, offset, loop.eos)
        transfer = (at >= 0) & (at < committed[:, None]) & run
        account_accepts(loop, committed, count > 0)
        return Decision(tokens, transfer, law.gather(-1, tokens[..., None])[..., 0])
