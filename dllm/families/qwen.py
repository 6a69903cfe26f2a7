"""Qwen2, Qwen2.5 (QKV bias) and Qwen3 (QK-norm) layout: causal bases that can be adapted, or targets of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dllm.families import Family
from dllm.families.llama import causal_spec, decoder_config
from dllm.families.tensor_names import llama_ignored, llama_sources
from dllm.model.decoder import Decoder, DecoderConfig


def qwen_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Qwen config dict -> DecoderConfig: Qwen2 always has QKV bias and no output bias, Qwen3 has QK-norm."""
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window must be false for this decoder: got true")
    is_qwen3 = config["model_type"] == "qwen3"
    return decoder_config(
        config,
        qkv_bias=bool(config.get("attention_bias", False)) if is_qwen3 else True,
        output_bias=bool(config.get("attention_bias", False)) if is_qwen3 else False,
        qk_norm=is_qwen3,
    )


def _build(config: Mapping[str, Any]) -> nn.Module:
    return Decoder(qwen_config(config))


FAMILY = Family(
    name="qwen",
    matches=lambda config: config.get("model_type") in ("qwen2", "qwen3"),
    build=_build,
    spec=causal_spec,
    sources=lambda config: llama_sources(qwen_config(config)),
    ignored=lambda config: llama_ignored(qwen_config(config)),
)
