"""LLaDA2.0 and 2.1 (Ant Group 2025, arXiv:2512.15745): mixture of experts, block-causal, no shift.

2.1 has the same tensors and config; it adds a decoding rule (editing of tokens already fixed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.llama import decoder_config
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.model.moe import MoEConfig
from dllm.types import DecodeSpec

MASK_TOKEN_ID = 156895
EOS_TOKEN_ID = 156892
BLOCK_LENGTH = 32


def llada2_config(config: Mapping[str, Any]) -> DecoderConfig:
    """An LLaDA2 config dict -> DecoderConfig with experts after the first dense layers and partial rotation."""
    require(
        config,
        hidden_act="silu",
        score_function="sigmoid",
        use_qk_norm=True,
        use_rmsnorm=True,
        norm_head=False,
        norm_softmax=False,
        use_sliding_window=False,
        moe_router_enable_expert_bias=True,
        using_split_qkv_in_self_attention=False,
    )
    moe = MoEConfig(
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        num_shared=config.get("num_shared_experts") or 0,
        num_groups=config.get("n_group") or 1,
        groups_per_token=config.get("topk_group") or 1,
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        normalize=bool(config.get("norm_topk_prob", True)),
        first_dense=config.get("first_k_dense_replace", 0),
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return decoder_config(
        config,
        qk_norm=True,
        qkv_bias=bool(config.get("use_qkv_bias") or config.get("use_bias")),
        output_bias=bool(config.get("use_bias")),
        rotary_dim=int(head_dim * config.get("partial_rotary_factor", 1.0)),
        moe=moe,
    )


def llada2_sources(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Our names from LLaDA2's; query_key_value is already fused in the order q, k, v."""
    shape = llada2_config(config)
    out: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("model.word_embeddings.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not shape.tie_embeddings:
        out["lm_head.weight"] = ("lm_head.weight",)
    for i in range(shape.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        attention, mlp = theirs + "attention.", theirs + "mlp."
        out[ours + "attention_norm.weight"] = (theirs + "input_layernorm.weight",)
        out[ours + "mlp_norm.weight"] = (theirs + "post_attention_layernorm.weight",)
        for leaf in ("weight", "bias") if shape.qkv_bias else ("weight",):
            out[ours + f"attention.qkv.{leaf}"] = (attention + f"query_key_value.{leaf}",)
        for leaf in ("weight", "bias") if shape.output_bias else ("weight",):
            out[ours + f"attention.out.{leaf}"] = (attention + f"dense.{leaf}",)
        out[ours + "attention.q_norm.weight"] = (attention + "query_layernorm.weight",)
        out[ours + "attention.k_norm.weight"] = (attention + "key_layernorm.weight",)
        if not shape.moe.is_sparse(i):
            out[ours + "mlp.gate_up.weight"] = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
            out[ours + "mlp.down.weight"] = (mlp + "down_proj.weight",)
            continue
        out[ours + "mlp.router.weight"] = (mlp + "gate.weight",)
        out[ours + "mlp.expert_bias"] = (mlp + "gate.expert_bias",)
        experts = [f"{mlp}experts.{e}." for e in range(shape.moe.num_experts)]
        out[ours + "mlp.experts_gate_up"] = tuple(e + f"{p}_proj.weight" for e in experts for p in ("gate", "up"))
        out[ours + "mlp.experts_down"] = tuple(e + "down_proj.weight" for e in experts)
        if shape.moe.num_shared:
            shared = mlp + "shared_experts."
            out[ours + "mlp.shared.gate_up.weight"] = (shared + "gate_proj.weight", shared + "up_proj.weight")
            out[ours + "mlp.shared.down.weight"] = (shared + "down_proj.weight",)
    return out


def llada2_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Blocks on the absolute grid. The config names neither mask nor eos; its padding token is the eos."""
    vocab_size = config["vocab_size"]
    stops = (config["pad_token_id"],) if config.get("pad_token_id") is not None else ()
    return DecodeSpec(
        mask_token_id=mask_id(config, MASK_TOKEN_ID, vocab_size),
        eos_token_ids=eos_ids(config, (*stops, EOS_TOKEN_ID), vocab_size),
        logits_shift=0,
        attention="block_causal",
        block_length=BLOCK_LENGTH,
        max_positions=config["max_position_embeddings"],
        vocab_size=vocab_size,
        first_slot="free",
        confidence="processed",
        block_origin="zero",
        default_threshold=0.95,
        default_cache="block",
    )


FAMILY = Family(
    name="llada2",
    matches=lambda config: config.get("model_type") == "llada2_moe",
    build=lambda config: Decoder(llada2_config(config)),
    spec=llada2_spec,
    sources=llada2_sources,
    ignored=lambda config: ("lm_head.weight",) if config.get("tie_word_embeddings") else (),
)
