"""What a drafter borrows from the model that it drafts for: embedding rows, output head, outputs of some layers.

Letters: B batch, L tokens, D width, V vocabulary. Works for Hugging Face causal LMs and for our own ``Decoder``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm.model.decoder import Decoder
from dllm.types import Attend


class Target:
    """A causal LM as a drafter sees it. Not a module: its weights are never the drafter's parameters.

    model: a Hugging Face causal LM, or a ``Decoder``. Raises TypeError for anything else, ValueError if its layers
    cannot be found.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_own = isinstance(model, Decoder)
        self.head_module: nn.Module | None = None
        if isinstance(model, Decoder):
            self.embed_weight: Tensor = model.embed_tokens.weight
            self.layers: Sequence[nn.Module] = list(model.layers)
            self.vocab_size = model.config.vocab_size
            self.max_positions = model.config.max_positions
            return
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if embedding is None or head is None:
            raise TypeError(
                "target must be a Hugging Face causal LM (input and output embeddings) or a dllm Decoder: "
                f"got {type(model).__name__}"
            )
        config = model.config.get_text_config()
        self.embed_weight = embedding.weight
        self.head_module = head
        self.layers = _decoder_layers(model, config.num_hidden_layers)
        weight = getattr(head, "weight", None)
        self.vocab_size = config.vocab_size if weight is None else weight.shape[0]
        self.max_positions = getattr(config, "max_position_embeddings", 0) or 0

    @classmethod
    def of(cls, model: Any) -> Target:
        """The model itself, wrapped once."""
        return model if isinstance(model, Target) else cls(model)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def name(self) -> str:
        """Where a Hugging Face model was loaded from; empty if unknown."""
        return str(getattr(getattr(self.model, "config", None), "_name_or_path", "") or "")

    @property
    def head_weight(self) -> Tensor | None:
        """Rows of the head [V, D], or None where it is not a plain matrix (quantised)."""
        if self.head_module is None:
            return self.model.head_weight
        weight = getattr(self.head_module, "weight", None)
        plain = (
            isinstance(weight, Tensor)
            and weight.is_floating_point()
            and weight.shape == (self.vocab_size, self.hidden_size)
        )
        return weight if plain else None

    @property
    def head_bias(self) -> Tensor | None:
        """Bias of the head [V], or None."""
        return None if self.head_module is None else getattr(self.head_module, "bias", None)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> raw embedding rows [..., D]: a scale or norm inside the target's embedding module is not
        applied.
        """
        return F.embedding(ids, self.embed_weight)

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] (after a final norm) -> logits [..., V] in the target's dtype."""
        hidden = hidden.to(self.dtype)
        return self.model.head(hidden) if self.head_module is None else self.head_module(hidden)

    @contextmanager
    def taps(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """While open, each forward of the model leaves the outputs [B, L, D] of the given layers in the yielded
        dictionary.
        """
        found: dict[int, Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                found[index] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [self.layers[i].register_forward_hook(keep(i)) for i in layer_ids]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def read(self, ids: Tensor, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One causal pass over ids [B, L] int64, no padding -> (logits [B, L, V], taps side by side [B, L,
        len(layer_ids) * D]).
        """
        with self.taps(layer_ids) as found:
            if isinstance(self.model, Decoder):
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
                logits = self.model.head(self.model(ids, positions, None, Attend.causal(positions)))
            else:
                logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, torch.cat([found[i] for i in layer_ids], dim=-1)

    def fingerprint(self) -> str:
        """Short hash of a few embedding rows, the same in bf16 and fp32 copies of one model; tells targets apart, not
        fine-tunes.
        """
        rows = torch.linspace(0, self.embed_weight.shape[0] - 1, 16, device=self.device).long()
        values = self.embed_weight.detach()[rows].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        return hashlib.sha256(values).hexdigest()[:16]


def _decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's decoder layers: the one list of modules that has as many as the config says."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    kinds = [
        m
        for m in lists
        if all(hasattr(layer, "self_attn") or hasattr(layer, "attn") or hasattr(layer, "attention") for layer in m)
    ]
    if len(kinds or lists) != 1:
        raise ValueError(f"target must have one list of {count} decoder layers: found {len(kinds or lists)}")
    return list((kinds or lists)[0])
