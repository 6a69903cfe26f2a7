"""Losses of drafters: what a slot should say, how far it is from it, and how much each slot of a block counts.

For slot k of a block (k = 1..n) with drafted law q_k and wanted law p_k, overlap ``alpha_k = sum_v min(p_k, q_k)`` is the probability
that rejection sampling keeps the draft; with p_k put on one token it is q_k of that token.

    ce, kl     -sum p log q, KL(p || q)
    tv         1 - alpha_k (total variation)
    lk         lam KL + (1 - lam) (1 - alpha), lam = exp(-3 stopgrad(alpha))                      (AngelSpec, arXiv:2607.25852, stage A)
    length     1 - 1/n sum_j prod_{i <= j} alpha_i: the expected accepted length of the block    (arXiv:2606.12370; AngelSpec, stage B)

Letters: R slots, n slots of a block, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOSSES = ("ce", "kl", "tv", "lk", "length")
LABELS = ("text", "target", "law")
WEIGHTS = ("uniform", "exponential", "dpace")


@dataclass(frozen=True)
class DraftLoss:
    """Which loss, towards what, with which weights.

    label: the "text"'s token; the "target"'s greedy token, which is what decides at temperature 0; or the target's "law", sharpened by
    label_temperature. weights: "uniform"; "exponential", exp(-(k - 1) / decay) (DFlash; decay 4 for blocks of 8); "dpace",
    ``dpace_weights``. greedy_path: slots behind a token of the text that is not the target's greedy choice do not count: in greedy
    decoding no draft is ever judged there. The loss "length" has its own weights.
    """

    kind: Literal["ce", "kl", "tv", "lk", "length"] = "lk"
    label: Literal["text", "target", "law"] = "target"
    weights: Literal["uniform", "exponential", "dpace"] = "dpace"
    decay: float = 4.0
    smoothing: float = 0.5
    label_temperature: float = 1.0
    greedy_path: bool = True

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("loss", self.kind, LOSSES),
            ("label", self.label, LABELS),
            ("weights", self.weights, WEIGHTS),
        ):
            if value not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}: got {value!r}")
        if not self.decay > 0 or not self.label_temperature > 0:
            raise ValueError(f"decay and label_temperature must be > 0: got {self.decay} and {self.label_temperature}")
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing must be in [0, 1]: got {self.smoothing}")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's logits at the slots are read."""
        return self.label != "text" or self.greedy_path


@dataclass(frozen=True, eq=False)
class SlotTerms:
    """Of each slot, fp32 [R]: divergence (ce or KL), overlap alpha; greedy int64 [R]: the target's token (the text's, where the
    target was not asked); top int64 [R]: the drafter's token.
    """

    divergence: Tensor
    overlap: Tensor
    greedy: Tensor
    top: Tensor

    def view(self, *shape: int) -> SlotTerms:
        """The same terms in another shape."""
        return SlotTerms(*(x.view(shape) for x in (self.divergence, self.overlap, self.greedy, self.top)))


