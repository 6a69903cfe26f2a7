"""DFlash (arXiv:2602.06036): one pass over a block of masks, every layer reading one fused feature per context token.

``C = RMSNorm(W_fc [taps])``; keys and values of C by each layer's own projections; slot k predicts the token k behind
the anchor.
"""

from __future__ import annotations

from torch import Tensor

from dllm.drafters.drafter import Drafter, pick
from dllm.types import Draft


class DFlash(Drafter):
    """Slots are drawn independently: the law of slot k is its softmax row, whatever the other slots became."""

    def fuse(self, features: Tensor) -> list[Tensor]:
        """features [B, C, F] -> the same normed projection [B, C, D] for every layer."""
        return [self.hidden_norm(self.fc(features))] * len(self.layers)

    def choose(self, hidden: Tensor, anchor: Tensor, temperature: float, uniform: Tensor | None) -> Draft:
        """One head product for the whole block."""
        return Draft(*pick(self.logits(hidden), temperature, uniform))
