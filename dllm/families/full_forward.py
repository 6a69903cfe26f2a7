"""One forward over whole sequences without a cache, under a family's own attention rule: the truth behind ``lm.forward``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dllm.types import Attend, DecodeSpec


def raw_logits(
    module: nn.Module,
    spec: DecodeSpec,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    conditioning_logits: Tensor | None = None,
    masked: Tensor | None = None,
) -> Tensor:
    """Logits [B, L, V] of every row as the head gives them, before the shift; undefined at padding.

    input_ids [B, L] int64; attention_mask [B, L], nonzero = token, on any side (None: all are tokens). Only the mask
    says what is padding; positions count tokens. Bidirectional: every token sees every token; block-causal: by
    position // ``spec.block_length``; causal: itself and what is before. A model of two passes (DiffusionGemma) takes
    the last ``spec.block_length`` tokens as its canvas and the rest as prompt; only there conditioning_logits [B, C,
    V], the laws of the step before at the C canvas tokens, are allowed. masked [B, L] bool: positions that stand for
    [MASK] whatever their id says, which matters where the mask has an input row of its own.

    Raises TypeError or ValueError for wrong shapes, dtypes, ids outside the vocabulary and rows without a token.
    """
    hidden, _ = full_forward(module, spec, input_ids, attention_mask, (), conditioning_logits, masked)
    return module.head(hidden)  # type: ignore[operator]


def full_forward(
    module: nn.Module,
    spec: DecodeSpec,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    taps: Sequence[int] = (),
    conditioning_logits: Tensor | None = None,
    masked: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Final hidden states [B, L, E] and the outputs of the tapped layers; arguments as ``raw_logits``."""
    valid = _checked(spec, input_ids, attention_mask)
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    extra: dict[str, Any] = {}
    if hasattr(module, "soft_embed"):
        left = valid.flip(-1).cumsum(-1).flip(-1)
        canvas = valid & (left <= spec.block_length)
        extra["canvas"] = canvas
        attend = Attend.by_group(canvas.to(torch.int32), None, valid)
        if conditioning_logits is not None:
            extra["soft"] = _soft(module, canvas, conditioning_logits)
    else:
        if conditioning_logits is not None:
            raise ValueError("conditioning_logits must be None: this model has no self-conditioning")
        attend = _attend(spec, positions, valid)
    if masked is not None and masked.shape != input_ids.shape:
        raise ValueError(f"masked must have the shape of input_ids {tuple(input_ids.shape)}: got {tuple(masked.shape)}")
    embeds = module.embed(input_ids, masked, spec.mask_token_id)  # type: ignore[operator]
    out = module(None, positions, None, attend, taps, embeds=embeds, **extra)
    return out if taps else (out, [])


def _attend(spec: DecodeSpec, positions: Tensor, valid: Tensor) -> Attend:
    if spec.attention == "bidirectional":
        return Attend.bidirectional(valid)
    if spec.attention == "causal":
        return Attend.causal(positions, valid)
    return Attend.block_causal(positions, spec.block_length, valid)


def _soft(module: Any, canvas: Tensor, conditioning_logits: Tensor) -> Tensor:
    """soft_embed of [B, C, V] at the canvas rows of [B, L], zero elsewhere."""
    count = int(canvas.sum(-1).max())
    if conditioning_logits.shape[:2] != (canvas.shape[0], count) or int(canvas.sum()) != canvas.shape[0] * count:
        raise ValueError(
            f"conditioning_logits must be [{canvas.shape[0]}, {count}, V], one law for each canvas token: got "
            f"{tuple(conditioning_logits.shape)}"
        )
    signal = module.soft_embed(conditioning_logits)
    out = signal.new_zeros(*canvas.shape, signal.shape[-1])
    out[canvas] = signal.flatten(0, 1)
    return out


def _checked(spec: DecodeSpec, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The validity [B, L] bool of a well-formed input."""
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers: got {input_ids.dtype}")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be [B, L] with B, L >= 1: got {tuple(input_ids.shape)}")
    if attention_mask is None:
        valid = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}: got {tuple(attention_mask.shape)}"
            )
        valid = attention_mask.to(input_ids.device) != 0
    if not bool(valid.any(-1).all()):
        raise ValueError("attention_mask must leave at least one token in every row: got an empty row")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= spec.vocab_size:
        raise ValueError(f"input_ids must lie in [0, {spec.vocab_size}): got {low} to {high}")
    return valid
