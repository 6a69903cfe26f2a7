"""The loop's side of guide and verifiers: what runs another forward between a proposal and its commit.

A hook is started once a call and owns what belongs to it (a key store, a draft); ``needs`` names
what it reads of the laws beside the sampler's needs. ``decide`` gets a ``Proposal`` and says what is
committed; a hook that ``extends`` the loop's own forward by rows has ``extend`` and ``split`` as well. ``select`` keeps some rows.
Letters: B batch, S slots, Q rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dllm.noise import STREAM_ACCEPT, STREAM_RESIDUAL
from dllm.samplers.guided import Guided, leading
from dllm.samplers.processors import process_logits
from dllm.samplers.verify import chain_acceptance, sample_law
from dllm.types import PADDING_GROUP, Attend, Draft, RowState, RowStats


@dataclass(eq=False)
class Proposal:
    """What a step proposes for the open blocks, all [B, S]: laws and canvas of the slots, ``masked`` and, of these, ``offered`` (what may
    be committed now), and what the sampler chose: tokens int64, transfer_index bool. decode [B] bool: rows that take a step.
    """

    laws: RowStats
    slots: Tensor
    canvas: Tensor
    masked: Tensor
    offered: Tensor
    decode: Tensor
    row_state: RowState
    tokens: Tensor
    transfer_index: Tensor


@dataclass(eq=False)
class Decision:
    """What is committed: tokens [B, S] int64, transfer_index [B, S] bool (among the offered), confidence [B, S] fp32 of each token under
    the law that chose it; steps [B] int64: denoise steps that it stands for (None: one)."""

    tokens: Tensor
    transfer_index: Tensor
    confidence: Tensor
    steps: Tensor | None = None


class Hook(Protocol):
    """One guide or verifier at work in one call of the loop."""

    extends: bool
    needs: frozenset[str]

    def decide(self, proposal: Proposal) -> Decision: ...

    def select(self, keep: Tensor) -> None: ...


def refuse(name: str, **reasons: tuple[bool, str]) -> None:
    """Raise ValueError for the first combination without meaning: keyword = argument's name, value = (whether it is there, why not)."""
    for argument, (present, why) in reasons.items():
        if present:
            raise ValueError(f"{name} does not go with {argument}: {why}")


def refuse_common(loop: Any, name: str) -> None:
    """What no guide or verifier goes with."""
    request = loop.request
    refuse(
        name,
        max_denoising_steps=(
            request.max_denoising_steps is not None,
            "it decides how many tokens a step commits, so a number of steps cannot be promised",
        ),
        resize=(request.resize is not None, "accepted tokens would move"),
        sampler=(
            hasattr(request.sampler, "revise"),
            f"{type(request.sampler).__name__} takes accepted tokens back",
        ),
        model=(hasattr(loop.model, "soft_embed"), "a model without a mask token changes every slot in every step"),
    )


def account(loop: Any, name: str, computed: Tensor) -> None:
    """Count one forward of a helper (``name``: "guide_nfe" or "draft_nfe") in which the rows computed [B] bool took part."""
    setattr(loop.stats, name, getattr(loop.stats, name) + 1)
    for row, took_part in zip(loop.rows, computed.tolist(), strict=True):
        setattr(row.stats, name, getattr(row.stats, name) + int(took_part))


def account_accepts(loop: Any, committed: Tensor, verified: Tensor) -> None:
    """Note the tokens that each verify pass committed: committed [B] int64, verified [B] bool."""
    for row, count, took_part in zip(loop.rows, committed.tolist(), verified.tolist(), strict=True):
        if took_part:
            row.stats.accept_lengths.append(count)
            loop.stats.accept_lengths.append(count)


def law_of(request: Any, logits: Tensor, banned: Tensor) -> Tensor:
    """Probabilities [..., V] fp32 that tokens are drawn from: banned ids out, temperature and filters as asked for; greedy: no filter."""
    if request.temperature > 0:
        scores = process_logits(
            logits,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            banned=banned,
        )
    else:
        scores = logits.float().masked_fill(banned, -torch.inf)
    return scores.softmax(-1)


