"""First-hitting sampling: one slot per pass at the time when it would be hit (Zheng et al. 2024, arXiv:2409.02908; BD3-LM, 2503.09573)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.noise import STREAM_POSITION, STREAM_TOKEN
from dllm.samplers.gumbel import gumbel_draw
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class FirstHitting:
    """Commit one masked slot, chosen uniformly, with a token drawn from its SUBS law (the mask has no mass).

    Equals the ancestral sampler in distribution for a model without time conditioning, whose times need not be drawn at all. Tokens
    are drawn here, from the model's own law; ``temperature`` stays 0. ``noise`` needs uniform_lanes, as ``CounterNoise`` has.
    """

    needs = frozenset({"top1", "logits"})

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.logits [B, S, V]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        law = subs_law(rows, state)
        lanes = noise.uniform_lanes(state.slots, state.step, law.shape[-1], STREAM_TOKEN)  # type: ignore[attr-defined]
        tokens = gumbel_draw(law, lanes)
        count = masked.sum(-1, keepdim=True)
        uniform = noise.uniform(state.slots[:, :1], state.step, STREAM_POSITION)
        hit = torch.minimum((uniform * count).long(), count - 1)
        chosen = masked & (masked.long().cumsum(-1) - 1 == hit)
        return Step(tokens, chosen)


def subs_law(rows: RowStats, state: RowState) -> Tensor:
    """softmax of rows.logits without the banned ids (the mask among them), fp32 [B, S, V]."""
    assert rows.logits is not None, "row_stats must give what needs names"
    logits = rows.logits.float()
    if state.banned is not None:
        logits = logits.masked_fill(state.banned, float("-inf"))
    return logits.log_softmax(-1).exp()
