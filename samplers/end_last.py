"""Static low-confidence remasking that leaves end tokens to the end (LLaDA's ``confidence_eos_eot_inf``, arXiv:2502.09992)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import even_quota, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class EndLast:
    """``LowConfidence`` with confidences from the law without the end tokens: a slot whose token is an end has confidence 0.

    end_token_ids: end of text and end of turn; () equals ``LowConfidence``. k: tokens per step without a step limit; with one, the even
    schedule. What is committed is unchanged, only the order.
    """

    end_token_ids: tuple[int, ...] = ()
    k: int = 1

    needs = frozenset({"top1", "logits"})

    def __post_init__(self) -> None:
        if not isinstance(self.end_token_ids, tuple) or any(not isinstance(i, int) for i in self.end_token_ids):
            raise ValueError(f"end_token_ids must be a tuple of ints: got {self.end_token_ids!r}")
        whole("k", self.k, 1)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token [B, S], rows.logits [B, S, V]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        assert rows.logits is not None, "row_stats must give what needs names"
        ends = torch.tensor(self.end_token_ids, dtype=torch.int64, device=rows.logits.device)
        law = rows.logits.index_fill(-1, ends, float("-inf")).softmax(-1)
        confidence = law.gather(-1, rows.token[..., None])[..., 0]
        return Step(rows.token, best(confidence, masked, even_quota(state, self.k)))
