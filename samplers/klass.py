"""KL-stability unmasking (KLASS, Kim et al. 2025, arXiv:2511.05664)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import even_quota, number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Klass:
    """Commit every masked slot with confidence > threshold whose law moved by less than max_kl in each of the last n steps, else the best.

    max_kl: nats, KL(p_t || p_{t-1}), compared with <; n: steps that must be stable, so that nothing is committed by this rule in a
    block's first n - 1 steps; a block's first law is compared with the uniform one. If no slot qualifies the even schedule's quota is
    taken by confidence (one without a step limit). max_kl 0 equals vanilla; max_kl inf with n = 1 is ``Threshold`` with a strict >.
    """

    threshold: float = 0.9
    max_kl: float = 0.01
    n: int = 2

    needs = frozenset({"top1", "logits", "previous"})

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        number("max_kl", self.max_kl, 0)
        whole("n", self.n, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.confidence [B, S], rows.logits, rows.previous [B, S, V] -> Step(tokens, transfer_index [B, S]).

        Keeps the last n - 1 divergences of each slot in state.history["klass"], [B, S, n - 1].
        """
        assert rows.logits is not None and rows.previous is not None, "row_stats must give what needs names"
        now, before = rows.logits.log_softmax(-1), rows.previous.log_softmax(-1)
        # A forbidden id has no mass now; its difference of infinities would be NaN.
        moved = (now.exp() * (now - before).nan_to_num(0.0, 0.0, 0.0)).sum(-1)
        past = self._past(state, masked.shape[1], moved)
        recent = torch.cat([past, moved[..., None]], dim=-1)
        state.history["klass"] = recent[..., 1:]
        stable = (recent < self.max_kl).all(-1) & (state.step >= self.n - 1)[:, None]
        sure = masked & stable & (rows.confidence > self.threshold)
        quota = even_quota(state)
        # A schedule may say zero; without one a step always commits.
        fallback = best(rows.confidence, masked, torch.where(sure.any(-1), torch.zeros_like(quota), quota))
        return Step(rows.token, sure | fallback)

    def _past(self, state: RowState, slots: int, like: Tensor) -> Tensor:
        """The divergences of the last n - 1 steps of this block, [B, S, n - 1]; blocks of a batch may change the width S."""
        past = state.history.get("klass")
        if past is None:
            past = like.new_zeros(like.shape[0], slots, self.n - 1)
        past = F.pad(past[:, :slots], (0, 0, 0, max(0, slots - past.shape[1])))
        return torch.where((state.step > 0)[:, None, None], past, 0.0)
