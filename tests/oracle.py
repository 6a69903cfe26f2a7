"""A hand-written model that says chosen tokens with chosen confidence at chosen slots, so that forwards and tokens are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dllm.pipeline import DiffusionLM
from tests.tiny import EOS, VOCAB, tiny_spec

Law = tuple[int, float]
"""Token and its probability; the other tokens share the rest evenly."""


class OracleStore:
    """Holds nothing; the loop only sets ``extent`` and takes rows out."""

    extent = 0

    def select(self, keep: Tensor) -> OracleStore:
        return self


class Oracle:
    """law(slot, call) -> (token, probability), or a whole row of logits [V]; call counts forwards from 1.

    calls: forwards so far; inputs: for each forward the (ids, masked) that the loop embedded.
    """

    device = torch.device("cpu")

    def __init__(self, law: Callable[[int, int], Law | Tensor], shift: int = 1) -> None:
        self.law, self.shift = law, shift
        self.calls = 0
        self.inputs: list[tuple[Tensor, Tensor]] = []

    def new_store(self, batch: int, capacity: int) -> OracleStore:
        return OracleStore()

    def embed(self, ids: Tensor, masked: Tensor, mask_token_id: int | None) -> Tensor:
        self.inputs.append((ids.clone(), masked.clone()))
        return torch.zeros(*ids.shape, 2)

    def __call__(self, ids: None, positions: Tensor, kv: Any, attend: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.stack([positions.float(), torch.full_like(positions, self.calls).float()], dim=-1)

    def head(self, hidden: Tensor) -> Tensor:
        flat = [self._logits(int(row[0]) + self.shift, int(row[1])) for row in hidden.flatten(0, 1)]
        return torch.stack(flat).view(*hidden.shape[:2], VOCAB)

    def _logits(self, slot: int, call: int) -> Tensor:
        law = self.law(slot, call)
        return law if isinstance(law, Tensor) else peaked(*law)


def peaked(token: int, probability: float) -> Tensor:
    """Logits [V] of a law that gives ``token`` this probability."""
    logits = torch.zeros(VOCAB)
    logits[token] = math.log(probability * (VOCAB - 1) / (1 - probability))
    return logits


def oracle_lm(
    law: Callable[[int, int], Law | Tensor] | Mapping[int, Law], attention: str = "block_causal", **changes: Any
) -> DiffusionLM:
    """A DiffusionLM around an oracle. A mapping slot -> law stands for itself, and for (10, 0.5) elsewhere."""
    spec = tiny_spec(attention, **changes)
    if isinstance(law, Mapping):
        table = law

        def law(slot: int, call: int) -> Law | Tensor:
            return table.get(slot, (10, 0.5))

    return DiffusionLM(Oracle(law, spec.logits_shift), spec)


def sentence(prompt_length: int, tokens: list[int], sure: float = 0.95) -> dict[int, Law]:
    """Laws that write ``tokens`` behind a prompt of this length, and EOS for ever after."""
    written = {prompt_length + i: (token, sure) for i, token in enumerate(tokens)}
    return written | {prompt_length + i: (EOS, sure) for i in range(len(tokens), 200)}
