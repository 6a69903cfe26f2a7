"""Does an output loop? Greedy decoding of a small model falls into repetition, and repetition is cheap to decode:
speed, length and likelihood of looping outputs are reported apart.

An output loops if one n-gram of its tokens occurs `times` times without overlapping itself (n = 8, three times, unless
told otherwise). Overlapping occurrences do not count: a ruled line in a table or the indentation of code is ten equal
tokens in a row, which hold three overlapping 8-grams and are no loop; the same text written three times over is one.
The occurrences need not follow each other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

Tokens = Iterable[SupportsIndex]
"""Token ids: a list, or a one-dimensional tensor or array of ints."""


def loops(tokens: Tokens, n: int = 8, times: int = 3) -> bool:
    """True if some n-gram of the token ids occurs `times` times or more, no occurrence overlapping another."""
    return loop_start(tokens, n, times) is not None


def loop_rate(outputs: Iterable[Tokens], n: int = 8, times: int = 3) -> float:
    """Share of the outputs that loop, in [0, 1]. Raises ValueError if there are no outputs."""
    flags = [loops(tokens, n, times) for tokens in outputs]
    if not flags:
        raise ValueError("outputs must hold at least one output: got none")
    return sum(flags) / len(flags)


def loop_start(tokens: Tokens, n: int = 8, times: int = 3) -> int | None:
    """Index of the first token that only repeats, or None if the output does not loop.

    It is the start of the second occurrence of a looping n-gram, the smallest such index if there are several:
    everything before it is said for the first time as far as loops go, so that the tokens up to it never loop
    themselves.
    """
    if n < 1:
        raise ValueError(f"n must be >= 1: got {n}")
    if times < 2:
        raise ValueError(f"times must be >= 2: got {times}")
    # Tensor elements hash by identity and would never match: they become ints first.
    ids = [operator.index(token) for token in tokens]
    starts: dict[tuple[int, ...], list[int]] = {}
    looping = []
    for i in range(len(ids) - n + 1):
        # Taking each occurrence as early as possible gives the largest number that do not overlap.
        found = starts.setdefault(tuple(ids[i : i + n]), [])
        if not found or i - found[-1] >= n:
            found.append(i)
            if len(found) == times:
                looping.append(found[1])
    return min(looping, default=None)


def truncate_at_loop(tokens: Tokens, n: int = 8, times: int = 3) -> list[int]:
    """The token ids up to `loop_start`; all of them if the output does not loop. The result never loops."""
    return [operator.index(token) for token in tokens][: loop_start(tokens, n, times)]
