"""FreeDave in the loop: branches of the open block ride in the next forward, and tell how many steps it stands for.

Letters: B batch, S slots, Q rows of the loop's forward, K - 1 branches of C rows each.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.cache.block import BlockCache
from dllm.cache.dual import DualCache
from dllm.cache.free import FreeCache
from dllm.cache.none import NoCache
from dllm.cache.prefix import PrefixCache
from dllm.hooks import Decision, Proposal, account_accepts, refuse, refuse_common
from dllm.samplers.free_dave import FreeDave
from dllm.types import Attend, Plan, RowStats, pack_bits
from dllm.uniform_corruption import spread


def path_free(cache: Any) -> bool:
    """Whether what a cache keeps depends only on the states that several steps in one forward share with single steps."""
    if isinstance(cache, (NoCache, BlockCache)):
        return True
    if isinstance(cache, (DualCache, PrefixCache)):
        return cache.refresh_interval is None
    if isinstance(cache, FreeCache):
        # A delayed freeze computes a finished block once more, from its final tokens.
        return cache.freeze_delay == 1 and cache.refresh_interval is None and cache.policy == "active"
    return False


class FreeDaveHook:
    """Branches of the open block in the loop's own forward, and as many of the sampler's steps as they confirm."""

    extends = True
    needs = frozenset({"top1"})

    def __init__(self, loop: Any, rule: FreeDave) -> None:
        request = loop.request
        refuse_common(loop, "verifier FreeDave")
        refuse(
            "verifier FreeDave",
            temperature=(
                request.temperature > 0,
                "it is defined for greedy decoding, where the next state is a function of this one",
            ),
            cfg_scale=(request.cfg_scale > 0, "every branch would need its unguided copy"),
            sampler=(
                "previous" in request.sampler.needs or getattr(request.sampler, "may_wait", False),
                f"{type(request.sampler).__name__} looks at the path, not only at the state",
            ),
            cache=(
                not path_free(request.cache),
                f"{type(request.cache).__name__} keeps rows that depend on the path, and several steps in one forward give another one; "
                "use 'none', 'block', 'dual' or 'prefix' without refresh_interval, or 'free' with freeze_delay 1",
            ),
        )
        self.loop, self.rule = loop, rule
        self.counts: Tensor | int = 0
        self.hidden: Tensor | None = None
        # The draft for the next forward: its block, and what each branch reveals; None before the first step.
        self.lo: Tensor | None = None
        self.draft: Tensor = loop.state.canvas
        self.reveal: Tensor = loop.state.canvas
        self.exists: Tensor = loop.state.canvas

    def select(self, keep: Tensor) -> None:
        self.hidden = None
        if self.lo is not None:
            self.lo, self.draft, self.reveal, self.exists = (
                x[keep] for x in (self.lo, self.draft, self.reveal, self.exists)
            )

    def extend(
        self, plan: Plan, rows: Tensor, attend: Attend, embeds: Tensor, positions: Tensor, write: Tensor | None
    ) -> tuple[Tensor, Attend, Tensor, Tensor, Tensor | None]:
        """(rows, attend, embeds, positions, write) of the forward with the branches' rows, of which none is stored."""
        self.hidden, self.counts = None, 0
        state = self.loop.state
        if self.lo is None:
            return rows, attend, embeds, positions, write
        # Which rows see the open block, and so differ from branch to branch.
        copied = plan.valid
        if state.spec.attention != "bidirectional":
            copied = copied & (rows >= state.row_lo[:, None]) & (rows < state.hi[:, None])
        exists = self.exists & ((self.lo == state.lo) & (state.step > 0) & plan.decode)[:, None]
        branches, width = int(exists.any(0).sum()), int(copied.sum(-1).max())
        if not branches or not width:
            return rows, attend, embeds, positions, write
        # Branches are nested, so those that exist come first.
        exists = exists[:, :branches]
        place = torch.sort((~copied).to(torch.int8), dim=1, stable=True).indices[:, :width]
        real = copied.gather(1, place)
        columns = rows.gather(1, place)
        reveal = self.reveal[:, :branches].gather(2, columns[:, None].expand(-1, branches, -1))
        ids = torch.where(reveal, self.draft.gather(1, columns)[:, None], state.canvas.gather(1, columns)[:, None])
        masked = state.masked.gather(1, columns)[:, None] & ~reveal
        batch, queries = rows.shape
        extra = self.loop.model.embed(ids.flatten(1), masked.flatten(1), state.spec.mask_token_id)
        seen = attend.new_mask
        own = seen.gather(1, place[..., None].expand(-1, -1, queries))
        outside = own & ~copied[:, None, :]
        inside = own.gather(2, place[:, None, :].expand(-1, width, -1)) & real[:, None, :]
        among = torch.zeros(batch, branches, width, branches, width, dtype=torch.bool, device=rows.device)
        for k in range(branches):
            among[:, k, :, k] = inside & exists[:, k, None, None]
        size = branches * width
        among = among.view(batch, size, size) | torch.eye(size, dtype=torch.bool, device=rows.device)
        mask = torch.cat([F.pad(seen, (0, size)), torch.cat([outside.repeat(1, branches, 1), among], dim=2)], dim=1)

        def widen(value: Tensor) -> Tensor:
            return torch.cat([value, value.gather(1, place).repeat(1, branches)], dim=1)

        self.columns = torch.where(real, columns, state.canvas.shape[1])
        self.live, self.width = exists, width
        self.counts = (real[:, None] & exists[..., None]).sum((1, 2))
        return (
            widen(rows),
            Attend(attend.key_group, widen(attend.low), widen(attend.group), pack_bits(mask)),
            torch.cat([embeds, extra], dim=1),
            widen(positions),
            None if write is None else F.pad(write, (0, size)),
        )

    def split(self, hidden: Tensor, queries: int) -> Tensor:
        """The hidden states of the forward's own rows [B, Q, D]; keeps the branches'."""
        if hidden.shape[1] > queries:
            self.hidden = hidden[:, queries:].unflatten(1, (-1, self.width))
        return hidden[:, :queries]

    def decide(self, proposal: Proposal) -> Decision:
        """The sampler's step, and the steps after it whose states were among the branches."""
        loop, rule, slots = self.loop, self.rule, proposal.slots
        width = loop.state.canvas.shape[1]
        given = loop.given.gather(1, slots)
        inside = loop.state.lo[:, None] + loop.columns[: slots.shape[1]] < loop.state.hi[:, None]
        canvas, open_slots = proposal.canvas, proposal.masked & ~proposal.transfer_index
        canvas = torch.where(proposal.transfer_index, proposal.tokens, canvas)
        confidence = torch.where(proposal.transfer_index, proposal.laws.confidence, 1.0)
        laws, steps = proposal.laws, proposal.decode.long()

        def offered() -> Tensor:
            stop = loop._first_stop(canvas, inside & ~open_slots & ~given, slots)
            return open_slots & (slots < stop[:, None]) & proposal.decode[:, None]

        if self.hidden is not None:
            branch_laws = [self._laws(k, slots) for k in range(self.hidden.shape[1])]
            reveal = self.reveal[:, : len(branch_laws)].gather(2, slots[:, None].expand(-1, len(branch_laws), -1))
            branch_open = proposal.masked[:, None] & ~reveal
            branch = torch.where(
                reveal & proposal.masked[:, None], self.draft.gather(1, slots)[:, None], proposal.canvas[:, None]
            )
            number = torch.arange(1, len(branch_laws) + 1, device=slots.device)
            best = torch.zeros_like(steps)
            for _ in branch_laws:
                found = rule.matches(branch, branch_open, canvas, open_slots) & self.live & (number > best[:, None])
                rest = offered()
                picked = found.any(-1) & rest.any(-1)
                if not bool(picked.any()):
                    break
                best = torch.where(picked, (found * number).amax(-1), best)
                at = (best - 1).clamp(min=0)
                new = _pick(branch_laws, at)
                laws = _merge(picked, new, laws)
                if rule.rule == "subset":
                    index = at[:, None, None].expand(-1, 1, slots.shape[1])
                    canvas = torch.where(picked[:, None], branch.gather(1, index)[:, 0], canvas)
                    open_slots = torch.where(picked[:, None], branch_open.gather(1, index)[:, 0], open_slots)
                    rest = offered()
                row_state = replace(proposal.row_state, step=loop.state.step + steps)
                choice = loop.request.sampler.step(loop._ranked(new, slots), canvas, rest, row_state, loop.noise)
                transfer = choice.transfer_index & rest & picked[:, None]
                canvas = torch.where(transfer, choice.tokens, canvas)
                confidence = torch.where(transfer, new.confidence, confidence)
                open_slots = open_slots & ~transfer
                steps = steps + picked
        transfer = proposal.masked & ~open_slots
        ranked = loop._ranked(laws, slots)
        chosen, exists = rule.draft(ranked.confidence, offered())
        wide = torch.zeros(*chosen.shape[:2], width + 1, dtype=torch.bool, device=slots.device)
        # A short block's last columns repeat a slot; only real ones are revealed.
        target = torch.where(chosen, slots[:, None], width)
        self.reveal = wide.scatter_(2, target, True)[..., :-1]
        self.draft = loop.walk.wide["canvas"].scatter(1, torch.where(open_slots, slots, width), laws.token)[:, :-1]
        self.lo, self.exists = loop.state.lo.clone(), exists
        account_accepts(loop, transfer.sum(-1), proposal.decode)
        return Decision(canvas, transfer, confidence, steps)

    def _laws(self, branch: int, slots: Tensor) -> RowStats:
        loop = self.loop
        assert self.hidden is not None and loop.hidden is not None
        own = self.hidden[:, branch]
        # The bin column takes the rows that are none.
        hidden = loop.hidden.scatter(1, spread(self.columns, own), own)
        source = (slots - loop.state.shift).clamp(min=0)
        return loop._laws(loop._logits(source, slots, hidden), slots, loop._banned(slots))


def _pick(laws: list[RowStats], at: Tensor) -> RowStats:
    """For each row b the laws number at[b]."""

    def one(name: str) -> Any:
        values = [getattr(law, name) for law in laws]
        if values[0] is None:
            return None
        stacked = torch.stack(values, dim=1)
        index = at.view(-1, *[1] * (stacked.dim() - 1)).expand(-1, 1, *stacked.shape[2:])
        return stacked.gather(1, index)[:, 0]

    return RowStats(**{entry.name: one(entry.name) for entry in fields(RowStats)})


def _merge(picked: Tensor, new: RowStats, old: RowStats) -> RowStats:
    """new where picked [B], else old."""

    def one(name: str) -> Any:
        a, b = getattr(new, name), getattr(old, name)
        return None if a is None else torch.where(picked.view(-1, *[1] * (a.dim() - 1)), a, b)

    return RowStats(**{entry.name: one(entry.name) for entry in fields(RowStats)})
