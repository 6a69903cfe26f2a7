"""The denoising loop as one step of fixed shape on the device: what ``dllm/denoise.py`` does, without the host in between.

Planning, forward, statistics, decision, commit, stop, block advance and counting are tensor operations, so that a step is captured
once per shape bucket (``dllm/graphs.py``) and replayed; the host looks at a flag every few steps, some steps late. Steps after a row's
end compute nothing that counts. Tokens, finish reasons and counters equal those of ``dllm/denoise.py``, which stays the truth, runs the
first forward (prefill) and everything that ``supports`` names.

Letters: B rows of the batch, W columns of the canvas (a bucket), S slots of a block, Q rows of a forward, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm.cache.block import BlockCache, storing
from dllm.cache.none import NoCache
from dllm.canvas import GAP_GROUP
from dllm.denoise import DenoiseLoop, _trim
from dllm.denoise_state import banned_tokens, check_step, first_slot
from dllm.device_hooks import free_dave, guide_of, refused
from dllm.environment import kernels_mode
from dllm.graphs import Buckets, Captured, Poll, capture, key_bucket, say_once
from dllm.hooks import GuideHook
from dllm.kernels._launch import use_triton
from dllm.kernels.denoise_step import MAX_BLOCK, DraftBuffers, commit_step, plan_step
from dllm.kernels.noise import counter_uniform
from dllm.kernels.row_stats import row_stats
from dllm.kernels.step_state import StepBuffers, StepRule
from dllm.model.fast_decoder import FastDecoder, unfit
from dllm.noise import STREAM_TOKEN, CounterNoise
from dllm.request import DenoiseRequest, DenoiseResult
from dllm.samplers.low_confidence import UNLIMITED, LowConfidence
from dllm.samplers.processors import process_logits
from dllm.samplers.threshold import Threshold
from dllm.types import PADDING_GROUP, Attend, DenoiseState, Plan, RowState, RowStats
from dllm.uniform_corruption import spread

SAMPLERS = (Threshold, LowConfidence)
"""Samplers whose step reads nothing but the laws, the masks and the quota."""
CACHES = (BlockCache, NoCache)
STATE_COLUMNS = ("lo", "hi", "row_lo", "prev_lo", "begin", "end", "step", "block", "forwards", "active")
COUNTERS = ("nfe", "positions", "useful", "stopped", "fault")
STEPS_PER_POLL = 4
"""Steps between two looks at the flag: the steps that may run for nothing at a call's end, against launches per look."""


def supports(request: DenoiseRequest) -> str | None:
    """Why this request must run on ``dllm/denoise.py``, or None if ``denoise_on_device`` gives the same result."""
    canvas = request.canvas
    # A guide decides itself what is committed.
    if type(request.sampler) not in SAMPLERS and guide_of(request) is None:
        return f"sampler {type(request.sampler).__name__}"
    if type(request.cache) not in CACHES:
        return f"cache {type(request.cache).__name__}"
    if not isinstance(request.block_length, int):
        return "a block policy"
    if type(request.noise) is not CounterNoise:
        return f"noise {type(request.noise).__name__}"
    if request.spec.mask_token_id is None:
        return "a model without a mask token"
    if request.spec.first_slot == "commit_full_pass":
        return "first_slot commit_full_pass"
    for name in ("closed_slots", "resize", "logits_processor", "find_stop"):
        if getattr(request, name) is not None:
            return name
    if (reason := refused(request)) is not None:
        return reason
    if request.cfg_scale > 0:
        return "cfg_scale"
    if request.want_history:
        return "output_history"
    if any(len(regions) != 1 for regions in canvas.regions):
        return "rows without a gap, or with several"
    pairs = zip(canvas.regions, canvas.anchors, strict=True)
    if any(not 0 <= regions[0][0] - anchors[0] < request.block_length for regions, anchors in pairs):
        return "a gap that opens inside a longer block"
    open_slots = sum(stop - start for regions in canvas.regions for start, stop in regions)
    if int(canvas.masked.sum()) != open_slots:
        return "pinned tokens"
    return None


