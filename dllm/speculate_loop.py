"""Rounds of drafting and verifying: the host's side of the loop, for every drafter, verifier and kind of target.

A round drafts behind each row's anchor (its last committed token), verifies anchor and drafts in one pass of the
target, and commits the accepted drafts and one more token. Rows have their own lengths, noise, stops and acceptance. A
round is tensor operations of fixed shape; the host looks at the outcome every ``POLL_ROUNDS`` rounds, or after each one
where it has something to decide (stop strings, policies, streams, a Hugging Face cache). Letters: B rows still running,
n drafts.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.drafter import Context, Drafter
from dllm.drafters.target import Target
from dllm.output import Stats
from dllm.samplers.processors import PrefixCounts
from dllm.speculate_request import SpeculateRequest
from dllm.speculate_state import RoundState, judge
from dllm.speculate_targets import COLUMN_BUCKET, TargetRows, open_rows
from dllm.types import Draft, PolicyState

POLL_ROUNDS = 8
"""Rounds between two looks of the host where nothing needs more."""
FEED_ROUNDS = 16
"""Rounds without drafts whose context is fed to the drafter at once."""
TOP_LOGITS = 64
"""Logits of the prefill that a block policy is given."""

_OPENED: weakref.WeakKeyDictionary[Drafter, object] = weakref.WeakKeyDictionary()
"""The ticket of the request that a drafter's context belongs to."""


@dataclass(frozen=True, eq=False)
class RoundView:
    """What a round left behind. Tensors are the loop's own: read them, do not keep or change them.

    step: rounds so far (0: the prefill); rows: places in the request of the rows that took part; anchors [B],
    draft_tokens [B, n]: what was verified; limits [B]: drafts of each row that counted; new_ids: tokens committed since
    the last view, one list a row, the stop included.
    """

    step: int
    rows: list[int]
    anchors: Tensor
    draft_tokens: Tensor
    limits: Tensor
    new_ids: list[list[int]]


@dataclass
class LoopRow:
    """Host-side book-keeping of one row; ids: committed tokens, a stop included; cut: how many behind a stop were cut."""

    index: int
    ids: list[int] = field(default_factory=list)
    useful: int = 0
    cut: int = 0
    reason: str | None = None
    stop_text: str | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def settled(self) -> list[int]:
        """Tokens that stay, without a stop."""
        return self.ids if self.reason is None else self.ids[: self.useful]


@dataclass
class SpeculateResult:
    """tokens: new tokens of each row, the ones that made the stop included; useful: how many of them count; stop_texts:
    the text before a stop string, or None.
    """

    tokens: list[list[int]]
    useful: list[int]
    finish_reasons: list[str]
    stop_texts: list[str | None]
    stats: Stats
    row_stats: list[Stats]


