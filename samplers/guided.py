"""Left-to-right unmasking under an AR guide: which prefix of the diffusion model's own draft is kept (FlashDLM, Hu et al. 2025,
arXiv:2505.21467, section 3.2; the rules are those of its released code).

Rules only: the loop runs both models (``dllm/hooks.py``). Letters: B batch, S slots, V vocabulary; q is the guide's law of a slot given
the text before it, drafts included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.quota import number, whole

ACCEPT = (
    "exact",
    "topk",
    "topk_relative",
    "dynamic_threshold",
    "aggressive",
    "original",
    "log_ratio",
    "speculative",
    "always",
    "never",
)
ON_REJECT = ("dlm", "ar")


@dataclass(frozen=True)
class Guided:
    """How far a draft t_1 .. t_m of the open block's masks is kept.

    accept, for a drafted token t:
      "exact" (the paper's Top-1): t is the guide's own token, arg-max q, or with on_reject "ar" and temperature > 0 its draw;
      "topk": t is among the accept_top_k likeliest; "topk_relative": also q(t) >= accept_ratio max q; "dynamic_threshold": q(t) >
      accept_prob; "aggressive": among the 5 likeliest, or q(t) > 0.05, or in the nucleus of 0.95; "original": with probability q(t);
      "log_ratio": ln p(t) > accept_ratio max ln q, p the diffusion model's law; "speculative": with probability min(1, q(t) / p(t)),
      for on_reject "ar" only (temperature 0: the same as exact); "always", "never": for comparison.
    on_reject "dlm", as published: the diffusion model writes every token and the guide only says how many, at least one; no law is kept.
    on_reject "ar": the guide's token follows the accepted ones. With "exact" the text is then the guide's own (greedy, or the one that
    its position-keyed noise draws); with "speculative" it has the guide's law (Leviathan et al. 2023, arXiv:2211.17192).
    guide_passes: how often the guide reads one draft, each time behind its own last token; None: until the block is full. Drafts behind a
    rejected one are older, but cost no forward of the diffusion model; a lossless rule stays so. 1 with on_reject "dlm".
    verify_batch_size: drafts that the guide sees in one forward; it stops at the first chunk with a rejection.
    """

    accept: str = "topk"
    on_reject: str = "dlm"
    accept_top_k: int = 5
    accept_ratio: float = 0.5
    accept_prob: float = 0.1
    verify_batch_size: int = 32
    guide_passes: int | None = 1

    def __post_init__(self) -> None:
        if self.accept not in ACCEPT:
            raise ValueError(f"accept must be one of {ACCEPT}: got {self.accept!r}")
        if self.on_reject not in ON_REJECT:
            raise ValueError(f"on_reject must be one of {ON_REJECT}: got {self.on_reject!r}")
        if self.accept == "speculative" and self.on_reject != "ar":
            raise ValueError(
                "accept 'speculative' needs on_reject 'ar': a rejected draft must give way to the residual law"
            )
        whole("accept_top_k", self.accept_top_k, 1)
        number("accept_ratio", self.accept_ratio, 0)
        number("accept_prob", self.accept_prob, 0)
        whole("verify_batch_size", self.verify_batch_size, 1)
        if self.guide_passes is not None:
            whole("guide_passes", self.guide_passes, 1)
        if self.guide_passes != 1 and self.on_reject != "ar":
            raise ValueError(
                f"guide_passes other than 1 needs on_reject 'ar': got {self.guide_passes}; the diffusion model's own token is not behind a "
                "rejected draft"
            )

    @property
    def lossless(self) -> bool:
        """Whether the output is the guide's own: its greedy text, or a text of its law."""
        return self.on_reject == "ar" and self.accept in ("exact", "speculative")

    def accepts(self, draft: Tensor, own: Tensor, law: Tensor, confidence: Tensor, uniform: Tensor) -> Tensor:
        """Which drafts pass on their own, bool [B, S].

        draft [B, S] int64; own [B, S] int64, the guide's token; law [B, S, V], its probabilities; confidence [B, S], the diffusion model's
        probability of the draft; uniform [B, S] in (0, 1), read by "original" only. Raises ValueError for "speculative", which is no
        test of one draft at a time (``dllm.samplers.verify.chain_rejection``).
        """
        chance = law.gather(-1, draft[..., None])[..., 0]
        if self.accept == "exact":
            return draft == own
        if self.accept == "topk":
            return rank(law, draft) < self.accept_top_k
        if self.accept == "topk_relative":
            return (rank(law, draft) < self.accept_top_k) & (chance >= self.accept_ratio * law.amax(-1))
        if self.accept == "dynamic_threshold":
            return chance > self.accept_prob
        if self.accept == "aggressive":
            before = torch.where(law > chance[..., None], law, 0.0).sum(-1)
            return (rank(law, draft) < 5) | (chance > 0.05) | (before < 0.95)
        if self.accept == "original":
            return uniform < chance
        if self.accept == "log_ratio":
            return confidence.clamp(min=1e-30).log() > self.accept_ratio * law.amax(-1).clamp(min=1e-30).log()
        if self.accept == "speculative":
            raise ValueError("accept 'speculative' is decided for the whole draft by chain rejection")
        return torch.full_like(draft, self.accept == "always", dtype=torch.bool)


def rank(law: Tensor, token: Tensor) -> Tensor:
    """Number of ids that come before token [B, S] in law [B, S, V]: likelier ones, and lower ids among equals; int64 [B, S]."""
    chance = law.gather(-1, token[..., None])
    ids = torch.arange(law.shape[-1], device=law.device)
    return ((law > chance) | ((law == chance) & (ids < token[..., None]))).sum(-1)


def leading(passed: Tensor, offered: Tensor) -> Tensor:
    """Length of the accepted prefix: passed, offered [B, S] bool, the offered slots of a row in one run -> int64 [B]."""
    settled = offered.long().cumsum(-1) == 0
    return ((passed & offered) | settled).long().cumprod(-1).mul(offered).sum(-1)
