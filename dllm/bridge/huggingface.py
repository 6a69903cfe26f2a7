"""Drafters inside ``model.generate``: a callable for its ``custom_generate`` argument.

    model.generate(**inputs, custom_generate=drafter.as_custom_generate(), max_new_tokens=256)

gives what ``model.generate(**inputs, max_new_tokens=256)`` gives, for any batch. ``generate`` prepares ids, mask, cache,
logits processors and stopping criteria as ever; all of them are honoured, or refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm.bridge.prefix_rules import CriteriaRule, ProcessorChain, split_criteria
from dllm.drafters.drafter import Drafter
from dllm.noise import CounterNoise
from dllm.output import Stats
from dllm.samplers.processors import Processors
from dllm.speculate import bound_target
from dllm.speculate_loop import SpeculateResult, SpeculativeLoop
from dllm.speculate_request import SpeculateRequest, draft_settings

_SETTINGS = ("num_drafts", "block_length", "verifier", "draft_temperature", "cost_table", "seed", "stop_strings")
# Fields of transformers' GenerationConfig that we cannot honour, with their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
# What generate adds for the model's forward that the loop works out itself.
_PREPARED = ("logits_to_keep", "use_cache", "cache_position")


class CustomGenerate:
    """A decoding loop for ``model.generate(..., custom_generate=self)``; made by ``Drafter.as_custom_generate``.

    Settings (here for all calls, or in ``generate`` for one): num_drafts or block_length, verifier, draft_temperature,
    cost_table as in ``dllm.speculate_generate``; seed: of the noise where do_sample is set (None: drawn from torch's
    generator, so ``torch.manual_seed`` counts); stop_strings, which ``generate`` itself takes only without a callable.
    tokenizer: for stop_strings (None: model.tokenizer). ``stats``: what the last call cost.
    """

    def __init__(self, drafter: Drafter, tokenizer: Any = None, **settings: Any) -> None:
        unknown = sorted(set(settings) - set(_SETTINGS))
        if unknown:
            raise TypeError(f"unknown argument {unknown[0]!r}; accepted: {[*_SETTINGS, 'tokenizer']}")
        self.drafter, self.tokenizer, self.settings = drafter, tokenizer, settings
        self.stats = Stats()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        *,
        num_drafts: int | None = None,
        block_length: Any = None,
        verifier: str | None = None,
        draft_temperature: float | None = None,
        cost_table: Any = None,
        seed: Any = None,
        stop_strings: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """input_ids [B, P] -> ids [B, P + T] with the prompts, padded behind each row's end; or transformers' output
        object where ``return_dict_in_generate`` is set.
        """
        given = dict(
            num_drafts=num_drafts,
            block_length=block_length,
            verifier=verifier,
            draft_temperature=draft_temperature,
            cost_table=cost_table,
            seed=seed,
            stop_strings=stop_strings,
        )
        settings = {**self.settings, **{name: value for name, value in given.items() if value is not None}}
        if generation_config is None:
            raise TypeError(
                "CustomGenerate is called by model.generate(..., custom_generate=...): got no generation_config"
            )
        target = bound_target(model, self.drafter)
        streamer = _streamer_of_generate(input_ids.shape[0])
        _check_config(generation_config)
        cache = _take_cache(model_kwargs)
        mask = _check_inputs(model_kwargs, input_ids)
        longest, eos, criteria = split_criteria(stopping_criteria or ())
        if settings.get("stop_strings"):
            criteria.append(self._stop_criterion(settings["stop_strings"], model))
        limits = [limit for limit in (longest, generation_config.max_length) if limit is not None]
        if not limits:
            raise ValueError("max_new_tokens or max_length must be given to generate: got neither")
        temperature = 1.0 if generation_config.do_sample else 0.0
        request = SpeculateRequest(
            prompts=[row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)],
            max_new_tokens=max(min(limits) - input_ids.shape[1], 0),
            noise=CounterNoise.for_rows(settings.get("seed"), input_ids.shape[0], target.device),
            # Temperature and filters are in the chain that generate built.
            processors=Processors(temperature=temperature),
            eos_token_ids=eos,
            prefix_processor=ProcessorChain(logits_processor, input_ids) if logits_processor else None,
            find_stop=CriteriaRule(criteria, input_ids) if criteria else None,
            **draft_settings(self.drafter, temperature, settings),
        )
        loop = SpeculativeLoop(target, self.drafter, request, watch=streamer is not None, cache=cache)
        for view in loop.run():
            streamer.put(torch.tensor(view.new_ids[0]))
        result = loop.result()
        self.stats = result.stats
        if streamer is not None:
            streamer.end()
        return _sequences(result, input_ids, generation_config, loop)

    def _stop_criterion(self, stop_strings: Any, model: Any) -> Any:
        from transformers import StopStringCriteria

        tokenizer = self.tokenizer or getattr(model, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                "stop_strings need a tokenizer: as_custom_generate(tokenizer=...), as generate does not hand on its own"
            )
        return StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)


def _streamer_of_generate(batch: int) -> Any:
    """The streamer that was given to ``generate``, or None; raises ValueError for what else it was given in vain.

    transformers (5.17 to 5.24) keeps these arguments from a callable, although it has put the prompt into the streamer by
    then: a stream that nobody ends would hang its reader. They stand in the frame of the caller.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "generate":
        return None
    given: Mapping[str, Any] = frame.f_locals
    for name in ("assistant_model", "synced_gpus"):
        if given.get(name):
            raise ValueError(
                f"{name} cannot be honoured together with custom_generate: got {type(given[name]).__name__}"
            )
    streamer = given.get("streamer")
    if streamer is not None and batch > 1:
        raise ValueError(f"streamer takes one row: got {batch}")
    return streamer


