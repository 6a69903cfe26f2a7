"""Fast-dLLM v2 (Wu et al. 2025, arXiv:2509.26328): Qwen2.5 layout, block-causal, shifted laws.

A block's first token comes from the last row of the pass that stores the block before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.llama import decoder_config
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.families.tensor_names import llama_ignored, llama_sources
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.types import DecodeSpec

# A default argument of the published code, in no config.
MASK_TOKEN_ID = 151665
EOS_TOKEN_ID = 151645
BLOCK_LENGTH = 32


def fast_dllm_v2_config(config: Mapping[str, Any]) -> DecoderConfig:
    """A Fast-dLLM v2 config dict -> DecoderConfig: Qwen2.5 with QKV bias and no output bias; small sizes tie the head."""
    require(config, hidden_act="silu", use_sliding_window=False)
    kinds = set(config.get("layer_types") or ("full_attention",))
    if kinds != {"full_attention"}:
        raise ValueError(f"config layer_types must all be 'full_attention' for this family: got {sorted(kinds)}")
    return decoder_config(config, qkv_bias=True, output_bias=False)


def fast_dllm_v2_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Blocks of ``bd_size`` on the absolute grid; row i predicts token i + 1."""
    vocab_size = config["vocab_size"]
    return DecodeSpec(
        mask_token_id=mask_id(config, MASK_TOKEN_ID, vocab_size),
        eos_token_ids=eos_ids(config, (EOS_TOKEN_ID,), vocab_size),
        logits_shift=1,
        attention="block_causal",
        block_length=config.get("bd_size") or BLOCK_LENGTH,
        max_positions=config.get("max_position_embeddings", 32768),
        vocab_size=vocab_size,
        first_slot="commit_store_pass",
        confidence="processed",
        block_origin="zero",
        default_cache="block",
    )


FAMILY = Family(
    name="fast_dllm_v2",
    matches=lambda config: config.get("model_type") == "Fast_dLLM_Qwen",
    build=lambda config: Decoder(fast_dllm_v2_config(config)),
    spec=fast_dllm_v2_spec,
    sources=lambda config: llama_sources(fast_dllm_v2_config(config)),
    ignored=lambda config: llama_ignored(fast_dllm_v2_config(config)),
)
