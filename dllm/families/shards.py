"""Fill a module on the meta device from safetensors files, one layer's tensors at a time, straight into their place.

Names and shapes are read from the headers first, so that everything that does not fit is reported before a weight is read.
Host memory then holds the weights placed so far and the mapped pages of one layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dllm.families import Sources
from dllm.families.placement import device_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """Where a tensor stands: its file, its shape, and its dtype as safetensors writes it."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(shards: Collection[Path]) -> dict[str, Entry]:
    """Every tensor of some files by name; raises ValueError for a damaged file or a name that stands in two."""
    entries: dict[str, Entry] = {}
    for shard in shards:
        with _open(shard) as handle:
            for name in handle.keys():  # noqa: SIM118 - the handle is no dict
                part = handle.get_slice(name)
                if name in entries:
                    raise ValueError(f"tensor {name!r} must stand in one file: got {entries[name].shard} and {shard}")
                entries[name] = Entry(shard, tuple(part.get_shape()), part.get_dtype())
    return entries


def main_dtype(entries: Mapping[str, Entry]) -> torch.dtype:
    """The floating dtype that most of a checkpoint's numbers have."""
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        if entry.dtype in _DTYPES:
            sizes[entry.dtype] += prod(entry.shape)
    if not sizes:
        raise ValueError(f"a checkpoint must hold tensors of {', '.join(_DTYPES)}: got none")
    return _DTYPES[sizes.most_common(1)[0][0]]


def fill(
    module: nn.Module,
    sources: Sources,
    ignored: Collection[str],
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    placement: Mapping[str, torch.device],
) -> None:
    """Give every parameter and stored buffer of ``module`` its tensor; mutates it.

    sources: our name -> names in ``entries``, joined along dim 0 (of the tensor with its leading dims flattened, where
    ours has more of them); every name has to be used or ignored. placement: module prefix -> device. Floating tensors
    become ``dtype``, except those that their owner lists in ``fp32_names``. Raises ValueError naming what does not fit.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert expected.keys() == sources.keys(), f"name map and module differ in {expected.keys() ^ sources.keys()}"
    _check_names({name for names in sources.values() for name in names}, entries.keys() - set(ignored))
    offsets: dict[str, tuple[str, int]] = {}
    for ours, theirs in sources.items():
        _check_shapes(expected[ours], theirs, entries)
        row = 0
        for name in theirs:
            offsets[name] = (ours, row)
            row += entries[name].shape[0] if entries[name].shape else 1
    made: dict[str, Tensor] = {}
    for name, tensor in _tensors(offsets, entries):
        ours, row = offsets[name]
        if ours not in made:
            made[ours] = _allocate(module, ours, dtype, device_of(ours, placement))
        rows = made[ours].view(-1, *tensor.shape[1:])
        rows[row : row + tensor.shape[0]].copy_(tensor)


def _check_names(wanted: set[str], found: set[str]) -> None:
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    parts = [f"{len(n)} {what}: {n[:8]}" for what, n in (("missing", missing), ("unknown", unknown)) if n]
    if parts:
        raise ValueError(f"tensors do not fit the config: {'; '.join(parts)}")


def _check_shapes(wanted: tuple[int, ...], theirs: tuple[str, ...], entries: Mapping[str, Entry]) -> None:
    shapes = [entries[name].shape for name in theirs]
    tail = shapes[0][1:]
    fits = all(shape[1:] == tail for shape in shapes) and sum(map(prod, shapes)) == prod(wanted)
    if len(theirs) == 1 and len(shapes[0]) == len(wanted):
        fits = fits and shapes[0] == wanted
    if not fits or tail != wanted[len(wanted) - len(tail) :]:
        names = theirs[0] if len(theirs) == 1 else f"{theirs[0]} .. {theirs[-1]} ({len(theirs)} joined)"
        got = ", ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"tensor {names} in {entries[theirs[0]].shard} must have shape {wanted}: got {got}")


def _allocate(module: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor in the place of a meta one."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    old = getattr(owner, leaf)
    keep = leaf in getattr(owner, "fp32_names", ())
    target = torch.float32 if keep else dtype if old.is_floating_point() else old.dtype
    value = torch.empty(old.shape, dtype=target, device=device)
    setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value)
    return value


def _tensors(names: Collection[str], entries: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """Tensors file by file and layer by layer; a file is mapped anew for each layer, so that pages already read are dropped."""
    groups: dict[tuple[Path, str], list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault((entries[name].shard, layer.group() if layer else name), []).append(name)
    for (shard, _), members in sorted(groups.items()):
        with _open(shard) as handle:
            for name in members:
                yield name, handle.get_tensor(name)


def _open(shard: Path) -> Any:
    try:
        return safe_open(str(shard), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{shard} must be a whole safetensors file: {error}") from error
