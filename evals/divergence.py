"""Where two greedy texts part, and how far apart the AR model's own logits of the two tokens are there: a near-tie, or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.target import Target


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer leaves the expected one.

    prompt: index of the pair; place: index of the token; expected, got: the two tokens, None where one of the answers has ended; gap: by
    how much the model's logit of the expected token is above that of the other, behind the text that both have (None where one ended).
    """

    prompt: int
    place: int
    expected: int | None
    got: int | None
    gap: float | None


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs (the shorter one's length where it is a prefix), or None for equal texts."""
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def next_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits fp32 [V] behind ids; model: a ``Decoder`` or a Hugging Face causal LM."""
    return Target.of(model).read(torch.tensor([list(ids)], device=model.device), [0])[0][0, -1].float()


def divergences(
    model: Any,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    stop: int | None = None,
) -> list[Divergence]:
    """Every pair of answers (token ids, without the prompt) that differ.

    stop: the token that ends an answer; given, an answer that has ended counts as having it there, so that there is always a gap.
    """
    found = []
    for number, (prompt, own, other) in enumerate(zip(prompts, expected, got, strict=True)):
        place = first_difference(own, other)
        if place is None:
            continue
        a, b = (tokens[place] if place < len(tokens) else stop for tokens in (own, other))
        gap = None
        if a is not None and b is not None:
            logits = next_logits(model, [*prompt, *own[:place]])
            gap = float(logits[a] - logits[b])
        found.append(Divergence(number, place, a, b, gap))
    return found
