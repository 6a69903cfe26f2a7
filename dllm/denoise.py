"""The denoising loop of diffusion LMs: one loop for all samplers, caches and families.

Each row of a batch walks its own blocks at its own pace, with its own positions, noise, quotas and stop; a row that is done leaves the
batch. The loop applies the shift (slot i is read from row i - ``logits_shift``), draws tokens, asks the sampler what to commit, and
keeps the final hidden state of every row, so that a law whose row is frozen is the law of the row's last computation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dllm.block_lengths import BlockLengths
from dllm.cache.block import storing
from dllm.denoise_state import banned_tokens, check_request, check_step, first_slot, remember, settle
from dllm.hooks import Proposal
from dllm.kernels.row_stats import row_stats
from dllm.model.kv_store import KVStore
from dllm.noise import STREAM_TOKEN
from dllm.output import Stats
from dllm.request import DenoiseRequest, DenoiseResult, StepView
from dllm.resize import Resizer
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.processors import process_logits
from dllm.shadow import Shadow
from dllm.types import PADDING_GROUP, Attend, Plan, RowState, RowStats
from dllm.uniform_corruption import UniformCorruption, spread
from dllm.walk import BlockWalk, RowWalk


class DenoiseLoop:
    """State and steps of one call. ``model`` has embed, forward, head and new_store, as ``dllm.model.decoder.Decoder``."""

    def __init__(self, model: Any, request: DenoiseRequest) -> None:
        self.model, self.request, self.spec = model, request, request.spec
        batch, width = request.canvas.ids.shape
        self.device = request.canvas.ids.device
        check_request(model, request, batch)
        self.walk = BlockWalk(request.canvas, request.spec, request.block_length)
        self.state = self.walk.state
        self.lengths: BlockLengths | None = None
        if not isinstance(request.block_length, int):
            self.lengths = BlockLengths(request.block_length, self.walk, request.spec)
        self.final = list(self.walk.rows)
        self.results: list[list[int]] = [row.tolist() for row in request.canvas.ids]
        self.columns = torch.arange(width, device=self.device)
        # Guidance runs every row a second time, with its given tokens masked.
        self.copies = 2 if request.cfg_scale > 0 else 1
        self.given = request.canvas.valid & ~request.canvas.masked
        uses_store = request.cache.uses_store and width > 0
        self.store: KVStore | None = model.new_store(self.copies * batch, width) if uses_store else None
        self.hidden: Tensor | None = None
        self.corruption = None
        if hasattr(model, "soft_embed"):
            self.corruption = UniformCorruption(model, request.spec, batch, width, self.device)
        self.resizer = None if request.resize is None else Resizer(request.resize, request.canvas, self.spec)
        self.revise = getattr(request.sampler, "revise", None)
        self.shadow = Shadow(model, self.walk) if getattr(request.sampler, "shadow", False) else None
        # Some published schedules commit nothing in a step and still end.
        self.may_wait = getattr(request.sampler, "may_wait", False)
        self.post_steps = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.previous: Tensor | None = None
        self.sampler_history: dict[str, Tensor] = {}
        self.noise = request.noise
        self.num_steps = 0
        self.decode_steps = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.log_confidence = torch.zeros(batch, device=self.device)
        self.final_log_confidence = [0.0] * batch
        limit = UNLIMITED if request.max_denoising_steps is None else request.max_denoising_steps
        self.limit = torch.tensor([limit] * batch if isinstance(limit, int) else list(limit), device=self.device)
        self.eos = torch.tensor(request.eos_token_ids, dtype=torch.int64, device=self.device)
        self.banned = request.banned.to(self.device)
        self.closed_slots = request.closed_slots
        self.closed_ids = torch.zeros_like(self.banned)
        self.closed_ids[list(request.closed_ids)] = True
        self.stats = Stats()
        self.hook = None if request.hook is None else request.hook(self)
        # Rows that ride in the loop's own forward: shadows, or what a verifier adds.
        self.riders: Any = self.hook if getattr(self.hook, "extends", False) else self.shadow
        self.started = time.perf_counter()
        self._drop_finished()

    @property
    def rows(self) -> list[RowWalk]:
        """The rows that are still there, in the order of the state's tensors."""
        return self.walk.rows

    def run(self) -> Iterator[StepView]:
        """Denoise until every row is done; yields after each step that decoded something."""
        while self.rows:
            plan = _trim(self.request.cache.plan(self.state))
            asked = [] if self.lengths is None else self.lengths.ask_before_forward(plan, self.hidden, self._logits)
            if asked:
                plan = _trim(self.request.cache.plan(self.state))
                if self.corruption is not None:
                    # Their slots got random tokens for a guess of the length; those of a slot are always the same.
                    self.corruption.seeded[asked] = -1
            if self.corruption is not None:
                self.corruption.seed(self.walk, self.noise)
            first_only = storing(self.state) if plan.first_only is None else plan.first_only
            if self._forward(plan):
                yield self._decode(plan.decode, first_only)
                self._drop_finished()

    def result(self) -> DenoiseResult:
        """The outcome, once ``run`` is exhausted."""
        self.stats.decode_s = self._now() - self.started - self.stats.prefill_s
        self.stats.useful_tokens = sum(row.stats.useful_tokens for row in self.final)
        return DenoiseResult(
            canvas=self.results,
            useful=[row.useful for row in self.final],
            finish_reasons=[row.reason for row in self.final],
            stop_texts=[row.stop_text for row in self.final],
            log_confidence=self.final_log_confidence,
            stats=self.stats,
            row_stats=[row.stats for row in self.final],
            history=[row.history for row in self.final] if self.request.want_history else None,
        )

    def _drop_finished(self) -> None:
        """Take finished rows out of the batch, so that they are neither computed nor written."""
        if not any(row.done for row in self.rows):
            return
        now, batch = self._now() - self.started, len(self.rows)
        for b, row in enumerate(self.rows):
            if row.done:
                self.results[row.index] = self.state.canvas[b].tolist()
                self.final_log_confidence[row.index] = float(self.log_confidence[b])
                # Pinned tokens are part of the text, but nobody generated them.
                pinned = self.given[b, row.begin : row.begin + row.useful].sum() if len(row.regions) == 1 else 0
                row.stats.useful_tokens = row.useful - int(pinned)
                row.stats.prefill_s = self.stats.prefill_s
                row.stats.decode_s = max(now - self.stats.prefill_s, 0.0)
        keep = self.walk.keep([b for b, row in enumerate(self.rows) if not row.done])
        if not self.rows:
            return
        again = torch.cat([keep + i * batch for i in range(self.copies)])
        self.store = self.store.select(again) if self.store is not None else None
        self.hidden = None if self.hidden is None else self.hidden[again]
        for name in (
            "previous",
            "closed_slots",
            "decode_steps",
            "limit",
            "log_confidence",
            "given",
            "post_steps",
        ):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[keep])
        self.sampler_history = {name: value[keep] for name, value in self.sampler_history.items()}
        self.noise = self.noise.select(keep)
        if self.lengths is not None:
            self.lengths.select(keep)
        if self.corruption is not None:
            self.corruption.select(keep)
        if self.hook is not None:
            self.hook.select(keep)

    @torch.no_grad()
    def _forward(self, plan: Plan) -> bool:
        """Run the planned rows and keep their hidden states; whether some row is to decode from them."""
        state = self.state
        width = state.canvas.shape[1]
        rows = plan.rows.clamp(max=width - 1)
        # Padding rows go to the bin column at the end.
        target = torch.where(plan.valid, rows, width)
        group, low, valid = state.group.gather(1, rows), state.low.gather(1, rows), plan.valid
        key_group = None
        if self.store is not None:
            recomputed = torch.zeros_like(self.walk.wide["stored"]).scatter_(1, target, True)[:, :-1]
            readable = state.stored & ~recomputed
            if plan.keys is not None:
                readable = readable & plan.keys
            ends = readable.any(0).nonzero()
            self.store.extent = int(ends[-1]) + 1 if len(ends) else 0
            key_group = torch.where(readable, state.group, PADDING_GROUP)[:, : self.store.extent]
        ids, masked, positions = (x.gather(1, rows) for x in (state.canvas, state.masked, state.position))
        extra = {}
        if self.corruption is not None:
            # A slot of the open block stays a row of the canvas after its commit; it turns into text with its block.
            opened = (rows >= state.lo[:, None]) & (rows < state.hi[:, None])
            extra = self.corruption.extra(target, masked | opened)
        write, places = plan.write if self.store is not None else None, target
        if self.copies > 1:
            masked = torch.cat([masked, masked | self.given.gather(1, rows)])
            ids, positions, group, low, valid, rows, places = (
                x.repeat(2, 1) for x in (ids, positions, group, low, valid, rows, places)
            )
            key_group = None if key_group is None else key_group.repeat(2, 1)
            write = None if write is None else write.repeat(2, 1)
        attend = Attend.by_group(group, low, valid, key_group)
        embeds = self.model.embed(ids, masked, self.spec.mask_token_id)
        queries = rows.shape[1]
        if self.riders is not None:
            rows, attend, embeds, positions, write = self.riders.extend(plan, rows, attend, embeds, positions, write)
        hidden = self.model(None, positions, self.store, attend, embeds=embeds, rows=rows, write=write, **extra)
        if self.riders is not None:
            hidden = self.riders.split(hidden, queries)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(hidden.shape[0], width + 1, hidden.shape[-1])
        self.hidden.scatter_(1, spread(places, hidden), hidden)
        if self.store is not None:
            self.walk.wide["stored"].scatter_(1, torch.where(plan.write, target, width), True)
        computed = plan.valid.sum(-1) + (0 if self.riders is None else self.riders.counts)
        state.forwards = state.forwards + (computed > 0)
        state.first_forward = False
        counts, decoded = torch.stack([computed, plan.decode.long()]).tolist()
        self.stats.nfe += 1
        self.stats.positions += sum(counts)
        for row, count in zip(self.rows, counts, strict=True):
            row.stats.nfe += int(count > 0)
            row.stats.positions += count
        if not any(decoded):
            self.stats.prefill_s = self._now() - self.started
        return any(decoded)

    @torch.no_grad()
    def _decode(self, decode: Tensor, first_only: Tensor) -> StepView:
        """Laws of the open blocks, the sampler's decision, the commit, revisions, stops and block ends."""
        state, request = self.state, self.request
        width = state.canvas.shape[1]
        if self.lengths is not None:
            self.lengths.ask_after_forward(decode, self.hidden, self._logits)
        slots = state.lo[:, None] + self.columns[: max(row.hi - row.lo for row in self.rows)]
        inside = slots < state.hi[:, None]
        slots = slots.clamp(max=width - 1)
        source = (slots - state.shift).clamp(min=0)
        logits = self._logits(source, slots)
        canvas, masked = state.canvas.gather(1, slots), state.masked.gather(1, slots) & inside
        banned = self._banned(slots)
        laws = self._laws(logits, slots, banned)
        # Nothing is committed after a stop token; what is masked before it still is.
        # A given token inside the block (a pinned canvas) is no stop, nor is it ever revised.
        given = self.given.gather(1, slots)
        stop = self._first_stop(canvas, inside & ~masked & ~given, slots)
        offered = masked & (slots < stop[:, None]) & decode[:, None]
        if self.revise is not None:
            # A stop token may yet be revised.
            offered = masked & decode[:, None]
            self.post_steps = (self.post_steps + (decode & ~masked.any(1))) * (state.step > 0)
        offered = offered & ~(first_only[:, None] & (slots != state.lo[:, None]))
        row_state = RowState(
            step=state.step,
            steps=self.limit,
            masks_at_start=state.hi - state.lo,
            slots=slots,
            history=self.sampler_history,
            block_start=state.row_lo,
            block_length=state.hi - state.row_lo,
            post_steps=self.post_steps,
            banned=banned,
        )
        choice = request.sampler.step(self._ranked(laws, slots), canvas, offered, row_state, self.noise)
        if choice.transfer_index.shape != offered.shape:
            raise ValueError(
                f"sampler must return transfer_index {tuple(offered.shape)}: got {tuple(choice.transfer_index.shape)}"
            )
        transfer = choice.transfer_index & offered
        if request.max_denoising_steps is not None:
            # The last step that the limit allows takes whatever is left.
            transfer = transfer | ((state.step + 1 >= self.limit)[:, None] & offered)
        transfer = transfer | (first_only[:, None] & offered)
        chosen, confidence, steps = choice.tokens, laws.confidence, decode
        if self.hook is not None:
            proposal = Proposal(laws, slots, canvas, masked, offered, decode, row_state, chosen, transfer)
            decision = self.hook.decide(proposal)
            chosen, confidence, transfer = decision.tokens, decision.confidence, decision.transfer_index & offered
            steps = decode if decision.steps is None else decision.steps
        tokens = torch.where(transfer, chosen, canvas)
        self.log_confidence += torch.where(transfer, confidence.clamp(min=1e-30).log(), 0.0).sum(1)
        settled = torch.ones_like(decode)
        if self.revise is not None:
            own = inside & ~masked & ~given & decode[:, None]
            judged = laws if self.shadow is None else self.shadow.laws(canvas)
            revision = self.revise(judged, canvas, own, row_state, self.noise)
            edit, remask = revision.edit & own, revision.remask & own
            tokens = torch.where(edit, revision.tokens, tokens)
            settled = revision.settled
            self.walk.wide["masked"].scatter_(1, torch.where(remask, slots, width), True)
            transfer = (transfer | edit) & ~remask
        target = torch.where(transfer, slots, width)
        self.walk.wide["canvas"].scatter_(1, target, tokens)
        self.walk.wide["masked"].scatter_(1, target, False)
        if self.lengths is not None:
            self.lengths.remember(target, confidence)
        if self.corruption is not None:
            # Committed slots keep their tokens and are conditioned on the last laws as the others are.
            if choice.canvas is not None:
                still_open = masked & ~transfer
                choice = replace(choice, canvas=torch.where(still_open, choice.canvas, tokens))
            self.corruption.renoise(self.walk, choice, inside & decode[:, None], slots)
        state.prev_lo = torch.where(decode, state.row_lo, state.prev_lo)
        state.step = state.step + steps
        self.decode_steps = self.decode_steps + steps
        self.num_steps += 1

        # One transfer to the host a step: faults, then where each row stands.
        masked = state.masked.gather(1, slots) & inside
        assert laws.log_total is not None, "row_stats must give log_total"
        columns = torch.stack(
            [
                decode,
                (~laws.log_total.isfinite() & inside).any(1) & decode,
                (banned_tokens(banned, tokens) & transfer).any(1),
                offered.any(1) & ~transfer.any(1) & (self.limit >= UNLIMITED) & (not self.may_wait),
                torch.minimum(first_slot(masked, slots, width), state.hi),
                self._first_stop(tokens, inside & ~masked & ~given, slots),
                settled,
            ]
        )
        decoded, broken, illegal, idle, edge, stopped, calm = columns.tolist()
        check_step(self.rows, request.sampler, self.decode_steps, broken, illegal, idle)
        moves = {} if self.resizer is None else self.resizer.pending(tokens, transfer, slots)
        ready = [d and b not in moves for b, d in enumerate(decoded)]
        # The token of a move is taken out again.
        bound = [moves[b][-1][0] if b in moves else row.hi for b, row in enumerate(self.rows)]
        if self.revise is not None:
            # A block that may still be revised is neither full nor at an end, and none of it is final.
            ready = [d and c and e == row.hi for d, c, e, row in zip(decoded, calm, edge, self.rows, strict=True)]
            bound = [row.lo for row in self.rows]
        frontier, full = settle(self.walk, ready, edge, stopped, bound, request.find_stop)
        view = StepView(
            step=self.num_steps,
            rows=[row.index for row in self.rows],
            canvas=state.canvas,
            masked=state.masked,
            frontier=frontier,
            stopped=[row.reason == "stop" for row in self.rows],
            slots=slots,
            inside=inside,
            provisional=torch.where(masked, laws.token, tokens),
            transfer_index=transfer,
        )
        if request.want_history:
            remember(self.walk, view, decoded, self.decode_steps)
        for b in full:
            self.walk.advance(b)
        for b, move in moves.items():
            assert self.resizer is not None, "only a resizer moves slots"
            self.resizer.apply(self.walk, self.given, b, move)
        return view

    def _logits(self, source: Tensor, slots: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of the rows source [B, S], guided and processed; slots [B, S] are what they predict.

        hidden [B, L + 1, D]: of other rows than the loop's own.
        """
        hidden = self.hidden if hidden is None else hidden
        assert hidden is not None, "decode before the first forward"
        source = source.repeat(self.copies, 1)
        logits = self.model.head(hidden.gather(1, spread(source, hidden)))
        if self.copies > 1:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + (self.request.cfg_scale + 1) * (conditional - unconditional)
        if self.resizer is not None:
            logits = self.resizer.bar(logits, self.walk)
        processor = self.request.logits_processor
        if processor is None:
            return logits
        processed = processor(logits, slots)
        if not isinstance(processed, Tensor) or processed.shape != logits.shape:
            shape = tuple(getattr(processed, "shape", ()))
            raise ValueError(f"logits_processor must return logits of shape {tuple(logits.shape)}: got {shape}")
        return processed

    def _banned(self, slots: Tensor) -> Tensor:
        """Ids that may not be committed: bool [V], or [B, S, V] where slots differ."""
        if self.closed_slots is None:
            return self.banned
        return self.banned | (self.closed_slots.gather(1, slots)[..., None] & self.closed_ids)

    def _laws(self, logits: Tensor, slots: Tensor, banned: Tensor) -> RowStats:
        request = self.request
        needs = request.sampler.needs | (frozenset() if self.hook is None else self.hook.needs)
        law = uniform = previous = None
        if request.temperature > 0:
            uniform = self.noise.uniform(slots, self.decode_steps, STREAM_TOKEN)
            law = process_logits(
                logits,
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                min_p=request.min_p,
                banned=banned,
            )
        if "previous" in needs:
            previous = torch.zeros_like(logits, dtype=torch.float32)
            if self.previous is not None:
                shared = min(previous.shape[1], self.previous.shape[1])
                same_block = (self.state.step > 0)[:, None, None]
                previous[:, :shared] = torch.where(same_block, self.previous[:, :shared], 0.0)
        processed = self.spec.confidence == "processed"
        laws = row_stats(logits, needs, banned, uniform, request.temperature, law, processed, previous)
        self.previous = laws.logits if "previous" in needs else None
        return laws

    def _ranked(self, laws: RowStats, slots: Tensor) -> RowStats:
        """The laws as the sampler ranks them: a first slot whose law cannot change any more is as sure as the surest of its block.

        Ties go to the lowest slot, so it goes first; the numbers stay those of real laws, for some rules add them up.
        """
        if self.spec.first_slot != "commit_first":
            return laws
        settled = (slots == self.state.lo[:, None]) & (self.state.row_lo == self.state.lo)[:, None]

        def raised(score: Tensor | None, best: Tensor | None) -> Any:
            return None if score is None or best is None else torch.where(settled, best, score)

        return replace(
            laws,
            confidence=raised(laws.confidence, laws.confidence.amax(1, keepdim=True)),
            entropy=raised(laws.entropy, None if laws.entropy is None else laws.entropy.amin(1, keepdim=True)),
            margin=raised(laws.margin, None if laws.margin is None else laws.margin.amax(1, keepdim=True)),
        )

    def _first_stop(self, tokens: Tensor, committed: Tensor, slots: Tensor) -> Tensor:
        """First slot with a committed stop token, [B]; the canvas width where there is none."""
        stop = (tokens[..., None] == self.eos).any(-1) & committed
        return first_slot(stop, slots, self.state.canvas.shape[1])

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _trim(plan: Plan) -> Plan:
    """Cut a bucket's last columns that no row uses (on the GPU whole steps are captured with the bucket as it is)."""
    columns = plan.valid.any(0).nonzero()
    assert len(columns), "a cache must plan at least one row while a sequence is active"
    used = int(columns[-1]) + 1
    return replace(plan, rows=plan.rows[:, :used], valid=plan.valid[:, :used], write=plan.write[:, :used])


def denoise(model: Any, request: DenoiseRequest) -> DenoiseResult:
    """Run the loop to its end."""
    loop = DenoiseLoop(model, request)
    for _ in loop.run():
        pass
    return loop.result()
