"""From what a user gives (text, chat messages, ids with a mask) to one list of ids per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Message = dict[str, Any]


def encode_prompts(
    tokenizer: Any,
    vocab_size: int,
    prompt: str | Sequence[str] | None = None,
    messages: Sequence[Any] | None = None,
    input_ids: Any = None,
    attention_mask: Any = None,
    use_chat_template: bool | str = "auto",
) -> list[list[int]]:
    """One list of ids a row; exactly one of prompt, messages and input_ids must be given.

    A str is wrapped as a user's turn where the tokenizer has a template ("auto") or must have one (True); False: raw text. input_ids
    [B, P] with attention_mask [B, P] (1 = token; any padding side; None: all tokens count). Padding is what the mask says, whatever
    the ids are. Empty prompts raise ValueError.
    """
    given = [
        name
        for name, value in (("prompt", prompt), ("messages", messages), ("input_ids", input_ids))
        if value is not None
    ]
    if len(given) != 1:
        raise ValueError(f"exactly one of prompt, messages and input_ids must be given: got {given or 'none'}")
    if attention_mask is not None and input_ids is None:
        raise ValueError("attention_mask goes with input_ids: got it without")
    if use_chat_template not in (True, False, "auto"):
        raise ValueError(f"use_chat_template must be True, False or 'auto': got {use_chat_template!r}")
    if input_ids is not None:
        rows = _rows_of_ids(input_ids, attention_mask)
    else:
        if tokenizer is None:
            raise ValueError(f"{given[0]} needs a tokenizer and this model has none: give input_ids")
        rows = (
            _from_messages(tokenizer, messages)
            if messages is not None
            else _from_text(tokenizer, prompt, use_chat_template)
        )
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"{given[0]} must not be empty: row {b} has no token")
        bad = [t for t in row if not 0 <= t < vocab_size]
        if bad:
            raise ValueError(f"{given[0]} must hold ids in [0, {vocab_size}): row {b} has {bad[0]}")
    if not rows:
        raise ValueError(f"{given[0]} must hold at least one row: got none")
    return rows


def _rows_of_ids(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    ids = torch.as_tensor(input_ids)
    if not ids.numel():
        raise ValueError(f"input_ids must not be empty: got shape {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers: got {ids.dtype}")
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2:
        raise ValueError(f"input_ids must be [B, P] or [P]: got shape {tuple(ids.shape)}")
    if attention_mask is None:
        return ids.tolist()
    mask: Tensor = torch.as_tensor(attention_mask)
    if mask.dim() == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids {tuple(ids.shape)}: got {tuple(mask.shape)}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 0 and 1 only")
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask.to(ids.device), strict=True)]


def masked_rows(masked: Any, input_ids: Any, attention_mask: Any) -> list[list[bool]]:
    """masked [B, P] bool or 0 and 1, laid out as input_ids -> one list a row, padding left out."""
    if input_ids is None:
        raise ValueError("masked goes with input_ids: got it without")
    ids, flags = torch.as_tensor(input_ids), torch.as_tensor(masked)
    if flags.shape != ids.shape:
        raise ValueError(f"masked must have the shape of input_ids {tuple(ids.shape)}: got {tuple(flags.shape)}")
    if not bool(((flags == 0) | (flags == 1)).all()):
        raise ValueError("masked must hold booleans, or 0 and 1 only")
    return [[bool(flag) for flag in row] for row in _rows_of_ids(flags.long(), attention_mask)]


def conversations(messages: Any) -> list[list[Message]]:
    """One conversation or a list of them -> a list of them. Raises TypeError for what is neither."""
    wanted = "messages must be a list of messages {'role': ..., 'content': ...}, or a list of such lists"
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"{wanted}: got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must not be empty")
    batch = [messages] if isinstance(messages[0], Mapping) else messages
    for b, row in enumerate(batch):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"{wanted}: row {b} is {type(row).__name__}")
        for message in row:
            if not isinstance(message, Mapping):
                raise TypeError(f"{wanted}: row {b} holds {type(message).__name__}")
    return [[dict(message) for message in row] for row in batch]


def _from_messages(tokenizer: Any, messages: Any) -> list[list[int]]:
    return [apply_template(tokenizer, row) for row in conversations(messages)]


def _from_text(tokenizer: Any, prompt: Any, use_chat_template: bool | str) -> list[list[int]]:
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    for b, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"prompt must be a str or a list of str: row {b} is {type(text).__name__}")
        if not text:
            raise ValueError(f"prompt must not be empty: row {b} has no text")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if use_chat_template is True and not has_template:
        raise ValueError("use_chat_template=True needs a tokenizer with a chat template: this one has none")
    if use_chat_template is not False and has_template:
        return [apply_template(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    return [encode_text(tokenizer, text) for text in texts]


def apply_template(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation, closed by the header of the assistant's turn."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return encode_text(tokenizer, text)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a raw text, no special token added. Raises ValueError for a lone surrogate, as bytes that are no UTF-8 are read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(
            f"text must be valid Unicode: got the lone surrogate {found!r} at character {error.start}"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
