"""Parity of the model families with reference logits: plain, cached and training passes.

A family folder holds config.json, model.safetensors, cases.json, cases.safetensors and unit.json. Every field that a case
lists under ``outputs`` is compared; one that nothing computes is a miss. A row shows the largest error of each field.
Reference: tiny random models run by the published code (float32).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor

from dllm.evals.parity_case import Case, close, tolerance
from dllm.families.full_forward import full_forward
from dllm.model.dit import subs_log_probs
from dllm.pipeline import DiffusionLM
from dllm.types import PADDING_GROUP, Attend, DecodeSpec, pack_bits


def load_golden(folder: Path) -> DiffusionLM:
    """The tiny model of a folder in fp32; ids that its config lacks come from unit.json."""
    unit = json.loads((folder / "unit.json").read_text()) if (folder / "unit.json").is_file() else {}
    ids = unit.get("special_ids", {})
    overrides = {"mask_token_id": ids["mask"]} if "mask" in ids else {}
    return DiffusionLM.from_pretrained(folder, dtype="float32", spec_overrides=overrides)


@dataclass(frozen=True)
class Golden:
    """A family folder in memory; tensors are named ``<case>.<field>``."""

    lm: DiffusionLM
    cases: list[dict[str, Any]]
    tensors: dict[str, Tensor]
    atol: float
    rtol: float

    @classmethod
    def load(cls, folder: Path) -> Golden:
        """Read a folder; tolerances come from the manifest beside it."""
        atol, rtol = tolerance(folder)
        return cls(
            lm=load_golden(folder),
            cases=json.loads((folder / "cases.json").read_text()),
            tensors=load_file(folder / "cases.safetensors"),
            atol=atol,
            rtol=rtol,
        )

    def input(self, case: Mapping[str, Any], field: str) -> Tensor:
        """A tensor of a case on the model's device."""
        return self.tensors[f"{case['name']}.{field}"].to(self.lm.device)

    def optional(self, case: Mapping[str, Any], field: str) -> Tensor | None:
        """As ``input``, or None."""
        return self.input(case, field) if f"{case['name']}.{field}" in self.tensors else None

    def compare(self, case: Mapping[str, Any], found: Mapping[str, Tensor], valid: Tensor | None = None) -> Case:
        """Every output of a case against ``found``, where ``valid`` [B, L] if that is its shape; integers exactly."""
        rows = []
        for field in case["outputs"]:
            if field not in found:
                rows.append(Case(field, "miss", "nothing computes it"))
                continue
            want, got = self.tensors[f"{case['name']}.{field}"], found[field].cpu()
            counts = None
            if valid is not None and want.shape[:2] == valid.shape:
                counts = valid.cpu().view(*valid.shape, *[1] * (want.ndim - 2))
            exact = not want.is_floating_point()
            rows.append(close(field, got, want, 0.0 if exact else self.atol, 0.0 if exact else self.rtol, counts))
        missed = [row for row in rows if row.status != "ok"]
        detail = ", ".join(f"{row.name} {row.detail.removeprefix('max abs error ')}" for row in missed or rows)
        return Case(case["name"], "miss" if missed else "ok", detail)


class CachedPasses:
    """Passes of a model over a growing store; a pass reads every stored row that it does not compute itself."""

    def __init__(self, lm: DiffusionLM, spec: DecodeSpec, batch: int, capacity: int = 128) -> None:
        self.model, self.spec = lm.model, spec
        self.store = lm.model.new_store(batch, capacity)
        self.stored = torch.zeros(batch, capacity, dtype=torch.bool, device=lm.device)

    def group(self, positions: Tensor) -> Tensor:
        """Attention groups [B, L] of positions under the family's rule."""
        # A model of two passes parts prompt and canvas by its own masks.
        if self.spec.attention == "bidirectional" or hasattr(self.model, "soft_embed"):
            return torch.zeros_like(positions)
        return torch.div(positions, self.spec.block_length, rounding_mode="floor")

    def run(self, ids: Tensor, start: int, write: bool, soft: Tensor | None = None) -> Tensor:
        """Logits of ids [B, Q] at positions start..; with write their keys and values are kept."""
        rows = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
        everything = torch.arange(self.stored.shape[1], device=ids.device).expand_as(self.stored)
        readable = self.stored.scatter(1, rows, False)
        key_group = torch.where(readable, self.group(everything), PADDING_GROUP)
        attend = Attend.by_group(self.group(rows), None, None, key_group)
        extra = {} if soft is None else {"soft": soft}
        hidden = self.model(
            ids, rows, self.store, attend, rows=rows, write=torch.full_like(rows, write).bool(), **extra
        )
        if write:
            self.stored.scatter_(1, rows, True)
        return self.model.head(hidden)

    def keep(self, length: int) -> None:
        """Forget rows from ``length`` on."""
        self.stored[:, length:] = False


