"""What a BlockPilot learns from: every prompt decoded once at every fixed block length, and what that cost in a machine's time.

A trace keeps counts, never seconds: tokens, passes, accepted lengths. ``block_pilot_costs.py`` turns counts into milliseconds, so that one
recording serves every machine, and a busy machine does not spoil it. Recording goes on where a file stops.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm.block_lengths import TOP_LOGITS
from dllm.drafters.drafter import Context, Drafter
from dllm.output import Stats
from dllm.speculate_targets import open_rows
from dllm.types import PolicyState

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class LengthCounts:
    """What one prompt cost at one fixed length.

    tokens: useful new tokens; passes: forwards of the main model, without the prefill where a drafter drafts; positions: rows that it
    computed, prefill included; accept_lengths: tokens of each verify pass (empty for a diffusion model).
    """

    tokens: int
    passes: int
    positions: int
    accept_lengths: tuple[int, ...] = ()

    @property
    def accept_length(self) -> float:
        """Mean tokens a pass, the paper's measure."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else self.tokens / self.passes


@dataclass(frozen=True, eq=False)
class PromptTrace:
    """One prompt. key: hash of its ids; group: class of the request; hidden [D], top_logits [k] fp32: what the policy was told first;
    counts: by block length.
    """

    key: str
    group: str
    prompt_length: int
    hidden: Tensor
    top_logits: Tensor
    counts: Mapping[int, LengthCounts]


@dataclass
class FirstSeen:
    """A policy of fixed length that keeps what it was told first. For one row."""

    length: int
    hidden: Tensor | None = None
    top_logits: Tensor | None = None

    def next(self, state: PolicyState) -> int:
        if self.hidden is None and state.hidden is not None and state.top_logits is not None:
            self.hidden, self.top_logits = state.hidden[0].float().cpu(), state.top_logits[0].float().cpu()
        return self.length


Decode = Callable[[Sequence[Sequence[int]]], list["PromptTrace | None"]]
"""Prompts -> their traces, None for one whose answer ends before a block is opened; key and group are set by ``record``."""


def draft_decoder(
    drafter: Drafter, lengths: Sequence[int], eos_token_ids: Sequence[int], max_new_tokens: int
) -> Decode:
    """Greedy draft and verify at every length; what ``speculative_generate`` counts, for far less than decoding once a length.

    At temperature 0 the text does not depend on the drafts. So the target writes it once, token by token, and the drafter drafts along
    it once a length: a draft is accepted as far as it says what stands there, and the drafter reads the taps that the target left.
    In bf16 a pass over several rows may round a near-tie otherwise; what is recorded then is the text of single rows.
    """
    longest = drafter.config.block_length
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        raise ValueError(f"lengths must be in [1, {longest}], the drafter's block: got {list(lengths)}")

    def decode(prompts: Sequence[Sequence[int]]) -> list[PromptTrace | None]:
        text = _write(drafter, prompts, eos_token_ids, max_new_tokens)
        by_length = {length: _draft_along(drafter, text, length, max_new_tokens) for length in lengths}
        traces: list[PromptTrace | None] = []
        for b, prompt in enumerate(prompts):
            counts = {length: rows[b] for length, rows in by_length.items()}
            found = PromptTrace("", "", len(prompt), text.hidden[b], text.top_logits[b], counts)
            traces.append(found if _whole(counts) else None)
        return traces

    return decode


@dataclass(frozen=True, eq=False)
class _Text:
    """Greedy answers: tokens [B, T], of which the first counts[b] are row b's, a stop included; taps [B, T - 1, F] of all but the last;
    given: the taps of the prompts; prompt_lengths [B]; hidden [B, D], top_logits [B, k] behind the prompts; stopped [B] bool.
    """

    tokens: Tensor
    counts: Tensor
    stopped: Tensor
    taps: Tensor
    given: Context
    prompt_lengths: Tensor
    hidden: Tensor
    top_logits: Tensor


