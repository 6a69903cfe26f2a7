"""AR models: targets of drafters, guides and judges, loaded through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dllm.families.loading import find_folder
from dllm.families.placement import resolve_device, resolve_dtype
from dllm.model.packed import pack_linears
from dllm.shipped import is_shipped, listing_shipped


def target_folder(name: str | Path, revision: str | None = None) -> Path:
    """Folder of an AR checkpoint: a shipped name, a folder or a hub id.

    Raises FileNotFoundError, naming what ships, if there is nothing at name; ValueError for the shipped name of another kind of model.
    """
    if is_shipped(name, "ar"):
        from dllm.model.weights import smollm2_folder

        return smollm2_folder()
    with listing_shipped("ar"):
        return find_folder(name, revision)


def load_target(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
) -> Any:
    """A Hugging Face causal LM in eval mode, with its tokenizer as ``.tokenizer`` (None where the folder has none).

    On a CPU its linear layers read packed weights (``dllm/model/packed.py``): a verification of a few rows costs little more than a step.

    name: "smollm2-135m", a folder or a hub id. dtype "auto": the checkpoint's own. device "auto": CUDA where there is one.
    Raises what ``target_folder`` raises.
    """
    from transformers import AutoModelForCausalLM

    folder = target_folder(name, revision)
    wanted = "auto" if dtype == "auto" else resolve_dtype(dtype)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=wanted, trust_remote_code=False)
    model = model.to(resolve_device(device)).eval().requires_grad_(False)
    pack_linears(model)
    model.tokenizer = load_tokenizer(folder)
    return model


def load_tokenizer(folder: Path) -> Any:
    """The folder's transformers tokenizer, or None if it holds no tokenizer file."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def stop_ids_of(target: Any) -> frozenset[int]:
    """The target's stop tokens: those of its generation config, as servers read them, or of its config."""
    for owner in (target.generation_config, target.config):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
