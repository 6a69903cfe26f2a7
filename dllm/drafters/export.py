"""Drafters written to folders that vLLM, SGLang and transformers load: z-lab and speculators layouts for DFlash,
AngelSpec's for DFly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.config import DraftConfig, Layout
from dllm.drafters.drafter import Drafter
from dllm.drafters.loading import published_names
from dllm.drafters.probe import PROBE_KEY, record_probe
from dllm.model.weights import save_safetensors

LAYOUTS_OF_KIND: dict[str, tuple[Layout, ...]] = {
    "dflash": ("z-lab", "speculators"),
    "dflash2": ("z-lab", "speculators"),
    "dfly": ("angelspec",),
}
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors under published names.

    layout: None = the first of ``LAYOUTS_OF_KIND``; dtype: of the weights (None: as they are; engines serve bf16);
    ``layer_fusion_weights`` stay fp32. metadata: noted under the key ``dllm``, which engines ignore, beside the
    target's name and fingerprint and a probe that ``from_pretrained`` answers again.

    Raises ValueError for a layout that cannot hold this drafter.
    """
    config = published_config(drafter.config, drafter.target.num_layers, drafter.target.name, layout)
    config["dtype"] = str(dtype or drafter.dtype).removeprefix("torch.")
    config["dllm"] = {
        **drafter.config.metadata,
        "target": drafter.target.name,
        "target_fingerprint": drafter.target.fingerprint(),
        PROBE_KEY: record_probe(drafter),
        **(metadata or {}),
    }
    folder = Path(folder)
    save_safetensors(published_tensors(drafter, dtype), folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def published_tensors(drafter: Drafter, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The drafter's tensors under published names, fused ones split again."""
    body = drafter.config.body
    widths = {
        3: [body.num_heads * body.head_dim] + [body.num_kv_heads * body.head_dim] * 2,
        2: [body.intermediate_size] * 2,
    }
    state = drafter.state_dict()
    out: dict[str, Tensor] = {}
    for ours, theirs in published_names(drafter).items():
        value = state[ours]
        if dtype is not None and value.is_floating_point() and ours != "layer_fusion_weights":
            value = value.to(dtype)
        parts = [value] if len(theirs) == 1 else value.split(widths[len(theirs)])
        out.update(zip(theirs, parts, strict=True))
    if drafter.d2t is not None:
        t2d = torch.zeros(body.vocab_size, dtype=torch.bool)
        t2d[drafter.vocab_map().cpu()] = True
        out["t2d"] = t2d
    return out


def published_config(
    config: DraftConfig, num_target_layers: int, target_name: str = "", layout: Layout | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a drafter in a layout, without notes about its target."""
    allowed = LAYOUTS_OF_KIND[config.kind]
    layout = allowed[0] if layout is None else layout
    if layout not in allowed:
        raise ValueError(f"layout must be one of {list(allowed)} for a {config.kind}: got {layout!r}")
    if layout == "speculators":
        return _speculators(config, target_name)
    ids, windows = list(config.target_layer_ids), [w for w in config.windows if w is not None]
    shared = {"block_size": config.block_length, "mask_token_id": config.mask_token_id, "target_layer_ids": ids}
    out = {**_body(config), **shared, "target_hidden_size": config.target_hidden_size}
    causal = _causality(config)
    if causal is not None:
        out["is_causal"] = causal
    if config.kind == "dfly":
        out.update(
            architectures=["Qwen3DFlyModel"],
            num_target_layers=len(ids),
            target_num_hidden_layers=num_target_layers,
            enable_hidden_correction=config.correction_width is not None,
            hidden_correction_intermediate_size=config.correction_width,
        )
        return out | _scales(config)
    inner: dict[str, Any] = {**shared, **_scales(config)}
    if causal is not None:
        inner["causal"] = causal
    if windows:
        inner.update(use_swa=True, swa_window_size=windows[0])
    if config.kind == "dflash2":
        inner.update({name: getattr(config, name) for name in _SELECTOR_KEYS})
    out.update(
        architectures=["DFlash2DraftModel" if config.kind == "dflash2" else "DFlashDraftModel"],
        num_target_layers=num_target_layers,
        dflash_config=inner,
    )
    if config.draft_vocab_size is not None:
        out["draft_vocab_size"] = config.draft_vocab_size
    return out


def _speculators(config: DraftConfig, target_name: str) -> dict[str, Any]:
    sliding = {c for w, c in zip(config.windows, config.causal, strict=True) if w is not None}
    full = {c for w, c in zip(config.windows, config.causal, strict=True) if w is None}
    if True in full or len(sliding) > 1:
        raise ValueError(
            "is_causal must be false in full layers and one value in sliding ones for the speculators layout"
        )
    if _scales(config):
        raise ValueError(f"layout speculators has no key for {sorted(_scales(config))}: they must be neutral")
    body = _body(config)
    body.pop("dtype", None)
    out: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if config.kind == "dflash2" else "DFlashDraftModel"],
        "speculators_model_type": config.kind,
        "transformer_layer_config": body,
        "draft_vocab_size": config.draft_vocab_size or config.body.vocab_size,
        "block_size": config.block_length,
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sliding_window_non_causal": True not in sliding,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_length - 1}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }
    if config.kind == "dflash2":
        out.update({name: getattr(config, name) for name in _SELECTOR_KEYS})
    return out


def _body(config: DraftConfig) -> dict[str, Any]:
    """The Qwen3 fields."""
    body, windows = config.body, [w for w in config.windows if w is not None]
    if len(set(windows)) > 1:
        raise ValueError(f"sliding_window must be one number in a published config: got {config.windows}")
    return {
        "model_type": "qwen3",
        "vocab_size": body.vocab_size,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": body.rms_norm_eps,
        "rope_theta": body.rope_theta,
        "rope_scaling": None if body.rope_scaling is None else dict(body.rope_scaling),
        "max_position_embeddings": body.max_positions,
        "attention_bias": body.qkv_bias,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "max_window_layers": body.num_layers,
    }


def _causality(config: DraftConfig) -> bool | None:
    """One explicit flag, or None where the layers follow the rule without one (sliding ones causal, full ones not)."""
    if len(set(config.causal)) == 1:
        return config.causal[0]
    if all(c == (w is not None) for w, c in zip(config.windows, config.causal, strict=True)):
        return None
    raise ValueError(
        f"is_causal cannot say which of the layers are causal: got {config.causal} with windows {config.windows}"
    )


def _scales(config: DraftConfig) -> dict[str, float]:
    """Scales that are not neutral."""
    out: dict[str, float] = {}
    if config.input_embedding_scale != 1:
        out["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1:
        out["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        out["final_logit_softcapping"] = config.final_logit_softcapping
    return out
