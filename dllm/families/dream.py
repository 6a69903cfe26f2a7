"""Dream-7B (Ye et al. 2025, arXiv:2508.15487), Dream-Coder and DiffuCoder: Qwen2 layout, bidirectional, shifted laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.llama import decoder_config
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.families.tensor_names import llama_ignored, llama_sources
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.types import DecodeSpec

MASK_TOKEN_ID = 151666
EOS_TOKEN_ID = 151643
IM_END_TOKEN_ID = 151645


def dream_config(config: Mapping[str, Any]) -> DecoderConfig:
    """A Dream config dict -> DecoderConfig: Qwen2 with QKV bias and no output bias."""
    require(config, hidden_act="silu", use_sliding_window=False, use_mrope=False)
    return decoder_config(config, qkv_bias=True, output_bias=False)


def dream_sources(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Our names from Dream's, which are Qwen2's."""
    return llama_sources(dream_config(config))


def dream_ignored(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Dream's names that carry nothing new."""
    return llama_ignored(dream_config(config))


def dream_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Row i predicts token i + 1; with a cache a block's first token is committed from the full pass."""
    vocab_size = config["vocab_size"]
    return DecodeSpec(
        mask_token_id=mask_id(config, MASK_TOKEN_ID, vocab_size),
        eos_token_ids=eos_ids(config, (EOS_TOKEN_ID, IM_END_TOKEN_ID), vocab_size),
        logits_shift=1,
        attention="bidirectional",
        block_length=32,
        max_positions=config.get("max_position_embeddings", 2048),
        vocab_size=vocab_size,
        first_slot="commit_full_pass",
        confidence="processed",
        block_origin="prompt",
    )


def is_dream(config: Mapping[str, Any]) -> bool:
    """Does the config dict describe a Dream backbone (DreamOn's too)."""
    return config.get("model_type") == "Dream" or "DreamModel" in (config.get("architectures") or ())


FAMILY = Family(
    name="dream",
    matches=lambda config: is_dream(config) and "expand_token_id" not in config,
    build=lambda config: Decoder(dream_config(config)),
    spec=dream_spec,
    sources=dream_sources,
    ignored=dream_ignored,
)
