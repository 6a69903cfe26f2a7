"""Committed and provisional text of a running generation, and the feed of a transformers streamer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dllm.denoise import StepView

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class StreamEvent:
    """One thing that happened in one row.

    kind "committed": ``text`` is new final text, to be appended; "provisional": ``text`` is the current guess of what follows the
    committed text up to the open block's end, which replaces the last one; "done": ``finish_reason`` is set and ``text`` is empty.
    step counts denoise steps of the call, from 1.
    """

    row: int
    kind: Literal["committed", "provisional", "done"]
    text: str
    step: int
    finish_reason: str | None = None


class TextDelta:
    """Turns a growing list of ids into text that only ever grows.

    Held back until it is settled: a half-finished character, and an end of the text with which a stop string may begin. A tokenizer
    may read earlier ids differently once more follow (bytes that join to a character): nothing is sent while it does.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, tuple(stops)
        self.sent = ""
        self._ids: list[int] = []

    def push(self, ids: list[int]) -> str:
        """New text since the last call; ids are all final ids so far, without a stop."""
        assert ids[: len(self._ids)] == self._ids, f"final ids must stay: {self._ids} became {ids}"
        self._ids = list(ids)
        text = settled_text(self.decode(ids), self.stops)
        if not text.startswith(self.sent):
            return ""
        new, self.sent = text[len(self.sent) :], text
        return new

    def rest(self, text: str) -> str:
        """What is left of the whole text. Raises RuntimeError where the tokenizer does not read it as what was sent."""
        if not text.startswith(self.sent):
            raise RuntimeError(
                f"text that was streamed must begin the output: {self.sent!r} was, the output is {text!r}"
            )
        return text[len(self.sent) :]

    def guess(self, ids: list[int]) -> str:
        """Text of ids (final ones and guesses) behind what was sent."""
        text = self.decode(ids)
        return text[len(self.sent) :] if text.startswith(self.sent) else ""


class StreamerFeed:
    """Feeds a transformers streamer: the prompt first, as ``generate`` of transformers does, then new tokens as they become final.

    decode: None without a tokenizer, where there are no stop strings either. Where a stop string cuts a token, the token is not put.
    """

    def __init__(self, streamer: Any, prompt: Sequence[int], decode: Decode | None, stops: Sequence[str] = ()) -> None:
        self.streamer, self.decode, self.stops = streamer, decode, tuple(stops)
        self._sent: list[int] = []
        streamer.put(torch.tensor([list(prompt)], dtype=torch.int64))

    def push(self, ids: list[int]) -> None:
        """ids: all final ids so far, without a stop."""
        count = len(ids)
        if self.stops and self.decode is not None:
            count = tokens_within(ids, settled_text(self.decode(ids), self.stops), self.decode)
        self._put(ids[:count])

    def end(self, ids: list[int]) -> None:
        """ids: the output's."""
        self._put(ids)
        self.streamer.end()

    def _put(self, ids: list[int]) -> None:
        count = len(self._sent)
        assert ids[:count] == self._sent[: len(ids)], f"final ids must stay: {self._sent} became {ids}"
        if len(ids) > count:
            self.streamer.put(torch.tensor(ids[count:], dtype=torch.int64))
            self._sent = list(ids)


def settled_text(text: str, stops: Sequence[str]) -> str:
    """``text`` without a trailing half-finished character, and without a trailing beginning of one of ``stops``."""
    text = text.rstrip("\ufffd")
    longest = max((len(s) for s in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(s) > length and s.startswith(text[-length:]) for s in stops):
            return text[:-length]
    return text


def tokens_within(ids: list[int], text: str, decode: Decode) -> int:
    """How many leading ids lie wholly within ``text``, a beginning of their text."""
    count = len(ids)
    while count and not text.startswith(decode(ids[:count])):
        count -= 1
    return count


def guessed_ids(view: StepView, b: int, start: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Row b's ids from slot ``start`` to the end of its open block, guesses for masked slots, up to a (guessed) stop token."""
    slots, guesses = view.slots[b][view.inside[b]].tolist(), view.provisional[b][view.inside[b]].tolist()
    ids = view.canvas[b, start : slots[0]].tolist() + guesses
    stop = next((i for i, token in enumerate(ids) if token in eos_token_ids), len(ids))
    return ids[:stop]
