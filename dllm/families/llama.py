"""Llama layout (SmolLM2, Llama 2/3, ...): causal, no bias; the base of our own adapted diffusion models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.tensor_names import llama_ignored, llama_sources
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.types import DecodeSpec


def rope_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from transformers 5's ``rope_parameters`` or the older ``rope_theta``, ``rope_scaling``."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", config.get("rope_theta") or 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return theta, None if kind == "default" else parameters


def decoder_config(config: Mapping[str, Any], **overrides: Any) -> DecoderConfig:
    """A Hugging Face Llama or Qwen config dict -> DecoderConfig; overrides win."""
    theta, scaling = rope_of(config)
    values: dict[str, Any] = dict(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    values.update(overrides)
    return DecoderConfig(**values)


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """``eos_token_id`` of a config as a tuple."""
    value = config.get("eos_token_id")
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def causal_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """An AR model as the decoder sees it: shifted, causal, no mask token."""
    return DecodeSpec(
        mask_token_id=None,
        eos_token_ids=eos_ids(config),
        logits_shift=1,
        attention="causal",
        block_length=1,
        max_positions=config.get("max_position_embeddings", 2048),
        vocab_size=config["vocab_size"],
    )


FAMILY = Family(
    name="llama",
    matches=lambda config: (
        config.get("model_type") == "llama" or "LlamaForCausalLM" in (config.get("architectures") or ())
    ),
    build=lambda config: Decoder(decoder_config(config)),
    spec=causal_spec,
    sources=lambda config: llama_sources(decoder_config(config)),
    ignored=lambda config: llama_ignored(decoder_config(config)),
)
