"""DFly (AngelSpec, arXiv:2607.25852): a context of its own for each draft layer, and a head that corrects slots from
left to right.

``C_i = RMSNorm(W_fc [taps] + sum_l softmax(F_i)_l tap_l)`` for layer i; ``h'_k = h_k + W_down(SiLU(W_gate u_k) * W_up
u_k)`` with ``u_k = [RMSNorm(h_k); RMSNorm(E[previous])]`` for slot k. Letters: T taps, W width of the correction, K
candidates a slot.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.drafters.drafter import Drafter, pick, spread, stack_draft
from dllm.model.decoder import RMSNorm
from dllm.model.packed import Linear
from dllm.types import Draft

CPU_CANDIDATES = 64
"""Candidates of a slot where the head is walked on a CPU: a head product reads the whole head, which costs more than
the body.
"""


class HiddenCorrection(nn.Module):
    """Residual correction of a slot's hidden state by the token chosen before it; built as the identity (W_down = 0)."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm, self.embed_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.gate_proj = Linear(2 * width, inner, bias=False)
        self.up_proj = Linear(2 * width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden, previous (embedding rows) [..., D] -> corrected hidden states [..., D]."""
        both = torch.cat([self.hidden_norm(hidden), self.embed_norm(previous)], dim=-1)
        return hidden + self.down_proj(F.silu(self.gate_proj(both)) * self.up_proj(both))


class DFly(Drafter):
    """The law of slot k is that of its corrected row, given the token drafted at k - 1; it is kept with the draft.

    head_candidates: K best tokens of the uncorrected row on which a slot is decided (its law is zero elsewhere), so
    that the block costs one head product; None: all tokens, one head product a slot; "auto": 64 on a CPU, else None.
    """

    def __init__(self, config: Any, target: Any, head_candidates: int | Literal["auto"] | None = "auto") -> None:
        super().__init__(config, target)
        body = config.body
        if head_candidates not in (None, "auto") and not (type(head_candidates) is int and head_candidates >= 1):
            raise ValueError(f"head_candidates must be an integer >= 1, None or 'auto': got {head_candidates!r}")
        self.head_candidates = head_candidates
        taps = len(config.target_layer_ids)
        self.layer_fusion_weights = nn.Parameter(torch.zeros(body.num_layers, taps, dtype=torch.float32))
        self.hidden_correction = (
            None
            if config.correction_width is None
            else HiddenCorrection(body.hidden_size, config.correction_width, body.rms_norm_eps)
        )

    def fuse(self, features: Tensor) -> list[Tensor]:
        """features [B, C, T * D] -> a normed context [B, C, D] for each layer, all with one norm weight."""
        shared = self.fc(features)
        taps = features.unflatten(-1, (len(self.config.target_layer_ids), -1))
        # The mixing weights are softmaxed in fp32: bf16 has too few digits for a mean of a few taps.
        weights = self.layer_fusion_weights.float().softmax(dim=-1).to(features.dtype)
        mixed = torch.einsum("bctd,lt->lbcd", taps, weights)
        return [self.hidden_norm(shared + mix) for mix in mixed]

    @property
    def num_candidates(self) -> int | None:
        """Candidates of a slot that this device and target call for, or None for the whole vocabulary."""
        wanted = self.head_candidates
        if wanted == "auto":
            wanted = CPU_CANDIDATES if self.device.type == "cpu" else None
        weight = self.target.head_weight if self.lm_head is None else None
        return None if weight is None or wanted is None or wanted >= weight.shape[0] else int(wanted)

    def choose(self, hidden: Tensor, anchor: Tensor, temperature: float, uniform: Tensor | None) -> Draft:
        """Walk the slots, each with the embedding of the token before it."""
        correction = self.hidden_correction
        if correction is None:
            return Draft(*pick(self.logits(hidden), temperature, uniform))
        count = self.num_candidates
        ids = rows = bias = None
        if count is not None:
            weight = self.target.head_weight
            assert weight is not None, "candidates need the head's rows"
            ids = self.logits(hidden).topk(count, dim=-1).indices
            rows = F.embedding(ids, weight)
            bias = None if self.target.head_bias is None else self.target.head_bias[ids]
        previous, tokens, laws, confidences = anchor, [], [], []
        for k in range(hidden.shape[1]):
            corrected = correction(hidden[:, k], self.target.embed(previous).to(self.dtype))
            if ids is None or rows is None:
                logits = self.logits(corrected)
            else:
                raw = torch.matmul(rows[:, k], corrected.to(rows.dtype)[..., None]).squeeze(-1)
                logits = self.finish_logits(raw if bias is None else raw + bias[:, k])
            place, law, confidence = pick(logits, temperature, None if uniform is None else uniform[:, k])
            previous = place if ids is None else ids[:, k].gather(1, place[:, None]).squeeze(1)
            tokens.append(previous)
            laws.append(law if law is None or ids is None else spread(law, ids[:, k], self.config.body.vocab_size))
            confidences.append(confidence)
        return stack_draft(tokens, laws, confidences)