@torch.no_grad()
def _write(
    drafter: Drafter, prompts: Sequence[Sequence[int]], eos_token_ids: Sequence[int], max_new_tokens: int
) -> _Text:
    target = drafter.target
    lengths = torch.tensor([len(p) for p in prompts], device=target.device)
    rows = open_rows(target, drafter.config.target_layer_ids, int(lengths.max()) + max_new_tokens)
    start = rows.prefill(prompts, want_hidden=True)
    assert start.features is not None and start.hidden is not None, "a drafter taps"
    eos = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=target.device)
    token = start.logits.argmax(-1)
    tokens, taps = [token], []
    done, one = torch.isin(token, eos), torch.ones_like(lengths)
    counts, at = one.clone(), lengths.clone()
    for _ in range(max_new_tokens - 1):
        if bool(done.all()):
            break
        logits, tapped = rows.verify(
            token[:, None], at, torch.ones_like(token[:, None], dtype=torch.bool), int(at.max())
        )
        assert tapped is not None, "a drafter taps"
        rows.commit(one)
        at = at + 1
        rows.tidy(int(at.max()))
        token = logits[:, 0].argmax(-1)
        tokens.append(token)
        taps.append(tapped)
        counts = counts + ~done
        done = done | torch.isin(token, eos)
    return _Text(
        tokens=torch.stack(tokens, dim=1),
        counts=counts,
        stopped=done,
        taps=torch.cat(taps, dim=1) if taps else start.features[:, :0],
        given=Context(start.features, start.valid),
        prompt_lengths=lengths,
        hidden=start.hidden.float().cpu(),
        top_logits=start.logits.float().topk(min(TOP_LOGITS, start.logits.shape[-1])).values.cpu(),
    )


@torch.no_grad()
def _draft_along(drafter: Drafter, text: _Text, length: int, max_new_tokens: int) -> list[LengthCounts]:
    """Rounds of one length over the answers; see ``draft_decoder``."""
    batch, width = text.tokens.shape
    useful = (text.counts - text.stopped.long()).tolist()
    if length == 1:
        # A pass a token behind the first.
        ends, starts = text.counts.tolist(), text.prompt_lengths.tolist()
        return [
            LengthCounts(n, end - 1, p + end - 1, (1,) * (end - 1))
            for n, end, p in zip(useful, ends, starts, strict=True)
        ]
    device = drafter.device
    tokens, counts, taps = text.tokens.to(device), text.counts.to(device), text.taps.to(device)
    drafter.reset(batch, int(text.prompt_lengths.max()) + max_new_tokens)
    drafter.feed(Context(text.given.features.to(device), text.given.valid.to(device)))
    at = torch.zeros_like(counts)
    slots = torch.arange(length, device=device)
    positions = text.prompt_lengths.to(device).clone()
    accepted: list[list[int]] = [[] for _ in range(batch)]
    while bool((at < counts - 1).any()):
        running = at < counts - 1
        limits = (max_new_tokens - 1 - at).clamp(max=length - 1) * running
        draft = drafter.propose(None, tokens.gather(1, at[:, None])[:, 0], length - 1, lengths=limits)
        ahead = at[:, None] + 1 + slots[:-1]
        same = draft.tokens == tokens.gather(1, ahead.clamp(max=width - 1))
        same = same & (ahead < counts[:, None]) & (slots[:-1] < limits[:, None])
        count = torch.minimum(same.long().cumprod(1).sum(1) + 1, counts - 1 - at) * running
        positions = positions + (limits + 1) * running
        read = (at[:, None] + slots).clamp(max=taps.shape[1] - 1)
        drafter.feed(Context(taps.gather(1, read[..., None].expand(-1, -1, taps.shape[-1])), slots < count[:, None]))
        at = at + count
        for row, number in zip(accepted, count.tolist(), strict=True):
            row.extend([number] if number else [])
    drafter.reset(batch, 1)
    return [
        LengthCounts(n, len(row), p, tuple(row)) for n, row, p in zip(useful, accepted, positions.tolist(), strict=True)
    ]


def denoise_decoder(lm: Any, lengths: Sequence[int], max_new_tokens: int, settings: Mapping[str, Any]) -> Decode:
    """A diffusion model decoded at every block length, one prompt at a time. The texts differ between lengths, unlike those of a drafter:
    judge their quality apart.
    """

    def decode(prompts: Sequence[Sequence[int]]) -> list[PromptTrace | None]:
        traces: list[PromptTrace | None] = []
        for prompt in prompts:
            seen, counts = FirstSeen(lengths[0]), {}
            for number, length in enumerate(lengths):
                policy = seen if number == 0 else FirstSeen(length)
                out = lm.generate(
                    input_ids=[list(prompt)], max_new_tokens=max_new_tokens, block_length=policy, **settings
                )
                counts[length] = _counts(out.row_stats[0])
            found = seen.hidden is not None and seen.top_logits is not None and _whole(counts)
            traces.append(PromptTrace("", "", len(prompt), seen.hidden, seen.top_logits, counts) if found else None)  # type: ignore[arg-type]
        return traces

    return decode


