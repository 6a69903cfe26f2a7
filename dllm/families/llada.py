"""LLaDA-8B Base, Instruct and 1.5 (Nie et al. 2025, arXiv:2502.09992): OLMo names, bidirectional, no shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.types import DecodeSpec

MASK_TOKEN_ID = 126336
EOS_TOKEN_ID = 126081
EOT_TOKEN_ID = 126348


def llada_config(config: Mapping[str, Any]) -> DecoderConfig:
    """A LLaDA config dict (OLMo's field names) -> DecoderConfig; raises ValueError for OLMo options not computed here."""
    require(
        config,
        block_type="llama",
        layer_norm_type="rms",
        activation_type="silu",
        rope=True,
        alibi=False,
        attention_layer_norm=False,
        include_bias=False,
        bias_for_layer_norm=False,
        input_emb_norm=False,
        scale_logits=False,
    )
    heads = config["n_heads"]
    kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
    return DecoderConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        hidden_size=config["d_model"],
        intermediate_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        num_layers=config["n_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config["d_model"] // heads,
        max_positions=config["max_sequence_length"],
        rope_theta=float(config.get("rope_theta", 10000.0)),
        rms_norm_eps=config.get("rms_norm_eps", 1e-5),
        qkv_bias=bool(config.get("include_qkv_bias")),
        tie_embeddings=bool(config.get("weight_tying")),
    )


def llada_sources(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Our names from LLaDA's; ``ff_out`` is the head outside the blocks and the MLP's output inside them."""
    shape = llada_config(config)
    top = "model.transformer."
    out: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": (top + "wte.weight",),
        "norm.weight": (top + "ln_f.weight",),
    }
    if not shape.tie_embeddings:
        out["lm_head.weight"] = (top + "ff_out.weight",)
    for i in range(shape.num_layers):
        theirs, ours = f"{top}blocks.{i}.", f"layers.{i}."
        out[ours + "attention_norm.weight"] = (theirs + "attn_norm.weight",)
        out[ours + "mlp_norm.weight"] = (theirs + "ff_norm.weight",)
        for leaf in ("weight", "bias") if shape.qkv_bias else ("weight",):
            out[ours + f"attention.qkv.{leaf}"] = tuple(theirs + f"{p}_proj.{leaf}" for p in "qkv")
        out[ours + "attention.out.weight"] = (theirs + "attn_out.weight",)
        out[ours + "mlp.gate_up.weight"] = (theirs + "ff_proj.weight", theirs + "up_proj.weight")
        out[ours + "mlp.down.weight"] = (theirs + "ff_out.weight",)
    return out


def llada_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """Same-position laws, blocks counted from the prompt's end; ends at end-of-text or end-of-turn."""
    vocab_size = llada_config(config).vocab_size
    return DecodeSpec(
        mask_token_id=mask_id(config, MASK_TOKEN_ID, vocab_size),
        eos_token_ids=eos_ids(config, (EOS_TOKEN_ID, EOT_TOKEN_ID), vocab_size),
        logits_shift=0,
        attention="bidirectional",
        block_length=32,
        max_positions=config["max_sequence_length"],
        vocab_size=vocab_size,
        first_slot="free",
        confidence="raw",
        block_origin="prompt",
    )


FAMILY = Family(
    name="llada",
    matches=lambda config: config.get("model_type") == "llada",
    build=lambda config: Decoder(llada_config(config)),
    spec=llada_spec,
    sources=llada_sources,
    ignored=lambda config: ("model.transformer.ff_out.weight",) if config.get("weight_tying") else (),
)
