"""A drafter from a folder or a hub id, in the z-lab, AngelSpec or speculators layout, bound to its target and checked
against it.

Every tensor is counted both ways, copies of the target's embedding and head must be copies, and the shapes in the
config must fit the target: a drafter that is loaded wrongly would draft on with an acceptance of a few per cent and no
error.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dllm.drafters.config import DraftConfig, read_config
from dllm.drafters.dflash import DFlash
from dllm.drafters.dflash2 import DFlash2
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Drafter
from dllm.drafters.probe import PROBE_KEY, probe_mismatch
from dllm.drafters.target import Target
from dllm.families.loading import find_folder
from dllm.families.placement import resolve_device, resolve_dtype
from dllm.families.tensor_names import llama_sources
from dllm.model.weights import load_state
from dllm.shipped import ASSETS, is_shipped, listing_shipped

logger = logging.getLogger(__name__)

CLASS_OF_KIND: dict[str, type[Drafter]] = {"dflash": DFlash, "dflash2": DFlash2, "dfly": DFly}
_PREFIXES = ("module.draft_model.", "draft_model.", "module.", "model.")
_RENAMED = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
# Parts of training checkpoints that no drafter of these kinds uses.
_UNUSED = ("markov_head.", "confidence_head.", "verifier_norm.", "verifier_lm_head.")


def load_drafter(
    path: str | Path,
    target: Any,
    strict: bool = True,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: torch.device | str = "auto",
    revision: str | None = None,
    head_candidates: int | Literal["auto"] | None = "auto",
) -> Drafter:
    """Read a drafter and bind it to its target; eval mode, no gradients.

    path: a shipped name, a folder with config.json and safetensors (or pytorch_model.bin), or a hub id. target: a
    Hugging Face causal LM or a ``Decoder``. strict: False turns what may be wrong, but can run, into warnings. dtype,
    device "auto": the target's. head_candidates: of a DFly head, see ``DFly``.

    Raises FileNotFoundError, naming what ships, if there is nothing at path; ValueError, naming the key, tensor or file,
    for a config that is inconsistent or does not fit the target, for a missing, unknown or misshapen tensor, and for
    the shipped name of another kind of model.
    """
    folder = drafter_folder(path, revision)
    with (folder / "config.json").open(encoding="utf-8") as file:
        config = read_config(json.load(file))
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(f"mask_embedding.pt must not be there: an own mask embedding is not supported, got {folder}")
    bound = Target.of(target)
    problems = target_problems(config, bound)
    wanted = bound.dtype if dtype == "auto" else resolve_dtype(dtype)
    with torch.device("meta"):
        drafter = _build(config, bound, head_candidates)
    tensors, doubtful = read_tensors(drafter, _raw_tensors(folder))
    _report(problems + doubtful, strict)
    state = {
        name: tensor.to(wanted) if tensor.is_floating_point() and name != "layer_fusion_weights" else tensor
        for name, tensor in tensors.items()
    }
    drafter.load_state_dict(state, assign=True)
    drafter.to(bound.device if device == "auto" else resolve_device(device)).eval().requires_grad_(False)
    if config.metadata.get(PROBE_KEY) is not None:
        wrong = probe_mismatch(drafter, config.metadata[PROBE_KEY])
        _report([] if wrong is None else [wrong], strict)
    noted = config.metadata.get("target_fingerprint")
    if noted is not None and noted != bound.fingerprint():
        warnings.warn(
            f"target_fingerprint {noted} belongs to {config.metadata.get('target')!r}: got a target with {bound.fingerprint()}; "
            "drafts will often be wrong (the output stays the target's)",
            stacklevel=2,
        )
    return drafter


def drafter_folder(path: str | Path, revision: str | None = None) -> Path:
    """The local folder of a drafter: a shipped name, a folder, or a hub id (downloaded)."""
    if is_shipped(path, "drafter"):
        return ASSETS / str(path)
    with listing_shipped("drafter"):
        folder = find_folder(path, revision)
    if not Path(path).is_dir() and not list(folder.glob("*.safetensors")):
        from huggingface_hub import snapshot_download

        # AngelSpec publishes pickles; they are read with weights_only.
        folder = Path(snapshot_download(str(path), revision=revision, allow_patterns=["*.json", "*.bin", "*.pt"]))
    return folder


def target_problems(config: DraftConfig, target: Target) -> list[str]:
    """What may be wrong between a drafter's config and its target. Raises ValueError for what cannot run at all."""
    body = config.body
    if body.vocab_size != target.vocab_size:
        raise ValueError(f"vocab_size must be the {target.vocab_size} rows of the target's head: got {body.vocab_size}")
    for name, width in (("hidden_size", body.hidden_size), ("target_hidden_size", config.target_hidden_size)):
        if width != target.hidden_size:
            raise ValueError(f"{name} must equal the target's hidden size {target.hidden_size}: got {width}")
    if max(config.target_layer_ids) >= target.num_layers:
        raise ValueError(
            f"target_layer_ids must be below the target's {target.num_layers} layers: got {list(config.target_layer_ids)}"
        )
    if config.num_target_layers not in (None, target.num_layers):
        name = "target_num_hidden_layers" if config.kind == "dfly" else "num_target_layers"
        return [f"{name} must be the target's {target.num_layers} layers: got {config.num_target_layers}"]
    return []