def forward_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """One plain pass: logits by ``lm.forward``, hidden states and router tables by taps."""
    ids, mask = golden.input(case, "input_ids"), golden.optional(case, "attention_mask")
    model = golden.lm.model
    found = {"logits": DiffusionLM(model, spec).forward(ids, mask)}
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    found["position_ids"] = (valid.cumsum(-1) - 1).masked_fill(~valid, 1)
    if "hidden_0" in case["outputs"]:
        count = len(model.layers)
        hidden, tapped = full_forward(model, spec, ids, mask, taps=range(count))
        states = [model.embed(ids), *tapped[:-1], hidden]
        found |= {f"hidden_{i}": state for i, state in enumerate(states)}
    if "router_logits_0" in case["outputs"]:
        found |= router_tables(model, spec, ids)
    if "log_probs_subs" in case["outputs"]:
        assert spec.mask_token_id is not None
        found["log_probs_subs"] = subs_log_probs(found["logits"], ids, spec.mask_token_id)
    return golden.compare(case, found, valid)


def router_tables(model: Any, spec: DecodeSpec, ids: Tensor) -> dict[str, Tensor]:
    """Router logits and sorted experts of every sparse layer in one pass."""
    from dllm.model.moe import SparseMoE, route

    seen: list[tuple[SparseMoE, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])))
        for module in model.modules()
        if isinstance(module, SparseMoE)
    ]
    full_forward(model, spec, ids)
    for hook in hooks:
        hook.remove()
    out = {}
    for i, (module, x) in enumerate(seen):
        logits = module.router_logits(x)
        experts, _ = route(logits.flatten(0, 1), module.expert_bias, module.config)
        out[f"router_logits_{i}"] = logits
        out[f"router_topk_{i}"] = experts.sort(-1).values.view(*x.shape[:2], -1)
    return out


def prefix_cache_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """A full pass, of which the first ``cut`` rows are kept; the suffix reads them."""
    ids, cut = golden.input(case, "cache_ids"), case["cut"]
    passes = CachedPasses(golden.lm, spec, ids.shape[0])
    found = {"logits_full": passes.run(ids, 0, write=True)}
    passes.keep(cut)
    found["logits_suffix"] = passes.run(golden.input(case, "suffix_ids"), cut, write=False)
    # The reference stores keys before rotation; turning ours back by their position gives the same numbers.
    model, store = golden.lm.model, passes.store
    rows = torch.arange(cut, device=ids.device).expand(ids.shape[0], -1)
    cos, sin = model.rotary(rows)
    store.rotate(rows, torch.ones_like(rows).bool(), cos[:, 0], -sin[:, 0])
    keys, values = (part[:, :, :cut] for part in store.view(0))
    if golden.tensors[f"{case['name']}.key_prefix_layer0"].ndim == 3:
        keys, values = (rearrange(part, "b k n d -> b n (k d)") for part in (keys, values))
    return golden.compare(case, found | {"key_prefix_layer0": keys, "value_prefix_layer0": values})


def dual_cache_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """A full pass is kept whole; a block in the middle is run twice and replaces its own rows."""
    ids = golden.input(case, "cache_ids")
    passes = CachedPasses(golden.lm, spec, ids.shape[0])
    found = {"logits_full": passes.run(ids, 0, write=True)}
    for i in (1, 2):
        found[f"logits_block_{i}"] = passes.run(golden.input(case, f"block_ids_{i}"), case["block"][0], write=True)
    return golden.compare(case, found)


def cached_block_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """Prefill, a block that reads it, the sub-block passes where there are any, the stored block, the next one."""
    prefill = golden.input(case, "prefill_ids")
    passes = CachedPasses(golden.lm, spec, prefill.shape[0])
    at, size = prefill.shape[1], case["block_length"]
    found = {"logits_prefill": passes.run(prefill, 0, write=True)}
    found["logits_block"] = passes.run(golden.input(case, "block_ids"), at, write="replace_position" in case)
    if "replace_position" in case:
        for i in (1, 2):
            small = golden.input(case, f"small_block_ids_{i}")
            found[f"logits_small_block_{i}"] = passes.run(small, at + case["replace_position"], write=True)
    if "logits_block_final" in case["outputs"]:
        passes.keep(at)
        found["logits_block_final"] = passes.run(golden.input(case, "block_ids_final"), at, write=True)
        found["logits_next_block"] = passes.run(golden.input(case, "next_block_ids"), at + size, write=False)
    return golden.compare(case, found)


def training_attend(length: int, block_length: int, device: torch.device) -> Attend:
    """cat([noisy, clean]) of 2 * length rows: noisy rows see their own block and the clean blocks before, clean ones
    block-causally.
    """
    block = torch.arange(length, device=device).repeat(2) // block_length
    clean = torch.arange(2 * length, device=device) >= length
    same, before = block[:, None] == block, block[:, None] > block
    mask = torch.where(clean[:, None], clean & (same | before), (~clean & same) | (clean & before))
    empty = torch.zeros(1, 0, dtype=torch.int32, device=device)
    rows = torch.zeros(1, 2 * length, dtype=torch.int32, device=device)
    return Attend(empty, rows, rows, pack_bits(mask[None]))


