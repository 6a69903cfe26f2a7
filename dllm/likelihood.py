"""Log-likelihood of given spans under a diffusion LM, by the chain rule along a left-to-right order.

``chain``: sum over i of ln p(x_i | given parts, x_<i, masks from i on), each law from the forward that sees exactly that. It is the
likelihood of the decoder that commits one token per step from left to right, and exact for it; other orders have other likelihoods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.canvas import GAP_GROUP, Canvas, generation_canvas, infill_canvas
from dllm.types import Attend, DecodeSpec


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
    if suffix is None:
        canvas = generation_canvas([prefix], [len(span)], spec, device)
    else:
        canvas = infill_canvas([[prefix, suffix]], [[len(span)]], spec, device)
    if spec.attention != "bidirectional":
        close_groups(canvas, spec.block_length)
    start = len(prefix)
    canvas.ids[0, start : start + len(span)] = torch.tensor(span, device=canvas.ids.device)
    values: list[float] = []
    for first in range(0, len(span), batch_size):
        steps = torch.arange(first, min(first + batch_size, len(span)), device=canvas.ids.device)
        values += _chain_rows(model, spec, canvas, start, len(span), steps).tolist()
    return values


def _chain_rows(model: Any, spec: DecodeSpec, canvas: Canvas, start: int, length: int, steps: Tensor) -> Tensor:
    rows = steps.shape[0]
    width = canvas.ids.shape[1]
    at = torch.arange(width, device=steps.device)
    # Row r of the batch has the first steps[r] tokens of the span revealed.
    masked = (at >= start + steps[:, None]) & (at < start + length)
    ids = canvas.ids.expand(rows, -1)
    valid = canvas.valid.expand(rows, -1)
    attend = Attend.by_group(canvas.group.expand(rows, -1), canvas.low.expand(rows, -1), valid)
    embeds = model.embed(ids, masked, spec.mask_token_id)
    hidden = model(None, canvas.position.expand(rows, -1), None, attend, embeds=embeds)
    slot = start + steps
    source = (slot - spec.logits_shift)[:, None, None].expand(-1, 1, hidden.shape[-1])
    law = model.head(hidden.gather(1, source))[:, 0].float().log_softmax(-1)
    return law.gather(1, canvas.ids[0, slot][:, None])[:, 0]


def close_groups(canvas: Canvas, block_length: int) -> None:
    """Give every slot of a canvas the attention group of its block, as if all blocks had been opened in order; mutates the canvas."""
    for b, (regions, anchors) in enumerate(zip(canvas.regions, canvas.anchors, strict=True)):
        counter = 0
        for (_, stop), anchor in zip(regions, anchors, strict=True):
            for first in range(anchor, stop, block_length):
                canvas.group[b, first : min(first + block_length, stop)] = GAP_GROUP + counter
                counter += 1
