"""What was measured: one `Sample` a prompt, one `Measurement` a setting, one `Comparison` a pair of settings; and
their JSON.

All of them are plain frozen data. `dllm.evals.measure` makes them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.statistics import RESAMPLES, Interval, bootstrap_mean, bootstrap_ratio

FORMAT = "dllm.evals.measurement/1"


@dataclass(frozen=True)
class Sample:
    """The answer to one prompt and what it cost.

    prompt_id: digest of the prompt; settings are compared prompt by prompt.
    tokens: ids of the useful tokens (up to and without the stop).
    nfe, guide_nfe, draft_nfe, positions: this row's own, whatever it was batched with (`Stats` of the row).
    seconds, decode_s: the batch's wall time and its `decode_s`, divided by the rows of the batch; a prompt's own only
        at batch size 1.
    log_likelihood: nats, summed over `scored_tokens` tokens by the judge; None without a judge or for an empty answer.
    """

    prompt_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    nfe: int
    guide_nfe: int
    draft_nfe: int
    positions: int
    seconds: float
    decode_s: float
    log_likelihood: float | None
    scored_tokens: int
    loops: bool
    accept_lengths: tuple[int, ...] = ()

    @property
    def useful_tokens(self) -> int:
        return len(self.tokens)

    @property
    def log_likelihood_per_token(self) -> float | None:
        """Nats per token of this answer."""
        return None if self.log_likelihood is None else self.log_likelihood / self.scored_tokens


@dataclass(frozen=True)
class Measurement:
    """One setting over all prompts. Each `Interval` is a 95 % bootstrap over prompts; None where nothing defines it.

    name, settings: what ran; settings hold JSON values.
    batch_seconds: wall time of each call, in order: the latencies. prefill_s: summed over the calls.
    finish_reasons: how many answers ended for which reason.
    tokens_per_forward: sum of useful tokens / sum of forwards (guide and draft forwards are not in it); `_no_loops`:
        the same over the answers that do not loop.
    length, nfe, positions, seconds: means per prompt. `length` is in useful tokens.
    tokens_per_second: sum of useful tokens / sum of decode_s.
    accept_length: tokens committed per verify pass, where there were such passes.
    loop_rate: share of the answers that loop, in [0, 1].
    log_likelihood: nats per token, the mean over answers of each answer's mean, so that a long answer weighs as much
        as a short one; `_no_loops`: over the answers that do not loop (repetition is likely text); `_by_token`: the
        mean over all tokens.
    """

    name: str
    settings: Mapping[str, Any]
    samples: tuple[Sample, ...]
    batch_seconds: tuple[float, ...]
    prefill_s: float
    finish_reasons: Mapping[str, int]
    tokens_per_forward: Interval | None
    tokens_per_forward_no_loops: Interval | None
    length: Interval
    nfe: Interval
    positions: Interval
    seconds: Interval
    tokens_per_second: Interval | None
    accept_length: Interval | None
    loop_rate: Interval
    log_likelihood: Interval | None
    log_likelihood_no_loops: Interval | None
    log_likelihood_by_token: Interval | None

    @classmethod
    def of(
        cls,
        name: str,
        samples: Sequence[Sample],
        *,
        settings: Mapping[str, Any] | None = None,
        batch_seconds: Sequence[float] = (),
        prefill_s: float = 0.0,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> Measurement:
        """Summarises samples. Raises ValueError if there are none and TypeError if the settings are not JSON."""
        if not samples:
            raise ValueError("samples must hold at least one sample: got none")
        options = {"resamples": resamples, "seed": seed}

        def mean(values: list[float]) -> Interval | None:
            return bootstrap_mean(values, **options) if values else None

        def ratio(numerators: list[float], denominators: list[float]) -> Interval | None:
            return bootstrap_ratio(numerators, denominators, **options) if sum(denominators) > 0 else None

        def likelihoods(chosen: Sequence[Sample]) -> list[float]:
            return [x for s in chosen if (x := s.log_likelihood_per_token) is not None]

        sound = [s for s in samples if not s.loops]
        scored = [s for s in samples if s.log_likelihood is not None]
        reasons = [s.finish_reason for s in samples]
        return cls(
            name=name,
            settings=json.loads(json.dumps(dict(settings or {}), allow_nan=False)),
            samples=tuple(samples),
            batch_seconds=tuple(batch_seconds),
            prefill_s=prefill_s,
            finish_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
            tokens_per_forward=ratio([s.useful_tokens for s in samples], [s.nfe for s in samples]),
            tokens_per_forward_no_loops=ratio([s.useful_tokens for s in sound], [s.nfe for s in sound]),
            length=bootstrap_mean([s.useful_tokens for s in samples], **options),
            nfe=bootstrap_mean([s.nfe for s in samples], **options),
            positions=bootstrap_mean([s.positions for s in samples], **options),
            seconds=bootstrap_mean([s.seconds for s in samples], **options),
            tokens_per_second=ratio([s.useful_tokens for s in samples], [s.decode_s for s in samples]),
            accept_length=ratio([sum(s.accept_lengths) for s in samples], [len(s.accept_lengths) for s in samples]),
            loop_rate=bootstrap_mean([s.loops for s in samples], **options),
            log_likelihood=mean(likelihoods(samples)),
            log_likelihood_no_loops=mean(likelihoods(sound)),
            log_likelihood_by_token=ratio([s.log_likelihood or 0.0 for s in scored], [s.scored_tokens for s in scored]),
        )

    def total(self, count: str) -> float:
        """Sum over the samples of one of their numbers: "useful_tokens", "nfe", "positions", "seconds", ..."""
        return sum(getattr(sample, count) for sample in self.samples)

    def to_json(self) -> str:
        """One JSON object, samples included; `from_json` gives an equal Measurement back."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Inverse of `to_json`. Raises ValueError for another format and for missing or unknown fields."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"text must be a measurement of format {FORMAT!r}: got {str(text)[:60]!r}")
        del data["format"]
        _check_fields(cls, data)
        for sample in data["samples"]:
            _check_fields(Sample, sample)
            sample["tokens"], sample["accept_lengths"] = tuple(sample["tokens"]), tuple(sample["accept_lengths"])
        data["samples"] = tuple(Sample(**sample) for sample in data["samples"])
        data["batch_seconds"] = tuple(data["batch_seconds"])
        for field in dataclasses.fields(cls):
            if "Interval" in str(field.type) and data[field.name] is not None:
                _check_fields(Interval, data[field.name])
                data[field.name] = Interval(**data[field.name])
        return cls(**data)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes `to_json` to a file, whole or not at all."""
        return write_text_atomic(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measurement:
        """Reads what `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Comparison:
    """Setting a against setting b on the same prompts, paired. Intervals as in `Measurement`; None where nothing
    defines it.

    num_identical: prompts (of n) for which both gave the same tokens.
    log_likelihood_difference: a - b in nats per token, mean over the prompts that both answered; `_no_loops`: over
        those where neither loops.
    length_ratio, nfe_ratio, positions_ratio: sum of a / sum of b.
    loop_rate_points: a - b in percentage points.
    tokens_per_forward_ratio: a / b; `_no_loops`: over the prompts where neither loops.
    speed_ratio: useful tokens per second of wall time (prefill included), a / b.
    """

    a: str
    b: str
    n: int
    num_identical: int
    log_likelihood_difference: Interval | None
    log_likelihood_difference_no_loops: Interval | None
    length_ratio: Interval | None
    nfe_ratio: Interval | None
    positions_ratio: Interval | None
    loop_rate_points: Interval
    tokens_per_forward_ratio: Interval | None
    tokens_per_forward_ratio_no_loops: Interval | None
    speed_ratio: Interval | None

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Inverse of `to_json`. Raises ValueError for missing or unknown fields."""
        data = json.loads(text)
        _check_fields(cls, data)
        for name, value in data.items():
            if isinstance(value, dict):
                _check_fields(Interval, value)
                data[name] = Interval(**value)
        return cls(**data)


def _check_fields(cls: Any, data: Any) -> None:
    expected = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(data, dict) or set(data) != expected:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{cls.__name__} must have the fields {sorted(expected)}: got {found}")
