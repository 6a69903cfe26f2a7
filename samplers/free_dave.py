"""Free draft-and-verification: a step's next surest predictions are a draft, and the next forward verifies it (FreeDave, arXiv:2510.00294).

Rules only: the loop runs the branches (``dllm/hooks_free_dave.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm.samplers.low_confidence import best
from dllm.samplers.quota import whole

RULES = ("exact", "subset")


@dataclass(frozen=True)
class FreeDave:
    """Verifier: after each step, ``draft_steps`` - 1 branches of the open block ride in the next forward.

    Branch j (from 2) is what stands after the step with the (j - 1) * tokens_per_step surest predictions of that step's law revealed as
    well. The sampler's own step from a state whose law is known gives the next state; where a branch is that state ("exact"), its law is
    known too, and so on. So one forward may do several steps, and in fp32 the text is that of the same sampler with the same cache,
    token for token: lossless. draft_steps 1 drafts nothing. "subset" (FreeDave++): a branch also counts if the tokens that it reveals are
    among the next state's; the decoder then goes on from a state with fewer tokens, which is no longer the sampler's path.
    Cost: each branch adds the rows that see the open block: S rows where attention is block-causal, all planned rows where it is
    bidirectional. It pays where a forward costs the same with more rows. Greedy decoding only; caches whose frozen rows depend on the
    path are refused (``dllm/hooks_free_dave.py`` says which).
    """

    draft_steps: int = 8
    tokens_per_step: int = 1
    rule: str = "exact"

    # Named, not imported: samplers hold rules, and the loop's side imports them.
    hook = "dllm.hooks_free_dave:FreeDaveHook"

    def __post_init__(self) -> None:
        whole("draft_steps", self.draft_steps, 1)
        whole("tokens_per_step", self.tokens_per_step, 1)
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}: got {self.rule!r}")

    def draft(self, confidence: Tensor, open_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Slots that each branch reveals, bool [B, K - 1, S], and which branches there are, bool [B, K - 1].

        confidence [B, S] of the proposals, open_slots [B, S] bool: what may be revealed. A branch that would reveal everything, or more
        than there is, is none: nobody needs its law.
        """
        left = open_slots.sum(-1)
        counts = [j * self.tokens_per_step for j in range(1, self.draft_steps)]
        revealed = [best(confidence, open_slots, torch.full_like(left, count)) for count in counts]
        exists = [left > count for count in counts]
        if not counts:
            shape = (open_slots.shape[0], 0)
            return open_slots.new_zeros(*shape, open_slots.shape[1]), open_slots.new_zeros(shape)
        return torch.stack(revealed, dim=1), torch.stack(exists, dim=1)

    def matches(self, branch: Tensor, branch_open: Tensor, target: Tensor, target_open: Tensor) -> Tensor:
        """Which branches the target state confirms, bool [B, K - 1].

        branch [B, K - 1, S] int64 and branch_open, the slots still masked, against target [B, S] and target_open.
        """
        same_token = (branch == target[:, None]) | branch_open
        if self.rule == "exact":
            return ((branch_open == target_open[:, None]) & same_token).all(-1)
        return ((branch_open | ~target_open[:, None]) & same_token).all(-1)
