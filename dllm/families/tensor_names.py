"""Tensor names of the Hugging Face Llama/Qwen layout as data: our name -> the checkpoint's names that are joined to make it."""

from __future__ import annotations

from dllm.model.decoder import DecoderConfig


def llama_sources(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Hugging Face Llama/Qwen layout: ``model.layers.<i>.self_attn.{q,k,v,o}_proj``, ``mlp.{gate,up,down}_proj``, ..."""
    out: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        out["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        out[ours + "attention_norm.weight"] = (theirs + "input_layernorm.weight",)
        out[ours + "mlp_norm.weight"] = (theirs + "post_attention_layernorm.weight",)
        for leaf in ("weight", "bias"):
            if leaf == "weight" or config.qkv_bias:
                out[ours + f"attention.qkv.{leaf}"] = tuple(theirs + f"self_attn.{p}_proj.{leaf}" for p in "qkv")
            if leaf == "weight" or config.output_bias:
                out[ours + f"attention.out.{leaf}"] = (theirs + f"self_attn.o_proj.{leaf}",)
            if leaf == "weight" or config.mlp_bias:
                out[ours + f"mlp.gate_up.{leaf}"] = tuple(theirs + f"mlp.{p}_proj.{leaf}" for p in ("gate", "up"))
                out[ours + f"mlp.down.{leaf}"] = (theirs + f"mlp.down_proj.{leaf}",)
        if config.qk_norm:
            for p in "qk":
                out[ours + f"attention.{p}_norm.weight"] = (theirs + f"self_attn.{p}_norm.weight",)
    return out


def llama_ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the Llama/Qwen layout that carry nothing new."""
    tables = tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers))
    return (*tables, *(("lm_head.weight",) if config.tie_embeddings else ()))
