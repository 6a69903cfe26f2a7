"""How a draft is judged: greedy matching, chain rejection sampling, block verification, equality acceptance.

Letters: B batch, n drafted tokens, V vocabulary. Row k (0-based) of the target's n + 1 rows is its law of the token
that follows the first k drafts; ``q_k`` is the law from which draft k was really drawn (``Draft.probs``; None: drafts
are deterministic, one-hot). Every rule commits ``accepted`` drafts and one more token, so its output has exactly the
target's law (greedy: is the target's text). The processors of the target (temperature, filters, penalties) are applied
to its rows before the test. Tensor operations only.

The number of drafts that are tested, ``lengths``, may be chosen from anything that is known before their tokens: a
choice that looks at the tokens whose fate it decides makes every rule here biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.types import Draft


@dataclass(frozen=True, eq=False)
class Verdict:
    """accepted [B] int64: accepted drafts (0..n); next_token [B] int64: the token after them; law [B, V]: what it was
    drawn from, or None.
    """

    accepted: Tensor
    next_token: Tensor
    law: Tensor | None = None

    @property
    def accept_length(self) -> Tensor:
        """Tokens committed by the pass, the last one included: [B] int64 in 1..n + 1."""
        return self.accepted + 1

    def tokens(self, draft_tokens: Tensor) -> Tensor:
        """draft_tokens [B, n] -> [B, n + 1]: accepted drafts, then ``next_token``; what follows is filled with
        ``next_token`` too.
        """
        slot = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
        padded = torch.nn.functional.pad(draft_tokens, (0, 1))
        return torch.where(slot < self.accepted[:, None], padded, self.next_token[:, None])


def sample_law(law: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: law [..., V] (need not sum to 1), uniform [...] in (0, 1) -> int64 [...]; never a token of
    probability 0.
    """
    # In fp32 the sum over a large vocabulary would swallow its tail.
    cumulative = law.double().cumsum(dim=-1)
    wanted = uniform.double()[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, wanted.contiguous(), right=True).squeeze(-1).clamp(max=law.shape[-1] - 1)


def match(target_tokens: Tensor, draft_tokens: Tensor, lengths: Tensor | None = None) -> Verdict:
    """Accept drafts while they equal the target's own tokens: target_tokens [B, n + 1], draft_tokens [B, n] -> Verdict.

    lengths [B]: drafts of each row that count (None: all n).
    """
    num_drafts = draft_tokens.shape[1]
    _check_rows(target_tokens, num_drafts)
    accepted = _prefix((target_tokens[:, :num_drafts] == draft_tokens) & _within(draft_tokens, lengths))
    return Verdict(accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1))


def greedy(target_logits: Tensor, draft: Draft, lengths: Tensor | None = None) -> Verdict:
    """Temperature 0: target_logits [B, n + 1, V]; the target's argmax decides, ties go to the lowest id."""
    return match(target_logits.argmax(dim=-1), draft.tokens, lengths)


def equality(target_probs: Tensor, draft: Draft, uniform: Tensor, lengths: Tensor | None = None) -> Verdict:
    """Draw the target's token in every slot and accept drafts while they equal it: exact for any draft, accepts
    p_k(d_k).

    target_probs [B, n + 1, V]; uniform [B, n + 1], one draw per slot.
    """
    verdict = match(sample_law(target_probs, uniform), draft.tokens, lengths)
    return Verdict(verdict.accepted, verdict.next_token, _row(target_probs, verdict.accepted))


def chain_acceptance(target_probs: Tensor, draft: Draft) -> Tensor:
    """Probability min(1, p_k(d_k) / q_k(d_k)) of accepting draft k once all before it are: [B, n]."""
    _check_rows(target_probs, draft.tokens.shape[1])
    p, q = _drafted(target_probs, draft)
    return torch.where(q > 0, p / q, (p > 0).to(p.dtype)).clamp(max=1)


