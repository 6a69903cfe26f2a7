"""Filling gaps: given parts stay untouched, every gap gets a given or a searched number of tokens.

A length may be given. "auto" is a search scored by the model, or what the model was trained for, a gap that grows or a window:
- ``grow`` (DreamOn): the gap starts with a few masks; the model doubles masks and removes them as it fills, up to ``max_length`` slots.
  One pass, one gap a row.
- ``window``: the gap is opened ``max_length`` slots wide; the model closes it with the filler token; what stands before the first
  filler is the fill. One pass, any number of gaps.
- ``score``: every length of a geometric ladder up to ``max_length`` is filled (one batch), and the fill with the highest mean log
  probability per token, as each token was committed, wins; then the lengths between its neighbours are tried. One gap only.

White space at the end of the text before a gap is written by the model, as the beginning of the gap's tokens (``dllm/white_space.py``).
Tokens of white space alone come on top of a gap's length; the one that ends the white space and begins the fill is a token of the fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dllm.canvas import Canvas, infill_canvas
from dllm.config import ALIASES, GenerationConfig
from dllm.denoise import DenoiseLoop
from dllm.denoise_state import check_request
from dllm.infill_rows import Task, border_white_space, check_fit, read_tasks
from dllm.noise import CounterNoise
from dllm.output import HistoryFrame, InfillOutput, Stats
from dllm.resize import Resize
from dllm.white_space import Border, HealedRow, gap_laws, heal

if TYPE_CHECKING:
    from dllm.pipeline import DiffusionLM

START_LENGTH = 4
"""Masks that a growing gap starts with."""
_NOT_FOR_INFILL = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "eos_token_id",
    "num_return_sequences",
    "streamer",
)


@dataclass
class _Filled:
    """Fill ids of each gap of one row, the borders before them, its score (mean nats per token) and what it cost."""

    ids: list[list[int]]
    borders: list[Border]
    score: float
    stats: Stats
    history: list[HistoryFrame] | None = None


def infill(
    lm: DiffusionLM,
    prefix: str | Sequence[str] | None,
    suffix: str | Sequence[str],
    length: Any,
    max_length: int,
    messages: Sequence[Any] | None,
    template: str | None,
    gaps: Mapping[str, Any] | None,
    heal_white_space: bool,
    kwargs: Mapping[str, Any],
) -> InfillOutput:
    """See ``DiffusionLM.infill``."""
    options = dict(kwargs)
    method = options.pop("length_method", None)
    if method not in (None, "score", "window", "grow"):
        raise ValueError(f"length_method must be 'score', 'window', 'grow' or None: got {method!r}")
    start_length = options.pop("start_length", None)
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise ValueError(f"max_length must be an int >= 1: got {max_length!r}")
    for name in options:
        if ALIASES.get(name, name) in _NOT_FOR_INFILL:
            raise TypeError(f"{name} has no meaning for infill: give length or max_length")
    if lm.tokenizer is None:
        raise ValueError("infill needs a tokenizer and this model has none")
    if not isinstance(heal_white_space, bool):
        raise TypeError(f"heal_white_space must be a bool: got {heal_white_space!r}")
    tasks = read_tasks(lm, prefix, suffix, length, messages, template, gaps, heal_white_space)
    check_fit(lm, tasks, max_length)
    config = GenerationConfig.from_kwargs(options)
    if config.noise is None:
        # Numbers belong to the user's rows, so that a row gives the same in a batch and alone.
        config = replace(config, noise=CounterNoise.for_rows(config.seed, len(tasks), lm.device), seed=None)
    elif len(tasks) > 1 and not callable(getattr(config.noise, "select", None)):
        raise TypeError(f"noise must have select(keep) for a batch of {len(tasks)}: got {config.noise!r}")
    grows = lm.spec.expand_token_id is not None and lm.spec.delete_token_id is not None
    search = method or ("grow" if grows else "window" if lm.spec.filler_token_id is not None else "score")
    if search == "grow" and not grows:
        raise ValueError(
            "length_method='grow' needs a model with expand and delete tokens (spec.expand_token_id, spec.delete_token_id): use 'score'"
        )
    if search == "window" and lm.spec.filler_token_id is None:
        raise ValueError(
            "length_method='window' needs a model trained with an end-of-gap filler (spec.filler_token_id): use 'score'"
        )
    fixed = [b for b, t in enumerate(tasks) if None not in t.lengths]
    open_rows = [b for b in range(len(tasks)) if b not in fixed]
    config, start_length = _growing(config, max_length, start_length, bool(open_rows) and search == "grow")
    total = Stats()
    filled: dict[int, _Filled] = {}
    if fixed:
        _run(lm, replace(config, resize=None), [tasks[b] for b in fixed], fixed, filled, total)
    if open_rows and search == "window":
        wide = [tasks[b].of_lengths([max_length if n is None else n for n in tasks[b].lengths]) for b in open_rows]
        searched = [[n is None for n in tasks[b].lengths] for b in open_rows]
        _run(lm, config, wide, open_rows, filled, total, searched)
        _cut_at_filler(lm, [tasks[b] for b in open_rows], open_rows, filled)
    elif open_rows and search == "grow":
        if any(len(tasks[b].lengths) > 1 for b in open_rows):
            raise ValueError("length 'auto' for several gaps in a row cannot grow: give lengths")
        small = [tasks[b].of_lengths([start_length]) for b in open_rows]
        _run(lm, config, small, open_rows, filled, total)
    elif open_rows:
        for b in open_rows:
            filled[b] = _search(lm, config, tasks[b], b, max_length, total)
    return _output(lm, tasks, filled, total)


def _growing(config: GenerationConfig, max_length: int, start_length: Any, grow: bool) -> tuple[GenerationConfig, int]:
    """The config by which gaps grow, and their first length; the whole gap is one block, and it may expand three times a slot."""
    if not grow:
        if start_length is not None or config.resize is not None:
            name = "start_length" if start_length is not None else "resize"
            raise ValueError(
                f"{name} goes with gaps that grow (length 'auto' with length_method 'grow'): got it without"
            )
        return config, 0
    if start_length is None:
        start_length = min(START_LENGTH, max_length)
    if isinstance(start_length, bool) or not isinstance(start_length, int) or not 1 <= start_length <= max_length:
        raise ValueError(f"start_length must be an int in [1, max_length {max_length}]: got {start_length!r}")
    resize = Resize(max_length, 3 * max_length) if config.resize is None else config.resize
    if resize.max_gap_length != max_length:
        raise ValueError(
            f"max_length {max_length} and resize.max_gap_length must be equal: got {resize.max_gap_length}"
        )
    return replace(config, resize=resize, block_length=config.block_length or max_length), start_length


def _run(
    lm: DiffusionLM,
    config: GenerationConfig,
    tasks: list[Task],
    rows: list[int],
    filled: dict[int, _Filled],
    total: Stats,
    searched: list[list[bool]] | None = None,
) -> None:
    """Fill tasks of known lengths in one batch; the results go to ``filled`` under ``rows``.

    searched: for each row its gaps that are windows, which the filler token may close.
    """
    found = _fill(lm, config, tasks, rows, total, searched)
    filled.update(zip(rows, found, strict=True))


def _fill(
    lm: DiffusionLM,
    config: GenerationConfig,
    tasks: list[Task],
    rows: list[int],
    total: Stats,
    searched: list[list[bool]] | None = None,
) -> list[_Filled]:
    """Fill tasks of known lengths, tasks[i] with the noise of the user's row rows[i]; adds what it cost to ``total``."""
    # A noise object of the user's without select can serve its one row.
    select = getattr(config.noise, "select", None)
    noise = config.noise if select is None else select(torch.tensor(rows, device=lm.device))
    healed = [HealedRow(task.borders(), [int(n or 0) for n in task.lengths], task.parts[-1]) for task in tasks]
    limits = None
    if any(border.rest for row in healed for border in row.borders):
        request = lm._request(config, _canvas(lm, config, healed), infill=True, noise=noise)
        check_request(lm.engine.model, request, len(healed))
        # Steps spread over the blocks that the user sees, not over those that a decided token leaves.
        limits, config = request.max_denoising_steps, replace(config, steps=None)
        spare = 0 if config.resize is None else config.resize.max_gap_length - healed[0].lengths[0]
        filters = {"top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
        laws = gap_laws(lm.engine.model, request, healed, lm._canvas_spec(config))
        white_space = border_white_space(lm)
        assert white_space is not None, "tasks have cuts only where it is there"
        limit = lm.spec.max_positions - spare
        _add(total, heal(healed, laws, white_space, noise, config.temperature, filters, limit))
    if config.resize is None:
        return _denoise(lm, config, healed, noise, limits, total, searched)
    # A first token that is decided takes a slot from what its row may grow to, and that is one number a call.
    found: dict[int, _Filled] = {}
    for begun in (0, 1):
        places = [i for i, row in enumerate(healed) if len(row.borders[0].begun) == begun]
        most, part = config.resize.max_gap_length - begun, [healed[i] for i in places]
        for row in part:
            # One mask at least, from which the gap can grow.
            row.lengths[0] = begun + max(row.lengths[0] - begun, min(1, most))
        if places:
            less = replace(config, resize=replace(config.resize, max_gap_length=most) if most else None)
            chosen = noise if len(places) == len(healed) else noise.select(torch.tensor(places, device=lm.device))
            kept = [limits[i] for i in places] if isinstance(limits, list) else limits
            found.update(zip(places, _denoise(lm, less, part, chosen, kept, total), strict=True))
    return [found[i] for i in range(len(healed))]


def _canvas(lm: DiffusionLM, config: GenerationConfig, rows: list[HealedRow]) -> Canvas:
    parts, lengths = [row.parts for row in rows], [row.open_lengths for row in rows]
    canvas = infill_canvas(parts, lengths, lm._canvas_spec(config), lm.device)
    return canvas if config.resize is None else config.resize.widen(canvas, lm.spec)


def _denoise(
    lm: DiffusionLM,
    config: GenerationConfig,
    rows: list[HealedRow],
    noise: Any,
    limits: Any,
    total: Stats,
    searched: list[list[bool]] | None = None,
) -> list[_Filled]:
    """Fill what is open in rows whose borders are decided; limits: replaces the steps that the config allows, or None."""
    canvas = _canvas(lm, config, rows)
    windows = None
    if searched is not None:
        windows = torch.zeros_like(canvas.masked)
        for b, (row, flags) in enumerate(zip(rows, searched, strict=True)):
            for (start, stop), flag in zip(_spans(row), flags, strict=True):
                windows[b, start:stop] = flag
    request = lm._request(config, canvas, infill=True, noise=noise, windows=windows)
    request = request if limits is None else replace(request, max_denoising_steps=limits)
    loop = DenoiseLoop(lm.engine.model, request)
    for view in loop.run():
        lm._notify(config, view)
    result = loop.result()
    _add(total, result.stats)
    found = []
    for b, row in enumerate(rows):
        spans = _spans(row)
        if config.resize is not None:
            # The one gap begins where it began and has the slots that it has grown to.
            spans = [(spans[0][0], spans[0][0] + result.useful[b])]
        ids = [
            border.begun + result.canvas[b][start:stop]
            for border, (start, stop) in zip(row.borders, spans, strict=True)
        ]
        score = result.log_confidence[b] + sum(border.log_prob for border in row.borders)
        stats = result.row_stats[b]
        stats.useful_tokens += sum(len(border.begun) for border in row.borders)
        _add(stats, row.stats)
        history = None if result.history is None else _with_begun(result.history[b], row)
        found.append(_Filled(ids, row.borders, score / max(sum(map(len, ids)), 1), stats, history))
    return found


def _with_begun(frames: list[HistoryFrame], row: HealedRow) -> list[HistoryFrame]:
    """The frames with what the borders cost, and from the first token of the fill on; later gaps' first tokens are in them already."""
    # If it is all of its gap, the frames begin with a later one.
    begun = row.borders[0].begun if row.open_lengths[0] else []
    given = [False] * len(begun)
    return [
        replace(
            frame,
            nfe=frame.nfe + row.stats.nfe,
            token_ids=begun + frame.token_ids,
            masked=given + frame.masked,
            new=given + frame.new,
            provisional_ids=begun + frame.provisional_ids,
        )
        for frame in frames
    ]


def _spans(row: HealedRow) -> list[tuple[int, int]]:
    """Canvas slots of the open part of each gap."""
    at, spans = 0, []
    for border, length in zip(row.borders, row.open_lengths, strict=True):
        at += len(border.before)
        spans.append((at, at + length))
        at += length
    return spans


def _cut_at_filler(lm: DiffusionLM, tasks: list[Task], rows: list[int], filled: dict[int, _Filled]) -> None:
    filler = lm.spec.filler_token_id
    for task, row in zip(tasks, rows, strict=True):
        for k, wanted in enumerate(task.lengths):
            ids = filled[row].ids[k]
            if wanted is None and filler in ids:
                filled[row].ids[k] = ids[: ids.index(filler)]
        filled[row].stats.useful_tokens = sum(len(ids) for ids in filled[row].ids)


def _search(lm: DiffusionLM, config: GenerationConfig, task: Task, row: int, max_length: int, total: Stats) -> _Filled:
    """The best-scoring length for one row: a geometric ladder, then the lengths between the best step's neighbours."""
    if len(task.lengths) > 1:
        raise ValueError(
            "length 'auto' for several gaps needs length_method='window', which this model was not trained for: give lengths"
        )
    tried: dict[int, _Filled] = {}
    # The cost of a searched fill is the cost of the search, whose candidates share their forwards.
    cost = Stats()
    ladder = sorted({max_length} | {max(1, round(1.5**k)) for k in range(30) if round(1.5**k) <= max_length})
    _try(lm, config, task, row, ladder, tried, cost)
    best = max(tried, key=lambda n: (tried[n].score, -n))
    at = ladder.index(best)
    below = ladder[at - 1] if at else best
    above = ladder[at + 1] if at + 1 < len(ladder) else best
    step = max(1, (above - below) // 8)
    between = [n for n in range(below + 1, above, step) if n not in tried]
    if between:
        _try(lm, config, task, row, between, tried, cost)
    best = max(tried, key=lambda n: (tried[n].score, -n))
    _add(total, cost)
    cost.useful_tokens = best
    return replace(tried[best], stats=cost)


def _try(
    lm: DiffusionLM,
    config: GenerationConfig,
    task: Task,
    row: int,
    lengths: list[int],
    tried: dict[int, _Filled],
    cost: Stats,
) -> None:
    tasks = [task.of_lengths([n]) for n in lengths]
    tried.update(zip(lengths, _fill(lm, config, tasks, [row] * len(lengths), cost), strict=True))


def _add(total: Stats, part: Stats) -> None:
    total.nfe += part.nfe
    total.positions += part.positions
    total.prefill_s += part.prefill_s
    total.decode_s += part.decode_s


def _output(lm: DiffusionLM, tasks: list[Task], filled: Mapping[int, _Filled], total: Stats) -> InfillOutput:
    texts, fills = [], []
    for b, task in enumerate(tasks):
        spans = [_text(lm, *gap) for gap in zip(filled[b].ids, filled[b].borders, strict=True)]
        text = task.texts[0]
        for span, part in zip(spans, task.texts[1:], strict=True):
            text += span + part
        texts.append(text)
        fills.append(spans[0] if len(spans) == 1 else spans)
    rows = [filled[b] for b in range(len(tasks))]
    total.useful_tokens = sum(len(ids) for row in rows for ids in row.ids)
    return InfillOutput(
        texts=texts,
        fills=fills,
        fill_ids=[row.ids for row in rows],
        lengths=[[len(ids) for ids in row.ids] for row in rows],
        scores=[row.score for row in rows],
        stats=total,
        row_stats=[row.stats for row in rows],
        history=[row.history or [] for row in rows] if any(row.history is not None for row in rows) else None,
        white_space_ids=[[border.white if border.healed else None for border in row.borders] for row in rows],
    )


def _text(lm: DiffusionLM, ids: list[int], border: Border) -> str:
    """What the fill adds to the given text."""
    white_space = border_white_space(lm) if border.healed else None
    # A tokenizer's own decoder may drop white space at a text's beginning.
    return lm._decode(ids) if white_space is None else white_space.decode(ids, border.held)
