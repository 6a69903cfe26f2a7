"""Low-rank adapters that turn an AR decoder into a diffusion LM without touching it.

An adapter folder holds ``adapter.safetensors`` (or shards) and ``adapter_config.json``: LoRA pairs for the seven projections of every
layer (Hu et al. 2021, arXiv:2106.09685), the replaced norm weights and the input row of the mask token. ``fold`` adds it to a second
set of tensors that shares embedding and head with the untouched base: W' = W + (alpha / rank) * B @ A, computed in fp32.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.model.decoder import Decoder, RMSNorm
from dllm.model.packed import Linear

CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter is and what it belongs to.

    base: a shipped name, a folder or a hub id; base_fingerprint: see ``fingerprint``; spec: the ``DecodeSpec`` fields of the adapted
    model; training: how it was made (data, steps, command), for the model card.
    """

    base: str
    base_fingerprint: dict[str, Any]
    rank: int
    alpha: float
    spec: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)
    format: str = "dllm-adapter-1"

    def save(self, folder: Path) -> None:
        """Write ``adapter_config.json`` into an existing folder."""
        (folder / CONFIG_NAME).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> AdapterConfig:
        """Read ``adapter_config.json``; raises ValueError naming the file where it is damaged or of another format."""
        path = folder / CONFIG_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be JSON: {error}") from error
        if not isinstance(raw, dict) or raw.get("format") != "dllm-adapter-1":
            got = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"{path}: format must be 'dllm-adapter-1': got {got!r}")
        try:
            return cls(**raw)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error


