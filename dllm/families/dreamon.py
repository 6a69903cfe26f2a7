"""DreamOn (Wu et al. 2025): Dream with two more tokens, so that a gap can grow and shrink while it is filled.

A mask that becomes the expand token turns into two masks; one that becomes the delete token (= eos) vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dllm.families import Family
from dllm.families.dream import dream_config, dream_ignored, dream_sources, dream_spec, is_dream
from dllm.model.decoder import Decoder
from dllm.types import DecodeSpec

EXPAND_TOKEN_ID = 151667


def expand_token_id(config: Mapping[str, Any]) -> int:
    """Id whose prediction replaces a mask by two masks."""
    return int(config.get("expand_token_id", EXPAND_TOKEN_ID))


def delete_token_id(config: Mapping[str, Any]) -> int:
    """Id whose prediction removes a mask: the config's eos."""
    return int(config["eos_token_id"])


def dreamon_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """As Dream, but every slot is free; eos inside a gap means "delete", so that no single token closes a gap."""
    return replace(
        dream_spec(config),
        first_slot="free",
        expand_token_id=expand_token_id(config),
        delete_token_id=delete_token_id(config),
    )


FAMILY = Family(
    name="dreamon",
    matches=lambda config: is_dream(config) and "expand_token_id" in config,
    build=lambda config: Decoder(dream_config(config)),
    spec=dreamon_spec,
    sources=dream_sources,
    ignored=dream_ignored,
)
