"""vLLM plugin for DFly: registers the model class, and holds the arithmetic that vLLM's DFlash does not have.

vLLM drafts with a DFly as with a DFlash (method "dflash"): the class in ``vllm_dfly.py`` is a DFlash whose context differs
from layer to layer and whose logits are walked. Nothing here imports vLLM before ``register`` is called, so that the
arithmetic can be tested without it. What the hooks allow and what they do not: docs/vllm.md.

Letters: R requests, K drafts of each, C context tokens, N draft layers, T taps, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dllm.drafters.dfly import HiddenCorrection

ARCHITECTURES = ("Qwen3DFlyModel", "DFlashQwen3DFlyModel")
"""The published name, and what vLLM makes of it: a drafter of method "dflash" is renamed unless its name starts or ends
with DFlash. Both are looked up."""
MODEL_CLASS = "dllm.bridge.vllm_dfly:DFlyQwen3ForCausalLM"
_OWN_PREFIX = "hidden_correction."
_FUSION = "layer_fusion_weights"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once in each of its processes, in any order."""
    from vllm import ModelRegistry  # type: ignore[import-not-found]

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, MODEL_CLASS)


class DFlyExtras(nn.Module):
    """The parts of a DFly that a DFlash lacks: mixing weights of the taps, and the hidden correction.

    width: D; num_layers: N; num_taps: T; correction_width: inner width of the correction, or None (no correction).
    """

    layer_fusion_weights: Tensor

    def __init__(self, width: int, num_layers: int, num_taps: int, correction_width: int | None, eps: float) -> None:
        super().__init__()
        # A buffer, since an engine's loader counts parameters; fp32 whatever the model's dtype, as it is softmaxed.
        self.register_buffer(_FUSION, torch.zeros(num_layers, num_taps, dtype=torch.float32))
        self.hidden_correction = None if correction_width is None else HiddenCorrection(width, correction_width, eps)

    @classmethod
    def of_config(cls, config: Any) -> DFlyExtras:
        """From a published DFly config (its keys as attributes). Raises ValueError for one that lacks a key."""
        taps = (getattr(config, "dflash_config", None) or {}).get("target_layer_ids")
        if not taps:
            # vLLM's first model runner looks nowhere else, and would tap its own default layers without a word.
            raise ValueError(
                "dflash_config.target_layer_ids must name the tapped layers: got none (dllm export --engine vllm writes it)"
            )
        inner = None
        if getattr(config, "enable_hidden_correction", True):
            inner = getattr(config, "hidden_correction_intermediate_size", None) or config.hidden_size
        return cls(config.hidden_size, config.num_hidden_layers, len(taps), inner, config.rms_norm_eps)

    def contexts(self, features: Tensor, shared: Tensor) -> Tensor:
        """features [C, T * D], shared [C, D] (their common projection) -> what each layer reads, before the norm
        [C, N, D].
        """
        taps = features.unflatten(-1, (self.layer_fusion_weights.shape[1], -1))
        weights = self.layer_fusion_weights.softmax(dim=-1).to(features.dtype)
        return shared[:, None] + torch.einsum("ctd,lt->cld", taps, weights)

    def walk(
        self,
        hidden: Tensor,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Logits of every slot, each corrected by the best token of the slot before it.

        hidden [R * K, D], a request's slots side by side; anchors [R]; embed: ids [R] -> [R, D]; logits: [R, D] ->
        [R, V]. Returns [R * K, V]; the best token of row k is the one that row k + 1 was corrected by, so that argmax
        gives the greedy walk. Tensor operations of fixed shape only.
        """
        if hidden.shape[0] % anchors.shape[0]:
            raise ValueError(
                f"hidden must hold as many slots for each of {anchors.shape[0]} anchors: got {hidden.shape[0]}"
            )
        if self.hidden_correction is None:
            return logits(hidden)
        previous, rows = anchors, []
        for slot in hidden.unflatten(0, (anchors.shape[0], -1)).unbind(1):
            rows.append(logits(self.hidden_correction(slot, embed(previous))))
            previous = rows[-1].argmax(dim=-1)
        return torch.stack(rows, dim=1).flatten(0, 1)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load this module's tensors out of a checkpoint's stream and hand on all others; mutates the module.

        Raises ValueError once the stream is exhausted if a tensor of ours was missing, unknown or of another shape.
        """
        missing = set(self.state_dict())
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, value in weights:
            if name != _FUSION and not name.startswith(_OWN_PREFIX):
                yield name, value
                continue
            if name not in own or own[name].shape != value.shape:
                expected = tuple(own[name].shape) if name in own else "no such tensor"
                raise ValueError(f"{name} must be {expected} as config.json says: got {tuple(value.shape)}")
            own[name].data.copy_(value)
            missing.discard(name)
        if missing:
            raise ValueError(f"the drafter's weights must hold {sorted(missing)}: they are missing")
