"""Rounds of drafting and verifying as one step of fixed shape on the device, captured once and replayed without the host.

A round is: draft behind the anchors, one pass of the target over anchors and drafts, context write of its taps, and one launch that
accepts, stops, commits and counts (``kernels/draft_round.py``). Plain AR decoding is the round without drafts. Rejected rows stay where
they are, unread, and are written over by the next round; rounds after a row's end change nothing. Tokens, finish reasons and counters
equal those of ``dllm/speculate_loop.py``, which stays the truth, reads the prompts, and runs everything that ``supports`` names.

Letters: B rows, Q = n + 1 slots of a round (n drafts), W columns of the stores (a bucket), T most new tokens (a bucket).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.drafter import Context, Drafter
from dllm.drafters.fast_drafter import FastDrafter
from dllm.drafters.fast_drafter import unfit as unfit_drafter
from dllm.drafters.target import Target
from dllm.environment import captured_drafts, kernels_mode
from dllm.graphs import Buckets, Captured, Poll, capture, key_bucket
from dllm.kernels.draft_round import BROKEN, RUNNING, RoundBuffers, commit_round
from dllm.kernels.lm_head_stats import lm_head_stats
from dllm.model.decoder import Decoder, inverse_frequencies
from dllm.model.fast_decoder import FastDecoder, unfit
from dllm.output import Stats
from dllm.samplers.processors import Processors
from dllm.speculate_loop import SpeculateResult, SpeculativeLoop
from dllm.speculate_request import SpeculateRequest
from dllm.types import LOWEST_GROUP, Attend, pack_bits

ROUNDS_PER_POLL = 1
"""Rounds between two looks at the flag. A look is late by as many, and costs one small copy."""


def supports(target: Target, drafter: Drafter | None, request: SpeculateRequest) -> str | None:
    """Why this request must run on ``dllm/speculate_loop.py``, or None if ``speculate_on_device`` gives the same result."""
    if not target.is_own:
        return "a Hugging Face target"
    reason = unfit(target.model)
    if reason is not None:
        return f"a target where {reason}"
    if request.verifier != "greedy":
        return f"verifier {request.verifier}"
    if request.processors != Processors(eos_token_ids=request.processors.eos_token_ids):
        return "logits processors"
    for name in ("policy", "prefix_processor", "find_stop"):
        if getattr(request, name) is not None:
            return name
    if request.max_new_tokens < 1:
        return "max_new_tokens 0"
    if drafter is not None and request.num_drafts > 0:
        if request.draft_temperature > 0:
            return "drafts that are drawn"
        return unfit_drafter(drafter)
    return None


class DeviceRounds:
    """Buffers of one bucket and the round over them. ``load`` fills them from a loop that has read its prompts.

    Everything is owned here and keeps its address, so that a captured round stays valid until the object goes. drafter None (or
    num_drafts 0): plain decoding.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter | None,
        batch: int,
        columns: int,
        most_new: int,
        num_drafts: int,
        num_eos: int,
    ) -> None:
        self.device, self.num_drafts = decoder.device, num_drafts
        slots = num_drafts + 1
        self.decoder = _LookedUp(decoder)
        self.buffers = RoundBuffers.idle(batch, slots, columns, most_new, num_eos, self.device)
        self.buffers.aim()
        self.store = decoder.new_store(batch, columns)
        self.angles = Angles(decoder.inv_freq, columns, batch, slots)
        self.draft_angles = self.angles
        self.drafter: FastDrafter | None = None
        self.tap_ids: tuple[int, ...] = ()
        if drafter is not None and num_drafts > 0:
            self.drafter = FastDrafter(drafter, batch, columns, num_drafts)
            self.tap_ids = drafter.config.target_layer_ids
            frequencies = inverse_frequencies(drafter.config.body).to(self.device)
            if not torch.equal(frequencies, decoder.inv_freq):
                self.draft_angles = Angles(frequencies, columns, batch, slots)
        self.group = torch.zeros(batch, slots, dtype=torch.int32, device=self.device)
        self.low = torch.full_like(self.group, LOWEST_GROUP)
        causal = torch.ones(slots, slots, dtype=torch.bool, device=self.device).tril()
        self.bits = pack_bits(causal.expand(batch, -1, -1))
        # Rows that do not count are written too: nobody reads a row before it is written again.
        self.write = torch.ones(batch, slots, dtype=torch.bool, device=self.device)
        self.poll = Poll(self.buffers.status)
        self.most_left = 0
        self.num_replays = 0
        self.captured: Captured = capture(
            self.step, self.device, owned=(decoder, drafter), name="draft-and-verify round"
        )

    @torch.no_grad()
    def load(self, loop: SpeculativeLoop) -> None:
        """Copy the rows of a loop behind its prefill; mutates every buffer."""
        source, state, rows = loop.state, self.buffers, loop.rows
        store = rows.store  # type: ignore[attr-defined]
        width = min(store.capacity, self.store.capacity)
        self.store.data[..., :width, :] = store.data[..., :width, :]
        names = ("anchor", "lengths", "produced", "remaining", "passes", "drafted", "active", "stopped", "broken")
        for name in names:
            getattr(state, name).copy_(getattr(source, name))
        state.computed.copy_(source.positions)
        rows.store = None  # type: ignore[attr-defined]
        wide = min(source.out.shape[1], state.out.shape[1]) - 1
        state.out[:, :wide].copy_(source.out[:, :wide])
        state.eos.copy_(loop.eos)
        state.aim()
        if self.drafter is not None:
            for context in loop.pending:
                self._read(context)
        self.poll.reset()
        self.most_left = loop.most_left

    def _read(self, context: Context) -> None:
        """Write the prompts' context."""
        assert self.drafter is not None, "no drafter"
        rows = (context.valid.cumsum(dim=1) - 1).clamp(min=0)
        cos, sin = self.draft_angles.at(rows)
        self.drafter.feed(context.features.to(self.drafter.drafter.dtype), cos, sin, rows, context.valid)

    def run(self, rounds_per_poll: int = ROUNDS_PER_POLL) -> None:
        """Replay rounds until the flag says that no row is active; what runs after that changes nothing."""
        status: list[int] | None = None
        self.num_replays = 0
        # Every round commits a token of each active row, so there are no more than that.
        while self.num_replays < self.most_left and (status is None or (RUNNING in status and BROKEN not in status)):
            for _ in range(min(rounds_per_poll, self.most_left - self.num_replays)):
                self.captured.replay()
                self.num_replays += 1
            self.poll.post()
            status = self.poll.read()

    def unload(self, loop: SpeculativeLoop) -> None:
        """Put tokens, ends and counters into the loop's books; raises as the loop does for a law that is not finite."""
        state = self.buffers
        names = ("produced", "stopped", "broken", "passes", "drafted", "computed")
        produced, stopped, broken, passes, drafted, computed = torch.stack(
            [getattr(state, name).long() for name in names]
        ).tolist()
        if any(broken):
            b = min((b for b, flag in enumerate(broken) if flag), key=lambda b: passes[b])
            raise ValueError(
                f"logits must be finite: got NaN or infinity in row {loop.live[b].index}, by round {passes[b]} (0: the prompt)"
            )
        out, log = state.out.tolist(), state.log.tolist()
        # All rows begin together and leave for good, so the longest row was in every pass.
        loop.stats.nfe += max(passes)
        loop.stats.draft_nfe += max(drafted)
        elapsed = max(loop._now() - loop.started - loop.stats.prefill_s, 0.0)
        for b, row in enumerate(loop.live):
            row.ids = out[b][: produced[b]]
            row.reason = "stop" if stopped[b] else "length"
            row.useful = produced[b] - stopped[b]
            row.stats = Stats(
                nfe=passes[b] + 1,
                draft_nfe=drafted[b],
                useful_tokens=row.useful,
                positions=computed[b],
                prefill_s=loop.stats.prefill_s,
                decode_s=elapsed,
                accept_lengths=log[b][: passes[b]],
            )
        loop.live = []

    @torch.no_grad()
    def step(self) -> None:
        """One round of every active row; mutates the buffers and stores, never looks at a value on the host."""
        state = self.buffers
        cos, sin = self.angles.look_up(state.place)
        draft_angles = (cos, sin)
        if self.draft_angles is not self.angles:
            draft_angles = self.draft_angles.look_up(state.place)
        tokens = state.anchor[:, None]
        if self.drafter is not None:
            drafts = self.drafter.propose(state.anchor, state.limits, state.key_group, *draft_angles)
            tokens = torch.cat([tokens, drafts], dim=1)
        attend = Attend(state.key_group, self.low, self.group, self.bits)
        self.decoder.angles = (cos, sin)
        found = self.decoder(tokens, state.place, self.store, attend, self.tap_ids, rows=state.place, write=self.write)
        hidden = found
        if self.drafter is not None:
            hidden, taps = found
            features = torch.cat([taps[self.order[i]] for i in range(len(taps))], dim=-1)
            self.drafter.feed(features, *draft_angles, state.place, self.write)
        laws = lm_head_stats(hidden, self.decoder.decoder.head_weight)
        commit_round(state, laws.token, laws.log_total, tokens)

    @property
    def order(self) -> list[int]:
        """Where each tap stands among the taps that the decoder gives, which come in the order of the layers."""
        ranked = sorted(self.tap_ids)
        return [ranked.index(tap) for tap in self.tap_ids]


