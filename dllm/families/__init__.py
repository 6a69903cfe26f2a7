"""Model families: each file turns one published checkpoint layout into a ``Decoder`` and a ``DecodeSpec``.

A family is config translation, a tensor-name map and a ``DecodeSpec``; ``register_family`` adds one from outside
(entry-point group ``dllm.families``). No remote code is ever run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllm.types import DecodeSpec

Config = Mapping[str, Any]
Sources = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """How to read one family's checkpoints.

    matches(config) -> bool: does a Hugging Face config dict belong here. build(config) -> an empty module, also on the
    meta device. spec(config) -> DecodeSpec. sources(config) -> {our name: the checkpoint's names, joined along dim 0};
    ignored(config) -> names of the checkpoint that carry nothing new. The loader counts both ways: a source that is not
    there and a tensor that is neither source nor ignored are errors. load(folder, config, dtype, device) -> a filled
    module, instead of sources, for classes that read their checkpoint themselves.
    """

    name: str
    matches: Callable[[Config], bool]
    build: Callable[[Config], nn.Module]
    spec: Callable[[Config], DecodeSpec]
    sources: Callable[[Config], Sources] | None = None
    ignored: Callable[[Config], tuple[str, ...]] = lambda config: ()
    load: Callable[[Path, Config, torch.dtype, torch.device], nn.Module] | None = None

    def __post_init__(self) -> None:
        if (self.sources is None) == (self.load is None):
            raise ValueError(f"exactly one of sources and load must be given for family {self.name!r}")


_BUILT_IN = (
    "llama",
    "qwen",
    "llada",
    "dream",
    "dreamon",
    "sdar",
    "fast_dllm_v2",
    "llada2",
    "mdlm",
    "bd3lm",
    "diffusion_gemma",
)
_registry: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family; a name that is taken raises ValueError."""
    if family.name in _registry or family.name in _BUILT_IN:
        raise ValueError(f"family name must be new: {family.name!r} is registered")
    _registry[family.name] = family


def families() -> dict[str, Family]:
    """All registered families by name; loads the built-in ones and the entry points on first use."""
    for name in _BUILT_IN:
        if name not in _registry:
            _registry[name] = importlib.import_module(f"dllm.families.{name}").FAMILY
    for point in entry_points(group="dllm.families"):
        if point.name not in _registry:
            _registry[point.name] = point.load()
    return dict(_registry)


def find_family(config: Config, name: str | None = None) -> Family:
    """The family called ``name``, or the one whose ``matches`` accepts the config."""
    known = families()
    if name is not None:
        if name not in known:
            raise ValueError(f"family must be one of {sorted(known)}: got {name!r}")
        return known[name]
    for family in known.values():
        if family.matches(config):
            return family
    raise ValueError(
        f"no family reads model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r}; "
        f"known: {sorted(known)}"
    )
