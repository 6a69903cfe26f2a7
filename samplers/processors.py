"""Logit processors: from a model's raw logits to the law that is sampled from or verified against.

Letters: B batch, S rows, V vocabulary. Every filter keeps the ties at its border, so that no result hangs on the order
of a sort. Order: bias, repetition penalty (Keskar et al. 2019, arXiv:1909.05858), presence and frequency penalties,
forbidden tokens, temperature, top-k (Fan et al. 2018), top-p (Holtzman et al. 2020, arXiv:1904.09751), min-p (Nguyen et
al. 2024, arXiv:2407.01082).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """logits [..., V] -> the same with -inf below the k-th largest value; k >= V changes nothing."""
    if k < 1:
        raise ValueError(f"top_k must be >= 1: got {k}")
    if k >= logits.shape[-1]:
        return logits
    border = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < border, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """logits [..., V] -> the same with -inf outside the smallest set of likely tokens whose probability reaches p."""
    if not 0 < p <= 1:
        raise ValueError(f"top_p must be in (0, 1]: got {p}")
    if p == 1:
        return logits
    ranked = logits.sort(dim=-1, descending=True).values
    law = ranked.float().softmax(dim=-1)
    # A token stays while the probability of those before it is short of p; the first one always does, also where p is 0 in fp32.
    kept = law.cumsum(dim=-1) - law < p
    border = ranked.gather(-1, kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    return logits.masked_fill(logits < border, -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """logits [..., V] -> the same with -inf where the probability is below p times the largest one."""
    if not 0 <= p <= 1:
        raise ValueError(f"min_p must be in [0, 1]: got {p}")
    if p == 0:
        return logits
    border = logits.amax(dim=-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < border, -torch.inf)


def process_logits(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    banned: Tensor | None = None,
) -> Tensor:
    """logits [..., V] -> fp32 logits of the law that is drawn from: banned ids out, temperature (> 0), top-k, top-p,
    min-p.

    banned: bool, broadcast against logits; such ids lose their mass before the filters look at it.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 for a law: got {temperature}")
    scores = logits.float() / temperature
    if banned is not None:
        scores = scores.masked_fill(banned, -torch.inf)
    if top_k is not None:
        scores = keep_top_k(scores, top_k)
    if top_p is not None:
        scores = keep_top_p(scores, top_p)
    return scores if min_p is None else keep_min_p(scores, min_p)


@dataclass(eq=False)
class PrefixCounts:
    """Which tokens a prefix holds; owned by the loop, one a batch.

    prompt [B, V] bool: tokens of the prompt; generated [B, V] int32: how often each was generated so far; length [B]
    int64: how many were generated.
    """

    prompt: Tensor
    generated: Tensor
    length: Tensor

    @classmethod
    def of_prompt(cls, ids: Tensor, valid: Tensor, vocab_size: int) -> PrefixCounts:
        """ids [B, P] int64, valid [B, P] bool (False: padding)."""
        wide = torch.zeros(ids.shape[0], vocab_size, dtype=torch.int32, device=ids.device)
        prompt = wide.scatter_add(1, ids, valid.to(torch.int32)) > 0
        return cls(prompt, wide, torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device))

    def append(self, tokens: Tensor, valid: Tensor) -> None:
        """Count committed tokens [B, n] int64 where valid [B, n] bool; mutates the counts in place."""
        self.generated.scatter_add_(1, tokens, valid.to(torch.int32))
        self.length += valid.sum(dim=1)

    def grown(self, draft_tokens: Tensor) -> Tensor:
        """Counts before each of n + 1 slots, int32 [B, n + 1, V]: slot k has draft_tokens[:, :k] (int64 [B, n])
        appended.
        """
        batch, num_drafts = draft_tokens.shape
        steps = self.generated.new_zeros(batch, num_drafts + 1, self.generated.shape[1])
        steps[:, 0] = self.generated
        steps[:, 1:].scatter_(2, draft_tokens[..., None], 1)
        return steps.cumsum(dim=1, dtype=torch.int32)


@dataclass(frozen=True)
class Processors:
    """What is done to a target's logits before its law is sampled or verified; the defaults do nothing and decode
    greedily.

    temperature: 0 = argmax. repetition_penalty (> 0): divides positive and multiplies negative logits of every token of
    prompt and output. presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the
    output. logit_bias: token id -> added logit. min_new_tokens: before that many new tokens none of ``eos_token_ids``
    is allowed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0: got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1: got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]: got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1]: got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be > 0: got {self.repetition_penalty}")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must be >= 0: got {self.min_new_tokens}")
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias.items())))

    @property
    def needs_counts(self) -> bool:
        """Whether ``adjust`` reads the prefix."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or (self.min_new_tokens > 0 and bool(self.eos_token_ids))
        )

    def adjust(self, logits: Tensor, draft_tokens: Tensor, counts: PrefixCounts | None = None) -> Tensor:
        """Bias and penalties on the growing prefix: row k is processed as if draft_tokens[:, :k] were committed.

        logits [B, n + 1, V], draft_tokens [B, n] int64 (n = 0: plain decoding) -> fp32 [B, n + 1, V].
        Raises ValueError if ``needs_counts`` and counts is None.
        """
        scores = logits.float()
        if self.logit_bias:
            ids, values = _bias(self.logit_bias, scores.device)  # type: ignore[arg-type]
            scores = scores.index_add(-1, ids, values.expand(*scores.shape[:-1], -1))
        if not self.needs_counts:
            return scores
        if counts is None:
            raise ValueError("counts must be given for penalties and min_new_tokens: got None")
        if self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0:
            grown = counts.grown(draft_tokens)
            if self.repetition_penalty != 1:
                seen = (grown > 0) | counts.prompt[:, None]
                punished = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
                scores = torch.where(seen, punished, scores)
            scores = scores - self.presence_penalty * (grown > 0) - self.frequency_penalty * grown
        if self.min_new_tokens > 0 and self.eos_token_ids:
            before = counts.length[:, None] + torch.arange(logits.shape[1], device=logits.device)
            eos, _ = _bias(tuple((i, 0.0) for i in self.eos_token_ids), scores.device)
            forbidden = (before < self.min_new_tokens)[..., None].expand(-1, -1, len(self.eos_token_ids))
            closed = scores.index_select(-1, eos).masked_fill(forbidden, -torch.inf)
            scores = scores.index_copy(-1, eos, closed)
        return scores

    def law(self, adjusted: Tensor) -> Tensor:
        """adjusted [..., V] (of ``adjust``) -> fp32 probabilities [..., V] that sum to 1. Raises ValueError at
        temperature 0.
        """
        logits = process_logits(
            adjusted, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )
        return logits.softmax(dim=-1)


@lru_cache(maxsize=64)
def _bias(pairs: tuple[tuple[int, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and values on the device; cached, so that a captured step makes no host copy."""
    ids = torch.tensor([i for i, _ in pairs], dtype=torch.int64, device=device)
    return ids, torch.tensor([v for _, v in pairs], dtype=torch.float32, device=device)