class Angles:
    """cos and sin of every position of a bucket, looked up into buffers: fp32 [B, Q, head_dim / 2]."""

    def __init__(self, frequencies: Tensor, columns: int, batch: int, slots: int) -> None:
        # A round that begins in the last column has slots behind it; they never count.
        angles = torch.arange(columns + slots, device=frequencies.device)[:, None].float() * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        shape = (batch, slots, frequencies.shape[0])
        self.out = (torch.zeros(shape, device=frequencies.device), torch.zeros(shape, device=frequencies.device))

    def look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] -> the buffers, filled."""
        for table, out in zip((self.cos, self.sin), self.out, strict=True):
            torch.index_select(table, 0, positions.view(-1), out=out.view(-1, table.shape[1]))
        return self.out

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same for any number of positions, in new tensors."""
        return self.cos[positions], self.sin[positions]


class _LookedUp(FastDecoder):
    """The decoder on its kernels, given the angles of its rows instead of computing them."""

    angles: tuple[Tensor, Tensor]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.angles


class Rounds(Buckets[DeviceRounds]):
    """Captured buckets; a copy of whoever keeps them begins without any, as a graph knows the addresses of one model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Rounds:
        return Rounds(self.capacity)


def refuses(target: Target, drafter: Drafter | None, request: SpeculateRequest) -> str | None:
    """Why the host's loop must run this request here, or None. Without a drafter nobody keeps what is captured."""
    if target.device.type != "cuda":
        return f"device {target.device.type}"
    if kernels_mode() == "reference":
        return "DLLM_KERNELS=reference"
    if not captured_drafts():
        return "DLLM_CAPTURED_DRAFTS is 0"
    if drafter is None:
        return "no drafter"
    return supports(target, drafter, request)


