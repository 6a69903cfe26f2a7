"""Log-likelihood of given spans under a diffusion LM: by the chain rule, or as the bound of masked diffusion.

``chain``: sum over i of ln p(x_i | given parts, x_<i, masks from i on), each law from the forward that sees exactly that. It is the
likelihood of the decoder that commits one token per step from left to right, and exact for it; other orders have other likelihoods.
``mc``: the mean over l ~ U{1..n} and a uniform choice of l of n masked tokens of n / l times their sum of ln p, an unbiased estimate of
a lower bound, the mean over all orders (LLaDA, Nie et al. 2025, arXiv:2502.09992, equation 6). ``block``: the same inside each block,
the blocks before it given (BD3-LM, Arriola et al. 2025, arXiv:2503.09573); blocks of one token make it the chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.canvas import GAP_GROUP, Canvas, generation_canvas, infill_canvas
from dllm.noise import STREAM_ACCEPT, STREAM_POSITION, CounterNoise
from dllm.prompts import encode_text
from dllm.types import Attend, DecodeSpec


def loglikelihood(lm: Any, context: Any, continuation: Any, method: str, seed: int, num_samples: int) -> float:
    """See ``DiffusionLM.loglikelihood``."""
    if method not in ("mc", "block", "chain"):
        raise ValueError(f"method must be 'mc', 'block' or 'chain': got {method!r}")
    prefix, span = (_ids(lm, name, value) for name, value in (("context", context), ("continuation", continuation)))
    if len(prefix) + len(span) > lm.spec.max_positions:
        raise ValueError(
            f"context and continuation must fit in {lm.spec.max_positions} positions: got {len(prefix) + len(span)}"
        )
    if method == "chain":
        return sum(chain_log_likelihood(lm.model, lm.spec, prefix, span, device=lm.device))
    return masked_log_likelihood(
        lm.model, lm.spec, prefix, span, method == "block", num_samples, seed, device=lm.device
    )


def _ids(lm: Any, name: str, value: Any) -> list[int]:
    if isinstance(value, str):
        if lm.tokenizer is None:
            raise ValueError(f"{name} must be a list of ids for a model without tokenizer: got a str")
        return encode_text(lm.tokenizer, value)
    ids = [int(token) for token in value]
    bad = [token for token in ids if not 0 <= token < lm.spec.vocab_size]
    if bad:
        raise ValueError(f"{name} must hold ids in [0, {lm.spec.vocab_size}): got {bad[0]}")
    return ids


@torch.no_grad()
def chain_log_likelihood(
    model: Any,
    spec: DecodeSpec,
    prefix: Sequence[int],
    span: Sequence[int],
    suffix: Sequence[int] | None = None,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
) -> list[float]:
    """ln p of each token of ``span`` after prefix and, if suffix is not None, before suffix (infill layout); nats, len(span) values.

    prefix must hold at least one token in a shifted model. One forward per token, ``batch_size`` of them at a time.
    """
    if not span:
        return []
    canvas = _span_canvas(spec, prefix, span, suffix, device)
    steps = torch.arange(len(span), device=canvas.ids.device)
    # Row r has the first r tokens of the span revealed, and is asked for the next one.
    masked = steps >= steps[:, None]
    return _log_probs(model, spec, canvas, len(prefix), masked, batch_size).diagonal().tolist()


@torch.no_grad()
def masked_log_likelihood(
    model: Any,
    spec: DecodeSpec,
    prefix: Sequence[int],
    span: Sequence[int],
    by_block: bool = False,
    num_samples: int = 128,
    seed: int = 0,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
) -> float:
    """Estimate of the bound on ln p(span | prefix), nats; the same seed gives the same number.

    by_block: the bound of each block with those before it given, else one bound for the whole span. num_samples: forwards' rows per
    bound. Raises ValueError for num_samples < 1. The estimate of a bound over one token is exact and takes one row.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be >= 1: got {num_samples}")
    if not span:
        return 0.0
    canvas = _span_canvas(spec, prefix, span, None, device)
    start, stop = len(prefix), len(prefix) + len(span)
    origin = 0 if spec.block_origin == "zero" else start
    borders = [start, *(b for b in range(start + 1, stop) if by_block and (b - origin) % spec.block_length == 0), stop]
    at = torch.arange(start, stop, device=canvas.ids.device)
    total = 0.0
    for low, high in itertools.pairwise(borders):
        length = high - low
        samples = 1 if length == 1 else num_samples
        noise = CounterNoise.for_rows([seed] * samples, samples, canvas.ids.device)
        row = torch.arange(samples, device=canvas.ids.device)
        count = (noise.uniform((row * 0 + low)[:, None], row, STREAM_ACCEPT)[:, 0] * length).long() + 1
        order = noise.uniform((at[None] + 0 * row[:, None])[:, low - start : high - start], row, STREAM_POSITION)
        drawn = order.argsort(-1).argsort(-1) < count[:, None]
        masked = (at >= high).expand(samples, -1).clone()
        masked[:, low - start : high - start] = drawn
        values = _log_probs(model, spec, canvas, start, masked, batch_size)[:, low - start : high - start]
        total += float((torch.where(drawn, values, 0.0).sum(-1) * length / count).mean())
    return total


def _span_canvas(
    spec: DecodeSpec, prefix: Sequence[int], span: Sequence[int], suffix: Sequence[int] | None, device: Any
) -> Canvas:
    """One row with the span in place, and the groups of its blocks."""
    if suffix is None:
        canvas = generation_canvas([prefix], [len(span)], spec, device)
    else:
        canvas = infill_canvas([[prefix, suffix]], [[len(span)]], spec, device)
    if spec.attention != "bidirectional":
        close_groups(canvas, spec.block_length)
    start = len(prefix)
    canvas.ids[0, start : start + len(span)] = torch.tensor(span, device=canvas.ids.device)
    return canvas


def _log_probs(model: Any, spec: DecodeSpec, canvas: Canvas, start: int, masked: Tensor, batch_size: int) -> Tensor:
    """ln p of every token of the span, [R, S], where row r has the tokens masked[r] ([R, S] bool) masked."""
    length = masked.shape[1]
    span = canvas.ids[:, start : start + length]
    out = []
    for rows in masked.split(batch_size):
        count = len(rows)
        flags = torch.zeros(count, canvas.ids.shape[1], dtype=torch.bool, device=masked.device)
        flags[:, start : start + length] = rows
        valid = canvas.valid.expand(count, -1)
        attend = Attend.by_group(canvas.group.expand(count, -1), canvas.low.expand(count, -1), valid)
        embeds = model.embed(canvas.ids.expand(count, -1), flags, spec.mask_token_id)
        hidden = model(None, canvas.position.expand(count, -1), None, attend, embeds=embeds)
        first = start - spec.logits_shift
        law = model.head(hidden[:, first : first + length]).float().log_softmax(-1)
        out.append(law.gather(-1, span.expand(count, -1)[..., None])[..., 0])
    return torch.cat(out)


def close_groups(canvas: Canvas, block_length: int) -> None:
    """Give every slot of a canvas the attention group of its block, as if all blocks had been opened in order; mutates the canvas."""
    for b, (regions, anchors) in enumerate(zip(canvas.regions, canvas.anchors, strict=True)):
        counter = 0
        for (_, stop), anchor in zip(regions, anchors, strict=True):
            for first in range(anchor, stop, block_length):
                canvas.group[b, first : min(first + block_length, stop)] = GAP_GROUP + counter
                counter += 1
