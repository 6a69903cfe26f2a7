"""One generation config: a frozen dataclass, one alias table; unknown or clashing names raise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

ALIASES: Mapping[str, str] = {
    "gen_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "denoising_steps": "max_denoising_steps",
    "num_inference_steps": "max_denoising_steps",
    "remasking": "sampler",
    "generator": "noise",
    "eos_token_ids": "eos_token_id",
    "stop": "stop_strings",
}
"""Other tools' spellings -> ours. ``steps`` is not here: it means a total over all blocks and is converted."""

MIN_TEMPERATURE = 1e-10
"""Lowest temperature above 0: logits divided by less could overflow fp32."""

# Fields of transformers' GenerationConfig that we honour under the same name, and those that are neutral at their default.
_HF_HONOURED = {
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_return_sequences",
    "eos_token_id",
    "stop_strings",
}
_HF_IGNORED = {"transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "do_sample", "use_cache"}


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate. Lengths in tokens; ``max_denoising_steps`` counts steps per block, ``steps`` is its total over all blocks.

    temperature 0 is greedy. seed: an int (row i gets seed + i), or one a row of the output, of which there are num_return_sequences for
    each prompt. callback_on_step_end(lm, step, step, kwargs): called after each step with canvas, masked [B', L], transfer_index
    [B', S] and rows, the loop's own tensors of the rows still running. streamer: transformers' put(ids) and end(), one row; it gets
    the prompt, then new tokens in text order as they become final. resize: a ``dllm.resize.Resize``, by which masked slots may grow and
    shrink (DreamOn). guide: an ``ARGuide`` that decides how far each draft is kept. verifier: "free_dave", "s2d2" or an object
    (``FreeDave``, ``S2D2``, ``SimSD``) by which drafts are judged. cfg_scale s > 0: classifier-free guidance, l_u + (s + 1) (l_c - l_u),
    where l_u are the logits with all given tokens masked; every forward then holds each row twice. logits_processor(logits
    [B', S, V], slots [B', S]) -> logits: applied before everything that looks at the law, confidence included. options: numbers of the
    chosen sampler, cache, guide or verifier (``threshold``, ``freeze_delay``, ...), checked against the chosen objects.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    block_length: Any = None
    max_denoising_steps: int | None = None
    steps: int | None = None
    sampler: Any = None
    cache: Any = "auto"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | Sequence[int] | None = None
    noise: Any = None
    num_return_sequences: int = 1
    stop_strings: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | None = None
    resize: Any = None
    guide: Any = None
    verifier: Any = None
    cfg_scale: float = 0.0
    logits_processor: Callable[..., Any] | None = None
    streamer: Any = None
    callback_on_step_end: Callable[..., Any] | None = None
    output_history: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 0)
        _whole("min_new_tokens", self.min_new_tokens, 0)
        _whole("num_return_sequences", self.num_return_sequences, 1)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be <= max_new_tokens {self.max_new_tokens}: got {self.min_new_tokens}"
            )
        for name in ("max_denoising_steps", "steps"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.max_denoising_steps is not None and self.steps is not None:
            raise ValueError(
                f"max_denoising_steps (per block) and steps (total) must not both be given: got {self.max_denoising_steps} and {self.steps}"
            )
        if isinstance(self.block_length, int):
            _whole("block_length", self.block_length, 1)
        elif self.block_length is not None and not hasattr(self.block_length, "next"):
            raise TypeError(f"block_length must be an int >= 1 or a BlockPolicy: got {self.block_length!r}")
        _number("temperature", self.temperature, 0.0, None)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or >= {MIN_TEMPERATURE}: got {self.temperature}")
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1)
        if self.temperature == 0 and any(v is not None for v in (self.top_p, self.top_k, self.min_p)):
            raise ValueError(
                "top_p, top_k and min_p need temperature > 0: got temperature 0 (greedy), where they change nothing"
            )
        if self.seed is not None and self.noise is not None:
            raise ValueError("seed and noise must not both be given")
        if self.noise is not None and not callable(getattr(self.noise, "uniform", None)):
            raise TypeError(f"noise must have uniform(positions, step, stream): got {self.noise!r}")
        _number("cfg_scale", self.cfg_scale, 0.0, None)
        if self.resize is not None and not callable(getattr(self.resize, "widen", None)):
            raise TypeError(f"resize must be a dllm.resize.Resize: got {self.resize!r}")
        if self.resize is not None and hasattr(self.block_length, "next"):
            raise ValueError("block_length must be an int with resize, which moves slots: got a BlockPolicy")
        if (
            self.guide is not None
            and not isinstance(self.guide, str)
            and not callable(getattr(self.guide, "start", None))
        ):
            raise TypeError(f"guide must have start(loop), as an ARGuide: got {self.guide!r}")
        if self.guide is not None and self.verifier is not None:
            raise ValueError("guide and verifier must not both be given: each decides alone what a step commits")
        if isinstance(self.guide, str):
            raise TypeError(f"guide must be an ARGuide (ARGuide.from_pretrained({self.guide!r})): got a str")
        if self.guide is not None and self.sampler is not None:
            raise ValueError(
                "guide and sampler must not both be given: the guide decides which slots are committed, from left to right"
            )
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise TypeError(f"logits_processor must be callable: got {self.logits_processor!r}")
        if self.streamer is not None and not all(callable(getattr(self.streamer, m, None)) for m in ("put", "end")):
            raise TypeError(f"streamer must have put(ids) and end(), as transformers' streamers: got {self.streamer!r}")
        if self.callback_on_step_end is not None and not callable(self.callback_on_step_end):
            raise TypeError(f"callback_on_step_end must be callable: got {self.callback_on_step_end!r}")
        eos = self.eos_token_id
        for token in () if eos is None else [eos] if not isinstance(eos, Sequence) else eos:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"eos_token_id must be an int or a list of ints: got {eos!r}")

    @property
    def stops(self) -> tuple[str, ...]:
        """stop_strings as a tuple."""
        if self.stop_strings is None:
            return ()
        if not isinstance(self.stop_strings, (str, Sequence)):
            raise TypeError(f"stop_strings must be a str or a list of str: got {self.stop_strings!r}")
        stops = (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop_strings must be non-empty strings: got {self.stop_strings!r}")
        return stops

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any], base: GenerationConfig | None = None) -> GenerationConfig:
        """Resolve aliases; names that are no field go to ``options`` and are checked later against sampler and cache."""
        known = {f.name for f in fields(cls)} - {"options"}
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        options = dict(base.options) if base is not None else {}
        for name, value in kwargs.items():
            target = ALIASES.get(name, name)
            if target in known:
                if target in values:
                    raise TypeError(f"{name} and {origin[target]} mean the same argument ({target}): give one of them")
                values[target], origin[target] = value, name
            else:
                options[name] = value
        values["options"] = options
        return cls(**values) if base is None else replace(base, **values)

    @classmethod
    def from_hf(cls, config: Any) -> GenerationConfig:
        """From transformers' GenerationConfig; raises ValueError for a field set there that we do not honour."""
        if not hasattr(config, "to_diff_dict") and not isinstance(config, Mapping):
            raise TypeError(f"generation_config must be a GenerationConfig or a mapping: got {type(config).__name__}")
        raw = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
        given = {k: v for k, v in raw.items() if v is not None}
        unknown = sorted(set(given) - _HF_HONOURED - _HF_IGNORED)
        if unknown:
            raise ValueError(
                f"generation_config fields that are not honoured here: {unknown}; honoured: {sorted(_HF_HONOURED)}"
            )
        values = {k: v for k, v in given.items() if k in _HF_HONOURED}
        if not given.get("do_sample", False):
            for name in ("temperature", "top_p", "top_k", "min_p"):
                values.pop(name, None)
        else:
            values.setdefault("temperature", 1.0)
        return cls(**values)


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {low}: got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}: got {value}")


def _number(name: str, value: Any, low: float, high: float | None, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number: got {value!r}")
    bad_low = value <= low if open_low else value < low
    # An int can be larger than any float.
    if bad_low or (high is not None and value > high) or not value <= sys.float_info.max:
        bounds = f"{'>' if open_low else '>='} {low} and " + ("finite" if high is None else f"<= {high}")
        raise ValueError(f"{name} must be {bounds}: got {value}")
