"""transformers' logits processors and stopping criteria, applied to growing prefixes of rows that differ in length.

``generate`` calls them once a step on the whole batch, whose rows are equally long there. Here every row has its own
length, and a block has a prefix of its own for each slot, so each is called for one row and one slot: ids [1, L], scores
[1, V]. What needs more than that (a state of its own, another row) is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.speculate_request import Stop

ROWWISE = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    }
)
"""Processors that do not read the prefix: one call for all rows and slots."""
PREFIX = frozenset(
    {
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WatermarkLogitsProcessor",
    }
)
"""Processors that are a function of the prefix and its scores."""
_CRITERIA = frozenset({"MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria"})


class ProcessorChain:
    """The chain that ``generate`` built (``dllm.speculate_request.PrefixProcessor``).

    input_ids [B, P]: the prompts as ``generate`` holds them, padding included. A processor of a user's own is called like
    the prefix ones. Raises ValueError, naming the class, for one of transformers' that is neither.
    """

    def __init__(self, processors: Sequence[Any], input_ids: Tensor) -> None:
        self.prompts = list(input_ids)
        for one in processors:
            name = type(one).__name__
            if _is_theirs(one) and name not in ROWWISE | PREFIX:
                raise ValueError(
                    f"logits processor {name} cannot be applied to drafted blocks; these of transformers can: "
                    f"{sorted(ROWWISE | PREFIX)}"
                )
        # Neighbours of one kind together: (is rowwise, processors of each row).
        self.chain = [(_is_rowwise(one), [_of_row(one, b) for b in range(len(self.prompts))]) for one in processors]

    def __call__(self, scores: Tensor, rows: list[int], ids: list[list[int]], draft_tokens: Tensor) -> Tensor:
        """See ``PrefixProcessor``."""
        wholes = [self._prefix(row, ids[b], draft_tokens[b]) for b, row in enumerate(rows)]
        for is_rowwise, of_row in self.chain:
            if is_rowwise:
                flat = scores.flatten(0, 1)
                scores = of_row[0](flat.new_zeros(len(flat), 1, dtype=torch.int64), flat).view_as(scores)
                continue
            out = torch.empty_like(scores)
            for b, row in enumerate(rows):
                known = wholes[b].shape[1] - draft_tokens.shape[1]
                for k in range(scores.shape[1]):
                    out[b, k] = of_row[row](wholes[b][:, : known + k], scores[b, k][None].clone())[0]
            scores = out
        return scores

    def _prefix(self, row: int, ids: list[int], drafts: Tensor) -> Tensor:
        prompt = self.prompts[row].to(drafts.device)
        return torch.cat([prompt, torch.tensor(ids, dtype=torch.int64, device=drafts.device), drafts])[None]


class CriteriaRule:
    """Stopping criteria beside length and stop tokens, asked after every token of a row (``StopRule``). The token with
    which one says stop is the last one, as in ``generate``.
    """

    def __init__(self, criteria: Sequence[Any], input_ids: Tensor) -> None:
        self.criteria, self.prompts = tuple(criteria), list(input_ids)

    def __call__(self, row: int, ids: list[int], start: int) -> Stop | None:
        new = torch.tensor(ids, dtype=torch.int64, device=self.prompts[row].device)
        whole = torch.cat([self.prompts[row], new])[None]
        behind = whole.shape[1] - len(ids)
        for end in range(start + 1, len(ids) + 1):
            if any(_says_stop(one(whole[:, : behind + end], None)) for one in self.criteria):
                return Stop(end, end)
        return None


def split_criteria(criteria: Sequence[Any]) -> tuple[int | None, tuple[int, ...], list[Any]]:
    """(longest text in tokens or None, stop tokens, the other criteria) of a list that ``generate`` built. Raises
    ValueError, naming the class, for one of transformers' that needs scores.
    """
    longest: int | None = None
    eos: list[int] = []
    others = []
    for one in criteria:
        name = type(one).__name__
        if _is_theirs(one) and name not in _CRITERIA:
            raise ValueError(
                f"stopping criterion {name} cannot be honoured; these of transformers can: {sorted(_CRITERIA)}"
            )
        if _is_theirs(one) and name == "MaxLengthCriteria":
            longest = one.max_length if longest is None else min(longest, one.max_length)
        elif _is_theirs(one) and name == "EosTokenCriteria":
            eos += torch.as_tensor(one.eos_token_id).reshape(-1).tolist()
        else:
            others.append(one)
    return longest, tuple(dict.fromkeys(eos)), others


def _is_theirs(one: Any) -> bool:
    return type(one).__module__.partition(".")[0] == "transformers"


def _is_rowwise(one: Any) -> bool:
    return _is_theirs(one) and type(one).__name__ in ROWWISE


def _of_row(one: Any, row: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The processor for calls that hold this row only."""
    name = type(one).__name__ if _is_theirs(one) else ""
    if name == "RepetitionPenaltyLogitsProcessor" and isinstance(one.prompt_ignore_length, Tensor):
        alone = copy.copy(one)
        alone.prompt_ignore_length = int(one.prompt_ignore_length[row])
        return alone
    if name == "PrefixConstrainedLogitsProcessor":
        allowed, alone = one._prefix_allowed_tokens_fn, copy.copy(one)
        alone._prefix_allowed_tokens_fn = lambda _, prefix: allowed(row, prefix)
        return alone
    return one


def _says_stop(answer: Any) -> bool:
    return bool(torch.as_tensor(answer).reshape(-1)[0])