def until_stop(tokens: Tensor, count: Tensor, first: Tensor, eos: Tensor) -> Tensor:
    """count [B], cut so that nothing after a stop token counts: tokens [B, S], of which count follow from column first [B] on."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens[..., None] == eos).any(-1)
    inside = (column >= first[:, None]) & (column < (first + count)[:, None])
    place = torch.where(stops & inside, column, tokens.shape[1] + 1).amin(1)
    return torch.minimum(count, (place - first + 1).clamp(min=0))


class CausalRun:
    """A causal model with keys and values of its own; rows of the batch stand at their own places."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        self.model = model
        self.store = model.new_store(batch, capacity)
        self.columns = torch.arange(capacity, device=model.device)

    def forward(self, ids: Tensor, start: Tensor, valid: Tensor) -> Tensor:
        """Hidden states [B, Q, D] of ids [B, Q] at positions start[b] + 0 .. Q - 1 (valid [B, Q]), over the keys before start [B].

        Their keys are stored; whoever knows that a row does not stand says so by a smaller start next time.
        """
        positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        extent = int(start.max()) if len(start) else 0
        self.store.extent = extent
        keys = self.columns[:extent].expand(len(start), -1)
        key_group = torch.where(keys < start[:, None], keys, PADDING_GROUP)
        attend = Attend.by_group(positions, None, valid, key_group)
        rows = positions.clamp(max=self.store.capacity - 1)
        return self.model(None, rows, self.store, attend, embeds=self.model.embed(ids), rows=rows, write=valid)

    def select(self, keep: Tensor) -> None:
        self.store = self.store.select(keep)


