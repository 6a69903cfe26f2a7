"""What is evaluated: a diffusion LM, or an AR model with or without a drafter, behind one interface.

A system answers samples of a task in one batch; row by row it says what came out and what it cost. Rows are seeded one by
one, so that an answer does not depend on the rows beside it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dllm.evals.judge import Judge
from dllm.evals.measure import filled
from dllm.evals.task import Sample
from dllm.likelihood import chain_log_likelihood
from dllm.output import GenerationOutput, HistoryFrame, Stats
from dllm.prompts import apply_template, encode_text

AR_INFILL = ("prefix", "prompt")
"""How an AR model is asked to fill a gap: by the prefix alone, or by prefix and suffix quoted in a prompt."""

FILL_REQUEST = (
    "A piece of a text is missing. Write the missing piece and nothing else, so that it fits between the two parts.\n\n"
    "Part before:\n{prefix}\n\nPart after:\n{suffix}"
)


@dataclass(frozen=True)
class Answer:
    """One row: its text and useful tokens (a fill's own, without prefix and suffix), and what it cost.

    seconds: wall time of the call divided by its rows; batch_rows: how many there were. true_length: tokens of the reference of
    an infill sample, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    cost: Stats
    seconds: float
    prefill_s: float
    decode_s: float
    batch_rows: int
    true_length: int | None = None
    history: Sequence[HistoryFrame] | None = field(default=None, repr=False)


class System(Protocol):
    """What the runner needs of a model."""

    @property
    def tokenizer(self) -> Any: ...

    def describe(self) -> dict[str, Any]:
        """Device and dtype: part of what the run's folder is checked by."""
        ...

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        """One answer a sample, in their order; history: record the denoise steps where the system has such."""
        ...

    def context_ids(self, sample: Sample) -> list[int]:
        """The prompt of a sample as the model sees it (the prefix, for an infill)."""
        ...

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        """Nats of an infill's true middle under the model, and over how many tokens."""
        ...


def fill_length(length: str) -> Callable[[int], int | str]:
    """The length setting of an infill run: "oracle", "auto" or "fixed:N" -> (tokens of the reference -> tokens or "auto")."""
    if length == "oracle":
        return lambda reference: reference
    if length == "auto":
        return lambda reference: "auto"
    kind, _, number = length.partition(":")
    if kind != "fixed" or not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise ValueError(f"length must be 'oracle', 'auto' or 'fixed:N' with N >= 1: got {length!r}")
    return lambda reference: int(number)


@dataclass
class DiffusionSystem:
    """A `DiffusionLM` with fixed settings.

    options: arguments of `generate` and `infill` (sampler, threshold, cache, temperature, guide, ...). length: see `fill_length`;
    max_new_tokens: replaces the task's own limit; for an infill it is the longest fill that "auto" may choose.
    """

    lm: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    length: str = "auto"
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.lm.tokenizer is None:
            raise ValueError("model must have a tokenizer: this one has none")
        self.tokenizer = self.lm.tokenizer
        self._length = fill_length(self.length)

    def describe(self) -> dict[str, Any]:
        return _where(self.lm.model)

    def context_ids(self, sample: Sample) -> list[int]:
        return _context(self.tokenizer, sample) or [_start_id(self.tokenizer, self.lm.spec.document_start_id)]

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        def key(sample: Sample) -> tuple[Any, ...]:
            if sample.kind == "infill":
                return ("infill", self._limit(sample))
            return ("generate", self._limit(sample), sample.stop)

        def call(rows: Sequence[Sample], seeds: Sequence[int]) -> GenerationOutput:
            options = {**self.options, "seed": list(seeds), "output_history": history}
            if rows[0].kind == "infill":
                lengths = [self._length(_tokens(self.tokenizer, row.reference)) for row in rows]
                limit = self._limit(rows[0])
                out = self.lm.infill(
                    [row.prefix for row in rows], [row.suffix for row in rows], lengths, max_length=limit, **options
                )
                return dataclasses.replace(filled(out), history=out.history)
            ids, mask = _padded([self.context_ids(row) for row in rows])
            return self.lm.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self._limit(rows[0]),
                stop_strings=list(rows[0].stop) or None,
                **options,
            )

        return _grouped(self.tokenizer, samples, seeds, key, call)

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        prefix, span, suffix = (
            self.context_ids(sample),
            *(encode_text(self.tokenizer, text) for text in (sample.reference, sample.suffix)),
        )
        values = chain_log_likelihood(self.lm.model, self.lm.spec, prefix, span, suffix, device=self.lm.device)
        return float(sum(values)), len(span)

    def _limit(self, sample: Sample) -> int:
        return sample.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass
