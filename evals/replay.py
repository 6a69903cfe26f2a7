"""One HTML page that replays denoising runs side by side, against a common clock of forwards.

The page (`replay.html`, filled here) is self-contained: no request leaves it, it works from a file, on a phone, in
light and dark. Runs that share a prompt are shown together, so that a reader sees one token per forward against many.
`#forward=12&prompt=0&runs=0,2` after the address opens it at that point.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dllm.evals.atomic_write import write_text_atomic

STATES = ("given", "committed", "new", "provisional", "masked")
"""given: prompt, prefix or suffix; new: committed by the forward that led to this frame; provisional: the model's
guess, not committed.
"""

Frame = Sequence[tuple[str, str]]
"""The canvas after a forward, in text order: (token text, state)."""


@dataclass(frozen=True)
class ReplayRun:
    """One run to replay.

    title: what differs from the runs beside it ("threshold 0.9"). prompt: the text asked; runs of equal prompt are
        shown together.
    history: frames, at least one; the canvas may grow or shrink between them.
    settings, stats: shown as they are; JSON values.
    forwards: model forwards spent when each frame was reached, never falling; None: frame i was reached after i
        forwards.
    """

    title: str
    prompt: str
    history: Sequence[Frame]
    settings: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    forwards: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.history:
            raise ValueError(f"history must hold at least one frame: got none in run {self.title!r}")
        for i, frame in enumerate(self.history):
            for text, state in frame:
                if state not in STATES:
                    raise ValueError(
                        f"token states must be one of {STATES}: got {state!r} in frame {i} of run {self.title!r}"
                    )
                if not isinstance(text, str):
                    raise TypeError(
                        f"token texts must be str: got {type(text).__name__} in frame {i} of run {self.title!r}"
                    )
        if self.forwards is not None:
            if len(self.forwards) != len(self.history):
                raise ValueError(
                    f"forwards must hold one number per frame ({len(self.history)}): got {len(self.forwards)} "
                    f"in run {self.title!r}"
                )
            if list(self.forwards) != sorted(self.forwards) or self.forwards[0] < 0:
                raise ValueError(
                    f"forwards must be >= 0 and never fall: got {list(self.forwards)} in run {self.title!r}"
                )


class RecordedStep(Protocol):
    """The part of `HistoryFrame` that is read: the slots after a denoise step, and the row's forwards so far."""

    @property
    def nfe(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def masked(self) -> Sequence[bool]: ...
    @property
    def new(self) -> Sequence[bool]: ...
    @property
    def provisional_ids(self) -> Sequence[int]: ...


def replay_run(
    title: str,
    prompt: str,
    steps: Sequence[RecordedStep],
    decode: Callable[[int], str],
    *,
    length: int | None = None,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    stats: Mapping[str, Any] | None = None,
) -> ReplayRun:
    """A run from the history that `generate` or `infill` records for one row with `output_history=True`.

    steps: `output.history[row]`. decode: text of one token id. length: useful tokens, where the last frame ends as the
        output does; None: the whole canvas stays. before, after: token texts given left and right of the slots (the
        prefix and the suffix of an infill).
    A masked slot is provisional where the step has a guess for it, that is an id that differs from what the canvas
    holds.
    """
    if not steps:
        raise ValueError(f"steps must hold at least one step: got none for run {title!r}")
    left, right = [(text, "given") for text in before], [(text, "given") for text in after]
    middles: list[list[tuple[str, str]]] = [[("", "masked")] * len(steps[0].token_ids)]
    for step in steps:
        middle = []
        for token, masked, new, guess in zip(step.token_ids, step.masked, step.new, step.provisional_ids, strict=True):
            if masked:
                middle.append(("", "masked") if guess == token else (decode(guess), "provisional"))
            else:
                middle.append((decode(token), "new" if new else "committed"))
        middles.append(middle)
    middles[-1] = middles[-1][:length]
    return ReplayRun(
        title=title,
        prompt=prompt,
        history=[left + middle + right for middle in middles],
        settings=settings or {},
        stats=stats or {},
        forwards=[0, *(step.nfe for step in steps)],
    )


def write_replay(path: str | os.PathLike[str], runs: Sequence[ReplayRun], title: str = "Denoising, replayed") -> Path:
    """Writes the page to `path` (whole or not at all) and returns the path. Errors as `render_replay`, and OSError."""
    return write_text_atomic(path, render_replay(runs, title))


def render_replay(runs: Sequence[ReplayRun], title: str = "Denoising, replayed") -> str:
    """The page as a string. Raises ValueError for no runs and TypeError or ValueError for settings or stats that are
    not JSON.
    """
    if not runs:
        raise ValueError("runs must hold at least one run: got none")
    texts: dict[str, int] = {}
    data = {"runs": [_packed(run, texts) for run in runs], "states": STATES}
    data["texts"] = list(texts)
    # Inside of a script element only "<" can end it; escaped like this the JSON holds no markup at all, whatever a
    # token says.
    payload = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        payload = payload.replace(character, f"\\u{ord(character):04x}")
    parts = {"TITLE": html.escape(title), "DATA": payload}
    page = Path(__file__).with_name("replay.html").read_text(encoding="utf-8")
    # One pass, so that a title that spells a placeholder stays a title.
    return re.sub("{{(TITLE|DATA)}}", lambda match: parts[match[1]], page)


def _packed(run: ReplayRun, texts: dict[str, int]) -> dict[str, Any]:
    """A run with each frame as [length, then slot, text index, state index for every slot that differs from the frame
    before].
    """
    frames = []
    before: list[tuple[int, int]] = []
    for frame in run.history:
        slots = [(texts.setdefault(text, len(texts)), STATES.index(state)) for text, state in frame]
        changes = [i for i, slot in enumerate(slots) if i >= len(before) or slot != before[i]]
        frames.append([len(slots), *(number for i in changes for number in (i, *slots[i]))])
        before = slots
    return {
        "title": run.title,
        "prompt": run.prompt,
        "settings": dict(run.settings),
        "stats": dict(run.stats),
        "forwards": list(run.forwards if run.forwards is not None else range(len(run.history))),
        "frames": frames,
    }
