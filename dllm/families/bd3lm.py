"""BD3-LM (Arriola et al. 2025, arXiv:2503.09573): MDLM's transformer with block-causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dllm.families import Family
from dllm.families.mdlm import dit_config, dit_ignored, dit_sources, mdlm_spec
from dllm.model.dit import DiT
from dllm.types import DecodeSpec


def bd3lm_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Blocks of ``block_size`` on the absolute grid."""
    return replace(
        mdlm_spec(config),
        attention="block_causal",
        block_length=config["block_size"],
        block_origin="zero",
        default_cache="block",
    )


FAMILY = Family(
    name="bd3lm",
    matches=lambda config: config.get("model_type") == "bd3lm",
    build=lambda config: DiT(dit_config(config)),
    spec=bd3lm_spec,
    sources=dit_sources,
    ignored=dit_ignored,
)