class DeviceStep:
    """Buffers of one bucket and the step over them. ``load`` fills them from a loop whose first forward is done.

    Everything is owned here and keeps its address, so that a captured step stays valid until the object goes. draft: of ``FreeDaveStep``.
    """

    draft: DraftBuffers | None = None

    def __init__(self, model: Any, request: DenoiseRequest, batch: int, width: int) -> None:
        """batch: rows B; width: columns W, at least those of the request's canvas."""
        self.model, self.spec, self.cache, self.sampler = model, request.spec, request.cache, request.sampler
        assert isinstance(request.block_length, int), "supports passes whole block lengths only"
        self.block_length = request.block_length
        self.limited = request.max_denoising_steps is not None
        # A guide reads the likeliest tokens, whatever the sampler beside it would.
        self.needs = request.sampler.needs if guide_of(request) is None else GuideHook.needs
        self.temperature = request.temperature
        self.filters: dict[str, Any] = dict(top_k=request.top_k, top_p=request.top_p, min_p=request.min_p)
        self.width = width
        device = request.canvas.ids.device
        self.device = device

        def column(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, dtype=dtype, device=device)

        def wide(dtype: torch.dtype) -> Tensor:
            # One more column at the end takes the writes that are masked out.
            return torch.zeros(batch, width + 1, dtype=dtype, device=device)

        self.wide = {"canvas": wide(torch.int64), "masked": wide(torch.bool), "stored": wide(torch.bool)}
        self.wide["group"] = wide(torch.int32)
        self.state = DenoiseState(
            **{name: value[:, :-1] for name, value in self.wide.items()},
            valid=torch.zeros(batch, width, dtype=torch.bool, device=device),
            low=torch.zeros(batch, width, dtype=torch.int32, device=device),
            position=torch.arange(width, device=device).expand(batch, -1).contiguous(),
            **{name: column(torch.bool if name == "active" else torch.int64) for name in STATE_COLUMNS},
            spec=request.spec,
            first_forward=False,
            row_bucket=2 * self.block_length,
        )
        self.store = model.new_store(batch, width) if request.cache.uses_store else None
        sample = model.embed(request.canvas.ids[:1, :1])
        verifier = free_dave(request)
        drafts = 1 if verifier is None else verifier.draft_steps
        # Behind the bin column stand the rows of the branches.
        columns = width + 1 + (drafts - 1) * self.block_length
        self.hidden = torch.zeros(batch, columns, sample.shape[-1], dtype=sample.dtype, device=device)
        self.columns = torch.arange(self.block_length, device=device)
        self.decode_steps, self.limit, self.seeds = column(), column(), column()
        self.log_confidence = column(torch.float32)
        self.nfe, self.positions, self.useful = column(), column(), column()
        self.stopped = column(torch.bool)
        self.fault = torch.zeros(3, batch, dtype=torch.bool, device=device)
        self.status = column(torch.int32)
        self.eos = torch.zeros(len(request.eos_token_ids), dtype=torch.int64, device=device)
        self.banned = torch.zeros_like(request.banned, device=device)
        self.noise = CounterNoise(self.seeds)
        self.poll = Poll(self.status)
        self.rule = StepRule(
            block_length=self.block_length,
            store_pass=self.spec.first_slot == "commit_store_pass",
            commit_first=self.spec.first_slot == "commit_first",
            grouped=self.spec.attention != "bidirectional",
            first_group=GAP_GROUP,
            threshold=getattr(self.sampler, "threshold", None),
            k=getattr(self.sampler, "k", 1),
            unlimited=UNLIMITED,
            shift=self.state.shift,
            draft_steps=drafts,
            tokens_per_step=1 if verifier is None else verifier.tokens_per_step,
        )
        state = {name: getattr(self.state, name) for name in STATE_COLUMNS if name != "forwards"}
        counts = {name: getattr(self, name) for name in COUNTERS}
        self.buffers = StepBuffers(
            **self.wide, **state, **counts, low=self.state.low, position=self.state.position, limit=self.limit,
            decode_steps=self.decode_steps, log_confidence=self.log_confidence, status=self.status, eos=self.eos,
            banned=self.banned,
        )  # fmt: skip
        self.fused = use_triton(self.wide["canvas"]) and isinstance(self.cache, BlockCache)
        self.fused = self.fused and self.block_length <= MAX_BLOCK
        # The tensor operations know no branches and no guide; ``supports`` passes them with kernels only.
        self.fused = self.fused or request.hook is not None
        # Nothing is active yet, so that the runs before the capture change nothing that counts.
        self.captured: Captured = capture(self.step, device, owned=(model,), name="denoise step")

    def load(self, loop: DenoiseLoop) -> None:
        """Copy a loop's state after its first forward; mutates every buffer."""
        source, width = loop.state, loop.state.canvas.shape[1]
        for name in ("canvas", "masked", "stored", "group", "valid", "low"):
            target = getattr(self.state, name)
            target.zero_()
            target[:, :width] = getattr(source, name)
        for name in STATE_COLUMNS:
            getattr(self.state, name).copy_(getattr(source, name))
        for name in ("decode_steps", "limit", "log_confidence"):
            getattr(self, name).copy_(getattr(loop, name))
        self.seeds.copy_(loop.noise.seeds)
        self.eos.copy_(loop.eos)
        self.banned.copy_(loop.banned)
        if self.store is not None and loop.store is not None:
            self.store.data[:, :, :, :, :width] = loop.store.data[:, :, :, :, :width]
            self.store.extent = self.width
        assert loop.hidden is not None, "load needs a loop whose first forward is done"
        self.hidden[:, :width] = loop.hidden[:, :width]
        for name in COUNTERS:
            getattr(self, name).zero_()
        self.status.copy_(self.state.active)
        self.poll.reset()

    def run(self, steps_per_poll: int = STEPS_PER_POLL) -> None:
        """Replay steps until the flag says that no row is active; what runs after that changes nothing."""
        status: list[int] | None = None
        # 1: active; 2: at fault, which ends the call.
        while status is None or (1 in status and 2 not in status):
            for _ in range(steps_per_poll):
                self.captured.replay()
            self.poll.post()
            status = self.poll.read()

    def unload(self, loop: DenoiseLoop) -> None:
        """Put canvas, ends and counters into the loop's books; raises as the loop does for a row at fault."""
        if bool(self.fault.any()):
            # Rows run in step: the fault that the plain loop meets is the one of the earliest step.
            wrong = self.fault.any(0)
            first = wrong & (self.nfe == self.nfe[wrong].min())
            check_step(loop.rows, loop.request.sampler, self.decode_steps, *(self.fault & first).tolist())
        numbers = torch.stack([self.nfe, self.positions, self.useful, self.stopped.long()]).tolist()
        canvas = self.state.canvas[:, : loop.state.canvas.shape[1]].tolist()
        log_confidence = self.log_confidence.tolist()
        # All rows begin together and leave for good, so the longest row was in every forward.
        loop.stats.nfe += max(numbers[0])
        elapsed = loop._now() - loop.started - loop.stats.prefill_s
        for b, row in enumerate(loop.rows):
            nfe, positions, useful, stopped = (column[b] for column in numbers)
            loop.walk.finish(b, "stop" if stopped else "length", row.begin + useful)
            row.stats.nfe += nfe
            row.stats.positions += positions
            loop.stats.positions += positions
            row.stats.useful_tokens = useful
            row.stats.prefill_s, row.stats.decode_s = loop.stats.prefill_s, elapsed
            loop.results[row.index] = canvas[b]
            loop.final_log_confidence[row.index] = log_confidence[b]

    @torch.no_grad()
    def step(self) -> None:
        """One forward and one decision of every active row; mutates the buffers, never looks at a value on the host."""
        if self.fused:
            self._fused_step()
            return
        plan = self.cache.plan(self.state)
        first_only = storing(self.state) if plan.first_only is None else plan.first_only
        self._forward(plan)
        self._decode(plan.decode, first_only)
        self.status.copy_(torch.where(self.fault.any(0), 2, self.state.active))

    def _fused_step(self) -> None:
        """The same step with its bookkeeping in two launches."""
        laws = self._fused_laws()
        assert laws.log_total is not None, "row_stats must give log_total"
        commit_step(self.buffers, self.rule, laws.token, laws.confidence, laws.log_total, self.draft)

    def _fused_laws(self) -> RowStats:
        """One forward, and the laws of the open blocks' slots."""
        plan = plan_step(self.buffers, self.rule, self.draft)
        embeds = self.model.embed(plan.ids, plan.masked, self.spec.mask_token_id)
        hidden = self.model(
            None, plan.position, self.store, plan.attend, embeds=embeds, rows=plan.rows, write=plan.write
        )
        self.hidden.scatter_(1, spread(plan.target, hidden), hidden)
        slots = (self.state.lo[:, None] + self.columns).clamp(max=self.width - 1)
        source = (slots - self.state.shift).clamp(min=0)
        if self.draft is not None:
            # Greedy only, so nothing asks for the slots.
            source, slots = plan.source, plan.rows
        return self._laws(source, slots)

    def _forward(self, plan: Plan) -> None:
        state, width = self.state, self.width
        rows = plan.rows.clamp(max=width - 1)
        target = torch.where(plan.valid, rows, width)
        group, low = state.group.gather(1, rows), state.low.gather(1, rows)
        key_group, write = None, None
        if self.store is not None:
            recomputed = torch.zeros_like(self.wide["stored"]).scatter_(1, target, True)[:, :-1]
            key_group = torch.where(state.stored & ~recomputed, state.group, PADDING_GROUP)
            write = plan.write
        attend = Attend.by_group(group, low, plan.valid, key_group)
        ids, masked, positions = (x.gather(1, rows) for x in (state.canvas, state.masked, state.position))
        embeds = self.model.embed(ids, masked, self.spec.mask_token_id)
        hidden = self.model(None, positions, self.store, attend, embeds=embeds, rows=rows, write=write)
        self.hidden.scatter_(1, spread(target, hidden), hidden)
        if write is not None:
            self.wide["stored"].scatter_(1, torch.where(write, target, width), True)
        computed = plan.valid.sum(-1)
        self.nfe += computed > 0
        self.positions += computed

    def _decode(self, decode: Tensor, first_only: Tensor) -> None:
        state, width = self.state, self.width
        slots = state.lo[:, None] + self.columns
        inside = slots < state.hi[:, None]
        slots = slots.clamp(max=width - 1)
        laws = self._laws((slots - state.shift).clamp(min=0), slots)
        canvas, masked = state.canvas.gather(1, slots), state.masked.gather(1, slots) & inside
        stop = self._first_stop(canvas, inside & ~masked, slots)
        offered = masked & (slots < stop[:, None]) & decode[:, None]
        offered = offered & ~(first_only[:, None] & (slots != state.lo[:, None]))
        row_state = RowState(state.step, self.limit, state.hi - state.lo, slots)
        choice = self.sampler.step(self._ranked(laws, slots), canvas, offered, row_state, self.noise)
        transfer = choice.transfer_index & offered
        if self.limited:
            transfer = transfer | ((state.step + 1 >= self.limit)[:, None] & offered)
        transfer = transfer | (first_only[:, None] & offered)
        tokens = torch.where(transfer, choice.tokens, canvas)
        self.log_confidence += torch.where(transfer, laws.confidence.clamp(min=1e-30).log(), 0.0).sum(1)
        target = torch.where(transfer, slots, width)
        self.wide["canvas"].scatter_(1, target, tokens)
        self.wide["masked"].scatter_(1, target, False)
        assert laws.log_total is not None, "row_stats must give log_total"
        fault = torch.stack(
            [
                (~laws.log_total.isfinite() & inside).any(1) & decode,
                (banned_tokens(self.banned, tokens) & transfer).any(1),
                offered.any(1) & ~transfer.any(1) & (self.limit >= UNLIMITED),
            ]
        )
        self.fault |= fault
        masked = masked & ~transfer
        edge = torch.minimum(first_slot(masked, slots, width), state.hi)
        stopped = self._first_stop(tokens, inside & ~masked, slots)
        self.decode_steps += decode
        state.prev_lo.copy_(torch.where(decode, state.row_lo, state.prev_lo))
        self._settle(decode, edge, stopped)
        # A row at fault ends the call; its step number must stay what it is.
        state.active &= ~fault.any()

    def _settle(self, decode: Tensor, edge: Tensor, stopped: Tensor) -> None:
        """Finish rows that stop or are full; open the next block of the others whose block is full."""
        state = self.state
        stops = decode & (stopped < edge)
        full = decode & ~stops & (edge == state.hi)
        ends = full & (state.hi == state.end)
        opens = full & ~ends
        self.stopped |= stops
        self.useful.copy_(torch.where(stops, stopped - state.begin, self.useful))
        self.useful.copy_(torch.where(ends, state.end - state.begin, self.useful))
        state.active &= ~(stops | ends)
        # A new block starts where the last one ended, so its first row is its first slot.
        lo = torch.where(opens, state.hi, state.lo)
        state.row_lo.copy_(torch.where(opens, state.hi, state.row_lo))
        state.hi.copy_(torch.where(opens, torch.minimum(lo + self.block_length, state.end), state.hi))
        state.lo.copy_(lo)
        state.block += opens
        state.step.copy_(torch.where(opens, 0, state.step + decode))
        if self.spec.attention != "bidirectional":
            slots = state.lo[:, None] + self.columns
            target = torch.where(opens[:, None] & (slots < state.hi[:, None]), slots, self.width)
            group = (GAP_GROUP + state.block).to(torch.int32)[:, None].expand_as(target)
            self.wide["group"].scatter_(1, target, group)

    def _laws(self, source: Tensor, slots: Tensor) -> RowStats:
        """Statistics of the rows source [B, S], which predict slots [B, S]."""
        needs, banned, temperature = self.needs, self.banned, self.temperature
        hidden = self.hidden.gather(1, spread(source, self.hidden))
        processed = self.spec.confidence == "processed"
        uniform = law = None
        if temperature > 0:
            uniform = counter_uniform(self.seeds, slots, self.decode_steps, STREAM_TOKEN)
        filtered = any(value is not None for value in self.filters.values())
        if hasattr(self.model, "head_stats") and not filtered:
            return self.model.head_stats(hidden, needs, banned, uniform, temperature, processed)
        logits = self.model.head(hidden)
        if temperature > 0:
            law = process_logits(logits, temperature=temperature, banned=banned, **self.filters)
        return row_stats(logits, needs, banned, uniform, temperature, law, processed)

    def _ranked(self, laws: RowStats, slots: Tensor) -> RowStats:
        """As ``DenoiseLoop._ranked``: a first slot whose law cannot change is as sure as the surest of its block."""
        if self.spec.first_slot != "commit_first":
            return laws
        state = self.state
        settled = (slots == state.lo[:, None]) & (state.row_lo == state.lo)[:, None]
        best = laws.confidence.amax(1, keepdim=True)
        return RowStats(laws.token, torch.where(settled, best, laws.confidence))

    def _first_stop(self, tokens: Tensor, committed: Tensor, slots: Tensor) -> Tensor:
        stop = (tokens[..., None] == self.eos).any(-1) & committed
        return first_slot(stop, slots, self.width)