def slot_terms(
    logits: Tensor, teacher: Tensor | None, token: Tensor, label: str, label_temperature: float, cross_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits, teacher [R, V] (fp32 inside), token int64 [R] -> divergence, overlap, greedy, top as in ``SlotTerms``."""
    log_q = logits.float().log_softmax(dim=-1)
    top = log_q.argmax(dim=-1)
    greedy = token if teacher is None else teacher.argmax(dim=-1)
    if label != "law":
        wanted = greedy if label == "target" else token
        divergence = -log_q.gather(-1, wanted[:, None]).squeeze(-1)
        return divergence, (-divergence).exp(), greedy, top
    assert teacher is not None, "a law needs the target's logits"
    log_p = (teacher.float() / label_temperature).log_softmax(dim=-1)
    p = log_p.exp()
    divergence = -(p * log_q).sum(dim=-1) if cross_entropy else (p * (log_p - log_q)).sum(dim=-1)
    return divergence, torch.minimum(p, log_q.exp()).sum(dim=-1), greedy, top


def dpace_weights(confidence: Tensor, labelled: Tensor, smoothing: float = 0.5) -> Tensor:
    """D-PACE weights fp32 [..., n]: ``m_j = (1 - a) c_j + a``, ``w_k = sum_{j >= k} prod_{i <= j} m_i`` over labelled slots.

    confidence [..., n] in [0, 1]; labelled bool [..., n]: a slot without a label weighs nothing and ends its block.
    """
    smoothed = ((1 - smoothing) * confidence.detach() + smoothing) * labelled
    reached = smoothed.cumprod(dim=-1)
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * labelled


def on_greedy_path(text: Tensor, greedy: Tensor) -> Tensor:
    """text, greedy int64 [..., n] -> bool [..., n]: every token of the text before the slot, anchor aside, is the greedy one."""
    same = (text == greedy)[..., :-1]
    first = torch.ones_like(same[..., :1]) if same.shape[-1] else torch.ones_like(text, dtype=torch.bool)
    return torch.cat([first, same], dim=-1).cumprod(dim=-1).bool()


def block_loss(terms: SlotTerms, counted: Tensor, loss: DraftLoss) -> Tensor:
    """Scalar loss of blocks: terms of [N, n] slots, counted bool [N, n] (a run from the block's first slot on; none: no block)."""
    if loss.kind == "length":
        reached = (terms.overlap * counted).cumprod(dim=-1)
        expected = (reached * counted).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)
        blocks = counted.any(dim=-1)
        return 1 - (expected * blocks).sum() / blocks.sum().clamp(min=1)
    if loss.kind in ("ce", "kl"):
        value = terms.divergence
    elif loss.kind == "tv":
        value = 1 - terms.overlap
    else:
        share = torch.exp(-3 * terms.overlap.detach())
        value = share * terms.divergence + (1 - share) * (1 - terms.overlap)
    if loss.weights == "dpace":
        weight = dpace_weights(terms.overlap, counted, loss.smoothing)
    elif loss.weights == "exponential":
        steps = torch.arange(counted.shape[-1], device=counted.device)
        weight = torch.exp(-steps / loss.decay) * counted
    else:
        weight = counted.float()
    return (value * weight).sum() / weight.sum().clamp(min=1e-6)


class SlotHead:
    """The head product and the terms of many slots, ``chunk`` at a time; recomputed in the backward pass where there are several
    chunks, so that logits of one chunk only are held.

    head_weight [V, D] is frozen; multiplier and cap are the checkpoint's (see ``Drafter.finish_logits``).
    """

    def __init__(
        self, head_weight: Tensor, loss: DraftLoss, multiplier: float, cap: float | None, chunk: int, compiled: bool
    ) -> None:
        self.head_weight, self.loss, self.chunk = head_weight, loss, chunk

        def terms(hidden: Tensor, teacher: Tensor | None, token: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            logits = F.linear(hidden.to(weight.dtype), weight).float()
            if multiplier != 1:
                logits = logits * multiplier
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            wanted = None if teacher is None else F.linear(teacher, weight)
            return slot_terms(logits, wanted, token, loss.label, loss.label_temperature, loss.kind == "ce")

        self.terms: Callable[..., tuple[Tensor, ...]] = torch.compile(terms, dynamic=False) if compiled else terms

    def __call__(self, hidden: Tensor, teacher: Tensor | None, token: Tensor) -> SlotTerms:
        """hidden, teacher [R, D] (final-normed states of drafter and target; None if the loss needs none), token int64 [R]."""
        found = []
        pieces = range(0, len(hidden), self.chunk)
        for at in pieces:
            part = slice(at, at + self.chunk)
            given = (hidden[part], None if teacher is None else teacher[part], token[part], self.head_weight)
            if torch.is_grad_enabled() and len(pieces) > 1:
                found.append(checkpoint(self.terms, *given, use_reentrant=False))
            else:
                found.append(self.terms(*given))
        return SlotTerms(*(torch.cat(column) for column in zip(*found, strict=True)))
