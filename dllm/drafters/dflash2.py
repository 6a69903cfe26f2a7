"""DFlash2 (z-lab, Aug 2026): DFlash with grouped dynamic convolutions around both sublayers and a candidate selector.

Letters: k taps of the convolution, G = D / group channels groups, r rank of the selector, K candidates a slot.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dllm.drafters.dflash import DFlash
from dllm.drafters.drafter import pick, spread, stack_draft
from dllm.model.decoder import DecoderLayer
from dllm.types import Draft


class DynamicConv(nn.Module):
    """Causal convolution over the slots of a block, ``y[t] = sum_o (base[o] + delta[t, o]) u[t - o]``, delta shared in
    groups.

    One projection of the sublayer's input gives the deltas before and after the sublayer. Built as the identity.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, Q, D] -> kernels [B, Q, k, D] before and after the sublayer."""
        delta = rearrange(self.kernel_projection(x), "b q (s k g) -> s b q k g", s=2, k=self.taps)
        both = self.base_kernel[:, None, None] + delta.repeat_interleave(self.group, dim=-1)
        return both[0], both[1]

    @staticmethod
    def apply_kernel(kernel: Tensor, x: Tensor) -> Tensor:
        """kernel [B, Q, k, D], x [B, Q, D] -> [B, Q, D]; slots before the block count as zero."""
        shifted = [F.pad(x, (0, 0, o, 0))[:, : x.shape[1]] for o in range(kernel.shape[2])]
        return (kernel * torch.stack(shifted, dim=2)).sum(dim=2)


class DFlash2Layer(DecoderLayer):
    """A decoder layer whose sublayers stand between two convolutions each."""

    def __init__(self, config: Any, index: int, taps: int, group: int) -> None:
        super().__init__(config, index)
        self.attention_conv = DynamicConv(config.hidden_size, taps, group)
        self.mlp_conv = DynamicConv(config.hidden_size, taps, group)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """As ``DecoderLayer``; context keys in ``past`` are not convolved."""
        inner = self.attention_norm(x)
        before, after = self.attention_conv.kernels(inner)
        q, k, v = self.attention.project(DynamicConv.apply_kernel(before, inner), cos, sin)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2))
        mixed = self.attention.out(self.attention.attend(q, keys, values, mask))
        x = x + DynamicConv.apply_kernel(after, mixed)
        inner = self.mlp_norm(x)
        before, after = self.mlp_conv.kernels(inner)
        return x + DynamicConv.apply_kernel(after, self.mlp(DynamicConv.apply_kernel(before, inner))), k, v


class CandidateSelector(nn.Module):
    """Low-rank correction of the kept logits: ``S_k(j) = U_k(c_j) + <A[previous] * (W h_k), B[c_j]>``."""

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class DFlash2(DFlash):
    """The K best logits of each slot are re-ranked from left to right; the law of a slot stands on its K candidates
    only.
    """

    def __init__(self, config: Any, target: Any) -> None:
        super().__init__(config, target)
        body = config.body
        self.candidate_selector = CandidateSelector(body.vocab_size, body.hidden_size, config.selector_rank)

    def make_layer(self, index: int) -> nn.Module:
        return DFlash2Layer(self.config.body, index, self.config.conv_kernel_size, self.config.conv_group_size)

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [B, n, D] -> the K best logits of each slot and their ids, both [B, n, K]."""
        best = self.logits(hidden).topk(self.config.selector_top_k, dim=-1)
        return best.values, best.indices

    def choose(self, hidden: Tensor, anchor: Tensor, temperature: float, uniform: Tensor | None) -> Draft:
        """One head product for the block, then a walk over K candidates a slot."""
        selector = self.candidate_selector
        unary, ids = self.candidates(hidden)
        projected = selector.hidden_projection(hidden)
        successors = F.embedding(ids, selector.successor_codebook)
        previous, tokens, laws, confidences = anchor, [], [], []
        for k in range(hidden.shape[1]):
            query = F.embedding(previous, selector.predecessor_codebook) * projected[:, k]
            score = unary[:, k] + torch.einsum("br,bkr->bk", query, successors[:, k]).float()
            place, law, confidence = pick(score, temperature, None if uniform is None else uniform[:, k])
            previous = ids[:, k].gather(1, place[:, None]).squeeze(1)
            tokens.append(previous)
            laws.append(None if law is None else spread(law, ids[:, k], self.config.body.vocab_size))
            confidences.append(confidence)
        return stack_draft(tokens, laws, confidences)
