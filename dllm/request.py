"""What goes into the denoising loop, what each step shows, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dllm.canvas import Canvas
from dllm.output import HistoryFrame, Stats
from dllm.resize import Resize
from dllm.types import BlockPolicy, DecodeSpec


@dataclass
class DenoiseRequest:
    """One call of the loop. Ids are int64, lengths tokens.

    banned: bool [V], ids that may never be committed; closed_ids may not be committed where closed_slots (bool [B, L]) either.
    max_denoising_steps: steps per block, an int or one a row; None: no limit. cfg_scale, logits_processor, resize: as in
    ``GenerationConfig``. hook: makes, from the loop, the guide or verifier at work in this call (``dllm.hooks.Hook``), or None.
    """

    canvas: Canvas
    spec: DecodeSpec
    sampler: Any
    cache: Any
    noise: Any
    block_length: int | BlockPolicy
    banned: Tensor
    eos_token_ids: tuple[int, ...] = ()
    closed_slots: Tensor | None = None
    closed_ids: tuple[int, ...] = ()
    max_denoising_steps: int | Sequence[int] | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    resize: Resize | None = None
    cfg_scale: float = 0.0
    logits_processor: Callable[[Tensor, Tensor], Tensor] | None = None
    hook: Callable[[Any], Any] | None = None
    find_stop: Callable[[list[int]], tuple[int, str] | None] | None = None
    want_history: bool = False


@dataclass
class StepView:
    """What a step left behind, for streams and callbacks. Tensors are the loop's own: read them, do not keep or change them.

    step: decoding forwards of the call so far, from 1; rows: original batch indices of the rows still there; canvas, masked [B', L];
    frontier: slots before it are final, one a row; in a row that has just ``stopped`` it is the stop's slot.
    provisional [B', S]: proposed tokens of the open block at ``slots`` [B', S], where ``inside`` (the blocks of a batch differ in
    length); transfer_index [B', S]: committed in this step.
    """

    step: int
    rows: list[int]
    canvas: Tensor
    masked: Tensor
    frontier: list[int]
    stopped: list[bool]
    slots: Tensor
    inside: Tensor
    provisional: Tensor
    transfer_index: Tensor


@dataclass
class DenoiseResult:
    """canvas: final ids of each row (list of ints, all slots); useful: tokens up to and without the stop; log_confidence: sum of ln
    probability of each committed token under the law of the step that committed it; stop_texts: the text before a stop string that cut
    the row, or None."""

    canvas: list[list[int]]
    useful: list[int]
    finish_reasons: list[str]
    stop_texts: list[str | None]
    log_confidence: list[float]
    stats: Stats
    row_stats: list[Stats]
    history: list[list[HistoryFrame]] | None
