"""Self-speculation: a block-diffusion model verifies its own parallel draft from left to right (S2D2, arXiv:2603.25702).

Rules only: the loop runs the verification forward (``dllm/hooks_s2d2.py``). Letters: B batch, S slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.quota import whole


@dataclass(frozen=True)
class S2D2:
    """Verifier: the first run of masked slots is drafted in one step and judged by the same model's left-to-right view of it.

    In that view a slot sees the rows stored before the block, the block's tokens before it, itself as a mask, and nothing else; in a
    shifted model its law stands in the row before it, so that no mask is fed at all. No row sees the token that it judges, at any depth.
    Greedy: the drafts that equal the view's arg-max are kept, then its own token; temperature > 0: chain rejection, so that verified
    tokens have the view's law (exact for the left-to-right view, which is another conditional than the denoiser's). Other slots stay
    masked in a verified step. Which rows are verified: those with score = E - cost > score_threshold and a run of at least min_span, where
    E = sum_i prod_{j <= i} exp(-H_j / ln V) estimates the accepted length from the draft's entropies H; other rows take the sampler's
    step. Cost: one forward of n (shifted) or 2 n rows, n the slots of the run, beside each verified step.

    cost: tokens; cost_by_count: multiply it by the number of tokens that the sampler would commit. score_off: once a row is verified it
    stays so while its score exceeds score_off (hysteresis); None: the same as score_threshold. Published: blocks of 4 with cost 1, of 16
    with cost 0; LLaDA2.1-mini cost 4 and score_threshold -5. cost -inf verifies always; inf never, which is the plain sampler.
    """

    cost: float = 1.0
    cost_by_count: bool = False
    score_threshold: float = 0.0
    score_off: float | None = None
    min_span: int = 1

    # Named, not imported: samplers hold rules, and the loop's side imports them.
    hook = "dllm.hooks_s2d2:S2D2Hook"

    def __post_init__(self) -> None:
        whole("min_span", self.min_span, 1)
        for name in ("cost", "score_threshold", "score_off"):
            value = getattr(self, name)
            if value is None and name == "score_off":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ValueError(f"{name} must be a number: got {value!r}")
        if not isinstance(self.cost_by_count, bool):
            raise ValueError(f"cost_by_count must be True or False: got {self.cost_by_count!r}")

    def expected(self, entropy: Tensor, run: Tensor, vocab_size: int) -> Tensor:
        """Estimated accepted length [B]: entropy [B, S] in nats, run [B, S] bool, the slots of the run."""
        chance = torch.where(run, (-entropy / math.log(vocab_size)).exp(), torch.ones_like(entropy))
        return (chance.cumprod(-1) * run).sum(-1)

    def routes(self, entropy: Tensor, run: Tensor, would_commit: Tensor, verified: Tensor, vocab_size: int) -> Tensor:
        """Rows to verify, bool [B]: would_commit [B] tokens of the sampler's own step, verified [B]: whether the row's last step was."""
        if math.isinf(self.cost):
            score = torch.full_like(entropy[:, 0], -self.cost)
        else:
            price = self.cost * (would_commit if self.cost_by_count else torch.ones_like(would_commit))
            score = self.expected(entropy, run, vocab_size) - price
        off = self.score_threshold if self.score_off is None else self.score_off
        wanted = (score > self.score_threshold) | (verified & (score > off))
        return wanted & (run.sum(-1) >= self.min_span)


def first_run(offered: Tensor) -> Tensor:
    """The first run of neighbouring True in offered [B, S], bool [B, S]."""
    started = offered.long().cumsum(-1) > 0
    gap = (started & ~offered).long().cumsum(-1) > 0
    return offered & ~gap


def view_mask(data: Tensor, slots: Tensor | None) -> Tensor:
    """Who sees whom in the left-to-right view, bool [B, N, N]: data columns [B, n] in text order, then one mask row for each of slots.

    A data row sees itself and the data before it; a mask row sees the data before its slot, and itself.
    """
    causal = data[:, None, :] <= data[:, :, None]
    if slots is None:
        return causal
    batch, masks = slots.shape
    before = data[:, None, :] < slots[:, :, None]
    top = torch.cat([causal, causal.new_zeros(batch, data.shape[1], masks)], dim=2)
    own = torch.eye(masks, dtype=torch.bool, device=data.device).expand(batch, -1, -1)
    return torch.cat([top, torch.cat([before, own], dim=2)], dim=1)