def _counts(stats: Stats) -> LengthCounts:
    return LengthCounts(stats.useful_tokens, stats.nfe, stats.positions)


def _whole(counts: Mapping[int, LengthCounts]) -> bool:
    """Whether every length says something about speed."""
    return all(c.tokens > 0 and c.passes > 0 for c in counts.values())


def record(
    path: Path,
    prompts: Sequence[tuple[str, Sequence[int]]],
    decode: Decode,
    settings: Mapping[str, Any],
    batch: int = 8,
    stop: Callable[[], bool] = lambda: False,
) -> list[PromptTrace]:
    """Traces of prompts (group, ids), kept in ``path`` (JSON lines, one a prompt behind one of settings); what is there is not run again.

    settings: what the counts depend on (models, dtype, lengths, tokens); ``stop`` is asked between batches. Prompts without a trace are
    kept as such. Raises ValueError if the file was recorded with other settings.
    """
    if batch < 1:
        raise ValueError(f"batch must be >= 1: got {batch}")
    known = _open(path, settings)
    keys = [hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16] for _, ids in prompts]
    todo = [i for i, key in enumerate(keys) if key not in known]
    for at in range(0, len(todo), batch):
        if stop():
            logger.info("stopped: %d of %d prompts recorded", len(prompts) - len(todo) + at, len(prompts))
            break
        part = todo[at : at + batch]
        lines = []
        for i, trace in zip(part, decode([prompts[i][1] for i in part]), strict=True):
            known[keys[i]] = (
                None if trace is None else PromptTrace(**{**trace.__dict__, "key": keys[i], "group": prompts[i][0]})
            )
            lines.append(_line(keys[i], known[keys[i]]))
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
        logger.info("recorded %d of %d prompts", len(prompts) - len(todo) + at + len(part), len(prompts))
    found = [known.get(key) for key in keys]
    return [trace for trace in found if trace is not None]


def read_traces(path: Path) -> tuple[dict[str, Any], list[PromptTrace]]:
    """(settings, traces) of a file that ``record`` wrote. Raises ValueError for another file."""
    lines = list(_lines(path))
    if not lines or lines[0].get("format") != FORMAT:
        raise ValueError(f"{path} must hold traces as train-block-pilot records them (format {FORMAT})")
    return lines[0]["settings"], [_trace(line) for line in lines[1:] if "counts" in line]


def _open(path: Path, settings: Mapping[str, Any]) -> dict[str, PromptTrace | None]:
    settings = json.loads(json.dumps(settings))
    if path.is_file() and path.stat().st_size:
        lines = list(_lines(path))
        before = lines[0].get("settings") if lines else None
        if before != settings:
            raise ValueError(f"{path} was recorded with other settings: got {before}, expected {settings}")
        # A killed run may have left half a line.
        whole = "".join(json.dumps(line) + "\n" for line in lines)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(whole, encoding="utf-8")
        partial.replace(path)
        return {line["key"]: _trace(line) if "counts" in line else None for line in lines[1:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "settings": settings}) + "\n", encoding="utf-8")
    return {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a file; a last one without its line break is what a killed run left."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected JSON: {error}") from error


def _line(key: str, trace: PromptTrace | None) -> str:
    if trace is None:
        return json.dumps({"key": key}) + "\n"
    line = {"key": key, "group": trace.group, "prompt_length": trace.prompt_length}
    line |= {name: _pack(getattr(trace, name)) for name in ("hidden", "top_logits")}
    line["counts"] = {str(length): asdict(counts) for length, counts in trace.counts.items()}
    return json.dumps(line) + "\n"


def _trace(line: dict[str, Any]) -> PromptTrace:
    counts = {
        int(length): LengthCounts(c["tokens"], c["passes"], c["positions"], tuple(c["accept_lengths"]))
        for length, c in line["counts"].items()
    }
    return PromptTrace(
        line["key"], line["group"], line["prompt_length"], _unpack(line["hidden"]), _unpack(line["top_logits"]), counts
    )


def _pack(values: Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def _unpack(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32))
