"""What one call of the draft-and-verify loop is asked for, and how a user's settings become that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from dllm.config import GenerationConfig
from dllm.draft_cost import CostTable, resolve_costs
from dllm.drafters.drafter import Drafter
from dllm.drafters.target import Target
from dllm.noise import CounterNoise
from dllm.prompts import encode_prompts
from dllm.samplers.processors import Processors
from dllm.streaming import tokens_within
from dllm.types import BlockPolicy

VERIFIERS = ("greedy", "rejection", "block", "equality")
OWN_SETTINGS = (
    "num_drafts",
    "verifier",
    "draft_temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logits_processor",
    "tokenizer",
    "cost_table",
)
"""Settings beside the fields of ``GenerationConfig``."""
_PROCESSOR_SETTINGS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
_HONOURED = frozenset(
    {"max_new_tokens", "min_new_tokens", "block_length", "temperature", "top_p", "top_k", "min_p", "seed", "noise"}
    | {"num_return_sequences", "stop_strings", "eos_token_id", "streamer", "callback_on_step_end"}
)
"""Fields of ``GenerationConfig`` that mean something for an AR target."""


@dataclass(frozen=True)
class Stop:
    """Where a row ends: ``end`` new tokens up to and with the one that completes the stop, of which ``useful`` count;
    text: what stands before the stop, where that is not what the useful tokens say.
    """

    end: int
    useful: int
    text: str | None = None


class StopRule(Protocol):
    """Looks for a stop in a row's new tokens ids (no EOS among them), of which those before ``start`` were looked at."""

    def __call__(self, row: int, ids: list[int], start: int) -> Stop | None: ...