Steps = Buckets[DeviceStep]


def denoise_on_device(
    model: Any, request: DenoiseRequest, steps: Steps | None = None, steps_per_poll: int = STEPS_PER_POLL
) -> DenoiseResult:
    """The result of ``dllm.denoise.denoise``; raises ValueError for a request that ``supports`` does not pass.

    steps: what was captured in earlier calls with this model; give it again and a bucket is captured once. Capturing counts neither as
    prefill nor as decoding. A row's ``decode_s`` is the call's: the host does not see when a row ends.
    """
    reason = supports(request)
    if reason is not None:
        raise ValueError(f"request must be one that the device loop supports: got {reason}")
    steps = Buckets() if steps is None else steps
    step = _step_for(model, request, request.canvas.ids.shape[0], steps)
    loop = DenoiseLoop(model, request)
    begin(loop)
    if loop.rows:
        if step.state.lo.shape[0] != len(loop.rows):
            step = _step_for(model, request, len(loop.rows), steps)
        step.load(loop)
        step.run(steps_per_poll)
        step.unload(loop)
    return loop.result()


class Engine:
    """How a model's requests run on its device: on the kernels where the model fits them, by the device loop where the request does.

    model: any model of the loop. Captured steps are kept for the next call. ``DLLM_KERNELS=reference`` and other devices than CUDA leave
    everything to the plain loop and the plain decoder.
    """

    def __init__(self, model: Any) -> None:
        self.plain = model
        self.fast: FastDecoder | None = None
        self.steps: Steps = Buckets()

    @property
    def model(self) -> Any:
        """The model that a loop should be given now."""
        if self._off() is not None:
            return self.plain
        reason = unfit(self.plain)
        if reason is not None:
            say_once(f"the decoder runs without its kernels: {reason}")
            return self.plain
        self.fast = self.fast or FastDecoder(self.plain)
        return self.fast

    def refuses(self, request: DenoiseRequest) -> str | None:
        """Why the plain loop must run this request, or None."""
        # A model that is no plain decoder may ask the host in its forward, which no graph can hold.
        return self._off() or unfit(self.plain) or supports(request)

    def run(self, request: DenoiseRequest) -> DenoiseResult:
        """``denoise_on_device`` for a request that is not refused."""
        return denoise_on_device(self.model, request, self.steps)

    def _off(self) -> str | None:
        if self.plain.device.type != "cuda":
            return f"device {self.plain.device.type}"
        return "DLLM_KERNELS=reference" if kernels_mode() == "reference" else None


