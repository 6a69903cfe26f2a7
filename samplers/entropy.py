"""Entropy-ordered unmasking: the slots of lowest entropy first (Dream, Ye et al. 2025, arXiv:2508.15487; d3LLM, arXiv:2601.07568)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import even_quota, number, whole
from dllm.types import Noise, RowState, RowStats, Step


@dataclass(frozen=True)
class Entropy:
    """Commit the k masked slots of lowest entropy, and every one of at most ``max_entropy`` nats; ties go to the lowest slot.

    k: tokens per step without a step limit; with one, the even schedule of ``LowConfidence``. max_entropy: 0 (default) adds only
    slots without any doubt; d3LLM and dParallel use 0.4 to 0.5. Lower entropy goes with higher confidence, but not slot by slot.
    """

    k: int = 1
    max_entropy: float = 0.0

    needs = frozenset({"top1", "entropy"})

    def __post_init__(self) -> None:
        whole("k", self.k, 1)
        number("max_entropy", self.max_entropy, 0)

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """rows.token, rows.entropy [B, S]; masked [B, S] bool -> Step(tokens [B, S], transfer_index [B, S])."""
        assert rows.entropy is not None, "row_stats must give what needs names"
        chosen = best(-rows.entropy, masked, even_quota(state, self.k))
        if self.max_entropy > 0:
            chosen = chosen | (masked & (rows.entropy <= self.max_entropy))
        return Step(rows.token, chosen)