def _check_config(config: Any) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(f"{name} must be one of {list(neutral)} with a drafter: got {value!r}")
    if config.use_cache is False:
        raise ValueError("use_cache must be True with a drafter: got False")


def _take_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache that generate prepared, under either version's name, taken out of its keywords."""
    caches = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    return next((cache for cache in caches if cache is not None), None)


def _check_inputs(model_kwargs: Mapping[str, Any], input_ids: Tensor) -> Tensor:
    """Mask bool [B, P] of the prompts; raises ValueError for model inputs that the loop would leave out."""
    rest = dict(model_kwargs)
    mask, positions = rest.pop("attention_mask", None), rest.pop("position_ids", None)
    unknown = sorted(name for name, value in rest.items() if value is not None and name not in _PREPARED)
    if unknown:
        raise ValueError(f"model inputs must be input_ids, attention_mask and a cache with a drafter: got {unknown}")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}: got {tuple(mask.shape)}"
        )
    if not bool(mask.any(dim=1).all()):
        raise ValueError("attention_mask must keep at least one token of each row")
    if positions is not None:
        counted = mask.long().cumsum(dim=1) - 1
        if positions.shape[-1] != mask.shape[1] or not bool(
            (positions.to(mask.device) == counted)[mask.expand_as(positions)].all()
        ):
            raise ValueError("position_ids must count the tokens of each row from 0 with a drafter: got others")
    return mask


def _sequences(result: SpeculateResult, input_ids: Tensor, config: Any, loop: SpeculativeLoop) -> Any:
    """Prompts and new tokens as ``generate`` returns them."""
    width = max(map(len, result.tokens))
    pad = config.pad_token_id
    if any(len(row) < width for row in result.tokens) and pad is None:
        pad = getattr(config, "_pad_token_tensor", None)
        if pad is None:
            raise ValueError("pad_token_id must be given where rows end at different lengths: got None")
    fill = 0 if pad is None else int(pad)
    new = torch.tensor([[*row, *[fill] * (width - len(row))] for row in result.tokens], dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, new.view(len(result.tokens), width).to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences, **{loop.rows.cache_name: loop.rows.cache})  # type: ignore[attr-defined]
