"""From what a user gives to ``infill`` (prefix and suffix, a conversation, a template) to the rows that are filled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm.prompts import apply_template, conversations, encode_text
from dllm.white_space import Border, WhiteSpace, white_space_of

if TYPE_CHECKING:
    from dllm.pipeline import DiffusionLM

_MARK = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


@dataclass
class Task:
    """One row: its texts, their ids, and the length of each gap (None: search).

    cuts: part number -> (ids of its text without the white space at its end, that white space), where a gap's tokens may write it.
    """

    texts: list[str]
    parts: list[list[int]]
    lengths: list[int | None]
    cuts: dict[int, tuple[list[int], bytes]] = field(default_factory=dict)

    def of_lengths(self, lengths: list[int | None]) -> Task:
        """The same with other lengths."""
        return Task(self.texts, self.parts, lengths, self.cuts)

    def borders(self) -> list[Border]:
        """A fresh border for each gap; the text before a gap without a slot stays whole."""
        pairs = enumerate(zip(self.parts[:-1], self.lengths, strict=True))
        return [Border(part, *(self.cuts.get(k) if n else None) or (part, b"")) for k, (part, n) in pairs]


def read_tasks(
    lm: DiffusionLM,
    prefix: Any,
    suffix: Any,
    length: Any,
    messages: Any,
    template: str | None,
    gaps: Mapping[str, Any] | None,
    heals: bool,
) -> list[Task]:
    """The rows that a user asks for; heals: the model may write white space before a gap. Raises what ``DiffusionLM.infill`` says."""
    if template is not None:
        if prefix is not None or suffix != "" or messages is not None or length != "auto":
            raise ValueError("template goes with gaps alone: prefix, suffix, length and messages must not be given")
        return [_template_task(lm, template, gaps, heals)]
    if gaps is not None:
        raise ValueError("gaps goes with template: got gaps without it")
    if prefix is None:
        raise ValueError("prefix or template must be given: got neither")
    prefixes = _texts("prefix", prefix)
    if not prefixes:
        raise ValueError("prefix must hold at least one row: got none")
    suffixes = [suffix] * len(prefixes) if isinstance(suffix, str) else _texts("suffix", suffix)
    if len(suffixes) != len(prefixes):
        raise ValueError(f"suffix must be a str or one a row ({len(prefixes)}): got {len(suffixes)}")
    lengths = list(length) if isinstance(length, Sequence) and not isinstance(length, str) else [length] * len(prefixes)
    if len(lengths) != len(prefixes):
        raise ValueError(f"length must be 'auto', an int or one a row ({len(prefixes)}): got {len(lengths)}")
    chats: list[Any] = [None] * len(prefixes)
    if messages is not None:
        chats = conversations(messages)
        if len(chats) != len(prefixes):
            raise ValueError(f"messages must be one conversation a row ({len(prefixes)}): got {len(chats)}")
    tasks = []
    for before, after, n, chat in zip(prefixes, suffixes, lengths, chats, strict=True):
        parts = [encode_text(lm.tokenizer, before), encode_text(lm.tokenizer, after)]
        cuts = _cuts(lm, [before, after], heals)
        if chat is not None:
            # The assistant's turn begins with the prefix and is closed after the suffix.
            header = apply_template(lm.tokenizer, chat)
            parts = [header + parts[0], parts[1] + list(lm.spec.eos_token_ids[:1])]
            cuts = {k: (header + ids, white) for k, (ids, white) in cuts.items()}
        tasks.append(Task([before, after], [_start(lm, parts[0]), parts[1]], [_length(n)], cuts))
    return tasks


def _cuts(lm: DiffusionLM, texts: list[str], heals: bool) -> dict[int, tuple[list[int], bytes]]:
    """``Task.cuts`` of these texts, behind each of which but the last there is a gap."""
    cuts: dict[int, tuple[list[int], bytes]] = {}
    for k, text in enumerate(texts[:-1]):
        # Most texts need no look at the vocabulary, whose reading takes a moment.
        white_space = border_white_space(lm) if heals and text != text.rstrip() else None
        bare, white = (text, b"") if white_space is None else white_space.split(text)
        ids = encode_text(lm.tokenizer, bare) if white else []
        if ids:
            cuts[k] = (ids, white)
    return cuts


def border_white_space(lm: Any) -> WhiteSpace | None:
    """What the model may write of the white space before a gap; None where it can do nothing about it.

    None: a tokenizer whose tokens are no bytes, and a model whose open slots hold random tokens.
    """
    spec = lm.spec
    never = (spec.mask_token_id, spec.filler_token_id, spec.expand_token_id, spec.delete_token_id, *spec.eos_token_ids)
    if hasattr(lm.model, "soft_embed"):
        return None
    return white_space_of(lm.tokenizer, spec.vocab_size, tuple(token for token in never if token is not None))


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a str or a list of str: got {text!r}")
    return texts


def _template_task(lm: DiffusionLM, template: str, gaps: Mapping[str, Any] | None, heals: bool) -> Task:
    names = _MARK.findall(template)
    if not names:
        raise ValueError("template must hold at least one {{name}} mark: got none")
    if len(set(names)) != len(names):
        raise ValueError(f"template marks must have different names: got {names}")
    given = dict(gaps or {})
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"gaps must name marks of the template {names}: got {unknown}")
    texts = _MARK.split(template)[::2]
    if any(not text for text in texts[1:-1]):
        raise ValueError("template must have text between two marks: merge neighbouring gaps into one")
    parts = [encode_text(lm.tokenizer, text) for text in texts]
    parts[0] = _start(lm, parts[0])
    lengths = [_length(given.get(name, "auto")) for name in names]
    return Task(texts, parts, lengths, _cuts(lm, texts, heals))


def _start(lm: DiffusionLM, ids: list[int]) -> list[int]:
    """An empty first part gets the model's document start, since a shifted model reads a slot's law one row before it."""
    if ids or not lm.spec.logits_shift:
        return ids
    if lm.spec.document_start_id is None:
        raise ValueError(
            "prefix must not be empty for this model: it predicts a token from the one before and has no document start"
        )
    return [lm.spec.document_start_id]


def _length(value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"length must be 'auto' or an int >= 0: got {value!r}")
    if value < 0:
        raise ValueError(f"length must be >= 0: got {value}")
    return value


def check_fit(lm: DiffusionLM, tasks: list[Task], max_length: int) -> None:
    """Raise ValueError for rows that with their longest gaps exceed the model's positions."""
    for b, task in enumerate(tasks):
        total = sum(len(p) for p in task.parts) + sum(max_length if n is None else n for n in task.lengths)
        if total > lm.spec.max_positions:
            raise ValueError(
                f"prefix, gaps and suffix must fit in {lm.spec.max_positions} positions: row {b} needs {total}"
            )
