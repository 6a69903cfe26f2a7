"""GGUF files of Llama-type models, dequantised and renamed to Hugging Face's names.

GGUF stores each head's query and key rows for interleaved rotary pairs (0, 1), (2, 3), ..., Hugging Face for halves (0,
D/2), (1, D/2 + 1), ...; the rows are put back here. Dequantisation itself is the `gguf` package's (every ggml type that
it knows).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

__all__ = ["read_gguf"]

# What reading a truncated or damaged file raises inside the gguf package and numpy.
DAMAGED = (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError, struct.error, MemoryError)

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(
    path: str | Path, dtype: torch.dtype = torch.float32, on_tensor: Callable[[int, int], None] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A GGUF file -> (config.json fields of a LlamaForCausalLM, its tensors under Hugging Face names).

    dtype: of all tensors returned (dequantised in fp32, then rounded). A tied head is left out, as in the file.
    on_tensor is called with (tensors done, tensors in all) after each tensor.

    Raises FileNotFoundError if there is no such file, ImportError without the `gguf` package, ValueError, naming the
    file, if it is damaged or holds something other than a plain Llama, TypeError if dtype is not a floating one.
    """
    import gguf

    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating torch.dtype: got {dtype}")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must be a GGUF file: {path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
        # Not the vocabulary: half of a second for what the tokenizer's own converter reads anyway.
        fields = {key: f.contents() for key, f in reader.fields.items() if f.types[:1] != [gguf.GGUFValueType.ARRAY]}
        stored = list(reader.tensors)
    except DAMAGED as error:
        raise ValueError(f"{path} is not a complete GGUF file ({path.stat().st_size} bytes): {error}") from error

    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in stored}
    config = _config(path, fields, shapes)
    names = {tensor.name: _hugging_face_name(path, tensor.name) for tensor in stored}
    _check_shapes(path, config, {names[stored_name]: shape for stored_name, shape in shapes.items()})
    tensors: dict[str, Tensor] = {}
    for done, tensor in enumerate(stored, 1):
        name = names[tensor.name]
        try:
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{path}: {tensor.name} has a type that gguf cannot read: {error}") from error
        weight = torch.from_numpy(values.reshape(shapes[tensor.name]))
        if ".q_proj." in name:
            weight = unpermute(weight, config["num_attention_heads"])
        elif ".k_proj." in name:
            weight = unpermute(weight, config["num_key_value_heads"])
        tensors[name] = weight.to(dtype).contiguous()
        if on_tensor is not None:
            on_tensor(done, len(stored))
    return config, tensors


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows [heads * D, ...] (or a bias [heads * D]) from interleaved rotary pairs to halves."""
    return rearrange(weight, "(h half pair) ... -> (h pair half) ...", h=num_heads, pair=2)


def _config(path: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the file says under Hugging Face's field names. Raises ValueError for what a plain Llama does not have."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: general.architecture must be llama: got {architecture!r}")
    if fields.get("llama.rope.scaling.type", "none") != "none" or fields.get("llama.expert_count", 0):
        raise ValueError(
            f"{path}: rope scaling and experts are not supported in GGUF files: use the safetensors release"
        )
    try:
        hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
        head_dim = fields.get("llama.attention.key_length", hidden // heads)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "vocab_size": shapes["token_embd.weight"][0],
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": _short(fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short(fields.get("llama.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        }
    except KeyError as error:
        raise ValueError(f"{path} lacks the field or tensor {error}") from error
    rotated = fields.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{path}: llama.rope.dimension_count must equal the head width {head_dim}: got {rotated}")
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if value is not None:
            config[f"{ours}_token_id"] = value
    return config


def _short(value: float) -> float:
    """A field stored in fp32, as the shortest decimal that rounds to it: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _hugging_face_name(path: Path, name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is not None and match[2] in LAYER_NAMES and not (match[3] == "bias" and match[2].endswith("norm")):
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    raise ValueError(f"{path}: tensor {name!r} has no place in a LlamaForCausalLM")


def _check_shapes(path: Path, config: dict[str, Any], found: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError if a weight is missing, or if a shape disagrees with the fields (biases: with their weight)."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        expected |= {layer + f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        expected |= {layer + f"self_attn.{p}_proj.weight": (keys, hidden) for p in "kv"}
        expected |= {layer + f"mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        expected[layer + "self_attn.q_proj.weight"] = (queries, hidden)
        expected[layer + "self_attn.o_proj.weight"] = (hidden, queries)
        expected[layer + "mlp.down_proj.weight"] = (hidden, inner)
    missing = sorted(set(expected) - set(found))
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} tensors: {missing[:5]}")
    for name, shape in found.items():
        wanted = expected.get(name, expected.get(name.removesuffix("bias") + "weight", ())[:1])
        if shape != wanted:
            raise ValueError(f"{path}: {name} must have shape {wanted}: got {shape}")