def training_mask_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """Both halves of a training input in one pass, under the published mask written as an ``Attend``."""
    noisy_name, clean_name = ("xt", "x0") if case["kind"] == "train_mode" else ("noisy_ids", "clean_ids")
    noisy, clean = golden.input(case, noisy_name), golden.input(case, clean_name)
    batch, length = noisy.shape
    attend = training_attend(length, spec.block_length, golden.lm.device)
    mask = attend.mask()
    positions = torch.arange(length, device=noisy.device).repeat(2).expand(batch, -1)
    logits = golden.lm.model.head(
        golden.lm.model(torch.cat([noisy, clean], 1), positions, None, mask.expand(batch, -1, -1))
    )
    found = {
        "logits": logits[:, :length],
        "logits_noisy_half": logits[:, :length],
        "logits_clean_half": logits[:, length:],
        "attention_mask": mask[0] if golden.tensors.get(f"{case['name']}.attention_mask", mask).ndim == 2 else mask,
    }
    return golden.compare(case, found)


def block_by_block_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """Every block twice: a noisy pass that reads the store, and a final one that adds to it."""
    size = spec.block_length
    passes = CachedPasses(golden.lm, spec, 1)
    found = {}
    for i in range(case["n_blocks"]):
        for kind in ("noisy", "final"):
            ids = golden.input(case, f"block{i}_{kind}")
            found[f"logits_block{i}_{kind}"] = passes.run(ids, i * size, write=kind == "final")
    return golden.compare(case, found)


def encode_decode_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """Prompt and canvas in one pass by ``full_forward``; encoder states at the prompt, laws at the canvas."""
    prompt, canvas = golden.input(case, "input_ids"), golden.input(case, "canvas")
    ids, length = torch.cat([prompt, canvas], dim=1), prompt.shape[1]
    mask = golden.optional(case, "decoder_attention_mask")
    condition = golden.optional(case, "self_conditioning_logits")
    hidden, _ = full_forward(golden.lm.model, spec, ids, mask, conditioning_logits=condition)
    found = {
        "logits": golden.lm.model.head(hidden[:, length:]),
        "encoder_last_hidden_state": hidden[:, :length],
    }
    return golden.compare(case, found, None if mask is None else mask[:, :length].bool())


def cached_prefix_case(golden: Golden, case: Mapping[str, Any], spec: DecodeSpec) -> Case:
    """Encode the prompt, two canvas passes (the second conditioned on the first), encode that canvas, one pass of the
    next.
    """
    model = golden.lm.model
    prompt = golden.input(case, "input_ids")
    canvases = [golden.input(case, name) for name in ("canvas", "canvas2", "canvas3")]
    passes = CachedPasses(golden.lm, spec, prompt.shape[0])
    at = prompt.shape[1]
    passes.run(prompt, 0, write=True)
    first = passes.run(canvases[0], at, write=False)
    second = passes.run(canvases[1], at, write=False, soft=model.soft_embed(first))
    passes.run(canvases[1], at, write=True)
    third = passes.run(canvases[2], at + canvases[1].shape[1], write=False)
    return golden.compare(
        case, {"logits_first": first, "logits_second_self_conditioned": second, "logits_next_block": third}
    )


KINDS: dict[str, Callable[[Golden, Mapping[str, Any], DecodeSpec], Case]] = {
    "forward": forward_case,
    "block_causal": forward_case,
    "full_attention": forward_case,
    "sample_mode": forward_case,
    "prefix_cache": prefix_cache_case,
    "dual_cache": dual_cache_case,
    "cached_block": cached_block_case,
    "training_mask": training_mask_case,
    "train_mode": training_mask_case,
    "sample_mode_kv": block_by_block_case,
    "encode_decode": encode_decode_case,
    "cached_prefix": cached_prefix_case,
}


@torch.no_grad()
def logit_cases(folder: Path) -> list[Case]:
    """Every case of a family folder; a kind that is not known here is a miss, a transformers without the class a skip."""
    if not (folder / "cases.json").is_file():
        return []
    try:
        golden = Golden.load(folder)
    except ImportError as error:
        return [Case("all", "skip", str(error))]
    results = []
    for case in golden.cases:
        spec = golden.lm.spec
        if "block_length" in case:
            spec = replace(spec, block_length=case["block_length"])
        if case["kind"] == "full_attention":
            spec = replace(spec, attention="bidirectional")
        if case["kind"] in KINDS:
            results.append(KINDS[case["kind"]](golden, case, spec))
        else:
            results.append(Case(case["name"], "miss", f"kind {case['kind']!r} is not known"))
    return results


FAMILIES: dict[str, Callable[[Path], list[Case]]] = dict.fromkeys(
    ("llada", "dream", "dreamon", "sdar", "fast_dllm_v2", "llada2_moe", "mdlm", "bd3lm", "diffusion_gemma"), logit_cases
)
"""Family folder name -> function(folder) -> results."""
