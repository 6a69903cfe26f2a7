"""An infill sample as a model meets it: white space before the gap belongs to the gap's tokens (`dllm/white_space.py`).

The text before the gap, the tokens that the true middle has behind it, and for an AR model the same beginning that `infill` decides for
a diffusion LM: plain forwards choose, one at a time, among the tokens that write the white space.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dllm.evals.task import Sample
from dllm.noise import CounterNoise
from dllm.prompts import encode_text
from dllm.white_space import Border, HealedRow, WhiteSpace, heal


@dataclass(frozen=True)
class Gap:
    """prefix: text before the gap without the white space at its end, white: that white space; reference_ids: tokens of white and the
    true middle; length: how many of them hold some of the middle.
    """

    prefix: str
    white: bytes
    reference_ids: list[int]
    length: int


def gap_of(tokenizer: Any, white_space: WhiteSpace | None, sample: Sample) -> Gap:
    """The gap of an infill sample; white_space: of a model that heals its prefixes, else None."""
    prefix, white = (sample.prefix, b"") if white_space is None else white_space.split(sample.prefix)
    if white_space is None or not white:
        ids = encode_text(tokenizer, sample.reference)
        return Gap(sample.prefix, b"", ids, len(ids))
    return Gap(prefix, white, *white_space.encode(white, sample.reference))


class Behind:
    """A tokenizer that decodes what stands behind the first token of a fill, with that token's part of the fill before it."""

    def __init__(self, white_space: WhiteSpace, border: Border) -> None:
        self.white_space, self.border = white_space, border

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        """The text; ``how`` is transformers', which has no say over bytes."""
        return self.white_space.decode([*self.border.begun, *ids], self.border.held)


def begin(
    model: Any,
    contexts: Sequence[tuple[list[int], list[int]]],
    whites: Sequence[bytes],
    white_space: WhiteSpace,
    seeds: Sequence[int],
    temperature: float = 0.0,
    **filters: Any,
) -> list[HealedRow]:
    """How a causal LM begins after each context: with its white space.

    contexts: ids with the white space (taken where it cannot be written) and without it; whites: that white space; filters: top_k,
    top_p, min_p.
    """
    rows = [HealedRow([Border(whole, bare, white)], [1]) for (whole, bare), white in zip(contexts, whites, strict=True)]
    device = next(iter(model.parameters())).device
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def laws(places: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        texts = [rows[b].borders[0].before for b in places]
        ids, mask = padded(texts)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=False,
            **last,
        )
        lengths = [len(text) for text in texts]
        return out.logits[:, -1:], torch.tensor(lengths, device=device)[:, None], lengths

    limit = getattr(model.config, "max_position_embeddings", None) or 2**30
    noise = CounterNoise.for_rows(list(seeds), len(rows), device)
    heal(rows, laws, white_space, noise, temperature, filters, limit)
    return rows


def padded(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, P] of ragged rows, padded on the left."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = torch.tensor(row)
        mask[b, width - len(row) :] = 1
    return ids, mask
