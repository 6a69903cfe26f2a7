"""Where weights go: dtype and device by name, and layers spread over several devices.

A spread decoder keeps embedding, norm, head, masks and the key-value store on its home device; a layer on another
device gets its inputs moved there and gives its outputs back at home. That fits models larger than one device; it
does not make them faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_NAMES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype from itself or its torch name."""
    if isinstance(dtype, torch.dtype) and dtype in _NAMES.values():
        return dtype
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in _NAMES:
        return _NAMES[dtype.removeprefix("torch.")]
    raise ValueError(f"dtype must be 'auto' or one of {', '.join(_NAMES)}: got {dtype!r}")


def resolve_device(device: str | torch.device) -> torch.device:
    """A device from its name; "auto" is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto' or a torch device: got {device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must exist on this machine: got {device!r} and CUDA is not available")
    if chosen.type == "cuda" and chosen.index is None:
        # A tensor says cuda:0, never cuda: without the index its device would look like another one.
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def resolve_device_map(
    module: nn.Module, device_map: str | torch.device | Mapping[str, Any]
) -> dict[str, torch.device]:
    """Module prefix -> device, complete for ``module``; the longest prefix wins, "" is the rest.

    A device, or its name: everything there. "balanced" (or "auto", as elsewhere): layers in equal parts over the
    visible CUDA devices, everything else on the first. A mapping: prefixes of our module names ("layers.3", "") to
    devices; parts outside ``layers`` must share one device. Raises ValueError for an unknown prefix or an incomplete
    map.
    """
    if isinstance(device_map, (str, torch.device)) and device_map not in ("auto", "balanced"):
        return {"": resolve_device(device_map)}
    if isinstance(device_map, str):
        count, layers = torch.cuda.device_count(), len(getattr(module, "layers", ()))
        if count < 2 or layers == 0:
            return {"": resolve_device("auto")}
        placement = {f"layers.{i}": torch.device("cuda", i * count // layers) for i in range(layers)}
        return {"": torch.device("cuda", 0), **placement}
    if not isinstance(device_map, Mapping):
        raise TypeError(f"device_map must be a device, 'balanced' or a mapping: got {type(device_map).__name__}")
    placement = {prefix: resolve_device(device) for prefix, device in device_map.items()}
    names = {""} | {name for name, _ in module.named_modules()} | set(module.state_dict())
    unknown = sorted(set(placement) - names)
    if unknown:
        top = [name for name, _ in module.named_children()]
        raise ValueError(f"device_map must name parts of the model (top parts: {top}): got {unknown}")
    homes = set()
    for name in module.state_dict():
        prefix = name
        while prefix and prefix not in placement:
            prefix = prefix.rpartition(".")[0]
        if prefix not in placement:
            raise ValueError(f"device_map must cover every tensor ('' stands for the rest): {name!r} has no device")
        if not name.startswith("layers."):
            homes.add(placement[prefix])
    if len(homes) > 1:
        raise ValueError(f"device_map must keep everything outside layers on one device: got {sorted(map(str, homes))}")
    return {**placement, **({} if "" in placement else {"": homes.pop()})}


def single_device(device_map: str | torch.device | Mapping[str, Any]) -> torch.device:
    """The device of a map that names just one, for families that are not spread; raises ValueError for any other map."""
    if isinstance(device_map, (str, torch.device)):
        return resolve_device("auto" if device_map == "balanced" else device_map)
    devices = {resolve_device(device) for device in device_map.values()}
    if len(devices) != 1:
        raise ValueError(f"device_map must name one device for this family: got {dict(device_map)}")
    return devices.pop()


def device_of(name: str, placement: Mapping[str, torch.device]) -> torch.device:
    """Device of the longest prefix in ``placement`` that holds ``name``."""
    while name and name not in placement:
        name = name.rpartition(".")[0]
    return placement[name]


def spread(module: nn.Module, placement: Mapping[str, torch.device]) -> None:
    """Hooks that move tensors to a layer's device and back, for layers away from home; mutates the module."""
    home = placement[""]
    for index, layer in enumerate(getattr(module, "layers", ())):
        devices = {parameter.device for parameter in layer.parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"device_map must keep a layer on one device: layers.{index} has {sorted(map(str, devices))}"
            )
        there = devices.pop()
        if (there.type, there.index or 0) != (home.type, home.index or 0):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, there=there: _move((args, kwargs), there), with_kwargs=True
            )
            layer.register_forward_hook(lambda _, __, output: _move(output, home))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_move(part, device) for part in value)
    if isinstance(value, dict):
        return {key: _move(part, device) for key, part in value.items()}
    return value