class SpeculativeLoop:
    """State and rounds of one request.

    drafter None: plain decoding, the same code. watch: give a view of every round, for streams and callbacks. cache: an
    empty Hugging Face cache to use. A drafter serves one request at a time: RuntimeError once another has reset it.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, request: SpeculateRequest, watch: bool = False, cache: Any = None
    ) -> None:
        self.target, self.request, self.watch = target, request, watch
        batch = len(request.prompts)
        drafts = request.num_drafts > 0 or request.policy is not None
        if drafts and request.cost_table is not None:
            # Rows only leave: if drafting pays at no size that can come, the drafter needs no context either.
            drafts = any(request.cost_table.pays(size) for size in range(1, batch + 1))
        self.drafter = drafter if drafts else None
        taps = () if self.drafter is None else self.drafter.config.target_layer_ids
        longest = max(len(row) for row in request.prompts)
        self.rows: TargetRows = open_rows(target, taps, longest + request.max_new_tokens, cache)
        self.all = [LoopRow(b) for b in range(batch)]
        self.live = list(self.all)
        self.device = target.device
        self.state = RoundState.behind(request.prompts, request.max_new_tokens, self.device)
        self.noise, self.ticket = request.noise, object()
        self.eos = torch.tensor(request.eos_token_ids, dtype=torch.int64, device=self.device)
        self.counts: PrefixCounts | None = None
        self.pending: list[Context] = []
        self.confidence: Tensor | None = None
        self.prefill_hidden: Tensor | None = None
        self.prefill_logits: Tensor | None = None
        self.policy_limits: list[int] | None = None
        self.num_rounds = self.last_look = 0
        # No row may commit more, and none holds more committed tokens.
        self.most_left, self.bound = request.max_new_tokens, longest
        self.stats = Stats()
        self.started = time.perf_counter()
        host_decides = (request.policy, request.prefix_processor, request.find_stop)
        self.every_round = (
            self.device.type != "cuda" or self.rows.follows_host or watch or any(x is not None for x in host_decides)
        )

    def run(self) -> Iterator[RoundView]:
        """Decode until every row is done; with ``watch`` a view of the prefill and of each round."""
        if self.request.max_new_tokens == 0:
            return
        yield from self.begin()
        while self.live:
            yield from self._round(self._num_drafts())

    def begin(self) -> list[RoundView]:
        """Read the prompts and choose each row's first token; with ``watch`` the view of that."""
        self.started = self._now()
        views = self._prefill()
        self.stats.prefill_s = self._now() - self.started
        return views

    def result(self) -> SpeculateResult:
        """The outcome, once ``run`` is exhausted."""
        self.stats.decode_s = max(self._now() - self.started - self.stats.prefill_s, 0.0)
        self.stats.useful_tokens = sum(row.useful for row in self.all)
        self.stats.positions = sum(row.stats.positions for row in self.all)
        self.stats.accept_lengths = [count for row in self.all for count in row.stats.accept_lengths]
        return SpeculateResult(
            tokens=[row.ids for row in self.all],
            useful=[row.useful for row in self.all],
            finish_reasons=[row.reason or "length" for row in self.all],
            stop_texts=[row.stop_text for row in self.all],
            stats=self.stats,
            row_stats=[row.stats for row in self.all],
        )

    # Rounds

    @torch.no_grad()
    def _prefill(self) -> list[RoundView]:
        """Read the prompts and choose the first token."""
        request = self.request
        start = self.rows.prefill(request.prompts, want_hidden=request.policy is not None)
        self.stats.nfe += 1
        self.state.positions += start.valid.sum(dim=1)
        if request.processors.needs_counts:
            width = max(len(row) for row in request.prompts)
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in request.prompts], device=self.device)
            given = torch.arange(width, device=self.device) <= self.state.lengths[:, None]
            self.counts = PrefixCounts.of_prompt(ids, given, start.logits.shape[-1])
        if self.drafter is not None:
            assert start.features is not None, "a drafter taps"
            _OPENED[self.drafter] = self.ticket
            self.drafter.reset(len(self.live), self.bound + request.max_new_tokens)
            self.pending.append(Context(start.features, start.valid))
        if start.hidden is not None:
            self.prefill_hidden = start.hidden
            self.prefill_logits = start.logits.float().topk(min(TOP_LOGITS, start.logits.shape[-1])).values
        anchors = self.state.anchor.clone()
        draft, limits = _no_draft(anchors), torch.zeros_like(anchors)
        self._commit(start.logits[:, None], draft, limits)
        return self._look(anchors, draft, limits)

    @torch.no_grad()
    def _round(self, num_drafts: int) -> list[RoundView]:
        """Draft, verify, commit."""
        state = self.state
        policy_limits = None if self.policy_limits is None else torch.tensor(self.policy_limits, device=self.device)
        limits = state.limits(num_drafts, policy_limits)
        anchors, ran = state.anchor.clone(), state.active.clone()
        if self.drafter is not None and (num_drafts > 0 or len(self.pending) >= FEED_ROUNDS):
            self._feed(self.drafter)
        draft = self._draft(num_drafts, limits) if num_drafts > 0 else _no_draft(anchors)
        tokens = torch.cat([anchors[:, None], draft.tokens], dim=1)
        slots = torch.arange(num_drafts + 1, device=self.device)
        valid = (slots <= limits[:, None]) & ran[:, None]
        state.positions += valid.sum(dim=1)
        logits, features = self.rows.verify(tokens, state.lengths, valid, self.bound)
        self.stats.nfe += 1
        count = self._commit(logits, draft, limits)
        state.note(count, limits, ran)
        self.rows.commit(count)
        if self.drafter is not None:
            assert features is not None, "a drafter taps"
            # The last committed token is the new anchor: its taps come with the next pass.
            self.pending.append(Context(features, slots < count[:, None]))
        self.num_rounds += 1
        self.bound += num_drafts + 1
        self.most_left -= 1
        if self.every_round or self.num_rounds - self.last_look >= POLL_ROUNDS or self.most_left <= 0:
            return self._look(anchors, draft, limits)
        return []

    def _num_drafts(self) -> int:
        """Drafts of the coming round, decided before anything of it is known; 0 where drafting does not pay."""
        request = self.request
        self.policy_limits = None
        if self.drafter is None or (request.cost_table is not None and not request.cost_table.pays(len(self.live))):
            return 0
        most = min(self.drafter.max_drafts, max(self.most_left, 1))
        if self.rows.capacity is not None:
            # The anchor needs a stored row too.
            most = min(most, self.rows.capacity - self.bound - 1)
        if request.policy is None:
            return max(min(request.num_drafts, most), 0)
        self.policy_limits = [max(min(self._ask_policy(b) - 1, most), 0) for b in range(len(self.live))]
        return max(self.policy_limits)

    def _ask_policy(self, b: int) -> int:
        """Row b's block length, anchor included."""
        assert self.request.policy is not None and self.drafter is not None, "no policy"
        one = slice(b, b + 1)
        length = self.request.policy.next(
            PolicyState(
                position=self.state.lengths[one] + 1,
                remaining=self.state.remaining[one].clone(),
                default=self.drafter.config.block_length,
                confidence=None if self.confidence is None else self.confidence[one],
                hidden=None if self.prefill_hidden is None else self.prefill_hidden[one],
                top_logits=None if self.prefill_logits is None else self.prefill_logits[one],
            )
        )
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"a block policy must return an int >= 1 (the anchor included): got {length!r}")
        return length

    def _feed(self, drafter: Drafter) -> None:
        """Hand over the taps of everything committed since the last time."""
        self._check_owner(drafter)
        if drafter.device.type == "cuda" and drafter.store is not None:
            # Unlike on the CPU it does not ask the device how long its rows are.
            drafter.store.extent = min(-(-self.bound // COLUMN_BUCKET) * COLUMN_BUCKET, drafter.store.capacity)
        if self.pending:
            features = torch.cat([c.features for c in self.pending], dim=1)
            valid = torch.cat([c.valid for c in self.pending], dim=1)
            self.pending.clear()
            drafter.feed(Context(features.to(drafter.device), valid.to(drafter.device)))

    def _draft(self, num_drafts: int, limits: Tensor) -> Draft:
        drafter, home = self.drafter, self.device
        assert drafter is not None, "no drafter"
        anchor, limits = self.state.anchor.to(drafter.device), limits.to(drafter.device)
        draft = drafter.propose(None, anchor, num_drafts, self.request.draft_temperature, self.noise, lengths=limits)
        self.stats.draft_nfe += 1
        self.confidence = None if draft.confidence is None else draft.confidence.to(home)
        return Draft(draft.tokens.to(home), None if draft.probs is None else draft.probs.to(home), self.confidence)

    def _commit(self, logits: Tensor, draft: Draft, limits: Tensor) -> Tensor:
        """Process, judge and commit; count [B]."""
        request = self.request
        scores = request.processors.adjust(logits, draft.tokens, self.counts)
        if request.prefix_processor is not None:
            ids = [row.ids for row in self.live]
            scores = request.prefix_processor(scores, [row.index for row in self.live], ids, draft.tokens)
        verdict = judge(request.verifier, scores, draft, limits, self.state.lengths, request.processors, self.noise)
        return self.state.commit(scores, draft, verdict, limits, self.eos, self.counts)

    # The host's look

    def _look(self, anchors: Tensor, draft: Draft, limits: Tensor) -> list[RoundView]:
        """Fetch where the rows stand, finish those that are done, take them out of the batch."""
        state = self.state
        parts = (state.produced, state.lengths, state.remaining, state.active, state.stopped, state.broken)
        produced, lengths, remaining, active, stopped, broken = torch.stack([p.long() for p in parts]).tolist()
        indices = [row.index for row in self.live]
        if any(broken):
            where = f"row {indices[broken.index(1)]}, by round {self.num_rounds} (0: the prompt)"
            raise ValueError(f"logits must be finite: got NaN or infinity in {where}")
        low = min(len(row.ids) for row in self.live)
        window = state.out[:, low : max(produced)].tolist()
        new_ids = []
        for b, row in enumerate(self.live):
            known = len(row.ids)
            row.ids.extend(window[b][known - low : produced[b] - low])
            if not active[b]:
                row.reason = "stop" if stopped[b] else "length"
                row.useful = len(row.ids) - stopped[b]
            self._stop_rule(row, known)
            new_ids.append(row.ids[known:])
        view = RoundView(self.num_rounds, indices, anchors, draft.tokens, limits, new_ids)
        left = [b for b, row in enumerate(self.live) if row.reason is None]
        if len(left) < len(self.live):
            self._finish()
            self._keep(left)
        if left:
            self.most_left = max(remaining[b] for b in left)
            self.bound = max(lengths[b] for b in left)
            self.rows.tidy(self.bound)
        self.last_look = self.num_rounds
        return [view] if self.watch else []

    def _stop_rule(self, row: LoopRow, known: int) -> None:
        """End the row where a stop string (or a user's rule) ends it; what was committed behind that is cut off."""
        if self.request.find_stop is None:
            return
        text = row.ids[:-1] if row.reason == "stop" else row.ids
        stop = self.request.find_stop(row.index, list(text), min(known, len(text)))
        if stop is not None:
            row.cut = len(row.ids) - stop.end
            del row.ids[stop.end :]
            row.reason, row.useful, row.stop_text = "stop", stop.useful, stop.text

    def _finish(self) -> None:
        """Close the books of the rows that are done."""
        numbers = torch.stack([self.state.passes, self.state.drafted, self.state.positions]).tolist()
        logs = self.state.log.tolist()
        now = self._now() - self.started
        for b, row in enumerate(self.live):
            if row.reason is None:
                continue
            passes, drafted, positions = (column[b] for column in numbers)
            counts = logs[b][:passes]
            if counts:
                counts[-1] -= row.cut
            row.stats = Stats(
                nfe=passes + 1,
                draft_nfe=drafted,
                useful_tokens=row.useful,
                positions=positions,
                prefill_s=self.stats.prefill_s,
                decode_s=max(now - self.stats.prefill_s, 0.0),
                accept_lengths=counts,
            )

    def _keep(self, left: list[int]) -> None:
        """Go on with the rows ``left``, so that the others are neither computed nor written."""
        self.live = [self.live[b] for b in left]
        if not left:
            return
        keep = torch.tensor(left, device=self.device)
        self.state = self.state.select(keep)
        self.rows.select(keep)
        self.noise = self.noise.select(keep)
        if self.counts is not None:
            self.counts = PrefixCounts(self.counts.prompt[keep], self.counts.generated[keep], self.counts.length[keep])
        for name in ("confidence", "prefill_hidden", "prefill_logits"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[keep])
        self.pending = [Context(c.features[keep], c.valid[keep]) for c in self.pending]
        if self.drafter is not None:
            self._check_owner(self.drafter)
            self.drafter.select(keep.to(self.drafter.device))

    def _check_owner(self, drafter: Drafter) -> None:
        if _OPENED.get(drafter) is not self.ticket:
            raise RuntimeError("drafter was reset by another request while this one is running: use one for each")

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _no_draft(anchors: Tensor) -> Draft:
    """A draft of no tokens: [B, 0]."""
    return Draft(anchors[:, None][:, :0])