class ARSystem:
    """A causal LM (`load_target`), plain or with a drafter bound to it.

    options: settings of `speculative_generate`. infill: one of `AR_INFILL`. A gap of known length is as many tokens after the
    prefix; asked by a prompt the model may stop earlier, and with length "auto" it stops by itself or at the sample's stops.
    """

    model: Any
    drafter: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    length: str = "auto"
    max_new_tokens: int | None = None
    infill: str = "prefix"

    def __post_init__(self) -> None:
        if getattr(self.model, "tokenizer", None) is None:
            raise ValueError("model must have a tokenizer: this one has none")
        if self.infill not in AR_INFILL:
            raise ValueError(f"infill must be one of {AR_INFILL}: got {self.infill!r}")
        self.tokenizer = self.model.tokenizer
        self._length = fill_length(self.length)

    def describe(self) -> dict[str, Any]:
        return _where(self.model)

    def context_ids(self, sample: Sample) -> list[int]:
        if sample.kind == "infill" and self.infill == "prompt":
            text = FILL_REQUEST.format(prefix=sample.prefix, suffix=sample.suffix)
            if getattr(self.tokenizer, "chat_template", None) is None:
                return encode_text(self.tokenizer, text + "\n\nMissing piece:\n")
            return apply_template(self.tokenizer, [{"role": "user", "content": text}])
        return _context(self.tokenizer, sample) or [_start_id(self.tokenizer, self.tokenizer.bos_token_id)]

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        from dllm.speculate import speculative_generate

        def call(rows: Sequence[Sample], seeds: Sequence[int]) -> GenerationOutput:
            limit, floor = self._limits(rows[0])
            ids, mask = _padded([self.context_ids(row) for row in rows])
            return speculative_generate(
                self.model,
                self.drafter,
                ids.to(self.model.device),
                mask.to(self.model.device),
                max_new_tokens=limit,
                min_new_tokens=floor,
                stop_strings=list(rows[0].stop) or None,
                seed=list(seeds),
                **self.options,
            )

        return _grouped(self.tokenizer, samples, seeds, lambda s: (s.kind, self._limits(s), s.stop), call)

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        [score] = Judge(self.model).score([self.context_ids(sample)], [encode_text(self.tokenizer, sample.reference)])
        return score.total, score.num_tokens

    def _limits(self, sample: Sample) -> tuple[int, int]:
        """(most, fewest) new tokens."""
        limit = sample.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        if sample.kind == "generate":
            return limit, 0
        length = self._length(_tokens(self.tokenizer, sample.reference))
        if isinstance(length, str):
            return limit, 0
        return max(length, 1), length if self.infill == "prefix" and not sample.stop else 0


def _grouped(
    tokenizer: Any,
    samples: Sequence[Sample],
    seeds: Sequence[int],
    key: Callable[[Sample], tuple[Any, ...]],
    call: Callable[[Sequence[Sample], Sequence[int]], GenerationOutput],
) -> list[Answer]:
    """Answers in the order of the samples; those of equal key share a call."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(key(sample), []).append(i)
    answers: dict[int, Answer] = {}
    for places in groups.values():
        started = time.perf_counter()
        out = call([samples[i] for i in places], [seeds[i] for i in places])
        seconds = time.perf_counter() - started
        rows = len(places)
        for b, i in enumerate(places):
            answers[i] = Answer(
                text=out.texts[b],
                token_ids=tuple(out.sequences[b, : out.lengths[b]].tolist()),
                finish_reason=out.finish_reasons[b],
                cost=out.row_stats[b],
                seconds=seconds / rows,
                prefill_s=out.stats.prefill_s / rows,
                decode_s=out.stats.decode_s / rows,
                batch_rows=rows,
                true_length=_tokens(tokenizer, samples[i].reference) if samples[i].kind == "infill" else None,
                history=None if out.history is None else out.history[b],
            )
    return [answers[i] for i in range(len(samples))]


def _context(tokenizer: Any, sample: Sample) -> list[int]:
    if sample.kind == "infill":
        return encode_text(tokenizer, sample.prefix)
    if sample.messages:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(f"sample {sample.id} is a chat: the model's tokenizer has no chat template")
        return apply_template(tokenizer, sample.messages)
    return encode_text(tokenizer, sample.prompt)


def _start_id(tokenizer: Any, wanted: int | None) -> int:
    """The token that stands before an empty prefix."""
    start = tokenizer.eos_token_id if wanted is None else wanted
    if start is None:
        raise ValueError("an empty prefix needs a document start: the model's tokenizer has no BOS and no EOS")
    return int(start)


def _tokens(tokenizer: Any, text: str) -> int:
    return len(encode_text(tokenizer, text))


def _padded(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, P] of ragged rows, padded on the left."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = torch.tensor(row)
        mask[b, width - len(row) :] = 1
    return ids, mask


def _where(model: Any) -> dict[str, Any]:
    parameter = next(iter(model.parameters()))
    device = parameter.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "dtype": str(parameter.dtype).removeprefix("torch.")}
