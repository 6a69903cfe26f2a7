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

from dllm.evals.gaps import Behind, Gap, begin, gap_of, padded
from dllm.evals.judge import Judge
from dllm.evals.measure import filled
from dllm.evals.task import Sample
from dllm.evals.tasks._common import cut_at
from dllm.infill_rows import border_white_space
from dllm.likelihood import chain_log_likelihood
from dllm.output import GenerationOutput, HistoryFrame, Stats
from dllm.prompts import apply_template, encode_text
from dllm.target import stop_ids_of
from dllm.white_space import HealedRow, WhiteSpace, white_space_of

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
    an infill sample, else None. white_space_ids: of an infill that begins with white space of its prefix, the tokens before token_ids
    that write nothing else; None where the prefix stood whole.
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
    white_space_ids: tuple[int, ...] | None = None


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
        """The prompt of a sample as the model sees it (for an infill the prefix, without white space that belongs to the gap)."""
        ...

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        """Nats of an infill's true middle under the model, and over how many tokens.

        White space at the prefix's end counts with the middle: tokens join the two, and no model was trained on them apart.
        """
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
        self._white_space = border_white_space(self.lm) if self.options.get("heal_white_space", True) else None

    def describe(self) -> dict[str, Any]:
        return _where(self.lm.model)

    def context_ids(self, sample: Sample) -> list[int]:
        return _context(self.tokenizer, self._white_space, sample) or [
            _start_id(self.tokenizer, self.lm.spec.document_start_id)
        ]

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        def key(sample: Sample) -> tuple[Any, ...]:
            if sample.kind == "infill":
                return ("infill", self._limit(sample))
            return ("generate", self._limit(sample), sample.stop)

        def call(rows: Sequence[Sample], seeds: Sequence[int]) -> GenerationOutput:
            options = {**self.options, "seed": list(seeds), "output_history": history}
            if rows[0].kind == "infill":
                lengths = [self._length(self._gap(row).length) for row in rows]
                limit = self._limit(rows[0])
                out = self.lm.infill(
                    [row.prefix for row in rows], [row.suffix for row in rows], lengths, max_length=limit, **options
                )
                white.update((row.id, ids[0]) for row, ids in zip(rows, out.white_space_ids, strict=True))
                return dataclasses.replace(filled(out), history=out.history)
            ids, mask = padded([self.context_ids(row) for row in rows])
            return self.lm.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self._limit(rows[0]),
                stop_strings=list(rows[0].stop) or None,
                **options,
            )

        white: dict[str, list[int] | None] = {}
        answers = _grouped(samples, seeds, key, call)
        return [
            _told(answer, sample, self._gap(sample).length, white[sample.id]) if sample.kind == "infill" else answer
            for answer, sample in zip(answers, samples, strict=True)
        ]

    def _gap(self, sample: Sample) -> Gap:
        return gap_of(self.tokenizer, self._white_space, sample)

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        prefix, span = self.context_ids(sample), self._gap(sample).reference_ids
        suffix = encode_text(self.tokenizer, sample.suffix)
        values = chain_log_likelihood(self.lm.model, self.lm.spec, prefix, span, suffix, device=self.lm.device)
        return float(sum(values)), len(span)

    def _limit(self, sample: Sample) -> int:
        return sample.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass
