"""SDAR dense (Cheng et al. 2025, arXiv:2510.06303), also TraDo: Qwen3 layout, block-causal, no shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.llama import decoder_config
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.families.tensor_names import llama_ignored, llama_sources
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.types import DecodeSpec

MASK_TOKEN_ID = 151669
STOP_TOKEN_IDS = (151645, 151643)
BLOCK_LENGTH = 4


def sdar_config(config: Mapping[str, Any]) -> DecoderConfig:
    """An SDAR config dict -> DecoderConfig: Qwen3 with QK-norm and a head width of its own."""
    require(config, hidden_act="silu", use_sliding_window=False)
    return decoder_config(config, qk_norm=True)


def sdar_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Blocks on the absolute grid; early configs lack block_size and mask_token_id, so that both have defaults."""
    vocab_size = config["vocab_size"]
    return DecodeSpec(
        mask_token_id=mask_id(config, MASK_TOKEN_ID, vocab_size),
        eos_token_ids=eos_ids(config, STOP_TOKEN_IDS, vocab_size),
        logits_shift=0,
        attention="block_causal",
        block_length=config.get("block_size") or BLOCK_LENGTH,
        max_positions=config.get("max_position_embeddings", 32768),
        vocab_size=vocab_size,
        first_slot="free",
        confidence="processed",
        block_origin="zero",
        default_threshold=0.85,
        default_cache="block",
    )


FAMILY = Family(
    name="sdar",
    matches=lambda config: config.get("model_type") == "sdar",
    build=lambda config: Decoder(sdar_config(config)),
    spec=sdar_spec,
    sources=lambda config: llama_sources(sdar_config(config)),
    ignored=lambda config: llama_ignored(sdar_config(config)),
)
