"""The AR checkpoint that is adapted: its decoder, its stop tokens, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dllm.families.loading import find_folder, load_checkpoint
from dllm.model.decoder import Decoder
from dllm.model.weights import smollm2_folder
from dllm.shipped import is_shipped
from dllm.types import DecodeSpec

SHIPPED_BASE = "smollm2-135m"


@dataclass(frozen=True, eq=False)
class Base:
    """name as given; decoder in evaluation mode, without gradients; spec: the AR model's own, with its stop tokens."""

    name: str
    decoder: Decoder
    spec: DecodeSpec


def base_source(name: str) -> str | Path:
    """The folder of a shipped name; any other name is a folder or a hub id and comes back as it is.

    Raises ValueError for a shipped name of another kind.
    """
    return smollm2_folder() if is_shipped(name, "ar") else name


def load_base(name: str, device: str = "auto", dtype: torch.dtype | None = None) -> Base:
    """An AR decoder of a Llama- or Qwen-type checkpoint. dtype None: bfloat16 on CUDA, float32 elsewhere.

    Raises ValueError if the checkpoint is no AR model, and what ``load_checkpoint`` raises.
    """
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    module, spec, _, _ = load_checkpoint(base_source(name), dtype=kind, device=where)
    if spec.attention != "causal" or not isinstance(module, Decoder):
        raise ValueError(f"base must be an autoregressive model: {name!r} has {spec.attention} attention")
    return Base(name, module, spec)


def load_tokenizer(name: str) -> Any:
    """The transformers tokenizer of a base."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(find_folder(base_source(name)))
