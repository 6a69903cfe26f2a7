"""Filling gaps: given parts stay untouched, every gap gets a given or a searched number of tokens.

A length may be given. "auto" is a search scored by the model, or what the model was trained for, a gap that grows or a window:
- ``grow`` (DreamOn): the gap starts with a few masks; the model doubles masks and removes them as it fills, up to ``max_length`` slots.
  One pass, one gap a row.
- ``window``: the gap is opened ``max_length`` slots wide; the model closes it with the filler token; what stands before the first
  filler is the fill. One pass, any number of gaps.
- ``score``: every length of a geometric ladder up to ``max_length`` is filled (one batch), and the fill with the highest mean log
  probability per token, as each token was committed, wins; then the lengths between its neighbours are tried. One gap only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dllm.canvas import infill_canvas
from dllm.config import ALIASES, GenerationConfig
from dllm.denoise import DenoiseLoop, DenoiseResult
from dllm.noise import CounterNoise
from dllm.output import InfillOutput, Stats
from dllm.prompts import apply_template, conversations, encode_text
from dllm.resize import Resize

if TYPE_CHECKING:
    from dllm.pipeline import DiffusionLM

START_LENGTH = 4
"""Masks that a growing gap starts with."""
_MARK = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")
_NOT_FOR_INFILL = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "eos_token_id",
    "num_return_sequences",
    "streamer",
)


@dataclass
class _Task:
    """One row: its texts, their ids, and the length of each gap (None: search)."""

    texts: list[str]
    parts: list[list[int]]
    lengths: list[int | None]


@dataclass
class _Filled:
    """Fill ids of each gap of one row, its score (mean nats per token) and what it cost."""

    ids: list[list[int]]
    score: float
    stats: Stats
    history: Any = None


def infill(
    lm: DiffusionLM,
    prefix: str | Sequence[str] | None,
    suffix: str | Sequence[str],
    length: Any,
    max_length: int,
    messages: Sequence[Any] | None,
    template: str | None,
    gaps: Mapping[str, Any] | None,
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
    tasks = _tasks(lm, prefix, suffix, length, messages, template, gaps)
    _check_fit(lm, tasks, max_length)
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
        wide = [
            _Task(tasks[b].texts, tasks[b].parts, [max_length if n is None else n for n in tasks[b].lengths])
            for b in open_rows
        ]
        searched = [[n is None for n in tasks[b].lengths] for b in open_rows]
        _run(lm, config, wide, open_rows, filled, total, searched)
        _cut_at_filler(lm, [tasks[b] for b in open_rows], open_rows, filled)
    elif open_rows and search == "grow":
        if any(len(tasks[b].lengths) > 1 for b in open_rows):
            raise ValueError("length 'auto' for several gaps in a row cannot grow: give lengths")
        small = [_Task(tasks[b].texts, tasks[b].parts, [start_length]) for b in open_rows]
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


def _tasks(
    lm: DiffusionLM,
    prefix: Any,
    suffix: Any,
    length: Any,
    messages: Any,
    template: str | None,
    gaps: Mapping[str, Any] | None,
) -> list[_Task]:
    if template is not None:
        if prefix is not None or suffix != "" or messages is not None or length != "auto":
            raise ValueError("template goes with gaps alone: prefix, suffix, length and messages must not be given")
        return [_template_task(lm, template, gaps)]
    if gaps is not None:
        raise ValueError("gaps goes with template: got gaps without it")
    if prefix is None:
        raise ValueError("prefix or template must be given: got neither")
    prefixes = _texts("prefix", prefix)
    if not prefixes:
        raise ValueError("prefix must hold at least one row: got none")
    suffixes = [suffix] * len(prefixes) if isinstance(suffix, str) else _texts("suffix", suffix)
    if len(suffixes) != len(prefixes):
        raise ValueError(f"suffix must be a str or one a row ({len(prefixes)}): got {len(suffixes)}")
    lengths = list(length) if isinstance(length, Sequence) and not isinstance(length, str) else [length] * len(prefixes)
    if len(lengths) != len(prefixes):
        raise ValueError(f"length must be 'auto', an int or one a row ({len(prefixes)}): got {len(lengths)}")
    chats: list[Any] = [None] * len(prefixes)
    if messages is not None:
        chats = conversations(messages)
        if len(chats) != len(prefixes):
            raise ValueError(f"messages must be one conversation a row ({len(prefixes)}): got {len(chats)}")
    tasks = []
    for before, after, n, chat in zip(prefixes, suffixes, lengths, chats, strict=True):
        parts = [encode_text(lm.tokenizer, before), encode_text(lm.tokenizer, after)]
        if chat is not None:
            # The assistant's turn begins with the prefix and is closed after the suffix.
            parts = [apply_template(lm.tokenizer, chat) + parts[0], parts[1] + list(lm.spec.eos_token_ids[:1])]
        tasks.append(_Task([before, after], [_start(lm, parts[0]), parts[1]], [_length(n)]))
    return tasks


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a str or a list of str: got {text!r}")
    return texts


def _template_task(lm: DiffusionLM, template: str, gaps: Mapping[str, Any] | None) -> _Task:
    names = _MARK.findall(template)
    if not names:
        raise ValueError("template must hold at least one {{name}} mark: got none")
    if len(set(names)) != len(names):
        raise ValueError(f"template marks must have different names: got {names}")
    given = dict(gaps or {})
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"gaps must name marks of the template {names}: got {unknown}")
    texts = _MARK.split(template)[::2]
    if any(not text for text in texts[1:-1]):
        raise ValueError("template must have text between two marks: merge neighbouring gaps into one")
    parts = [encode_text(lm.tokenizer, text) for text in texts]
    parts[0] = _start(lm, parts[0])
    return _Task(texts, parts, [_length(given.get(name, "auto")) for name in names])


def _start(lm: DiffusionLM, ids: list[int]) -> list[int]:
    """An empty first part gets the model's document start, since a shifted model reads a slot's law one row before it."""
    if ids or not lm.spec.logits_shift:
        return ids
    if lm.spec.document_start_id is None:
        raise ValueError(
            "prefix must not be empty for this model: it predicts a token from the one before and has no document start"
        )
    return [lm.spec.document_start_id]


def _length(value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"length must be 'auto' or an int >= 0: got {value!r}")
    if value < 0:
        raise ValueError(f"length must be >= 0: got {value}")
    return value


def _check_fit(lm: DiffusionLM, tasks: list[_Task], max_length: int) -> None:
    for b, task in enumerate(tasks):
        total = sum(len(p) for p in task.parts) + sum(max_length if n is None else n for n in task.lengths)
        if total > lm.spec.max_positions:
            raise ValueError(
                f"prefix, gaps and suffix must fit in {lm.spec.max_positions} positions: row {b} needs {total}"
            )


def _run(
    lm: DiffusionLM,
    config: GenerationConfig,
    tasks: list[_Task],
    rows: list[int],
    filled: dict[int, _Filled],
    total: Stats,
    searched: list[list[bool]] | None = None,
) -> None:
    """Fill tasks of known lengths in one batch; the results go to ``filled`` under ``rows``.

    searched: for each row its gaps that are windows, which the filler token may close.
    """
    result = _denoise(lm, config, tasks, rows, searched)
    _add(total, result.stats)
    for i, row in enumerate(rows):
        spans = _spans(tasks[i])
        if config.resize is not None:
            # The one gap begins where it began and has the slots that it has grown to.
            spans = [(spans[0][0], spans[0][0] + result.useful[i])]
        ids = [result.canvas[i][start:stop] for start, stop in spans]
        count = sum(stop - start for start, stop in spans)
        history = None if result.history is None else result.history[i]
        filled[row] = _Filled(ids, result.log_confidence[i] / max(count, 1), result.row_stats[i], history)


def _denoise(
    lm: DiffusionLM,
    config: GenerationConfig,
    tasks: list[_Task],
    rows: list[int],
    searched: list[list[bool]] | None = None,
) -> DenoiseResult:
    parts, lengths = [t.parts for t in tasks], [[int(n or 0) for n in t.lengths] for t in tasks]
    canvas = infill_canvas(parts, lengths, lm._canvas_spec(config), lm.device)
    if config.resize is not None:
        canvas = config.resize.widen(canvas, lm.spec)
    windows = None
    if searched is not None:
        windows = torch.zeros_like(canvas.masked)
        for b, (task, flags) in enumerate(zip(tasks, searched, strict=True)):
            for (start, stop), flag in zip(_spans(task), flags, strict=True):
                windows[b, start:stop] = flag
    # A noise object of the user's without select can serve its one row.
    select = getattr(config.noise, "select", None)
    noise = config.noise if select is None else select(torch.tensor(rows, device=lm.device))
    loop = DenoiseLoop(lm.engine.model, lm._request(config, canvas, infill=True, noise=noise, windows=windows))
    for view in loop.run():
        lm._notify(config, view)
    return loop.result()


def _spans(task: _Task) -> list[tuple[int, int]]:
    """Canvas slots of each gap of a task whose lengths are known."""
    at, spans = 0, []
    for part, gap in zip(task.parts, [*task.lengths, 0], strict=True):
        at += len(part)
        spans.append((at, at + int(gap or 0)))
        at += int(gap or 0)
    return spans[:-1]


def _cut_at_filler(lm: DiffusionLM, tasks: list[_Task], rows: list[int], filled: dict[int, _Filled]) -> None:
    filler = lm.spec.filler_token_id
    for task, row in zip(tasks, rows, strict=True):
        for k, wanted in enumerate(task.lengths):
            ids = filled[row].ids[k]
            if wanted is None and filler in ids:
                filled[row].ids[k] = ids[: ids.index(filler)]
        filled[row].stats.useful_tokens = sum(len(ids) for ids in filled[row].ids)


def _search(lm: DiffusionLM, config: GenerationConfig, task: _Task, row: int, max_length: int, total: Stats) -> _Filled:
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
    task: _Task,
    row: int,
    lengths: list[int],
    tried: dict[int, _Filled],
    cost: Stats,
) -> None:
    tasks = [_Task(task.texts, task.parts, [n]) for n in lengths]
    found: dict[int, _Filled] = {}
    result = _denoise(lm, config, tasks, [row] * len(lengths))
    _add(cost, result.stats)
    for i, n in enumerate(lengths):
        start, stop = _spans(tasks[i])[0]
        history = None if result.history is None else result.history[i]
        found[n] = _Filled([result.canvas[i][start:stop]], result.log_confidence[i] / n, result.row_stats[i], history)
    tried.update(found)


def _add(total: Stats, part: Stats) -> None:
    total.nfe += part.nfe
    total.positions += part.positions
    total.prefill_s += part.prefill_s
    total.decode_s += part.decode_s


def _output(lm: DiffusionLM, tasks: list[_Task], filled: Mapping[int, _Filled], total: Stats) -> InfillOutput:
    texts, fills = [], []
    for b, task in enumerate(tasks):
        spans = [lm._decode(ids) for ids in filled[b].ids]
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
        history=[row.history for row in rows] if any(row.history is not None for row in rows) else None,
    )