def published_names(drafter: Drafter) -> dict[str, tuple[str, ...]]:
    """Our tensor name -> its names in a published file (several: joined along dim 0), the same in all layouts."""
    state = drafter.state_dict()
    body = {
        ours: tuple(t.removeprefix("model.") for t in theirs)
        for ours, theirs in llama_sources(drafter.config.body).items()
    }
    return {name: body.get(name, (name,)) for name in state}


def read_tensors(drafter: Drafter, raw: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Published tensors -> (ours, complete and of the right shapes; what looks wrong but can run).

    Raises ValueError naming missing, unknown, doubled and misshapen tensors.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in raw.items():
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        plain = _RENAMED.get(plain, plain)
        if plain in found:
            raise ValueError(f"tensor {plain} must be there once: got it again as {name}")
        found[plain] = tensor
    unused = [name for name in found if name.startswith(_UNUSED) or name.endswith("rotary_emb.inv_freq")]
    if unused:
        logger.info("tensors that a %s does not use were left out: %s", drafter.config.kind, unused)
    for name in unused:
        del found[name]
    problems = _drop_copies(drafter, found)
    names = published_names(drafter)
    wanted = {theirs for sources in names.values() for theirs in sources}
    missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
    if missing or unknown:
        raise ValueError(
            f"tensors must be those of a {drafter.config.kind} with {drafter.config.body.num_layers} layers: "
            f"missing {missing[:8]} ({len(missing)}), unknown {unknown[:8]} ({len(unknown)})"
        )
    ours: dict[str, Tensor] = {}
    for name, parameter in drafter.state_dict().items():
        parts = [found[source] for source in names[name]]
        shapes = [tuple(part.shape) for part in parts]
        same_rows = len({shape[1:] for shape in shapes}) == 1
        rows = sum(shape[0] for shape in shapes if shape)
        if not same_rows or (rows, *shapes[0][1:]) != tuple(parameter.shape):
            raise ValueError(f"tensor {' + '.join(names[name])} must have shape {tuple(parameter.shape)}: got {shapes}")
        ours[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return ours, problems


def _build(config: DraftConfig, target: Target, head_candidates: int | Literal["auto"] | None) -> Drafter:
    if config.kind == "dfly":
        return DFly(config, target, head_candidates)
    if head_candidates != "auto":
        raise ValueError(
            f"head_candidates must be 'auto' for a {config.kind}, which has no such head: got {head_candidates!r}"
        )
    return CLASS_OF_KIND[config.kind](config, target)


def _raw_tensors(folder: Path) -> dict[str, Tensor]:
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not list(folder.glob("*.safetensors")):
        state = torch.load(pickled, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return load_state(folder)


def _drop_copies(drafter: Drafter, found: dict[str, Tensor]) -> list[str]:
    """Take out stored copies of the target's embedding and head, and the redundant vocabulary table; mutates found."""
    target, problems = drafter.target, []
    copies: list[tuple[str, Tensor | None]] = [("embed_tokens.weight", target.embed_weight)]
    if drafter.config.draft_vocab_size is None:
        copies.append(("lm_head.weight", target.head_weight))
        for redundant in ("d2t", "t2d"):
            found.pop(redundant, None)
    for name, own in copies:
        copy = found.pop(name, None)
        if copy is None:
            continue
        if own is not None and copy.shape != own.shape:
            raise ValueError(
                f"{name} must be a copy of the target's, of shape {tuple(own.shape)}: got {tuple(copy.shape)}"
            )
        if own is None or not torch.equal(copy.to(own.device, own.dtype), own):
            problems.append(f"{name} must be a copy of the target's: its values differ, and the target's are used")
    if drafter.config.draft_vocab_size is not None and "d2t" in found:
        vocab, mapped = target.vocab_size, found["d2t"].long() + torch.arange(found["d2t"].shape[0])
        if mapped.unique().shape != mapped.shape or not bool(((mapped >= 0) & (mapped < vocab)).all()):
            raise ValueError(
                f"d2t must map rows to distinct ids in [0, {vocab}): got ids {int(mapped.min())} to {int(mapped.max())}"
            )
        table = found.pop("t2d", None)
        if table is not None and not torch.equal(table.nonzero().squeeze(1), mapped.sort().values):
            raise ValueError("t2d must mark exactly the ids that d2t maps to: it marks others")
        found["d2t"] = found["d2t"].long()
    return problems


def _report(problems: list[str], strict: bool) -> None:
    if problems and strict:
        raise ValueError("; ".join(problems) + " (strict=False loads it all the same)")
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
