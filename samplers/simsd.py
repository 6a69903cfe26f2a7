"""SimSD: a drafted block is verified by one forward over its tokens and its masks (Cui et al. 2026, arXiv:2606.02544).

Rules only: the loop drafts and runs the layout (``dllm/hooks_simsd.py``). Letters: B batch, n drafted slots, r known tokens of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.samplers.quota import number

AFTER_REJECT = ("truncate", "target_argmax", "draft_argmax")


@dataclass(frozen=True)
class SimSD:
    """Verifier: a drafter fills the open block, the target accepts its tokens in position order, the first rejected one gives way to the
    target's own, and there is no token after a block that is accepted whole.

    draft: a ``DiffusionLM`` with the same vocabulary (drafts block by block with the call's sampler, so that ``threshold`` decides how
    many forwards a draft takes); an ``ARGuide`` (from left to right); or an int k: the target's first k layers with its own head.
    Greedy: a draft is kept if it equals the arg-max of the target's row; temperature > 0: chain rejection against the drafter's law.

    exact False, as published: each drafted slot stands in the forward as a token (DATA) and as a mask (MASK) at one position, and slot i's
    law is that of its mask among {tokens revealed before it} + {masks of the others}. An approximation: with two layers or more the mask
    of slot i hears of its own token through masks that are revealed later, and known tokens of the block do not see its masks. One layer
    and no known tokens: the law of the real denoising state. exact True: token-causal DATA, and slot i's mask sees the tokens before it
    and itself (the view of S2D2): no leak at any depth, and the text is that of left-to-right decoding under this view, whatever the
    drafter; exact for that conditional, not for the denoiser's. In a shifted model slot i is read from a row at i - 1: a third copy
    (paper's layout), or the token before it, so that no mask is fed (exact).

    after_reject: "truncate" commits the accepted tokens and the target's, and the rest is drafted again with the block's known tokens;
    "target_argmax" and "draft_argmax" fill the rest of the block with the target's arg-max or the draft, unverified. eos_min_prob: a stop
    token that replaces a rejected draft needs at least this probability, else the best other token stands there (0: off).
    Cost: 2 n + r rows (shifted: 3 n + r; exact: n + r or 2 n + r) beside the step's own rows, and the drafter's forwards.
    """

    draft: Any
    exact: bool = False
    after_reject: str = "truncate"
    eos_min_prob: float = 0.0

    # Named, not imported: samplers hold rules, and the loop's side imports them.
    hook = "dllm.hooks_simsd:SimSDHook"

    def __post_init__(self) -> None:
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact must be True or False: got {self.exact!r}")
        if self.after_reject not in AFTER_REJECT:
            raise ValueError(f"after_reject must be one of {AFTER_REJECT}: got {self.after_reject!r}")
        number("eos_min_prob", self.eos_min_prob, 0)
        if self.exact and self.after_reject != "truncate":
            raise ValueError(
                f"exact needs after_reject 'truncate': {self.after_reject!r} keeps tokens that nobody verified"
            )
        layers = isinstance(self.draft, int) and not isinstance(self.draft, bool)
        if (layers and self.draft < 1) or (not layers and not hasattr(self.draft, "model")):
            raise TypeError(f"draft must be a DiffusionLM, an ARGuide or a number of layers >= 1: got {self.draft!r}")


def temporal_mask(times: Tensor, drafted: Tensor, known: Tensor, queries: bool = False) -> Tensor:
    """Who sees whom among [known r | DATA n | MASK n | query n, if asked for], bool [B, Q, Q] with True = may look.

    times [B, n] int64: when each slot was revealed, from 1 on; never filled: later than all others; drafted [B, n], known [B, r] bool:
    which of them are there. Slots are paired by index. Known tokens see each other only; DATA i sees the tokens revealed up to its time
    and the masks of later ones; MASK i (and query i) the tokens revealed before its time and the masks of the others. So each sees
    either the token or the mask of every drafted slot. Padding sees itself only.
    """
    batch, n = times.shape
    r = known.shape[1]
    query, key = times[:, :, None], times[:, None, :]
    real = drafted[:, None, :]
    head = known[:, None, :].expand(batch, -1, r)
    data = torch.cat([head.expand(-1, n, -1), (key <= query) & real, (key > query) & real], dim=2)
    mask = torch.cat([head.expand(-1, n, -1), (key < query) & real, (key >= query) & real], dim=2)
    first = torch.cat([head.expand(-1, r, -1), known.new_zeros(batch, r, 2 * n)], dim=2)
    whole = torch.cat([first, data, mask], dim=1)
    valid = torch.cat([known, drafted, drafted], dim=1)
    if queries:
        whole = torch.nn.functional.pad(torch.cat([whole, mask], dim=1), (0, n))
        valid = torch.cat([valid, drafted], dim=1)
        alone = torch.cat([known.new_zeros(batch, r + 2 * n), drafted], dim=1)
    else:
        alone = torch.zeros_like(valid)
    eye = torch.eye(whole.shape[1], dtype=torch.bool, device=times.device)
    # A query row stands for a row that is there already as token or mask: it does not see itself beside that.
    return (whole & valid[:, :, None]) | (eye & ~alone[:, :, None] & ~valid[:, :, None])


def gate_stop(own: Tensor, law: Tensor, stops: Tensor, eos_min_prob: float) -> Tensor:
    """own [B, S] with each stop token of probability < eos_min_prob under law [B, S, V] replaced by the best token that is none."""
    if eos_min_prob <= 0 or not len(stops):
        return own
    is_stop = (own[..., None] == stops).any(-1)
    unlikely = law.gather(-1, own[..., None])[..., 0] < eos_min_prob
    open_law = law.clone()
    open_law[..., stops] = -1.0
    return torch.where(is_stop & unlikely, open_law.argmax(-1), own)