def kept_rounds(target: Target) -> Rounds:
    """The buckets that live as long as a drafter's target."""
    if not hasattr(target, "captured_rounds"):
        target.captured_rounds = Rounds(4)  # type: ignore[attr-defined]
    return target.captured_rounds  # type: ignore[attr-defined]


def speculate_on_device(
    target: Target,
    drafter: Drafter | None,
    request: SpeculateRequest,
    rounds: Rounds | None = None,
    rounds_per_poll: int = ROUNDS_PER_POLL,
) -> SpeculateResult:
    """The result of ``SpeculativeLoop``; raises ValueError for a request that ``supports`` does not pass.

    rounds: what was captured in earlier calls; give it again and a bucket is captured once. Capturing counts neither as prefill nor as
    decoding. With a cost table, whether to draft is decided once, for the whole batch. A row's ``decode_s`` is the call's.
    """
    reason = supports(target, drafter, request)
    if reason is not None:
        raise ValueError(f"request must be one that the device's rounds support: got {reason}")
    if request.cost_table is not None:
        pays = request.cost_table.pays(len(request.prompts))
        request = replace(request, cost_table=None, num_drafts=request.num_drafts if pays else 0)
    if request.num_drafts == 0:
        drafter = None
    rounds = Rounds(8) if rounds is None else rounds
    built = rounds_for(target, drafter, request, len(request.prompts), rounds)
    loop = SpeculativeLoop(target, drafter, request)
    loop.begin()
    if loop.live:
        if built.buffers.anchor.shape[0] != len(loop.live):
            built = rounds_for(target, drafter, request, len(loop.live), rounds)
        built.load(loop)
        built.run(rounds_per_poll)
        built.unload(loop)
    return loop.result()


def rounds_for(
    target: Target, drafter: Drafter | None, request: SpeculateRequest, batch: int, rounds: Rounds
) -> DeviceRounds:
    """The bucket of a request for ``batch`` of its rows, captured if it is not yet."""
    drafts, most = request.num_drafts if drafter is not None else 0, request.max_new_tokens
    longest = max(len(row) for row in request.prompts)
    columns, num_eos = key_bucket(longest + most + drafts), len(request.eos_token_ids)
    # Moved weights are other addresses, which a captured round would not see; changed ones make its folded products stale.
    weights: Sequence[Tensor] = [*target.model.parameters(), *(() if drafter is None else drafter.parameters())]
    state = hash(tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in weights))
    kind = (drafter is None, getattr(drafter, "num_candidates", None), kernels_mode())
    key = (batch, columns, key_bucket(most), drafts, num_eos, kind, state)
    return rounds.get(
        key, lambda: DeviceRounds(target.model, drafter, batch, columns, key_bucket(most), drafts, num_eos)
    )
