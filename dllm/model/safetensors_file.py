"""Tensors in safetensors files: one file, or shards with a Hugging Face index (`NAME.safetensors.index.json`)."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

__all__ = ["load_state", "save_safetensors"]

INDEX_SUFFIX = ".safetensors.index.json"

# Room that a tensor's entry takes in a shard's header beside its name, and the header's own frame (bytes, rounded up).
ENTRY_BYTES, FRAME_BYTES = 160, 512


def load_state(path: str | Path, name: str | None = None) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU, in the dtypes and under the names that they have on disk.

    path: a `.safetensors` file, a `.safetensors.index.json` file, or a folder with one checkpoint; name: which one
    (`NAME.safetensors` or `NAME.safetensors.index.json`) where a folder holds several.

    Raises FileNotFoundError if path does not exist; ValueError, naming the file, if the folder holds no checkpoint or
    several, or if a shard is missing, truncated or damaged, or lacks a tensor that the index promises.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path must be a checkpoint folder or file: {path} does not exist")
    file = _checkpoint(path, name) if path.is_dir() else path
    if file.name.endswith(INDEX_SUFFIX):
        return _load_shards(file)
    if file.suffix != ".safetensors":
        raise ValueError(f"path must be a folder, a .safetensors file or a {INDEX_SUFFIX} file: got {file}")
    return _load_file(file)


def save_safetensors(
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    max_shard_bytes: int = 15_500_000,
    metadata: Mapping[str, str] | None = None,
    name: str = "model",
) -> list[Path]:
    """Write tensors to `folder` as `NAME.safetensors`, or as shards (`NAME-00001-of-00003.safetensors`) with an index.

    max_shard_bytes: no file is larger, header included; only a tensor that alone exceeds it has a larger file to
    itself. Views and tensors that share memory are written out in full. Every file is complete before the first one
    takes its final name, and the index comes last; then files of an earlier save under the same name are removed. After
    an error in writing the folder is as it was.

    Returns the written paths, the index (if any) last. Raises ValueError or TypeError for bad arguments, OSError if
    writing fails.
    """
    state = _checked(tensors)
    texts = _checked_metadata(metadata)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be >= 1: got {max_shard_bytes}")
    if not name or Path(name).name != name:
        raise ValueError(f"name must be a file name without folders: got {name!r}")

    shards = _split(state, max_shard_bytes, texts)
    if len(shards) == 1:
        names = [f"{name}.safetensors"]
    else:
        names = [f"{name}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    folder = Path(folder)
    created = _make_folder(folder)
    mark = f".{uuid.uuid4().hex}.tmp"
    try:
        for file_name, keys in zip(names, shards, strict=True):
            shard = {key: _plain(state[key]) for key in keys}
            _write_file(shard, folder / (file_name + mark), {"format": "pt", **texts})
        if len(shards) > 1:
            names.append(name + INDEX_SUFFIX)
            (folder / (names[-1] + mark)).write_text(_index_text(state, shards, names), encoding="utf-8")
        for file_name in names:
            (folder / (file_name + mark)).replace(folder / file_name)
    except BaseException:
        for left in folder.glob(f"*{mark}"):
            left.unlink()
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    for old in folder.iterdir():
        if old.name not in names and _belongs(old.name, name):
            old.unlink()
    return [folder / file_name for file_name in names]


def _checkpoint(folder: Path, name: str | None) -> Path:
    """The one index or file of a checkpoint in a folder."""
    if name is not None:
        found = [f for f in (folder / (name + INDEX_SUFFIX), folder / f"{name}.safetensors") if f.is_file()][:1]
        wanted = f"{name}.safetensors or {name}{INDEX_SUFFIX}"
    else:
        found = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
        stems = tuple(index.name.removesuffix(INDEX_SUFFIX) for index in found)
        found += [f for f in sorted(folder.glob("*.safetensors")) if not any(_belongs(f.name, s) for s in stems)]
        wanted = f"a .safetensors or {INDEX_SUFFIX} file"
    if not found:
        raise ValueError(f"{folder} must hold {wanted}: got {sorted(f.name for f in folder.iterdir())[:10]}")
    if len(found) > 1:
        raise ValueError(f"{folder} holds several checkpoints, name must say which: got {[f.name for f in found][:10]}")
    return found[0]


def _belongs(file_name: str, stem: str) -> bool:
    """Whether a file is part of the checkpoint called `stem`: the single file, a shard, or the index."""
    return re.fullmatch(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?", file_name) is not None


def _load_shards(index: Path) -> dict[str, Tensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for key, shard in weight_map.items():
            shards.setdefault(shard, []).append(key)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} must be JSON with a weight_map of tensor names to file names: {error!r}") from error
    state: dict[str, Tensor] = {}
    for shard, keys in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} must name files of its own folder: got {shard!r}")
        file = index.parent / shard
        if not file.is_file():
            raise ValueError(f"shard {file} is missing ({len(keys)} tensors, the first is {keys[0]})")
        found = _load_file(file)
        missing = [key for key in keys if key not in found]
        if missing:
            raise ValueError(f"shard {file} lacks {len(missing)} tensors that {index.name} promises: {missing[:5]}")
        state.update((key, found[key]) for key in keys)
    return state


def _load_file(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is not a complete safetensors file ({file.stat().st_size} bytes): {error}") from error


def _write_file(shard: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    # safetensors makes files that only their owner can read; a checkpoint gets the mode of any other new file.
    file.touch()
    mode = file.stat().st_mode
    try:
        safetensors.torch.save_file(shard, file, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
    file.chmod(mode)


def _checked(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not tensors:
        raise ValueError("tensors must hold at least one tensor: got none")
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise TypeError(f"tensors must map names to torch.Tensor: got {key!r}: {type(value).__name__}")
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"tensors must hold dense values: {key} is on {value.device} with layout {value.layout}")
    return tensors


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    texts = dict(metadata or {})
    for key, value in texts.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map str to str: got {key!r}: {value!r}")
    return texts


def _split(state: Mapping[str, Tensor], max_shard_bytes: int, metadata: dict[str, str]) -> list[list[str]]:
    """Names by shard, in the order given; a shard is closed when the next tensor would make the file too large."""
    frame = FRAME_BYTES + len(json.dumps(metadata).encode())
    shards: list[list[str]] = []
    used = 0
    for key, value in state.items():
        size = value.numel() * value.element_size() + len(json.dumps(key)) + ENTRY_BYTES
        if not shards or used + size > max_shard_bytes:
            shards.append([])
            used = frame
        shards[-1].append(key)
        used += size
    return shards


def _plain(value: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous, in memory of its own (safetensors refuses anything else)."""
    value = value.detach()
    copied = value.to("cpu").contiguous()
    return copied.clone() if copied.data_ptr() == value.data_ptr() else copied


def _index_text(state: Mapping[str, Tensor], shards: list[list[str]], names: list[str]) -> str:
    total = sum(value.numel() * value.element_size() for value in state.values())
    weight_map = {key: file_name for file_name, keys in zip(names, shards, strict=False) for key in keys}
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; returns those that were not there, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