class PrefixProcessor(Protocol):
    """scores [B, n + 1, V] fp32 of rows (their places in the request) -> the same after processors that read each slot's
    own prefix: ids[b] are row b's new tokens, slot k has draft_tokens[b, :k] behind them.
    """

    def __call__(self, scores: Tensor, rows: list[int], ids: list[list[int]], draft_tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SpeculateRequest:
    """One call of the loop. Lengths in tokens.

    num_drafts: most drafts of a round; policy: draws the length of each row's block (anchor included) before each
    round, or None; verifier: one of ``VERIFIERS``; draft_temperature 0: drafts by argmax, else drawn, and their law is
    kept.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    noise: Any
    processors: Processors = field(default_factory=Processors)
    num_drafts: int = 0
    policy: BlockPolicy | None = None
    verifier: str = "greedy"
    draft_temperature: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    cost_table: CostTable | None = None
    prefix_processor: PrefixProcessor | None = None
    find_stop: StopRule | None = None


@dataclass(frozen=True)
class PrefixProcessors:
    """transformers' logits processors on growing prefixes: each is called once a row and slot, with ids [1, L] and scores
    [1, V], so it must be a function of the two.

    prefixes: what stands before the new tokens of each row of the request.
    """

    processors: Sequence[Callable[[Tensor, Tensor], Tensor]]
    prefixes: Sequence[Sequence[int]]

    def __call__(self, scores: Tensor, rows: list[int], ids: list[list[int]], draft_tokens: Tensor) -> Tensor:
        out = scores.clone()
        for b, row in enumerate(rows):
            known = torch.tensor([*self.prefixes[row], *ids[b]], device=scores.device)
            whole = torch.cat([known, draft_tokens[b]])[None]
            for k in range(scores.shape[1]):
                for processor in self.processors:
                    out[b, k] = processor(whole[:, : len(known) + k], out[b : b + 1, k])[0]
        return out


class StopStrings:
    """Cuts a row at the first stop string, whichever block it ends in; ``decode`` turns ids into text."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops, self.decode = tuple(stops), decode

    def __call__(self, row: int, ids: list[int], start: int) -> Stop | None:
        if not any(stop in self.decode(ids) for stop in self.stops):
            return None
        # Token by token, as a loop without drafts would have looked.
        for end in range(start + 1, len(ids) + 1):
            text = self.decode(ids[:end])
            places = [at for at in map(text.find, self.stops) if at >= 0]
            if places:
                cut = text[: min(places)]
                return Stop(end, tokens_within(ids[:end], cut, self.decode), cut)
        return None


@dataclass(frozen=True)
class Settings:
    """A user's settings, read: the request, and what the public face does around it."""

    request: SpeculateRequest
    config: GenerationConfig
    decode: Callable[[list[int]], str] | None


def read_settings(
    target: Target, drafter: Drafter | None, input_ids: Any, attention_mask: Any, settings: Mapping[str, Any]
) -> Settings:
    """Check everything a user gave; raises TypeError for an unknown name and ValueError for what cannot be honoured."""
    given = dict(settings)
    own = {name: given.pop(name) for name in OWN_SETTINGS if name in given}
    base = given.pop("generation_config", None)
    if base is not None and not isinstance(base, GenerationConfig):
        base = GenerationConfig.from_hf(base)
    config = GenerationConfig.from_kwargs(given, base)
    if config.options:
        accepted = sorted(_HONOURED | set(OWN_SETTINGS))
        raise TypeError(f"unknown argument {sorted(config.options)[0]!r}; accepted: {accepted}")
    for entry in fields(config):
        value = getattr(config, entry.name)
        if entry.name not in _HONOURED and entry.name != "options" and value != entry.default:
            raise ValueError(f"{entry.name} belongs to diffusion LMs, not to an AR target: got {value!r}")
    prompts = _prompts(target, input_ids, attention_mask, config)
    decode = _decoder(own.get("tokenizer") or getattr(target.model, "tokenizer", None))
    if config.stops and decode is None:
        raise ValueError("stop_strings need a tokenizer: give tokenizer= (load_target sets model.tokenizer)")
    eos = _eos(target, config)
    processors = Processors(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        min_new_tokens=config.min_new_tokens,
        eos_token_ids=eos,
        **{name: own[name] for name in _PROCESSOR_SETTINGS if own.get(name) is not None},
    )
    chain = own.get("logits_processor")
    if chain is not None:
        chain = PrefixProcessors(_callables(chain), prompts)
    noise = config.noise
    if noise is None:
        noise = CounterNoise.for_rows(config.seed, len(prompts), target.device)
    elif len(prompts) > 1 and not callable(getattr(noise, "select", None)):
        raise TypeError(f"noise must have select(keep) for a batch of {len(prompts)}: {type(noise).__name__} has none")
    request = SpeculateRequest(
        prompts=prompts,
        max_new_tokens=config.max_new_tokens,
        noise=noise,
        processors=processors,
        eos_token_ids=eos,
        prefix_processor=chain,
        find_stop=None if decode is None or not config.stops else StopStrings(config.stops, decode),
        **draft_settings(drafter, config.temperature, {**own, "block_length": config.block_length}),
    )
    return Settings(request, config, decode)


def draft_settings(drafter: Drafter | None, temperature: float, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request that speak of drafts and their test, from num_drafts, block_length, verifier,
    draft_temperature, cost_table (absent or None: default).
    """
    count, block = own.get("num_drafts"), own.get("block_length")
    if count is not None and block is not None:
        raise ValueError(f"num_drafts and block_length (one more) must not both be given: got {count} and {block!r}")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError(f"num_drafts must be an int >= 0: got {count!r}")
    policy = None if block is None or isinstance(block, int) else block
    most = 0 if drafter is None else drafter.max_drafts
    if count is None:
        count = most if block is None or policy is not None else block - 1
    if not 0 <= count <= most:
        reason = "without a drafter" if drafter is None else f"block_size {most + 1}"
        raise ValueError(f"num_drafts must be in [0, {most}] ({reason}): got {count}")
    if policy is not None and drafter is None:
        raise ValueError("block_length needs a drafter: got a policy and drafter=None")
    verifier = own.get("verifier") or "auto"
    if verifier == "auto":
        # Without drafts every rule draws from the target's law; this one gives the text that it would give with drafts.
        verifier = "greedy" if temperature == 0 else "equality" if most == 0 else "rejection"
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be 'auto' or one of {list(VERIFIERS)}: got {verifier!r}")
    if (verifier == "greedy") != (temperature == 0):
        raise ValueError(
            f"verifier must be 'greedy' at temperature 0 and only there: got {verifier!r} at {temperature}"
        )
    warm = own.get("draft_temperature") or 0.0
    if isinstance(warm, bool) or not isinstance(warm, (int, float)) or not 0 <= warm < float("inf"):
        raise ValueError(f"draft_temperature must be a number >= 0: got {warm!r}")
    if warm > 0 and drafter is None:
        raise ValueError(f"draft_temperature needs a drafter: got {warm} and drafter=None")
    return dict(
        num_drafts=count,
        policy=policy,
        verifier=verifier,
        draft_temperature=float(warm),
        cost_table=resolve_costs(own.get("cost_table"), drafter),
    )


def _prompts(target: Target, input_ids: Any, attention_mask: Any, config: GenerationConfig) -> list[list[int]]:
    if isinstance(input_ids, (str, Mapping)):
        raise TypeError(f"input_ids must be token ids [B, P]: got {type(input_ids).__name__}")
    if isinstance(input_ids, Tensor):
        input_ids = input_ids.cpu()
    if isinstance(attention_mask, Tensor):
        attention_mask = attention_mask.cpu()
    rows = encode_prompts(None, target.vocab_size, input_ids=input_ids, attention_mask=attention_mask)
    for b, row in enumerate(rows):
        if target.max_positions and len(row) + config.max_new_tokens > target.max_positions:
            raise ValueError(
                f"prompt of {len(row)} tokens and max_new_tokens {config.max_new_tokens} must fit in "
                f"{target.max_positions} positions: row {b} needs {len(row) + config.max_new_tokens}"
            )
    return [row for row in rows for _ in range(config.num_return_sequences)]


def _eos(target: Target, config: GenerationConfig) -> tuple[int, ...]:
    """Stop ids: the setting, or those of a Hugging Face model's configs."""
    ids: Any = config.eos_token_id
    for owner in ("generation_config", "config"):
        if ids is None:
            ids = getattr(getattr(target.model, owner, None), "eos_token_id", None)
    ids = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    for token in ids:
        if not 0 <= token < target.vocab_size:
            raise ValueError(f"eos_token_id must be in [0, {target.vocab_size}): got {token}")
    return ids


def _callables(value: Any) -> tuple[Callable[..., Any], ...]:
    chain = tuple(value) if isinstance(value, Sequence) else (value,)
    for one in chain:
        if not callable(one):
            raise TypeError(
                f"logits_processor must be a callable (ids, scores) -> scores, or a list of them: got {one!r}"
            )
    return chain


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode
