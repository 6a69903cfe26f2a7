"""When a block policy is asked, and what it is told: the seam between ``BlockPolicy`` and the denoising loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dllm.kernels.row_stats import row_stats
from dllm.types import BlockPolicy, DecodeSpec, ForesightPolicy, Plan, PolicyState
from dllm.walk import BlockWalk

TOP_LOGITS = 64
"""Logits of the last given row that a policy gets, best first."""
Read = Callable[[Tensor, Tensor], Tensor]
"""(rows [B, S], slots [B, S]) -> logits [B, S, V] of what stands there, as the loop decodes from them."""


class BlockLengths:
    """Asks the policy of one call for each block's length, row by row, so that a row of a batch gets what it would get alone.

    Bidirectional models: after the block's first forward and before its first commit, so that this forward both tells the length and
    decodes. Others: before the first forward that decodes the block, for there the length decides who sees whom. Of the tokens whose
    block is to be opened a policy gets no ids.
    """

    def __init__(self, policy: BlockPolicy, walk: BlockWalk, spec: DecodeSpec) -> None:
        check = getattr(policy, "check", None)
        if check is not None:
            check(spec)
        self.policy, self.walk, self.spec = policy, walk, spec
        self.foresight = policy if isinstance(policy, ForesightPolicy) else None
        if self.foresight is not None and spec.attention != "bidirectional":
            raise ValueError(
                f"block_length {type(policy).__name__} looks ahead, which needs bidirectional attention: got {spec.attention}"
            )
        # Confidence of each slot when it was committed, with a bin column.
        self.confidence = torch.zeros(*walk.wide["canvas"].shape, device=walk.state.canvas.device)
        self.before: list[tuple[int, int] | None] = [None] * len(walk.rows)

    def select(self, keep: Tensor) -> None:
        """Let only the rows keep [B'] stay."""
        self.confidence = self.confidence[keep]
        self.before = [self.before[b] for b in keep.tolist()]

    def remember(self, target: Tensor, confidence: Tensor) -> None:
        """confidence [B, S] fp32 of what has been committed at target [B, S] (the bin column: nothing)."""
        self.confidence.scatter_(1, target, confidence)

    def ask_before_forward(self, plan: Plan, hidden: Tensor | None, read: Read) -> list[int]:
        """Settle the blocks that this plan decodes, where their length decides the plan; rows for which it must be made again."""
        if self.spec.attention == "bidirectional":
            return []
        return self._ask(plan.decode, hidden, read)

    def ask_after_forward(self, decode: Tensor, hidden: Tensor | None, read: Read) -> None:
        """Settle what is still open among the rows decode [B] bool, whose first forward has just been run."""
        self._ask(decode, hidden, read)

    def _ask(self, decode: Tensor, hidden: Tensor | None, read: Read) -> list[int]:
        flags = decode.tolist()
        rows = [b for b, row in enumerate(self.walk.rows) if row.pending and flags[b]]
        if not rows:
            return []
        last_hidden, top_logits = self._given_row(hidden, read)
        delimiters = self._delimiters(rows, read)
        for b in rows:
            row, one = self.walk.rows[b], slice(b, b + 1)
            start, stop = row.regions[row.region]
            place = self.before[b]
            length = self.policy.next(
                PolicyState(
                    position=self.walk.state.lo[one].clone(),
                    remaining=torch.full_like(self.walk.state.lo[one], stop - row.lo),
                    default=self.spec.block_length,
                    confidence=None if place is None else self.confidence[one, place[0] : place[1]].clone(),
                    hidden=None if last_hidden is None else last_hidden[one],
                    top_logits=None if top_logits is None else top_logits[one],
                    total=torch.full_like(self.walk.state.lo[one], stop - start),
                    delimiter_confidence=delimiters.get(b),
                )
            )
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ValueError(f"a block policy must return an int >= 1: got {length!r}")
            self.walk.set_length(b, length)
            row.pending = False
            self.before[b] = (row.lo, row.hi)
        return rows

    def _given_row(self, hidden: Tensor | None, read: Read) -> tuple[Tensor | None, Tensor | None]:
        """Last hidden state [B, D] and best logits [B, k] of the row before each first gap, as that row was last computed."""
        if hidden is None:
            return None, None
        # A row that begins with its gap has no such row, and gets its own first one.
        place = (self.walk.state.begin - 1).clamp(min=0)[:, None]
        logits = read(place, place + self.spec.logits_shift)[:, 0].float()
        last = hidden[: len(place)].gather(1, place[..., None].expand(-1, -1, hidden.shape[-1]))[:, 0]
        return last, logits.topk(min(TOP_LOGITS, logits.shape[-1])).values

    def _delimiters(self, rows: list[int], read: Read) -> dict[int, Tensor]:
        """For each of the rows [1, W] fp32: the confidence of arg-maxes that are delimiters, 0 elsewhere."""
        if self.foresight is None:
            return {}
        windows = {}
        for b in rows:
            start, stop = self.walk.rows[b].regions[self.walk.rows[b].region]
            windows[b] = min(
                self.foresight.window(stop - start, stop - self.walk.rows[b].lo), stop - self.walk.rows[b].lo
            )
        state = self.walk.state
        most = max(max(windows.values()), 1)
        slots = state.lo[:, None] + torch.arange(most, device=state.lo.device)
        slots = slots.clamp(max=state.canvas.shape[1] - 1)
        laws = row_stats(read((slots - self.spec.logits_shift).clamp(min=0), slots), frozenset({"top1"}))
        wanted = torch.tensor(self.foresight.delimiter_ids, device=slots.device)
        # A pinned token is no guess.
        guessed = (laws.token[..., None] == wanted).any(-1) & state.masked.gather(1, slots)
        found = torch.where(guessed, laws.confidence, 0.0)
        return {b: found[b : b + 1, :window] for b, window in windows.items()}
