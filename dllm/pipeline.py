"""The public face of diffusion LMs: ``DiffusionLM`` loads, generates, fills gaps and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.canvas import Canvas, generation_canvas, pin
from dllm.config import GenerationConfig
from dllm.denoise import DenoiseLoop, DenoiseRequest, DenoiseResult, StepView
from dllm.device_loop import Engine
from dllm.families.loading import load_checkpoint, override_spec
from dllm.infill import infill as run_infill
from dllm.likelihood import loglikelihood
from dllm.limits import steps_per_block, stop_finder
from dllm.model.adapter import CONFIG_NAME, AdapterConfig, fold
from dllm.model.weights import load_state
from dllm.noise import CounterNoise
from dllm.output import GenerationOutput, InfillOutput
from dllm.prompts import encode_prompts, masked_rows
from dllm.registry import accepted_numbers, resolve_cache, resolve_hook, resolve_sampler
from dllm.shipped import ASSETS, is_shipped, listing_shipped
from dllm.streaming import StreamerFeed, StreamEvent, TextDelta, guessed_ids
from dllm.target import load_tokenizer, target_folder
from dllm.types import DecodeSpec


class DiffusionLM:
    """A diffusion language model: weights, what its decoder must know (``spec``), and a tokenizer where there is one."""

    def __init__(
        self, model: Any, spec: DecodeSpec, tokenizer: Any = None, config: Mapping[str, Any] | None = None
    ) -> None:
        """model: anything with embed, forward, head and new_store as ``Decoder``; mostly made by ``from_pretrained``."""
        if spec.attention == "causal":
            raise ValueError(
                "a causal AR model is no diffusion LM: adapt it first (`dllm adapt`), or load it with load_target"
            )
        self.model, self.spec, self.tokenizer = model, spec, tokenizer
        self.config = dict(config or {})
        self._engine = Engine(model)
        # Folder of the AR checkpoint under the adapter; None for a model that is none.
        self.base_folder: Path | None = None

    @property
    def engine(self) -> Engine:
        """What runs requests on this model's device; another one if ``model`` was replaced."""
        if self._engine.plain is not self.model:
            self._engine = Engine(self.model)
        return self._engine

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""
        return self.model.device

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        device_map: Any = None,
        revision: str | None = None,
        family: str | None = None,
        spec_overrides: Mapping[str, Any] | None = None,
    ) -> DiffusionLM:
        """Load a shipped model, a folder or a hub id.

        A folder holds a checkpoint in its original layout (config.json, safetensors) or one of our adapters (adapter_config.json).
        dtype "auto": the checkpoint's own; device "auto": CUDA where there is one; spec_overrides: DecodeSpec fields that a config
        lacks. Raises ValueError naming what is missing, damaged or of another base, and for the shipped name of a drafter or AR model.
        """
        folder = Path(name)
        if is_shipped(name, "diffusion"):
            folder = ASSETS / str(name)
        if (folder / CONFIG_NAME).is_file():
            if family is not None:
                raise ValueError(f"family must be None for an adapter, whose base says what it is: got {family!r}")
            return cls._from_adapter(folder, dtype, device, device_map, revision, spec_overrides)
        with listing_shipped("diffusion"):
            model, spec, config, found = load_checkpoint(
                name, family, dtype, device, device_map, revision, spec_overrides
            )
        return cls(model, spec, load_tokenizer(found), config)

    @classmethod
    def _from_adapter(
        cls,
        folder: Path,
        dtype: Any,
        device: Any,
        device_map: Any,
        revision: str | None,
        spec_overrides: Mapping[str, Any] | None,
    ) -> DiffusionLM:
        adapter = AdapterConfig.load(folder)
        base_folder = target_folder(adapter.base, revision)
        base, _, config, _ = load_checkpoint(base_folder, None, dtype, device, device_map)
        known = {**adapter.spec, "eos_token_ids": tuple(adapter.spec.get("eos_token_ids", ()))}
        try:
            spec = DecodeSpec(**known)
        except TypeError as error:
            raise ValueError(f"{folder / CONFIG_NAME}: spec does not fit: {error}") from error
        model = fold(base, adapter, load_state(folder))  # type: ignore[arg-type]
        lm = cls(model, override_spec(spec, spec_overrides), load_tokenizer(base_folder), config)
        lm.base_folder = base_folder
        return lm

    @torch.no_grad()
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Tensor:
        """Raw logits [B, L, V] under the family's own attention rule, before the shift.

        input_ids [B, L] int64; attention_mask [B, L], 1 = token. Positions count tokens, not padding; values at padding are undefined.
        """
        from dllm.families.loading import raw_logits

        ids = torch.as_tensor(input_ids, device=self.device)
        mask = None if attention_mask is None else torch.as_tensor(attention_mask, device=self.device)
        return raw_logits(self.model, self.spec, ids, mask)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Sequence[Any] | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        masked: Any = None,
        use_chat_template: bool | str = "auto",
        generation_config: Any = None,
        **kwargs: Any,
    ) -> GenerationOutput:
        """Answer a prompt: exactly one of prompt (str or list of str), messages and input_ids.

        messages: a conversation (a list of dicts with role and content), or a list of them. input_ids [B, P] or [P], integers of any
        dtype, with attention_mask of the same shape, 1 = token and 0 = padding on any side (None: all are tokens). use_chat_template,
        of a prompt: "auto" makes it a user's turn where the tokenizer has a template, True demands one, False gives the raw text.

        masked [B, P] bool beside input_ids: slots of the prompt to fill as well (bidirectional models); the tokens around them are
        pinned. The row's text then begins at its first masked slot.

        kwargs: fields of ``GenerationConfig`` (max_new_tokens=256, block_length, max_denoising_steps, sampler, cache="auto",
        temperature=0.0, seed, stop_strings, ...), their aliases, and the numbers of the chosen sampler and cache (threshold=0.9,
        freeze_delay, ...), guide=ARGuide(...) and verifier=FreeDave(...) among the fields. generation_config: a ``GenerationConfig``,
        transformers' one or a mapping; kwargs go before it.

        Gives a ``GenerationOutput`` of new tokens only, num_return_sequences rows a prompt, in the prompts' order.

        Raises TypeError for an unknown name (with the accepted ones) and a value of another type; ValueError for an empty prompt, an id
        outside the vocabulary, text without a tokenizer, a prompt that with max_new_tokens exceeds the model's positions, a number out of
        range, an unknown sampler or cache, and a cache, guide or verifier that does not fit the model.
        """
        config = self._config(generation_config, kwargs)
        prompts = self._prompts(prompt, messages, input_ids, attention_mask, use_chat_template, config)
        canvas = self._generation_canvas(prompts, config)
        if config.resize is not None and masked is None:
            raise ValueError("resize needs masked, the slots that may grow: got it without")
        if masked is not None:
            flags = [
                row
                for row in masked_rows(masked, input_ids, attention_mask)
                for _ in range(config.num_return_sequences)
            ]
            canvas = pin(canvas, flags, self.spec)
            canvas = canvas if config.resize is None else config.resize.widen(canvas, self.spec)
            prompts = [p[: row[0][0]] if row else p for p, row in zip(prompts, canvas.regions, strict=True)]
        request = self._request(config, canvas)
        if config.streamer is None and config.callback_on_step_end is None and self.engine.refuses(request) is None:
            return self._output(self.engine.run(request), [len(p) for p in prompts])
        loop = DenoiseLoop(self.engine.model, request)
        feed = None
        if config.streamer is not None:
            if len(prompts) > 1:
                raise ValueError(f"streamer takes one row: got {len(prompts)}; use stream(), which takes a batch")
            feed = StreamerFeed(
                config.streamer, prompts[0], None if self.tokenizer is None else self._decode, config.stops
            )
        for view in loop.run():
            self._notify(config, view)
            if feed is not None:
                feed.push(view.canvas[0, len(prompts[0]) : view.frontier[0]].tolist())
        output = self._output(loop.result(), [len(p) for p in prompts])
        if feed is not None:
            feed.end(output.sequences[0, : output.lengths[0]].tolist())
        return output

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Sequence[Any] | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        use_chat_template: bool | str = "auto",
        provisional: bool = False,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> Iterator[StreamEvent]:
        """The same as ``generate`` without ``masked``, as events: committed text to append, then one "done" a row.

        provisional (default False): after each step also the open block's guess, which replaces the row's last one.
        Arguments are checked at the call: it raises what ``generate`` raises, and ValueError for a model without a tokenizer and for
        streamer. A row's committed texts add up to what ``generate`` gives in ``texts``.
        """
        if self.tokenizer is None:
            raise ValueError("stream needs a tokenizer and this model has none: use generate with callback_on_step_end")
        config = self._config(generation_config, kwargs)
        if config.streamer is not None:
            raise ValueError("stream gives events itself: streamer goes with generate")
        if config.resize is not None:
            raise ValueError(
                "resize needs masked, the slots that may grow, which goes with generate: got it with stream"
            )
        prompts = self._prompts(prompt, messages, input_ids, attention_mask, use_chat_template, config)
        loop = DenoiseLoop(self.engine.model, self._request(config, self._generation_canvas(prompts, config)))
        return self._events(config, loop, prompts, provisional)

    def _events(
        self, config: GenerationConfig, loop: DenoiseLoop, prompts: list[list[int]], provisional: bool
    ) -> Iterator[StreamEvent]:
        deltas = [TextDelta(self._decode, config.stops) for _ in prompts]
        step = 0
        for view in loop.run():
            step = view.step
            self._notify(config, view)
            for b, row in enumerate(view.rows):
                start = len(prompts[row])
                text = deltas[row].push(view.canvas[b, start : view.frontier[b]].tolist())
                if text:
                    yield StreamEvent(row, "committed", text, step)
                if provisional and not view.stopped[b]:
                    guess = deltas[row].guess(guessed_ids(view, b, start, loop.request.eos_token_ids))
                    yield StreamEvent(row, "provisional", guess, step)
        output = self._output(loop.result(), [len(p) for p in prompts])
        for row, delta in enumerate(deltas):
            rest = delta.rest(output.texts[row])
            if rest:
                yield StreamEvent(row, "committed", rest, step)
            yield StreamEvent(row, "done", "", step, output.finish_reasons[row])

    def infill(
        self,
        prefix: str | Sequence[str] | None = None,
        suffix: str | Sequence[str] = "",
        length: Any = "auto",
        *,
        max_length: int = 64,
        messages: Sequence[Any] | None = None,
        template: str | None = None,
        gaps: Mapping[str, Any] | None = None,
        heal_white_space: bool = True,
        **kwargs: Any,
    ) -> InfillOutput:
        """Fill the gap between prefix and suffix, or the gaps of a template.

        Raw text unless ``messages`` is given (a conversation whose answer begins with prefix and ends with suffix). prefix may be a
        list, one a row, and suffix, length and messages with it. template: one text with ``{{name}}`` marks; gaps: a length for each
        name ("auto" where none is given).

        heal_white_space: white space at the end of the text before a gap is written by the model, in one further forward for each token of
        it (mostly one or two), as the beginning of the gap's tokens: tokenizers join it with what follows, so that a text cut behind it is
        one that no model was trained on. prefix + fill + suffix stay what was given, byte for byte. Only white space, which nearly always
        belongs to the next token; a cut inside of a word is taken as it is. Nothing is healed where the text is white space only, where no
        tokens write it, or by a tokenizer whose tokens are no bytes. False: given text is cut into tokens by itself.

        length: tokens of the fill, an int >= 0, which it has exactly (tokens of healed white space alone come on top); or "auto", at most
        max_length tokens, found by length_method: "grow" (where the model can expand and delete slots), else "window" (where it has a
        filler token, as the shipped models, which nearly always fill the whole window: give them lengths), else "score"; see
        ``dllm.infill``. start_length: masks that a growing gap begins with. Only "window" searches several gaps of one row.

        kwargs: as for ``generate``; max_new_tokens, min_new_tokens, num_return_sequences, eos_token_id, stop_strings and streamer are
        refused with TypeError, as are unknown names. Raises ValueError without a tokenizer, for texts that do not fit together or into the
        model's positions, for a length below 0, and for a length_method that the model or the number of gaps does not allow.
        """
        return run_infill(self, prefix, suffix, length, max_length, messages, template, gaps, heal_white_space, kwargs)

    def loglikelihood(
        self, context: Any, continuation: Any, method: str = "mc", seed: int = 0, num_samples: int = 128
    ) -> float:
        """ln p(continuation | context) in nats; both are texts or lists of ids.

        method "chain": exact for left-to-right decoding; "mc", "block": estimates of a lower bound with fixed seeds, see
        ``dllm.likelihood``. Raises ValueError for another method, and for an empty context of a shifted model.
        """
        return loglikelihood(self, context, continuation, method, seed, num_samples)

    # From arguments to a request

    def _config(self, generation_config: Any, kwargs: Mapping[str, Any]) -> GenerationConfig:
        base = generation_config
        if base is not None and not isinstance(base, GenerationConfig):
            base = GenerationConfig.from_hf(base)
        return GenerationConfig.from_kwargs(kwargs, base)

    def _prompts(
        self,
        prompt: Any,
        messages: Any,
        input_ids: Any,
        attention_mask: Any,
        use_chat_template: Any,
        config: GenerationConfig,
    ) -> list[list[int]]:
        rows = encode_prompts(
            self.tokenizer, self.spec.vocab_size, prompt, messages, input_ids, attention_mask, use_chat_template
        )
        rows = [row for row in rows for _ in range(config.num_return_sequences)]
        for b, row in enumerate(rows):
            total = len(row) + config.max_new_tokens
            if total > self.spec.max_positions:
                raise ValueError(
                    f"prompt of {len(row)} tokens and max_new_tokens {config.max_new_tokens} must fit in {self.spec.max_positions} "
                    f"positions: row {b} needs {total}"
                )
        return rows

    def _generation_canvas(self, prompts: list[list[int]], config: GenerationConfig) -> Canvas:
        lengths = [config.max_new_tokens] * len(prompts)
        return generation_canvas(prompts, lengths, self._canvas_spec(config), self.device)

    def _canvas_spec(self, config: GenerationConfig) -> DecodeSpec:
        """The spec by which given tokens are laid out: where blocks count from 0, one grid for given and generated ones."""
        if self.spec.block_origin == "zero" and isinstance(config.block_length, int):
            return replace(self.spec, block_length=config.block_length)
        return self.spec

    def _eos(self, config: GenerationConfig) -> tuple[int, ...]:
        if config.eos_token_id is None:
            return self.spec.eos_token_ids
        ids = (config.eos_token_id,) if isinstance(config.eos_token_id, int) else tuple(config.eos_token_id)
        for token in ids:
            if not 0 <= token < self.spec.vocab_size:
                raise ValueError(f"eos_token_id must be in [0, {self.spec.vocab_size}): got {token}")
        return ids

    def _request(
        self, config: GenerationConfig, canvas: Canvas, infill: bool = False, noise: Any = None, windows: Any = None
    ) -> DenoiseRequest:
        """Resolve names, check what nobody takes, and build the loop's request.

        noise: replaces what the config says; windows: slots [B, L] bool of gaps that the filler token may close (infill).
        """
        options = dict(config.options)
        hook, takers = resolve_hook(self, config, options)
        # A guide reads the draft and commits by itself.
        default = "sequential" if config.guide is not None else self.spec.default_sampler
        sampler_name = default if config.sampler is None else config.sampler
        shared = dict(options)
        sampler = resolve_sampler(sampler_name, options, {"threshold": self.spec.default_threshold})
        # A number that both have (the length of sub-blocks) goes to both.
        cache = resolve_cache(self.spec.default_cache if config.cache == "auto" else config.cache, shared)
        options = {name: value for name, value in options.items() if name in shared}
        if options:
            raise TypeError(
                f"unknown argument {sorted(options)[0]!r}; accepted: {sorted(GenerationConfig.__dataclass_fields__.keys() - {'options'})}, "
                f"numbers of sampler {type(sampler).__name__}: {accepted_numbers(sampler)}, of cache {type(cache).__name__}: "
                f"{accepted_numbers(cache)}"
                + "".join(f", of {type(taker).__name__}: {accepted_numbers(taker)}" for taker in takers)
            )
        cache.check(self.spec)
        if noise is None:
            noise = config.noise
        if noise is None:
            noise = CounterNoise.for_rows(config.seed, canvas.ids.shape[0], self.device)
        length = self.spec.block_length if config.block_length is None else config.block_length
        banned = torch.zeros(self.spec.vocab_size, dtype=torch.bool)
        # In a gap of changing length the eos means "delete".
        eos = () if infill or config.resize is not None else self._eos(config)
        never = [self.spec.mask_token_id, self.spec.filler_token_id if windows is None else None]
        if config.resize is None:
            never.append(self.spec.expand_token_id)
        if infill:
            keep = None if config.resize is None else self.spec.delete_token_id
            never += [token for token in self.spec.eos_token_ids if token != keep]
        for token in never:
            if token is not None:
                banned[token] = True
        if self.spec.mask_token_id in eos:
            raise ValueError(f"eos_token_id must not be the mask token {self.spec.mask_token_id}")
        closed_slots, closed_ids = None, eos
        if windows is not None:
            assert self.spec.filler_token_id is not None, "windows need a filler token"
            closed_slots, closed_ids = ~windows, (self.spec.filler_token_id,)
        elif config.min_new_tokens and not infill:
            first = torch.tensor([row[0][0] for row in canvas.regions], device=self.device)
            closed_slots = canvas.position < (first + config.min_new_tokens)[:, None]
        return DenoiseRequest(
            canvas=canvas,
            spec=self.spec,
            sampler=sampler,
            cache=cache,
            noise=noise,
            block_length=length,
            banned=banned,
            eos_token_ids=eos,
            closed_slots=closed_slots,
            closed_ids=closed_ids,
            max_denoising_steps=steps_per_block(config, canvas, length),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            resize=config.resize,
            cfg_scale=config.cfg_scale,
            logits_processor=config.logits_processor,
            find_stop=stop_finder(config.stops, self.tokenizer, self._decode),
            want_history=config.output_history,
            hook=hook,
        )

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # From the loop's result to what a user reads

    def _output(self, result: DenoiseResult, prompt_lengths: list[int]) -> GenerationOutput:
        rows = [canvas[p : p + n] for canvas, p, n in zip(result.canvas, prompt_lengths, result.useful, strict=True)]
        sequences = torch.zeros(len(rows), max((len(r) for r in rows), default=0), dtype=torch.int64)
        for b, row in enumerate(rows):
            sequences[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        texts: list[str] = []
        if self.tokenizer is not None:
            cuts = result.stop_texts
            texts = [self._decode(row) if cut is None else cut for row, cut in zip(rows, cuts, strict=True)]
        return GenerationOutput(
            texts=texts,
            sequences=sequences,
            lengths=[len(r) for r in rows],
            finish_reasons=result.finish_reasons,
            stats=result.stats,
            row_stats=result.row_stats,
            history=result.history,
        )

    def _notify(self, config: GenerationConfig, view: StepView) -> None:
        if config.callback_on_step_end is not None:
            kwargs = {
                "canvas": view.canvas,
                "masked": view.masked,
                "slots": view.slots,
                "transfer_index": view.transfer_index,
                "rows": view.rows,
            }
            config.callback_on_step_end(self, view.step, view.step, kwargs)
