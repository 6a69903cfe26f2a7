"""One loader for every family: a folder or a hub id in the checkpoint's own layout -> module, DecodeSpec, config.

The module is built on the meta device and filled from the files (``shards.py``). No remote code is run: only json and
safetensors are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dllm.families import Family, find_family
from dllm.families.full_forward import raw_logits
from dllm.families.placement import resolve_device, resolve_device_map, resolve_dtype, single_device, spread
from dllm.families.shards import fill, main_dtype, read_headers
from dllm.families.special_ids import eos_ids
from dllm.model.decoder import Decoder, inverse_frequencies
from dllm.types import DecodeSpec

__all__ = ["CheckpointNotFoundError", "load_checkpoint", "override_spec", "raw_logits"]

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
INDEX_NAME = "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class CheckpointNotFoundError(FileNotFoundError, ValueError):
    """No checkpoint at this path or hub id, or the hub cannot be reached; the message says what to do."""


def load_checkpoint(
    path_or_hub_id: str | Path,
    family: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    revision: str | None = None,
    spec_overrides: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, DecodeSpec, dict[str, Any], Path]:
    """Read a checkpoint: (module in eval mode without gradients, DecodeSpec, config dict, folder).

    path_or_hub_id: a folder with config.json and safetensors (one file, or shards with their index), or a hub id,
    downloaded at ``revision`` by huggingface_hub. family: a registered name, or None to recognise it from the config.
    dtype: "auto" = the one that most of the checkpoint's numbers have. device: "auto" = CUDA where there is one.
    device_map: see ``placement.resolve_device_map``; not together with a device. spec_overrides: DecodeSpec fields to
    replace, for ids that a config lacks.

    Raises CheckpointNotFoundError (a FileNotFoundError and a ValueError) if there is nothing to read, ValueError for
    a damaged file, an unknown family, a missing, unknown or misshapen tensor, an unknown DecodeSpec field.
    """
    folder = find_folder(path_or_hub_id, revision)
    config = read_json(folder / CONFIG_NAME)
    chosen = find_family(config, family)
    try:
        spec = override_spec(_stops(chosen.spec(config), folder), spec_overrides)
        module = _empty_module(chosen, config) if chosen.load is None else None
    except KeyError as error:
        raise ValueError(f"{folder / CONFIG_NAME} must have {error} for family {chosen.name!r}") from error
    entries = read_headers(shard_files(folder))
    wanted = main_dtype(entries) if dtype == "auto" else resolve_dtype(dtype)
    if device_map is not None and device != "auto":
        raise ValueError(f"give device or device_map, not both: got {device!r} and {device_map!r}")
    target = resolve_device(device) if device_map is None else device_map
    if module is not None:
        assert chosen.sources is not None
        placement = resolve_device_map(module, target)
        try:
            fill(module, chosen.sources(config), chosen.ignored(config), entries, wanted, placement)
        except ValueError as error:
            raise ValueError(f"{folder} as family {chosen.name!r}: {error}") from error
        restore_buffers(module, placement)
    else:
        assert chosen.load is not None
        module = chosen.load(folder, config, wanted, single_device(target))
    return module.eval().requires_grad_(False), spec, config, folder


def _stops(spec: DecodeSpec, folder: Path) -> DecodeSpec:
    """``spec`` with the stop ids of generation_config.json, where there is one, added to its own."""
    path = folder / GENERATION_NAME
    if not path.is_file():
        return spec
    extra = eos_ids(read_json(path), (), spec.vocab_size)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + extra)))


def override_spec(spec: DecodeSpec, overrides: Mapping[str, Any] | None) -> DecodeSpec:
    """``spec`` with some fields replaced; raises ValueError naming the accepted fields for an unknown one."""
    if not overrides:
        return spec
    known = [f.name for f in fields(DecodeSpec)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"spec_overrides must name fields of DecodeSpec ({', '.join(known)}): got {unknown}")
    values = dict(overrides)
    if isinstance(values.get("eos_token_ids"), (int, list)):
        eos = values["eos_token_ids"]
        values["eos_token_ids"] = (eos,) if isinstance(eos, int) else tuple(eos)
    return replace(spec, **values)


def find_folder(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (json, safetensors and tokenizer files only)."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"path_or_hub_id must be a folder or a hub id: {path} is a file")
    name = str(path_or_hub_id)
    if isinstance(path_or_hub_id, Path) or not _HUB_ID.fullmatch(name):
        raise CheckpointNotFoundError(f"no such folder: {name!r} (and it is no hub id such as 'owner/model')")
    return _download(name, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    what = f"hub id {hub_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        raise ValueError(f"path_or_hub_id must be a folder or a hub id: got {hub_id!r} ({error})") from error
    except HfHubHTTPError as error:
        raise CheckpointNotFoundError(f"{what} cannot be downloaded: {error}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointNotFoundError(
            f"{what} is neither a folder here nor in the local hub cache, and the hub cannot be reached (offline, or "
            f"HF_HUB_OFFLINE=1). Download it where there is a network (`hf download {hub_id}`), then set HF_HOME to "
            "that cache or pass the folder's path"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ValueError naming the file if it is missing, damaged or not an object."""
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path} is missing: a checkpoint folder holds {CONFIG_NAME} and safetensors files"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object: got {type(value).__name__}")
    return value


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint in reading order; raises ValueError naming a listed shard that is gone."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{index} must have a weight_map: got {names!r}")
        files = [folder / name for name in sorted(set(names.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointNotFoundError(f"{file} is missing: {index.name} lists it")
        return files
    files = sorted(folder.glob("*.safetensors"))
    preferred = [file for file in files if file.name == "model.safetensors"]
    if len(files) > 1 and not preferred:
        raise ValueError(
            f"{folder} has {len(files)} safetensors files and no {INDEX_NAME} to say which belong together"
        )
    if not files:
        raise CheckpointNotFoundError(
            f"{folder} has no safetensors file (pickled weights are not read; convert them first)"
        )
    return preferred or files


def _empty_module(family: Family, config: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return family.build(config)


def restore_buffers(module: nn.Module, placement: Mapping[str, torch.device]) -> None:
    """Compute the buffers that no checkpoint stores and the meta device left empty; spread layers over devices.

    placement: devices by module name as ``resolve_device_map`` gives them; "" is where inputs, heads and buffers are. Mutates module;
    no parameter or buffer may be left on the meta device.
    """
    home = placement[""]
    for part in module.modules():
        if isinstance(part, Decoder):
            part.inv_freq = inverse_frequencies(part.config).to(home)
        elif callable(getattr(part, "reset_buffers", None)):
            part.reset_buffers(home)  # type: ignore[operator]
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    assert not left, f"left on the meta device: {left}"
    spread(module, placement)
