"""What ends a block or a row: the number of steps, and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dllm.canvas import Canvas
from dllm.config import GenerationConfig
from dllm.streaming import tokens_within


def steps_per_block(config: GenerationConfig, canvas: Canvas, length: Any) -> int | list[int] | None:
    """max_denoising_steps of each row: as given, or ``steps`` spread over its blocks, which must divide it."""
    if config.steps is None:
        return config.max_denoising_steps
    if not isinstance(length, int):
        raise ValueError(
            "steps (a total over all blocks) needs a fixed block_length: got a policy; use max_denoising_steps"
        )
    limits = []
    for b, (regions, anchors) in enumerate(zip(canvas.regions, canvas.anchors, strict=True)):
        blocks = sum(-(-(stop - anchor) // length) for (_, stop), anchor in zip(regions, anchors, strict=True))
        if blocks and config.steps % blocks:
            raise ValueError(
                f"steps must be a multiple of the number of blocks ({blocks} in row {b}): got {config.steps}; "
                "max_denoising_steps counts per block"
            )
        limits.append(config.steps // max(blocks, 1))
    return limits


def stop_finder(stops: tuple[str, ...], tokenizer: Any, decode: Callable[[list[int]], str]) -> Any:
    """A function of a row's final ids: (tokens before the first stop string, the text before it), or None; None without stops."""
    if not stops:
        return None
    if tokenizer is None:
        raise ValueError("stop_strings need a tokenizer and this model has none: use eos_token_id")

    def find(ids: list[int]) -> tuple[int, str] | None:
        text = decode(ids)
        places = [at for at in (text.find(s) for s in stops) if at >= 0]
        if not places:
            return None
        cut = text[: min(places)]
        return tokens_within(ids, cut, decode), cut

    return find
