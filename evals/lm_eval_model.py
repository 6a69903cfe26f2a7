"""lm-evaluation-harness (EleutherAI) with our models: `--model dllm`.

    dllm lm-eval --model dllm --model_args pretrained=smollm2-135m-bd8,threshold=0.9 --tasks gsm8k --batch_size 8

The name stands in the entry point group `lm_eval.models`. lm-eval 0.4.13 reads no entry points itself, so `dllm lm-eval` (or
importing this file before `lm_eval.simple_evaluate(model="dllm", ...)`) registers it and hands the arguments on. Generation goes
through the same `System` as `dllm eval`, so both give one score on the same samples.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: install it with `pip install dllm-toolkit[evals]`", name=error.name) from error
from rich.console import Console
from rich.progress import track

from dllm.evals.judge import Judge
from dllm.evals.runner import sample_seed
from dllm.evals.systems import ARSystem, DiffusionSystem
from dllm.evals.task import Sample
from dllm.likelihood import chain_log_likelihood, masked_log_likelihood
from dllm.pipeline import DiffusionLM
from dllm.prompts import encode_text
from dllm.shipped import SHIPPED_TARGETS
from dllm.target import load_target

METHODS = ("chain", "block", "mc")
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@register_model("dllm")
class DllmLM(TemplateLM):
    """A diffusion LM, or an AR model with or without a drafter, as lm-eval asks it.

    pretrained: a shipped name, a folder or a hub id. kind: "auto", "diffusion" or "ar". drafter: of an AR model.
    max_gen_toks: where a task sets none. likelihood: of a diffusion LM "chain" (exact for decoding from left to right; what
    lm-eval asks for), "block" or "mc" (bounds, of `num_samples` draws); seed: of their noise and of sampling.
    options: arguments of `generate` (sampler, threshold, cache, ...) or of `speculative_generate`; unknown ones raise TypeError
    with the accepted names. Inputs longer than the model raise ValueError; nothing is cut in silence.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: Any = "smollm2-135m-bd8",
        kind: str = "auto",
        drafter: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        likelihood: str = "chain",
        num_samples: int = 128,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a number >= 1: got {batch_size!r}")
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size goes with an automatic batch size, which is not offered: got {max_batch_size}"
            )
        if likelihood not in METHODS:
            raise ValueError(f"likelihood must be one of {METHODS}: got {likelihood!r}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("--model dllm runs in one process: for several, run `dllm eval` by accelerate launch")
        if isinstance(pretrained, str):
            pretrained = self._load(pretrained, kind, drafter, dtype, device or "auto")
        system = pretrained
        if isinstance(pretrained, DiffusionLM):
            system = DiffusionSystem(pretrained)
        if not isinstance(system, DiffusionSystem | ARSystem):
            raise TypeError(
                f"pretrained must be a name, a DiffusionLM or a system of dllm.evals.systems: got {type(system).__name__}"
            )
        self.system: DiffusionSystem | ARSystem = dataclasses.replace(system, options={**system.options, **options})
        self.tokenizer = self.system.tokenizer
        self.batch_size, self.max_gen_toks = int(batch_size), int(max_gen_toks)
        self.likelihood, self.num_samples, self.seed = likelihood, num_samples, seed
        # An option that nobody takes should raise now, not after the task is loaded.
        self._decode([[self.prefix_token_id]], 0)

    @staticmethod
    def _load(name: str, kind: str, drafter: str | None, dtype: str, device: str) -> Any:
        if kind not in ("auto", "diffusion", "ar"):
            raise ValueError(f"kind must be 'auto', 'diffusion' or 'ar': got {kind!r}")
        if kind == "diffusion" or (kind == "auto" and drafter is None and name not in SHIPPED_TARGETS):
            if drafter is not None:
                raise ValueError("drafter goes with an AR model: got kind 'diffusion'")
            return DiffusionLM.from_pretrained(name, dtype=dtype, device=device)
        target = load_target(name, dtype=dtype, device=device)
        if drafter is None:
            return ARSystem(target)
        from dllm.drafters.drafter import Drafter

        return ARSystem(target, Drafter.from_pretrained(drafter, target=target))

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the model's document start."""
        return self.system.context_ids(Sample("start", "infill"))[0]

    @property
    def max_length(self) -> int:
        if isinstance(self.system, DiffusionSystem):
            return int(self.system.lm.spec.max_positions)
        return int(self.system.model.config.max_position_embeddings)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's own template; a named one is not offered."""
        if isinstance(chat_template, str):
            raise ValueError(f"chat_template must be True or False: got {chat_template!r}")
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode_text(self.tokenizer, string)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """One continuation a request, cut before its first stop string; requests of equal settings share batches."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._settings(request.args[1]), []).append(i)
        batches = [
            (settings, rows[start : start + self.batch_size])
            for settings, rows in groups.items()
            for start in range(0, len(rows), self.batch_size)
        ]
        texts: dict[int, str] = {}
        for (stop, limit, sampling), rows in self._shown(batches, disable_tqdm):
            system = dataclasses.replace(self.system, options={**self.system.options, **dict(sampling)})
            samples = [
                Sample(str(i), "generate", prompt=requests[i].args[0], max_new_tokens=limit, stop=stop) for i in rows
            ]
            seeds = [sample_seed(self.seed, requests[i].args[0]) for i in rows]
            for i, answer in zip(rows, system.answer(samples, seeds), strict=True):
                texts[i] = answer.text
                self.cache_hook.add_partial("generate_until", requests[i].args, answer.text)
        return [texts[i] for i in range(len(requests))]

    def _settings(self, given: dict[str, Any]) -> tuple[tuple[str, ...], int, tuple[tuple[str, Any], ...]]:
        """(stop strings, most new tokens, sampling options) of a request; raises ValueError for what we do not honour."""
        rest = dict(given)
        until = rest.pop("until", None) or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        lengths = [rest.pop(name) for name in LENGTH_NAMES if rest.get(name) is not None]
        sample = rest.pop("do_sample", None)
        sampling = {name: rest.pop(name) for name in SAMPLING if name in rest}
        rest = {name: value for name, value in rest.items() if value is not None}
        if rest or len(lengths) > 1:
            wrong = f"{sorted(rest)}" if rest else f"{len(lengths)} of {LENGTH_NAMES}"
            raise ValueError(
                f"generation arguments must be among until, do_sample, {', '.join(SAMPLING)} and one of {LENGTH_NAMES}: got {wrong}"
            )
        # lm-eval's rule: without do_sample the temperature decides.
        drawn = bool(sample) if sample is not None else float(sampling.get("temperature") or 0.0) > 0
        if sample is not None or sampling:
            sampling = (
                {**sampling, "temperature": float(sampling.get("temperature", 1.0))} if drawn else {"temperature": 0.0}
            )
        limit = int(lengths[0]) if lengths else self.max_gen_toks
        return tuple(s for s in stop if s), limit, tuple(sorted(sampling.items()))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """requests: (texts, context ids, continuation ids) -> (nats, whether greedy decoding with these settings gives it)."""
        if kwargs:
            raise TypeError(f"no further arguments are taken: got {sorted(kwargs)}")
        results = []
        for texts, context, continuation in self._shown(requests, disable_tqdm):
            nats = self._nats(context, continuation)
            greedy = self._decode([context], len(continuation))[0] == list(continuation)
            results.append((nats, greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats of whole texts, each token scored once, in windows of the model's length."""
        results = []
        for request in self._shown(requests, disable_tqdm):
            windows = map(
                make_disjoint_window,
                # A token of room for the prefix, which stands in the same positions here.
                get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, context_len=1
                ),
            )
            results.append(sum(self._nats(context, continuation) for context, continuation in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def _nats(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        if len(context) + len(continuation) > self.max_length:
            raise ValueError(
                f"context and continuation must fit in {self.max_length} positions: got {len(context) + len(continuation)}"
            )
        if isinstance(self.system, ARSystem):
            return Judge(self.system.model).score([context], [continuation])[0].total
        lm = self.system.lm
        if self.likelihood == "chain":
            return float(sum(chain_log_likelihood(lm.model, lm.spec, context, continuation, device=lm.device)))
        return masked_log_likelihood(
            lm.model,
            lm.spec,
            context,
            continuation,
            by_block=self.likelihood == "block",
            num_samples=self.num_samples,
            seed=self.seed,
            device=lm.device,
        )

    def _decode(self, prompts: list[list[int]], length: int) -> list[list[int]]:
        """Greedy tokens after each prompt of one length."""
        options = {name: value for name, value in self.system.options.items() if name not in SAMPLING}
        if length == 0:
            options = dict(self.system.options)
        options |= {"input_ids": prompts, "max_new_tokens": length}
        if isinstance(self.system, DiffusionSystem):
            out = self.system.lm.generate(**options)
        else:
            from dllm.speculate import speculative_generate

            out = speculative_generate(self.system.model, self.system.drafter, **options)
        return [row[:n].tolist() for row, n in zip(out.sequences, out.lengths, strict=True)]

    @staticmethod
    def _shown(items: Sequence[Any], hidden: bool) -> Any:
        console = Console(stderr=True)
        return track(items, description="dllm", console=console, disable=hidden or not console.is_terminal)


def main(arguments: Sequence[str] | None = None) -> None:
    """lm-eval's own command line, in which `--model dllm` is known."""
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