class ARSystem:
    """A causal LM (`load_target`), plain or with a drafter bound to it.

    options: settings of `speculative_generate`. infill: one of `AR_INFILL`. A gap of known length is as many tokens after the
    prefix; asked by a prompt the model may stop earlier, and with length "auto" it stops by itself or at the sample's stops. White space
    at the prefix's end is written by the model, as `DiffusionLM.infill` lets a diffusion LM do; of the options the choice of those
    tokens reads temperature, top_k, top_p and min_p.
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
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self._white_space = white_space_of(self.tokenizer, vocab_size, tuple(sorted(stop_ids_of(self.model))))

    def describe(self) -> dict[str, Any]:
        return _where(self.model)

    def context_ids(self, sample: Sample) -> list[int]:
        return self._asked(sample, self._gap(sample).prefix if sample.kind == "infill" else "")

    def _asked(self, sample: Sample, prefix: str) -> list[int]:
        """The prompt of a sample; of an infill, with this text before the gap."""
        if sample.kind == "infill" and self.infill == "prompt":
            text = FILL_REQUEST.format(prefix=prefix, suffix=sample.suffix)
            if getattr(self.tokenizer, "chat_template", None) is None:
                return encode_text(self.tokenizer, text + "\n\nMissing piece:\n")
            return apply_template(self.tokenizer, [{"role": "user", "content": text}])
        ids = encode_text(self.tokenizer, prefix) if sample.kind == "infill" else _context(self.tokenizer, None, sample)
        return ids or [_start_id(self.tokenizer, self.tokenizer.bos_token_id)]

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        from dllm.speculate import speculative_generate

        started = time.perf_counter()
        begun = self._begin(samples, seeds)
        share = (time.perf_counter() - started) / max(len(begun), 1)

        def limits(sample: Sample) -> tuple[int, int]:
            taken = len(begun[sample.id].borders[0].begun) if sample.id in begun else 0
            most, fewest = self._limits(sample)
            return most - taken, max(fewest - taken, 0)

        def first(sample: Sample) -> tuple[int, ...]:
            """The token that begins the sample's fill and its bytes of white space, if stop strings have to look behind it."""
            border = begun[sample.id].borders[0] if sample.stop and sample.id in begun else None
            return () if border is None or border.first is None else (border.first, border.held)

        def call(rows: Sequence[Sample], seeds: Sequence[int]) -> GenerationOutput:
            limit, floor = limits(rows[0])
            if limit == 0:
                return _nothing([self._first_text(row, begun[row.id]) for row in rows])
            ids, mask = padded(
                [begun[row.id].borders[0].before if row.id in begun else self.context_ids(row) for row in rows]
            )
            settings = {"stop_strings": list(rows[0].stop) or None, **self.options}
            if first(rows[0]) and self._white_space is not None:
                settings["tokenizer"] = Behind(self._white_space, begun[rows[0].id].borders[0])
            return speculative_generate(
                self.model,
                self.drafter,
                ids.to(self.model.device),
                mask.to(self.model.device),
                max_new_tokens=limit,
                min_new_tokens=floor,
                seed=list(seeds),
                **settings,
            )

        answers = _grouped(samples, seeds, lambda s: (s.kind, limits(s), s.stop, first(s)), call)
        return [
            self._whole(answer, sample, begun.get(sample.id), share) if sample.kind == "infill" else answer
            for answer, sample in zip(answers, samples, strict=True)
        ]

    def _first_text(self, sample: Sample, row: HealedRow) -> str:
        """What a fill that is its first token says, as a generation behind that token would give it."""
        assert self._white_space is not None, "without it no first token is decided"
        return cut_at(Behind(self._white_space, row.borders[0]).decode([]), sample.stop)

    def _begin(self, samples: Sequence[Sample], seeds: Sequence[int]) -> dict[str, HealedRow]:
        """Id -> how the model begins, for the infill samples whose prefix ends in white space."""
        found = [(s, seed) for s, seed in zip(samples, seeds, strict=True) if s.kind == "infill" and self._gap(s).white]
        if not found or self._white_space is None:
            return {}
        contexts = [(self._asked(sample, sample.prefix), self.context_ids(sample)) for sample, _ in found]
        whites = [self._gap(sample).white for sample, _ in found]
        how = {name: self.options.get(name) for name in ("top_k", "top_p", "min_p")}
        temperature = self.options.get("temperature", 0.0)
        rows = begin(self.model, contexts, whites, self._white_space, [n for _, n in found], temperature, **how)
        return {sample.id: row for (sample, _), row in zip(found, rows, strict=True)}

    def _whole(self, answer: Answer, sample: Sample, row: HealedRow | None, seconds: float) -> Answer:
        """The answer to an infill with what was decided before its tokens; seconds: the time of that."""
        length, white_space = self._gap(sample).length, self._white_space
        if row is None or white_space is None:
            return _told(answer, sample, length, None)
        cost = dataclasses.replace(answer.cost, nfe=answer.cost.nfe + row.stats.nfe)
        cost.positions += row.stats.positions
        cost.prefill_s += row.stats.prefill_s
        [border] = row.borders
        ids, text = [*border.begun, *answer.token_ids], answer.text
        if border.begun and sample.stop:
            # The generation read its stops behind the first token, and its text begins with it.
            ids = ids if text.startswith(white_space.decode(border.begun, border.held)) else []
        elif border.healed:
            text = white_space.decode(ids, border.held)
        cost.useful_tokens = len(ids)
        answer = dataclasses.replace(
            answer,
            text=text,
            token_ids=tuple(ids),
            cost=cost,
            seconds=answer.seconds + seconds,
            prefill_s=answer.prefill_s + seconds,
        )
        return _told(answer, sample, length, border.white if border.healed else None)

    def _gap(self, sample: Sample) -> Gap:
        return gap_of(self.tokenizer, self._white_space, sample)

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        [score] = Judge(self.model).score([self.context_ids(sample)], [self._gap(sample).reference_ids])
        return score.total, score.num_tokens

    def _limits(self, sample: Sample) -> tuple[int, int]:
        """(most, fewest) new tokens."""
        limit = sample.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        if sample.kind == "generate":
            return limit, 0
        length = self._length(self._gap(sample).length)
        if isinstance(length, str):
            return limit, 0
        return max(length, 1), length if self.infill == "prefix" and not sample.stop else 0


def _told(answer: Answer, sample: Sample, true_length: int, white: Sequence[int] | None) -> Answer:
    """An infill's answer with what is known of its gap."""
    return dataclasses.replace(answer, true_length=true_length, white_space_ids=None if white is None else tuple(white))


def _nothing(texts: list[str]) -> GenerationOutput:
    """Of rows in which nothing is left to generate."""
    rows = len(texts)
    return GenerationOutput(
        texts=texts,
        sequences=torch.zeros(rows, 0, dtype=torch.int64),
        lengths=[0] * rows,
        finish_reasons=["length"] * rows,
        stats=Stats(),
        row_stats=[Stats() for _ in range(rows)],
    )


def _grouped(
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
                history=None if out.history is None else out.history[b],
            )
    return [answers[i] for i in range(len(samples))]


def _context(tokenizer: Any, white_space: WhiteSpace | None, sample: Sample) -> list[int]:
    if sample.kind == "infill":
        return encode_text(tokenizer, gap_of(tokenizer, white_space, sample).prefix)
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


def _where(model: Any) -> dict[str, Any]:
    parameter = next(iter(model.parameters()))
    device = parameter.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "dtype": str(parameter.dtype).removeprefix("torch.")}