class GuideHook:
    """A guide with the diffusion model's own vocabulary: one causal pass over what is new since the last one and the draft."""

    extends = False
    needs = frozenset({"top1"})

    def __init__(self, loop: Any, model: Any, rule: Guided) -> None:
        check_guided(loop, rule)
        self.loop, self.rule = loop, rule
        batch, width = loop.state.canvas.shape
        limit = getattr(getattr(model, "config", None), "max_positions", width)
        if width > limit:
            raise ValueError(f"prompt and generation must fit in the guide's {limit} positions: got {width}")
        self.run = CausalRun(model, batch, width)
        # Canvas columns whose keys in the guide's store belong to committed tokens.
        self.cached = torch.zeros(batch, dtype=torch.int64, device=loop.device)

    def select(self, keep: Tensor) -> None:
        self.run.select(keep)
        self.cached = self.cached[keep]

    def decide(self, proposal: Proposal) -> Decision:
        """Keep the accepted prefix of the draft; every row with an offered slot commits at least one."""
        left, passes = self.rule.guide_passes, 0
        self.drafted = proposal.offered
        decision = self._pass(proposal)
        while True:
            passes += 1
            stopped = ((decision.tokens[..., None] == self.loop.eos).any(-1) & decision.transfer_index).any(-1)
            rest = self.drafted & ~decision.transfer_index & ~stopped[:, None]
            if (left is not None and passes >= left) or not bool(rest.any()):
                return decision
            laws = replace(proposal.laws, token=decision.tokens, confidence=decision.confidence)
            more = self._pass(replace(proposal, laws=laws, offered=rest))
            decision = Decision(more.tokens, decision.transfer_index | more.transfer_index, more.confidence)

    def _pass(self, proposal: Proposal) -> Decision:
        """One reading of the draft by the guide."""
        loop, rule, request = self.loop, self.rule, self.loop.request
        slots, offered, draft = proposal.slots, proposal.offered, proposal.laws.token
        count = offered.sum(-1)
        offset = offered.long().argmax(-1)
        first = slots[:, 0] + offset
        banned = loop._banned(slots)
        law, own = self._score(proposal, first, count, banned)
        chance = law.gather(-1, draft[..., None])[..., 0]
        fixed = torch.zeros_like(loop.decode_steps)
        column = torch.arange(slots.shape[1], device=slots.device)
        at = column - offset[:, None]
        if rule.accept == "speculative" and request.temperature > 0:
            drafted = law_of(request, loop._logits((slots - loop.state.shift).clamp(min=0), slots), banned)
            uniform = loop.noise.uniform(slots, loop.decode_steps, STREAM_ACCEPT)
            test = chain_acceptance(torch.cat([law, law[:, -1:]], dim=1), Draft(draft, drafted))
            kept = leading(uniform < test, offered)
            place = (offset + kept).clamp(max=slots.shape[1] - 1)[:, None, None].expand(-1, 1, law.shape[-1])
            residual = (law.gather(1, place) - drafted.gather(1, place)).clamp(min=0)
            # No mass left is rounding: then both laws agree.
            residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, law.gather(1, place))
            redrawn = sample_law(residual.expand_as(law), loop.noise.uniform(slots, loop.decode_steps, STREAM_RESIDUAL))
            own = torch.where(at == kept[:, None], redrawn, own)
        else:
            uniform = loop.noise.uniform(slots, fixed, STREAM_RESIDUAL)
            accept = "exact" if rule.accept == "speculative" else rule.accept
            passed = (
                draft == own if accept == "exact" else rule.accepts(draft, own, law, proposal.laws.confidence, uniform)
            )
            kept = leading(passed, offered)
        tokens, confidence = draft, proposal.laws.confidence
        if rule.on_reject == "ar":
            tokens = torch.where(offered & (at == kept[:, None]), own, draft)
            fresh = torch.where(at == kept[:, None], law.gather(-1, own[..., None])[..., 0], chance)
            confidence = torch.where(offered & (at <= kept[:, None]), fresh, confidence)
            committed = torch.minimum(kept + 1, count)
        else:
            committed = torch.minimum(kept.clamp(min=1), count)
        committed = until_stop(tokens, committed, offset, loop.eos)
        # The last committed token is read next time, even where it was fed as a draft: its row predicts the slot behind it.
        self.cached = torch.where(count > 0, torch.minimum(first + committed - 1, self.fed), self.cached)
        transfer = (at >= 0) & (at < committed[:, None]) & offered
        account_accepts(loop, committed, count > 0)
        return Decision(tokens, transfer, confidence)

    def _score(self, proposal: Proposal, first: Tensor, count: Tensor, banned: Tensor) -> tuple[Tensor, Tensor]:
        """The guide's law [B, S, V] and its own token [B, S] at each offered slot; leaves in ``fed`` how far it has read."""
        loop, request = self.loop, self.loop.request
        slots, offered = proposal.slots, proposal.offered
        width = loop.state.canvas.shape[1]
        text = proposal.laws.token
        # What earlier passes over this draft have committed is not on the canvas yet.
        text = loop.walk.wide["canvas"].scatter(1, torch.where(self.drafted, slots, width), text)[:, :-1]
        law: Tensor | None = None
        own = torch.zeros_like(slots)
        self.fed = self.cached.clone()
        alive, done = count > 0, 0
        longest = int(count.max())
        while done < longest and bool(alive.any()):
            upto = torch.minimum(count, torch.full_like(count, done + self.rule.verify_batch_size))
            # Row i - 1 predicts slot i, so the last draft of a chunk is not needed.
            stop = torch.where(alive & (upto > done), first + upto - 1, self.fed)
            length = int((stop - self.fed).max())
            at = self.fed[:, None] + torch.arange(length, device=slots.device)
            valid = at < stop[:, None]
            hidden = self.run.forward(text.gather(1, at.clamp(max=width - 1)), self.fed, valid)
            account(loop, "guide_nfe", valid.any(-1))
            number = slots - first[:, None]
            here = offered & (number >= done) & (number < upto[:, None]) & alive[:, None]
            source = (slots - 1 - self.fed[:, None]).clamp(0, length - 1)
            logits = self.run.model.head(hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1])))
            fresh = law_of(request, logits, banned)
            law = fresh if law is None else torch.where(here[..., None], fresh, law)
            if request.temperature > 0:
                chosen = sample_law(
                    fresh, loop.noise.uniform(slots, torch.zeros_like(loop.decode_steps), STREAM_ACCEPT)
                )
            else:
                chosen = fresh.argmax(-1)
            if not bool((logits.isfinite().any(-1) & ~logits.isnan().any(-1) | ~here).all()):
                raise ValueError("the guide's logits must be finite: got NaN or infinity")
            own = torch.where(here, chosen, own)
            self.fed = torch.maximum(self.fed, stop)
            done += self.rule.verify_batch_size
            if done < longest:
                passed = self._passes(proposal, law, own)
                alive = alive & (count > done) & (leading(passed, offered) >= done)
        if law is None:
            law = torch.zeros(*slots.shape, loop.spec.vocab_size, device=slots.device)
        return law, own

    def _passes(self, proposal: Proposal, law: Tensor, own: Tensor) -> Tensor:
        """A first look at a chunk: whether it is worth going on behind it."""
        draft, rule = proposal.laws.token, self.rule
        if rule.accept == "speculative":
            return draft == own
        uniform = self.loop.noise.uniform(proposal.slots, torch.zeros_like(self.loop.decode_steps), STREAM_RESIDUAL)
        return rule.accepts(draft, own, law, proposal.laws.confidence, uniform)


def check_guided(loop: Any, rule: Guided) -> None:
    """Raise ValueError for a request in which an AR guide has no meaning."""
    refuse_common(loop, "guide")
    # The guide reads from left to right: what stands behind a gap is hidden from it.
    gaps = [row.regions for row in loop.rows]
    ends = [int(n) for n in loop.request.canvas.lengths]
    behind = any(
        len(row) != 1 or row[0][1] != end or bool((~loop.state.masked[b, row[0][0] : end]).any())
        for b, (row, end) in enumerate(zip(gaps, ends, strict=True))
        if row
    )
    refuse(
        "guide",
        infill=(behind, "an AR guide cannot see given tokens behind a gap"),
        prompt=(
            any(row and row[0][0] < 1 for row in gaps),
            "the guide needs a given token to start from, got an empty one",
        ),
        cfg_scale=(
            rule.lossless and loop.request.cfg_scale > 0 and rule.accept == "speculative",
            "the residual law needs the law that the draft was drawn from, without guidance",
        ),
    )
