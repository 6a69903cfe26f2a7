"""Draft-and-verify decoding of AR models: the public face. The loop is ``speculate_loop.py``;
on CUDA, for a target on our decoder whole rounds run as graphs (``speculate_device.py``).

What a call is asked for: ``speculate_request.py``; state and judgement of a round: ``speculate_state.py``; the target's
side (our decoder, Hugging Face models): ``speculate_targets.py``; when drafting pays: ``draft_cost.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dllm.drafters.drafter import Drafter
from dllm.drafters.target import Target
from dllm.output import GenerationOutput
from dllm.speculate_device import kept_rounds, refuses, speculate_on_device
from dllm.speculate_loop import RoundView, SpeculateResult, SpeculativeLoop
from dllm.speculate_request import Settings, read_settings
from dllm.streaming import StreamerFeed, StreamEvent, TextDelta


def speculative_generate(
    model: Any, drafter: Drafter | None, input_ids: Any, attention_mask: Any = None, **settings: Any
) -> GenerationOutput:
    """Decode an AR model with a drafter: the same text (or the same law), in fewer passes.

    model: a Hugging Face causal LM, or a ``Decoder`` of ours; drafter: bound to that model, or None (plain decoding).
    input_ids [B, P] int64 with attention_mask [B, P] (any padding side; None: all tokens count).

    settings: max_new_tokens=256, min_new_tokens, num_drafts (0..block_size - 1) or block_length (an int, anchor
    included, or a BlockPolicy), verifier ("auto", "greedy", "rejection", "block", "equality"), temperature=0.0, top_k,
    top_p, min_p, draft_temperature=0.0 (argmax drafts), repetition_penalty, presence_penalty, frequency_penalty,
    logit_bias, logits_processor (transformers' contract), seed or noise, num_return_sequences, stop_strings with
    tokenizer (default: model.tokenizer), eos_token_id (default: the model's), streamer (one row), cost_table (a
    CostTable, a path, or "auto": drafting stays off at batch sizes where it does not pay), callback_on_step_end(model,
    step, step, kwargs), generation_config. Unknown names raise TypeError with the accepted ones.

    The output does not depend on the drafter: token for token at temperature 0, and with verifier "equality" at any
    temperature (the text is that of plain sampling with the same seed); otherwise in law. In bf16 a pass over several
    rows may round a near-tie otherwise than a pass over one.
    """
    target, read = _open(model, drafter, input_ids, attention_mask, settings)
    config, feed = read.config, None
    if config.streamer is not None and len(read.request.prompts) > 1:
        raise ValueError(
            f"streamer takes one row: got {len(read.request.prompts)}; use speculative_stream, which takes a batch"
        )
    if not _watches(read) and refuses(target, drafter, read.request) is None:
        return _output(speculate_on_device(target, drafter, read.request, kept_rounds(target)), read)
    loop = SpeculativeLoop(target, drafter, read.request, watch=_watches(read))
    if config.streamer is not None:
        feed = StreamerFeed(config.streamer, read.request.prompts[0], read.decode, config.stops)
    for view in loop.run():
        _notify(model, read, view)
        if feed is not None:
            feed.push(loop.all[0].settled)
    output = _output(loop.result(), read)
    if feed is not None:
        feed.end(output.sequences[0, : output.lengths[0]].tolist())
    return output


def speculative_stream(
    model: Any, drafter: Drafter | None, input_ids: Any, attention_mask: Any = None, **settings: Any
) -> Iterator[StreamEvent]:
    """The same as ``speculative_generate``, as events: committed text to append, then one "done" a row.

    Arguments are checked at the call. A row's committed texts add up to what ``speculative_generate`` gives in
    ``texts``. A drafter serves one running request at a time.
    """
    target, read = _open(model, drafter, input_ids, attention_mask, settings)
    if read.decode is None:
        raise ValueError("speculative_stream needs a tokenizer: give tokenizer= (load_target sets model.tokenizer)")
    if read.config.streamer is not None:
        raise ValueError("speculative_stream gives events itself: streamer goes with speculative_generate")
    return _events(model, SpeculativeLoop(target, drafter, read.request, watch=True), read)


def _events(model: Any, loop: SpeculativeLoop, read: Settings) -> Iterator[StreamEvent]:
    assert read.decode is not None, "events need text"
    deltas = [TextDelta(read.decode, read.config.stops) for _ in loop.all]
    for view in loop.run():
        _notify(model, read, view)
        for index in view.rows:
            text = deltas[index].push(loop.all[index].settled)
            if text:
                yield StreamEvent(index, "committed", text, view.step)
    output = _output(loop.result(), read)
    for index, delta in enumerate(deltas):
        rest = delta.rest(output.texts[index])
        if rest:
            yield StreamEvent(index, "committed", rest, loop.num_rounds)
        yield StreamEvent(index, "done", "", loop.num_rounds, output.finish_reasons[index])


def _open(
    model: Any, drafter: Any, input_ids: Any, attention_mask: Any, settings: dict[str, Any]
) -> tuple[Target, Settings]:
    target = bound_target(model, drafter)
    return target, read_settings(target, drafter, input_ids, attention_mask, settings)


def bound_target(model: Any, drafter: Any) -> Target:
    """The model as a target; raises TypeError or ValueError if drafter is none, or another model's."""
    if drafter is None:
        return Target.of(model)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter or None: got {type(drafter).__name__}")
    wanted = model.model if isinstance(model, Target) else model
    if drafter.target.model is not wanted:
        raise ValueError(
            "drafter must be bound to this model: load it with Drafter.from_pretrained(path, target=model)"
        )
    return drafter.target


def _watches(read: Settings) -> bool:
    return read.config.streamer is not None or read.config.callback_on_step_end is not None


def _notify(model: Any, read: Settings, view: RoundView) -> None:
    if read.config.callback_on_step_end is not None:
        names = ("rows", "anchors", "draft_tokens", "limits", "new_ids")
        kwargs = {name: getattr(view, name) for name in names}
        read.config.callback_on_step_end(model, view.step, view.step, kwargs)


def _output(result: SpeculateResult, read: Settings) -> GenerationOutput:
    rows = [ids[:useful] for ids, useful in zip(result.tokens, result.useful, strict=True)]
    sequences = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
    for b, row in enumerate(rows):
        sequences[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
    texts: list[str] = []
    if read.decode is not None:
        texts = [read.decode(row) if cut is None else cut for row, cut in zip(rows, result.stop_texts, strict=True)]
    return GenerationOutput(
        texts=texts,
        sequences=sequences,
        lengths=[len(row) for row in rows],
        finish_reasons=result.finish_reasons,
        stats=result.stats,
        row_stats=result.row_stats,
    )