def fingerprint(decoder: Decoder) -> dict[str, Any]:
    """What tells one base from another, whatever dtype it was loaded in: a hash of names and shapes, and sample values.

    The values are single weights (a mean of many would drown in rounding): some of the embedding, one of each layer's tensors, some of
    the final norm; so a fine-tuned model differs from its base too.
    """
    parameters = dict(decoder.named_parameters())
    names = sorted(f"{name}{tuple(value.shape)}" for name, value in parameters.items())
    embedding, norm = decoder.embed_tokens.weight, decoder.norm.weight
    samples = [embedding.diagonal()[:32], norm[:: max(1, norm.numel() // 16)][:16]]
    samples += [
        value.flatten()[value.numel() // 2][None] for name, value in parameters.items() if name.startswith("layers.")
    ]
    values = torch.cat([sample.detach().float().cpu() for sample in samples])
    return {
        "shapes": hashlib.sha256("".join(names).encode()).hexdigest()[:16],
        "values": [float(f"{v:.5g}") for v in values.tolist()],
    }


def same_base(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Do two fingerprints belong to one base? Values may differ by rounding to bf16 (1 in 512) or fp16 (6e-8 near zero)."""
    if a["shapes"] != b["shapes"] or len(a["values"]) != len(b["values"]):
        return False
    return all(abs(x - y) <= 0.005 * abs(x) + 1e-7 for x, y in zip(a["values"], b["values"], strict=True))


class LoRALinear(nn.Module):
    """A frozen linear layer, possibly of several joined projections, plus one low-rank update per projection.

    splits: output width of each joined projection, in order; names: their names in the adapter file. merged: add the update to the
    weight instead of to the outputs: one product a call, rounded as ``fold`` rounds; the products of rank ``rank`` are bound by memory.
    """

    merged = False

    def __init__(self, base: nn.Linear, splits: list[int], names: list[str], rank: int, alpha: float) -> None:
        super().__init__()
        if sum(splits) != base.out_features:
            raise ValueError(f"splits must add up to {base.out_features}: got {splits}")
        self.base, self.splits, self.names, self.rank, self.scale = base, splits, names, rank, alpha / rank
        base.weight.requires_grad_(False)
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(len(splits) * rank, base.in_features, device=device))
        self.lora_b = nn.ParameterList(nn.Parameter(torch.zeros(width, rank, device=device)) for width in splits)
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            pairs = zip(self.lora_b, self.lora_a.chunk(len(self.splits)), strict=True)
            update = torch.cat([b @ a for b, a in pairs])
            return F.linear(x, (self.base.weight.float() + self.scale * update).to(x.dtype), self.base.bias)
        low = F.linear(x, self.lora_a.to(x.dtype)).chunk(len(self.splits), dim=-1)
        updates = [F.linear(part, b.to(x.dtype)) for part, b in zip(low, self.lora_b, strict=True)]
        return self.base(x) + self.scale * (updates[0] if len(updates) == 1 else torch.cat(updates, dim=-1))


def projections(decoder: Decoder) -> Iterator[tuple[nn.Module, str, list[int], list[str]]]:
    """Every adaptable linear layer as (owner, attribute, output splits, adapter names)."""
    c = decoder.config
    kv = c.num_kv_heads * c.head_dim
    for i, layer in enumerate(decoder.layers):
        prefix = f"layers.{i}."
        attention, mlp = layer.attention, layer.mlp
        yield attention, "qkv", [c.num_heads * c.head_dim, kv, kv], [f"{prefix}self_attn.{p}_proj" for p in "qkv"]  # type: ignore[misc]
        yield attention, "out", [c.hidden_size], [f"{prefix}self_attn.o_proj"]  # type: ignore[misc]
        yield mlp, "gate_up", [c.intermediate_size] * 2, [f"{prefix}mlp.{p}_proj" for p in ("gate", "up")]  # type: ignore[misc]
        yield mlp, "down", [c.hidden_size], [f"{prefix}mlp.down_proj"]  # type: ignore[misc]


def add_lora(base: Decoder, rank: int, alpha: float, mask_token_id: int, merged: bool = False) -> Decoder:
    """A trainable copy of ``base`` for adaptation: LoRA pairs, norms and mask embedding in fp32, everything else frozen and shared.

    merged: see ``LoRALinear``. The parameters that need gradients are exactly what ``adapter_state`` saves.
    """
    if rank < 1:
        raise ValueError(f"rank must be >= 1: got {rank}")
    model = _share(base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for owner, attribute, splits, names in list(projections(model)):
        layer = LoRALinear(getattr(owner, attribute), splits, names, rank, alpha)
        layer.merged = merged
        setattr(owner, attribute, layer)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight = nn.Parameter(module.weight.detach().float().clone())
    row = base.embed_tokens.weight[mask_token_id].detach().float()
    model.mask_embedding = nn.Parameter(row.clone())
    return model


def adapter_state(model: Decoder) -> dict[str, Tensor]:
    """The trained tensors of ``add_lora``'s model, bf16, on the CPU, under adapter names."""
    state: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, LoRALinear):
            for name, a, b in zip(module.names, module.lora_a.chunk(len(module.names)), module.lora_b, strict=True):
                state[name + ".lora_A.weight"], state[name + ".lora_B.weight"] = a, b
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            state[name] = parameter
    assert model.mask_embedding is not None, "not a model made by add_lora"
    state["mask_embedding"] = model.mask_embedding
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}


def load_adapter_state(model: Decoder, state: dict[str, Tensor]) -> None:
    """Put a saved adapter back into ``add_lora``'s model (to go on training); names are checked both ways."""
    own = adapter_state(model)
    _check_names(set(own), set(state))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_a.copy_(torch.cat([state[name + ".lora_A.weight"] for name in module.names]))
                for name, b in zip(module.names, module.lora_b, strict=True):
                    b.copy_(state[name + ".lora_B.weight"])
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(state[name])
        assert model.mask_embedding is not None
        model.mask_embedding.copy_(state["mask_embedding"])


def fold(base: Decoder, config: AdapterConfig, state: dict[str, Tensor]) -> Decoder:
    """The adapted decoder: new tensors for projections, norms and mask row; embedding and head are those of ``base``.

    Raises ValueError if the adapter was made for another base, or if a tensor is missing, unknown or of another shape.
    """
    found = fingerprint(base)
    if not same_base(config.base_fingerprint, found):
        wanted = config.base_fingerprint
        raise ValueError(
            f"adapter belongs to another base: it was made for {config.base!r} (shapes {wanted['shapes']}, first values "
            f"{wanted['values'][:3]}), this base has shapes {found['shapes']}, first values {found['values'][:3]}"
        )
    expected = {"mask_embedding"} | {n for n, _ in base.named_parameters() if n.endswith("norm.weight")}
    for _, _, _, names in projections(base):
        expected |= {f"{name}.lora_{leaf}.weight" for name in names for leaf in "AB"}
    _check_names(expected, set(state))
    model = _share(base)
    scale = config.alpha / config.rank
    with torch.no_grad():
        for owner, attribute, splits, names in projections(model):
            linear = getattr(owner, attribute)
            deltas = []
            for width, name in zip(splits, names, strict=True):
                a, b = state[name + ".lora_A.weight"].float(), state[name + ".lora_B.weight"].float()
                if a.shape != (config.rank, linear.in_features) or b.shape != (width, config.rank):
                    raise ValueError(
                        f"{name}: lora_A and lora_B must be {(config.rank, linear.in_features)} and {(width, config.rank)}: "
                        f"got {tuple(a.shape)} and {tuple(b.shape)}"
                    )
                deltas.append(b @ a)
            delta = torch.cat(deltas).to(linear.weight.device) * scale
            merged = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
            merged.weight = nn.Parameter((linear.weight.float() + delta).to(linear.weight.dtype), requires_grad=False)
            if linear.bias is not None:
                merged.bias = linear.bias
            setattr(owner, attribute, merged)
        for name, parameter in list(model.named_parameters()):
            if name.endswith("norm.weight"):
                owner = model.get_submodule(name.rsplit(".", 1)[0])
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} must be {tuple(parameter.shape)}: got {tuple(state[name].shape)}")
                owner.weight = nn.Parameter(state[name].to(parameter.device, parameter.dtype), requires_grad=False)
        row = state["mask_embedding"].to(base.device, base.dtype)
        if row.shape != (base.config.hidden_size,):
            raise ValueError(f"mask_embedding must be {(base.config.hidden_size,)}: got {tuple(row.shape)}")
        model.mask_embedding = nn.Parameter(row, requires_grad=False)
    return model


def _share(base: Decoder) -> Decoder:
    """A copy of the module tree whose tensors are those of ``base``."""
    memo = {id(tensor): tensor for tensor in [*base.parameters(), *base.buffers()]}
    return copy.deepcopy(base, memo)


def _check_names(expected: set[str], found: set[str]) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise ValueError(
            f"adapter tensors do not fit: missing {missing[:5]} ({len(missing)}), unknown {unknown[:5]} ({len(unknown)})"
        )