def chain_rejection(target_probs: Tensor, draft: Draft, uniform: Tensor, lengths: Tensor | None = None) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    target_probs [B, n + 1, V]; uniform [B, n + 1]: n acceptance tests and one draw. After a rejection at k the next
    token comes from ``normalise(max(p_k - q_k, 0))``, after none from the last row.
    """
    within = _within(draft.tokens, lengths)
    accepted = _prefix((uniform[:, :-1] < chain_acceptance(target_probs, draft)) & within)
    law = _residual(target_probs, draft, accepted, within, torch.ones_like(target_probs[:, 0, 0]))
    return Verdict(accepted, sample_law(law, uniform[:, -1]), law)


def block_acceptance(target_probs: Tensor, draft: Draft, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Block verification's thresholds h [B, n] and weights P [B, n + 1] (Sun et al. 2024, arXiv:2403.10444).

    ``P_0 = 1``, ``P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))``, ``S_i = sum_v max(P_i p_{i+1}(v) - q_{i+1}(v), 0)``,
    ``h_i = S_i / (S_i + 1 - P_i)``; at a row's last draft ``h = P``, beyond it 0. h[:, i - 1] is the threshold of
    prefix length i.
    """
    num_drafts = draft.tokens.shape[1]
    _check_rows(target_probs, num_drafts)
    p, q = _drafted(target_probs, draft)
    ratio = torch.where(q > 0, p / q, (p > 0).to(p.dtype))
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for k in range(num_drafts):
        weights.append((weights[-1] * ratio[:, k]).clamp(max=1))
    weight = torch.stack(weights, dim=1)
    inner = weight[:, 1:-1]
    if draft.probs is None:
        excess = inner * (1 - p[:, 1:])
    else:
        excess = (inner[..., None] * target_probs[:, 1:num_drafts] - draft.probs[:, 1:]).clamp(min=0).sum(dim=-1)
    denominator = excess + 1 - inner
    threshold = torch.where(denominator > 0, excess / denominator, torch.ones_like(excess))
    threshold = torch.cat([threshold, weight[:, -1:]], dim=1) if num_drafts else weight[:, 1:]
    if lengths is not None:
        slot = torch.arange(1, num_drafts + 1, device=lengths.device)
        threshold = torch.where(slot == lengths[:, None], weight[:, 1:], threshold) * (slot <= lengths[:, None])
    return threshold, weight


def block_verification(target_probs: Tensor, draft: Draft, uniform: Tensor, lengths: Tensor | None = None) -> Verdict:
    """Accept the longest prefix that passes its own test (Sun et al. 2024); never fewer in expectation than
    ``chain_rejection``.

    target_probs [B, n + 1, V]; uniform [B, n + 1], fresh in every step: all n tests are made, none stops the others.
    """
    threshold, weight = block_acceptance(target_probs, draft, lengths)
    passed = uniform[:, :-1] < threshold
    slot = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    accepted = torch.cat([torch.zeros_like(weight[:, :1], dtype=slot.dtype), passed * slot], dim=1).amax(dim=1)
    scale = weight.gather(1, accepted[:, None]).squeeze(1)
    law = _residual(target_probs, draft, accepted, _within(draft.tokens, lengths), scale)
    return Verdict(accepted, sample_law(law, uniform[:, -1]), law)


def _check_rows(target: Tensor, num_drafts: int) -> None:
    if target.shape[1] != num_drafts + 1:
        raise ValueError(f"target rows must be one more than the drafts ({num_drafts} + 1): got {target.shape[1]}")


def _within(draft_tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Which drafts count: bool [B, n]."""
    slot = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    return torch.ones_like(draft_tokens, dtype=torch.bool) if lengths is None else slot < lengths[:, None]


def _prefix(accept: Tensor) -> Tensor:
    """accept [B, n] bool -> length of its leading run of True, int64 [B]."""
    return accept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _row(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, m, V], index [B] -> [B, V]."""
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[-1])).squeeze(1)


def _drafted(target_probs: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """p_k(d_k) and q_k(d_k), both [B, n]."""
    p = target_probs[:, :-1].gather(-1, draft.tokens[..., None]).squeeze(-1)
    if draft.probs is None:
        return p, torch.ones_like(p)
    return p, draft.probs.gather(-1, draft.tokens[..., None]).squeeze(-1).to(p.dtype)


def _residual(target_probs: Tensor, draft: Draft, accepted: Tensor, within: Tensor, scale: Tensor) -> Tensor:
    """normalise(max(scale p - q, 0)) of the first token after the accepted drafts; p itself where no draft stands
    there.
    """
    p = _row(target_probs, accepted)
    num_drafts = draft.tokens.shape[1]
    if num_drafts == 0:
        return p
    # The drafted token behind the accepted ones, if there is one that counts.
    place = accepted.clamp(max=num_drafts - 1)
    tested = within.gather(1, place[:, None]) & (accepted < num_drafts)[:, None]
    if draft.probs is None:
        rest = (scale[:, None] * p).scatter(1, draft.tokens.gather(1, place[:, None]), 0.0)
    else:
        rest = (scale[:, None] * p - _row(draft.probs, place).to(p.dtype)).clamp(min=0)
    mass = rest.sum(dim=-1, keepdim=True)
    # No mass left is rounding: then p and q agree, and p is the law.
    return torch.where(tested & (mass > 0), rest / mass.clamp(min=torch.finfo(p.dtype).tiny), p)
