"""Special token ids: the config's own, or the published ones that a config leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mask_id(config: Mapping[str, Any], published: int, vocab_size: int) -> int | None:
    """The config's ``mask_token_id``, else the published id; None if that lies outside the vocabulary.

    None is no guess: a decoder that needs the id has to be told by ``spec_overrides``.
    """
    value = config.get("mask_token_id")
    if value is not None:
        return int(value)
    return published if published < vocab_size else None


def eos_ids(config: Mapping[str, Any], published: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The config's ``eos_token_id`` (one or several), then the published stop ids that fit the vocabulary."""
    value = config.get("eos_token_id")
    own = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
    return tuple(dict.fromkeys(own + tuple(i for i in published if i < vocab_size)))


def require(config: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError for a config value that this backbone does not compute; a name that the config lacks passes."""
    for name, value in expected.items():
        found = config.get(name, value)
        if found != value and not (value is False and found is None):
            raise ValueError(f"config {name} must be {value!r} for this family: got {found!r}")
