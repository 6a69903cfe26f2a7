"""MDLM (Sahoo et al. 2024, arXiv:2406.07524): a diffusion transformer over the GPT-2 vocabulary plus one mask token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm.families import Family
from dllm.families.special_ids import eos_ids, mask_id, require
from dllm.model.dit import DiT, DiTConfig
from dllm.types import DecodeSpec

GPT2_EOS_TOKEN_ID = 50256


def dit_config(config: Mapping[str, Any]) -> DiTConfig:
    """An MDLM or BD3-LM config dict -> DiTConfig."""
    require(config, time_conditioning=False, causal=False)
    return DiTConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_dim"],
        num_layers=config["n_blocks"],
        num_heads=config["n_heads"],
        conditioning_size=config["cond_dim"],
        max_positions=config["model_length"],
        adaptive=bool(config.get("adaln", True)),
    )


def dit_sources(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Our names from ``backbone.*``."""
    shape = dit_config(config)
    top = "backbone."
    out: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": (top + "vocab_embed.embedding",),
        "norm.weight": (top + "output_layer.norm_final.weight",),
    }
    pairs = {"lm_head": top + "output_layer.linear"}
    if shape.adaptive:
        pairs["noise_level.inner"] = top + "sigma_map.mlp.0"
        pairs["noise_level.outer"] = top + "sigma_map.mlp.2"
        pairs["norm_modulation"] = top + "output_layer.adaLN_modulation"
    for i in range(shape.num_layers):
        theirs, ours = f"{top}blocks.{i}.", f"layers.{i}."
        out[ours + "attention_norm.weight"] = (theirs + "norm1.weight",)
        out[ours + "mlp_norm.weight"] = (theirs + "norm2.weight",)
        out[ours + "qkv.weight"] = (theirs + "attn_qkv.weight",)
        out[ours + "out.weight"] = (theirs + "attn_out.weight",)
        pairs[ours + "mlp_up"], pairs[ours + "mlp_down"] = theirs + "mlp.0", theirs + "mlp.2"
        if shape.adaptive:
            pairs[ours + "modulation"] = theirs + "adaLN_modulation"
    for ours, theirs in pairs.items():
        for leaf in ("weight", "bias"):
            out[f"{ours}.{leaf}"] = (f"{theirs}.{leaf}",)
    return out


def dit_ignored(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A stored table of frequencies, and bounds that only training reads."""
    return ("backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")


def mdlm_spec(config: Mapping[str, Any]) -> DecodeSpec:
    """The whole window is one block; the mask is the last id of the vocabulary."""
    vocab_size = config["vocab_size"]
    return DecodeSpec(
        mask_token_id=mask_id(config, vocab_size - 1, vocab_size),
        eos_token_ids=eos_ids(config, (GPT2_EOS_TOKEN_ID,), vocab_size),
        logits_shift=0,
        attention="bidirectional",
        block_length=config["model_length"],
        max_positions=config["model_length"],
        vocab_size=vocab_size,
        first_slot="free",
        confidence="raw",
        block_origin="prompt",
    )


FAMILY = Family(
    name="mdlm",
    matches=lambda config: config.get("model_type") == "mdlm",
    build=lambda config: DiT(dit_config(config)),
    spec=mdlm_spec,
    sources=dit_sources,
    ignored=dit_ignored,
)
