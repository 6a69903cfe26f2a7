"""What a round changes: tensors on the target's device, judged and committed in place, without a look of the host.

Letters: B rows still running, n drafts, V vocabulary, T most new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dllm.noise import STREAM_ACCEPT, STREAM_RESIDUAL
from dllm.samplers.processors import PrefixCounts, Processors
from dllm.samplers.verify import Verdict, block_verification, chain_rejection, equality, greedy
from dllm.types import Draft, Noise


@dataclass(eq=False)
class RoundState:
    """int64 [B] unless said otherwise.

    anchor: last committed token; lengths: its position, so the number of committed tokens before it; produced,
    remaining: new tokens so far and still allowed; active, stopped, broken: bool, still running, ended by a stop token,
    had a law that is not finite; passes, drafted: verify passes and those with drafts; positions: rows computed; out [B,
    T + 1]: new tokens; log [B, T + 1]: tokens committed by each pass (the last column of both takes what is masked out).
    """

    anchor: Tensor
    lengths: Tensor
    produced: Tensor
    remaining: Tensor
    active: Tensor
    stopped: Tensor
    broken: Tensor
    passes: Tensor
    drafted: Tensor
    positions: Tensor
    out: Tensor
    log: Tensor

    @classmethod
    def behind(cls, prompts: Sequence[Sequence[int]], limit: int, device: torch.device) -> RoundState:
        """Before the first token: the anchor is the prompt's last token, so that the prefill is a pass like any other."""
        batch = len(prompts)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            anchor=torch.tensor([row[-1] for row in prompts], device=device),
            lengths=torch.tensor([len(row) - 1 for row in prompts], device=device),
            produced=zeros(batch),
            remaining=zeros(batch) + limit,
            active=~zeros(batch, dtype=torch.bool),
            stopped=zeros(batch, dtype=torch.bool),
            broken=zeros(batch, dtype=torch.bool),
            passes=zeros(batch),
            drafted=zeros(batch),
            positions=zeros(batch),
            out=zeros(batch, limit + 1),
            log=zeros(batch, limit + 1),
        )

    def select(self, keep: Tensor) -> RoundState:
        """The state of the rows keep [B'] only."""
        return RoundState(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})

    def limits(self, num_drafts: int, policy_limits: Tensor | None = None) -> Tensor:
        """Drafts of each row that count, [B]: no more than it may still commit."""
        most = self.remaining.clamp(max=num_drafts)
        if policy_limits is not None:
            most = torch.minimum(most, policy_limits)
        return most * self.active

    def commit(
        self, scores: Tensor, draft: Draft, verdict: Verdict, limits: Tensor, eos: Tensor, counts: PrefixCounts | None
    ) -> Tensor:
        """Take the accepted drafts and the token after them into the state, up to the first stop token and the length
        limit; count [B]: tokens committed. Mutates the state and counts.

        scores [B, n + 1, V]: processed logits, looked at for being finite only; limits [B]: drafts that counted.
        """
        width = scores.shape[1]
        slots = torch.arange(width, device=scores.device)
        # A NaN or an infinity becomes the largest score; a law without any token has -inf.
        bad = ~scores.amax(dim=-1).isfinite() & (slots <= limits[:, None])
        self.broken |= bad.any(dim=1) & self.active
        tokens = verdict.tokens(draft.tokens)
        count = torch.minimum(verdict.accept_length, self.remaining) * self.active
        ends = (tokens[..., None] == eos).any(dim=-1) & (slots < count[:, None])
        first = torch.where(ends, slots, width).amin(dim=1)
        count = torch.minimum(count, first + 1)
        inside = slots < count[:, None]
        self.out.scatter_(1, torch.where(inside, self.produced[:, None] + slots, self.out.shape[1] - 1), tokens)
        if counts is not None:
            counts.append(tokens, inside)
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
        self.anchor.copy_(torch.where(self.active, last, self.anchor))
        self.lengths += count
        self.produced += count
        self.remaining -= count
        self.stopped |= first < width
        self.active &= ~self.stopped & (self.remaining > 0)
        return count

    def note(self, count: Tensor, limits: Tensor, ran: Tensor) -> None:
        """Book a verify pass of the rows ``ran`` [B] bool: count [B] tokens from limits [B] drafts. Mutates the state."""
        self.log.scatter_(1, torch.where(ran, self.passes, self.log.shape[1] - 1)[:, None], count[:, None])
        self.passes += ran
        self.drafted += ran & (limits > 0)


def judge(
    rule: str, scores: Tensor, draft: Draft, limits: Tensor, lengths: Tensor, processors: Processors, noise: Noise
) -> Verdict:
    """Test drafts behind anchors at positions lengths [B] against processed logits scores [B, n + 1, V]."""
    if rule == "greedy":
        return greedy(scores, draft, limits)
    law = processors.law(scores)
    positions = lengths[:, None] + torch.arange(1, scores.shape[1] + 1, device=scores.device)
    if rule == "equality":
        # Keyed by the token's position alone: a slot behind the first mismatch was never looked at, so its number is
        # fresh when it is drawn again, and the text is the one that the noise gives without drafts.
        return equality(law, draft, noise.uniform(positions, torch.zeros_like(lengths), STREAM_ACCEPT), limits)
    tests = noise.uniform(positions[:, :-1], lengths, STREAM_ACCEPT)
    last = noise.uniform(positions[:, :1], lengths, STREAM_RESIDUAL)
    verify = chain_rejection if rule == "rejection" else block_verification
    return verify(law, draft, torch.cat([tests, last], dim=1), limits)