def begin(loop: DenoiseLoop) -> None:
    """The loop's first forward, eagerly: the prefill, and the first step of rows that have nothing to prefill."""
    plan = _trim(loop.request.cache.plan(loop.state))
    first_only = storing(loop.state) if plan.first_only is None else plan.first_only
    if loop._forward(plan):
        loop._decode(plan.decode, first_only)
        loop._drop_finished()


def kind_of(request: DenoiseRequest) -> type[DeviceStep]:
    """The step of a request that ``supports`` passes."""
    # Each is built on the step here.
    from dllm.device_free_dave import FreeDaveStep
    from dllm.device_guided import GuidedStep

    if guide_of(request) is not None:
        return GuidedStep
    return DeviceStep if free_dave(request) is None else FreeDaveStep


def _step_for(model: Any, request: DenoiseRequest, batch: int, steps: Steps) -> DeviceStep:
    width = key_bucket(request.canvas.ids.shape[1])
    # Moved or replaced weights are other addresses, which a captured step would not see.
    weights = tuple(p.data_ptr() for p in model.parameters())
    guide = guide_of(request)
    helper: Any = free_dave(request)
    sampler = request.sampler
    if guide is not None:
        own = tuple(p.data_ptr() for p in guide.model.parameters())
        helper = (guide.rule.guide_passes, hash(own))
        # It has no say beside a guide, and only the samplers of ``SAMPLERS`` are known to be hashable.
        sampler = None
    key = (
        (batch, width, request.block_length, len(request.eos_token_ids), request.canvas.ids.device),
        (request.spec, request.cache, sampler, request.max_denoising_steps is not None),
        (request.temperature, request.top_k, request.top_p, request.min_p, kernels_mode(), helper),
        hash(weights),
    )
    return steps.get(key, lambda: kind_of(request)(model, request, batch, width))
