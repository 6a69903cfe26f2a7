"""Book-keeping of the denoising loop on the host: requests, faults, stops, block ends and history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.output import HistoryFrame
from dllm.request import DenoiseRequest, StepView
from dllm.walk import BlockWalk, RowWalk

READABLE = frozenset({"top1", "entropy", "margin", "logits", "previous"})
"""What the loop can put into ``RowStats`` for a sampler's ``needs``."""
FindStop = Callable[[list[int]], tuple[int, str] | None]


def check_request(model: Any, request: DenoiseRequest, batch: int) -> None:
    """Raise for a request that this model, or the loop, cannot honour."""
    longest = int(request.canvas.lengths.max())
    if longest > request.spec.max_positions:
        raise ValueError(f"prompt and generation must fit in {request.spec.max_positions} positions: got {longest}")
    request.cache.check(request.spec)
    if request.spec.mask_token_id is None and not hasattr(model, "soft_embed"):
        raise ValueError(
            "mask_token_id must be given to denoise: got None, since the config names none; "
            "give spec_overrides={'mask_token_id': ...} to from_pretrained"
        )
    if request.cfg_scale > 0 and hasattr(model, "soft_embed"):
        raise ValueError(f"cfg_scale must be 0 for a model without a mask token: got {request.cfg_scale}")
    if request.resize is not None and request.cache.uses_store:
        raise ValueError("cache must be 'none' with resize: stored rows would be at other positions after a move")
    unknown = set(request.sampler.needs) - READABLE
    if unknown:
        raise ValueError(f"sampler needs must be among {sorted(READABLE)}: got {sorted(unknown)}")
    if batch > 1 and not callable(getattr(request.noise, "select", None)):
        name = type(request.noise).__name__
        raise TypeError(f"noise must have select(keep) for a batch of {batch}: {name} has none")
    if getattr(request.sampler, "shadow", False) and (
        request.spec.logits_shift or request.cfg_scale or hasattr(model, "soft_embed")
    ):
        name = type(request.sampler).__name__
        raise ValueError(
            f"sampler {name} needs a masked model without shift, and no guidance: its shadow rows stand for themselves"
        )
    if getattr(request.sampler, "uniform_corruption", False) and not hasattr(model, "soft_embed"):
        name = type(request.sampler).__name__
        raise ValueError(f"sampler {name} is for models of uniform corruption: got one with a mask token")


def first_slot(flag: Tensor, slots: Tensor, none: int) -> Tensor:
    """First of slots [B, S] where flag [B, S], int64 [B]; ``none`` where there is no such slot."""
    return torch.where(flag, slots, none).amin(1)


def banned_tokens(banned: Tensor, tokens: Tensor) -> Tensor:
    """Whether tokens [B, S] are banned; banned [V] or [B, S, V] -> bool [B, S]."""
    return banned[tokens] if banned.dim() == 1 else banned.gather(-1, tokens[..., None])[..., 0]


def check_step(
    rows: Sequence[RowWalk],
    sampler: Any,
    decode_steps: Tensor,
    broken: Sequence[int],
    illegal: Sequence[int],
    idle: Sequence[int],
) -> None:
    """Raise for the first row at fault; steps are counted from 1, as everywhere that a user sees them."""
    if not (any(broken) or any(illegal) or any(idle)):
        return
    name = f"sampler {type(sampler).__name__}"
    for b, row in enumerate(rows):
        where = f"row {row.index}, step {int(decode_steps[b])}"
        if broken[b]:
            raise ValueError(f"logits must be finite: got NaN or infinity in {where}")
        if illegal[b]:
            raise ValueError(f"{name} committed a mask or banned token in {where}")
        if idle[b]:
            raise RuntimeError(f"{name} committed nothing in {where}: the loop would not end")


def settle(
    walk: BlockWalk,
    ready: Sequence[int],
    edge: Sequence[int],
    stopped: Sequence[int],
    bound: Sequence[int],
    find_stop: FindStop | None,
) -> tuple[list[int], list[int]]:
    """Finish rows that stop: (the frontier of each row, the rows whose block is full).

    ready: rows that may stop or fill their block; edge: first masked slot of each open block, or its end; stopped: first stop token of
    each, or the canvas width; bound: first slot of each that may yet change though it holds a token, for rows that are not ready.
    """
    frontier, full = list(edge), []
    for b, row in enumerate(walk.rows):
        if not ready[b]:
            frontier[b] = min(edge[b], bound[b])
            continue
        stop = _text_stop(walk, b, min(edge[b], stopped[b]), find_stop)
        if stop is None and stopped[b] < edge[b]:
            stop = stopped[b]
        if stop is not None:
            walk.finish(b, "stop", stop)
            frontier[b] = stop
        elif edge[b] == row.hi:
            full.append(b)
    return frontier, full


def _text_stop(walk: BlockWalk, b: int, final: int, find_stop: FindStop | None) -> int | None:
    """Slot at which a stop string cuts row b's text before slot ``final``, or None."""
    if find_stop is None:
        return None
    begin = walk.rows[b].begin
    found = find_stop(walk.state.canvas[b, begin:final].tolist())
    if found is None:
        return None
    walk.rows[b].stop_text = found[1]
    return begin + found[0]


def remember(walk: BlockWalk, view: StepView, decoded: Sequence[int], decode_steps: Tensor) -> None:
    """Add a frame to the history of each row that was decoded."""
    width = view.canvas.shape[1]
    target = torch.where(view.transfer_index, view.slots, width)
    new = torch.zeros_like(walk.wide["masked"]).scatter_(1, target, True)
    guess = walk.wide["canvas"].scatter(1, torch.where(view.inside, view.slots, width), view.provisional)
    for b, row in enumerate(walk.rows):
        if not decoded[b]:
            continue
        begin, end = row.begin, row.end
        row.history.append(
            HistoryFrame(
                step=int(decode_steps[b]),
                nfe=row.stats.nfe,
                token_ids=view.canvas[b, begin:end].tolist(),
                masked=view.masked[b, begin:end].tolist(),
                new=new[b, begin:end].tolist(),
                provisional_ids=guess[b, begin:end].tolist(),
            )
        )
