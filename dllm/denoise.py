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

from dllm.kernels.row_stats import row_stats
from dllm.model.kv_store import KVStore
from dllm.noise import STREAM_TOKEN
from dllm.output import HistoryFrame, Stats
from dllm.request import DenoiseRequest, DenoiseResult, StepView
from dllm.samplers.low_confidence import UNLIMITED
from dllm.samplers.processors import process_logits
from dllm.types import PADDING_GROUP, Attend, Plan, RowState, RowStats
from dllm.walk import BlockWalk, RowWalk

READABLE = frozenset({"top1", "entropy", "margin", "logits", "previous"})
"""What the loop can put into ``RowStats`` for a sampler's ``needs``."""


class DenoiseLoop:
    """State and steps of one call. ``model`` has embed, forward, head and new_store, as ``dllm.model.decoder.Decoder``."""

    def __init__(self, model: Any, request: DenoiseRequest) -> None:
        self.model, self.request, self.spec = model, request, request.spec
        batch, width = request.canvas.ids.shape
        self.device = request.canvas.ids.device
        self._check_request(batch)
        self.walk = BlockWalk(request.canvas, request.spec, request.block_length)
        self.state = self.walk.state
        self.final = list(self.walk.rows)
        self.results: list[list[int]] = [row.tolist() for row in request.canvas.ids]
        self.columns = torch.arange(width, device=self.device)
        uses_store = request.cache.uses_store and width > 0
        self.store: KVStore | None = model.new_store(batch, width) if uses_store else None
        self.hidden: Tensor | None = None
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
            if self._forward(plan):
                yield self._decode(plan.decode)
                self._drop_finished()

    def result(self) -> DenoiseResult:
        """The outcome, once ``run`` is exhausted."""
        self.stats.decode_s = self._now() - self.started - self.stats.prefill_s
        self.stats.useful_tokens = sum(row.useful for row in self.final)
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

    def _check_request(self, batch: int) -> None:
        request = self.request
        longest = int(request.canvas.lengths.max())
        if longest > self.spec.max_positions:
            raise ValueError(f"prompt and generation must fit in {self.spec.max_positions} positions: got {longest}")
        request.cache.check(self.spec)
        unknown = set(request.sampler.needs) - READABLE
        if unknown:
            raise ValueError(f"sampler needs must be among {sorted(READABLE)}: got {sorted(unknown)}")
        if batch > 1 and not callable(getattr(request.noise, "select", None)):
            name = type(request.noise).__name__
            raise TypeError(f"noise must have select(keep) for a batch of {batch}: {name} has none")

    def _drop_finished(self) -> None:
        """Take finished rows out of the batch, so that they are neither computed nor written."""
        if not any(row.done for row in self.rows):
            return
        now = self._now() - self.started
        for b, row in enumerate(self.rows):
            if row.done:
                self.results[row.index] = self.state.canvas[b].tolist()
                self.final_log_confidence[row.index] = float(self.log_confidence[b])
                row.stats.useful_tokens = row.useful
                row.stats.prefill_s = self.stats.prefill_s
                row.stats.decode_s = max(now - self.stats.prefill_s, 0.0)
        keep = self.walk.keep([b for b, row in enumerate(self.rows) if not row.done])
        if not self.rows:
            return
        self.store = self.store.select(keep) if self.store is not None else None
        for name in ("hidden", "previous", "closed_slots", "decode_steps", "limit", "log_confidence"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[keep])
        self.sampler_history = {name: value[keep] for name, value in self.sampler_history.items()}
        self.noise = self.noise.select(keep)

    @torch.no_grad()
    def _forward(self, plan: Plan) -> bool:
        """Run the planned rows and keep their hidden states; whether some row is to decode from them."""
        state = self.state
        width = state.canvas.shape[1]
        rows = plan.rows.clamp(max=width - 1)
        # Padding rows go to the bin column at the end.
        target = torch.where(plan.valid, rows, width)
        group, low = state.group.gather(1, rows), state.low.gather(1, rows)
        key_group = None
        if self.store is not None:
            recomputed = torch.zeros_like(self.walk.wide["stored"]).scatter_(1, target, True)[:, :-1]
            readable = state.stored & ~recomputed
            if plan.keys is not None:
                readable = readable & plan.keys
            ends = readable.any(0).nonzero()
            self.store.extent = int(ends[-1]) + 1 if len(ends) else 0
            key_group = torch.where(readable, state.group, PADDING_GROUP)[:, : self.store.extent]
        attend = Attend.by_group(group, low, plan.valid, key_group)
        embeds = self.model.embed(state.canvas.gather(1, rows), state.masked.gather(1, rows), self.spec.mask_token_id)
        hidden = self.model(
            None,
            state.position.gather(1, rows),
            self.store,
            attend,
            embeds=embeds,
            rows=rows,
            write=plan.write if self.store is not None else None,
        )
        if self.hidden is None:
            self.hidden = hidden.new_zeros(state.canvas.shape[0], width + 1, hidden.shape[-1])
        self.hidden.scatter_(1, target[..., None].expand_as(hidden), hidden)
        if self.store is not None:
            self.walk.wide["stored"].scatter_(1, torch.where(plan.write, rows, width), True)
        computed = plan.valid.sum(-1)
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
    def _decode(self, decode: Tensor) -> StepView:
        """Laws of the open blocks, the sampler's decision, the commit, stops and block ends."""
        state, request = self.state, self.request
        assert self.hidden is not None, "decode before the first forward"
        width = state.canvas.shape[1]
        slots = state.lo[:, None] + self.columns[: max(row.hi - row.lo for row in self.rows)]
        inside = slots < state.hi[:, None]
        slots = slots.clamp(max=width - 1)
        source = (slots - state.shift).clamp(min=0)
        logits = self.model.head(self.hidden.gather(1, source[..., None].expand(-1, -1, self.hidden.shape[-1])))
        canvas, masked = state.canvas.gather(1, slots), state.masked.gather(1, slots) & inside
        banned = self._banned(slots)
        laws = self._laws(logits, slots, banned)
        # Nothing is committed after a stop token; what is masked before it still is.
        stop = self._first_stop(canvas, inside & ~masked, slots)
        offered = masked & (slots < stop[:, None]) & decode[:, None]
        row_state = RowState(
            step=state.step,
            steps=self.limit,
            masks_at_start=state.hi - state.lo,
            slots=slots,
            history=self.sampler_history,
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
        tokens = torch.where(transfer, choice.tokens, canvas)
        self.log_confidence += torch.where(transfer, laws.confidence.clamp(min=1e-30).log(), 0.0).sum(1)
        target = torch.where(transfer, slots, width)
        self.walk.wide["canvas"].scatter_(1, target, tokens)
        self.walk.wide["masked"].scatter_(1, target, False)
        state.prev_lo = torch.where(decode, state.row_lo, state.prev_lo)
        state.step = state.step + decode
        self.decode_steps = self.decode_steps + decode
        self.num_steps += 1

        # One transfer to the host a step: faults, then where each row stands.
        masked = masked & ~transfer
        assert laws.log_total is not None, "row_stats must give log_total"
        columns = torch.stack(
            [
                decode,
                (~laws.log_total.isfinite() & inside).any(1) & decode,
                (_banned_tokens(banned, tokens) & transfer).any(1),
                offered.any(1) & ~transfer.any(1) & (self.limit >= UNLIMITED),
                torch.minimum(_first(masked, slots, width), state.hi),
                self._first_stop(tokens, inside & ~masked, slots),
            ]
        )
        decoded, broken, illegal, idle, edge, stopped = columns.tolist()
        self._check(broken, illegal, idle)
        frontier, full = self._settle(decoded, edge, stopped)
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
            self._remember(view, decoded)
        for b in full:
            self.walk.advance(b)
        return view

    def _banned(self, slots: Tensor) -> Tensor:
        """Ids that may not be committed: bool [V], or [B, S, V] where slots differ."""
        if self.closed_slots is None:
            return self.banned
        return self.banned | (self.closed_slots.gather(1, slots)[..., None] & self.closed_ids)

    def _laws(self, logits: Tensor, slots: Tensor, banned: Tensor) -> RowStats:
        request = self.request
        needs = request.sampler.needs
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
        """The laws as the sampler ranks them: a first slot whose law cannot change any more is the surest of its block."""
        if self.spec.first_slot != "commit_first":
            return laws
        settled = (slots == self.state.lo[:, None]) & (self.state.row_lo == self.state.lo)[:, None]
        return replace(
            laws,
            confidence=laws.confidence.masked_fill(settled, float("inf")),
            entropy=None if laws.entropy is None else laws.entropy.masked_fill(settled, float("-inf")),
            margin=None if laws.margin is None else laws.margin.masked_fill(settled, float("inf")),
        )

    def _first_stop(self, tokens: Tensor, committed: Tensor, slots: Tensor) -> Tensor:
        """First slot with a committed stop token, [B]; the canvas width where there is none."""
        stop = (tokens[..., None] == self.eos).any(-1) & committed
        return _first(stop, slots, self.state.canvas.shape[1])

    def _check(self, broken: list[int], illegal: list[int], idle: list[int]) -> None:
        """Raise for the first row at fault; steps are counted from 1, as everywhere that a user sees them."""
        if not (any(broken) or any(illegal) or any(idle)):
            return
        sampler = f"sampler {type(self.request.sampler).__name__}"
        for b, row in enumerate(self.rows):
            where = f"row {row.index}, step {int(self.decode_steps[b])}"
            if broken[b]:
                raise ValueError(f"logits must be finite: got NaN or infinity in {where}")
            if illegal[b]:
                raise ValueError(f"{sampler} committed a mask or banned token in {where}")
            if idle[b]:
                raise RuntimeError(f"{sampler} committed nothing in {where}: the loop would not end")

    def _settle(self, decoded: list[int], edge: list[int], stopped: list[int]) -> tuple[list[int], list[int]]:
        """Finish rows that stop: (the frontier of each row, the rows whose block is full).

        edge: first masked slot of each open block, or its end; stopped: first stop token of each, or the canvas width.
        """
        frontier, full = list(edge), []
        for b, row in enumerate(self.rows):
            if not decoded[b]:
                continue
            stop = self._text_stop(b, min(edge[b], stopped[b]))
            if stop is None and stopped[b] < edge[b]:
                stop = stopped[b]
            if stop is not None:
                self.walk.finish(b, "stop", stop)
                frontier[b] = stop
            elif edge[b] == row.hi:
                full.append(b)
        return frontier, full

    def _text_stop(self, b: int, final: int) -> int | None:
        """Slot at which a stop string cuts row b's text before slot ``final``, or None."""
        if self.request.find_stop is None:
            return None
        begin = self.rows[b].begin
        found = self.request.find_stop(self.state.canvas[b, begin:final].tolist())
        if found is None:
            return None
        self.rows[b].stop_text = found[1]
        return begin + found[0]

    def _remember(self, view: StepView, decoded: list[int]) -> None:
        width = view.canvas.shape[1]
        new = torch.zeros_like(self.walk.wide["masked"]).scatter_(
            1, torch.where(view.transfer_index, view.slots, width), True
        )
        guess = self.walk.wide["canvas"].scatter(1, torch.where(view.inside, view.slots, width), view.provisional)
        for b, row in enumerate(self.rows):
            if not decoded[b]:
                continue
            begin, end = row.begin, row.end
            row.history.append(
                HistoryFrame(
                    step=int(self.decode_steps[b]),
                    nfe=row.stats.nfe,
                    token_ids=view.canvas[b, begin:end].tolist(),
                    masked=view.masked[b, begin:end].tolist(),
                    new=new[b, begin:end].tolist(),
                    provisional_ids=guess[b, begin:end].tolist(),
                )
            )

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


def _first(flag: Tensor, slots: Tensor, none: int) -> Tensor:
    """First of slots [B, S] where flag [B, S], int64 [B]; ``none`` where there is no such slot."""
    return torch.where(flag, slots, none).amin(1)


def _banned_tokens(banned: Tensor, tokens: Tensor) -> Tensor:
    """Whether tokens [B, S] are banned; banned [V] or [B, S, V] -> bool [B, S]."""
    return banned[tokens] if banned.dim() == 1 else banned.gather(-1, tokens[..., None])[..., 0]


def denoise(model: Any, request: DenoiseRequest) -> DenoiseResult:
    """Run the loop to its end."""
    loop = DenoiseLoop(model, request)
    for _ in loop.run():
        pass
    return loop.result()
