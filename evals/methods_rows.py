"""What ``methods_bench`` measures: suites of rows, and how a row runs, batched for its quality and alone for its speed.

A suite is a set of prompts with a number of new tokens and the rows that are measured on them. Rows come most telling first, so that a
run that is cut has measured those.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dllm.cache.free import FreeCache
from dllm.drafters.drafter import Drafter
from dllm.drafters.target import Target
from dllm.evals.graphed import GraphedForward
from dllm.guide import ARGuide
from dllm.model.fast_decoder import FastDecoder
from dllm.noise import CounterNoise
from dllm.output import GenerationOutput
from dllm.pipeline import DiffusionLM
from dllm.samplers.free_dave import FreeDave
from dllm.samplers.s2d2 import S2D2
from dllm.samplers.simsd import SimSD
from dllm.speculate import speculative_generate
from dllm.speculate_device import Rounds, speculate_on_device
from dllm.speculate_request import SpeculateRequest
from dllm.training.base import load_base, load_tokenizer

BLOCK, FULL, BASE = "smollm2-135m-bd8", "smollm2-135m-full", "smollm2-135m"
EXACT = {"accept": "exact", "on_reject": "ar", "guide_passes": None}
"""The guide's own greedy text; every draft is read until its block is full, which costs the fewest forwards."""


@dataclass(frozen=True)
class Row:
    """A way to decode: name; group "ar", "bd8" or "full"; settings of ``generate``; guide: rule of an AR guide, or None.

    naive: decode every position and cut at the stop afterwards. whole_step False: never as one captured step, for rows that are to be
    compared with methods whose steps cannot be captured. drafted: an AR model with its drafter. simsd: SimSD over drafts of the AR model,
    in its exact layout or not.
    """

    name: str
    group: str
    settings: dict[str, Any] = field(default_factory=dict)
    guide: dict[str, Any] | None = None
    naive: bool = False
    whole_step: bool = True
    drafted: bool = False
    simsd: bool | None = None

    @property
    def slug(self) -> str:
        """File name of its results."""
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in self.name)


def _block(name: str, guide: dict[str, Any] | None = None, **settings: Any) -> Row:
    # A guide decides itself which slots are committed.
    sampler = {} if guide is not None else {"sampler": "threshold", "threshold": 0.9}
    return Row(f"bd8 {name}", "bd8", {"cache": "block", **sampler, **settings}, guide)


def _full(name: str, **settings: Any) -> Row:
    return Row(f"full {name}", "full", {"sampler": "threshold", "threshold": 0.9, **settings})


VANILLA: dict[str, Any] = {"sampler": "low_confidence"}


def main_rows() -> list[Row]:
    """Every method at its own setting, on conversations."""
    return [
        Row("AR", "ar"),
        Row("AR + DFly", "ar", drafted=True),
        Row("bd8 vanilla", "bd8", {"cache": "block", **VANILLA}),
        _block("threshold 0.9"),
        Row("full vanilla", "full", {"cache": "none", **VANILLA}),
        _full("threshold 0.9", cache="none"),
        _block("guided, on_reject ar, exact", EXACT),
        _block("S2D2", verifier=S2D2()),
        _block("FreeDave 4", verifier=FreeDave(4)),
        _block("FreeDave 2", verifier=FreeDave(2)),
        _full("FreeCache", cache=FreeCache()),
        Row("bd8 threshold 0.9, host loop", "bd8", _block("").settings, whole_step=False),
        _block("guided, on_reject dlm", {}),
        _block("guided, on_reject ar, exact, one reading", {**EXACT, "guide_passes": 1}),
        replace(_block("guided, on_reject ar, exact, host loop", EXACT), whole_step=False),
        replace(_block("FreeDave 4, host loop", verifier=FreeDave(4)), whole_step=False),
        replace(_block("SimSD, exact, AR drafts"), simsd=True),
        replace(_block("SimSD, paper's layout, AR drafts"), simsd=False),
        _full("dual", cache="dual"),
        _full("prefix", cache="prefix"),
        _full("FreeCache, delay 1", cache=FreeCache(freeze_delay=1)),
        Row("full threshold 0.9, host loop", "full", _full("", cache="none").settings, whole_step=False),
        _block("threshold 0.8", threshold=0.8),
        _block("FreeDave 3", verifier=FreeDave(3)),
        _block("FreeDave 8", verifier=FreeDave(8)),
        _block("S2D2, always", verifier=S2D2(cost=float("-inf"))),
        _block("SimSD, exact, 10 layers draft", verifier=SimSD(draft=10, exact=True)),
        _full("FreeCache, aligned", cache=FreeCache(policy="aligned", freeze_block=8)),
        _full("FreeCache, aggressive", cache=FreeCache(policy="aggressive")),
        _full("FreeCache, prompt", cache=FreeCache(policy="prompt")),
    ]


def long_rows() -> list[Row]:
    """Caches against none behind long prompts, one token a step; all by the host's loop with captured forwards, so that rows decide."""
    caches = {
        "no cache": "none", "FreeCache": FreeCache(), "FreeCache, delay 1": FreeCache(freeze_delay=1), "dual": "dual", "prefix": "prefix",
    }  # fmt: skip
    rows = [Row(f"full {name}", "full", {**VANILLA, "cache": c}, whole_step=False) for name, c in caches.items()]
    return [*rows, Row("full no cache, whole step", "full", {**VANILLA, "cache": "none"}), Row("AR", "ar")]


def answer_rows() -> list[Row]:
    """What makes a "12x": stopping at the answer's end, the cache, the guide."""
    plain = {**VANILLA, "cache": "none"}
    return [
        Row("full vanilla, all positions", "full", plain, naive=True, whole_step=False),
        Row("full vanilla, stops", "full", plain, whole_step=False),
        Row("full FreeCache", "full", {**VANILLA, "cache": FreeCache()}, whole_step=False),
        Row("full FreeCache + guide", "full", {"cache": FreeCache()}, {}, whole_step=False),
    ]


def chained(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], eos: int, newline: Sequence[int], target: int
) -> list[list[int]]:
    """Prompts of about ``target`` tokens from (prompt, answer) pairs: earlier turns, each closed by eos and newline, and one more question.

    A prompt ends with the question that reaches ``target``; pairs are used once, the rest that reaches no target is left out.
    """
    found: list[list[int]] = []
    turns: list[int] = []
    for prompt, answer in rows:
        if len(turns) + len(prompt) >= target:
            found.append([*turns, *prompt])
            turns = []
            continue
        turns += [*prompt, *answer, eos, *newline]
    return found


class Systems:
    """The models of all rows, loaded when a row first needs them."""

    def __init__(self, device: str, drafter: str, block: str = BLOCK, full: str = FULL) -> None:
        self.device, self.drafter_name, self.names = device, drafter, {"bd8": block, "full": full}
        self.base = load_base(BASE, device)
        self.target = Target.of(self.base.decoder)
        self.tokenizer = load_tokenizer(BASE)
        self.rounds = Rounds(8)
        self._kept: dict[Any, Any] = {}

    def lm(self, group: str, graphed: bool) -> DiffusionLM:
        """A diffusion model; graphed: with captured forwards."""
        if (group, graphed) not in self._kept:
            if graphed:
                other = copy.copy(self.lm(group, False))
                other.model = GraphedForward(FastDecoder(other.model))
            else:
                other = DiffusionLM.from_pretrained(
                    self.names[group], dtype=self.target.dtype, device=self.target.device
                )
            self._kept[group, graphed] = other
        return self._kept[group, graphed]

    def guide(self, graphed: bool, rule: dict[str, Any]) -> ARGuide:
        """The AR model as the guide."""
        if ("guide", graphed) not in self._kept:
            model = GraphedForward(FastDecoder(self.base.decoder)) if graphed else self.base.decoder
            self._kept["guide", graphed] = ARGuide(
                model, self.base.spec.eos_token_ids, self.tokenizer, vocabulary="same"
            )
        return self._kept["guide", graphed].with_rule(**rule)

    def drafter(self) -> Drafter:
        if "drafter" not in self._kept:
            self._kept["drafter"] = Drafter.from_pretrained(self.drafter_name, target=self.base.decoder)
        return self._kept["drafter"]

    def quality(self, row: Row, new_tokens: int) -> Callable[[Sequence[Any]], GenerationOutput]:
        """A batch of prompts (ids) -> output, by the host's loop on plain PyTorch."""

        def run(prompts: Sequence[Any]) -> GenerationOutput:
            ids, mask = padded(prompts)
            with plain_kernels():
                if row.group == "ar":
                    drafter = self.drafter() if row.drafted else None
                    return speculative_generate(
                        self.base.decoder, drafter, ids.to(self.target.device), mask.to(self.target.device),
                        max_new_tokens=new_tokens, eos_token_id=list(self.base.spec.eos_token_ids), tokenizer=self.tokenizer,
                    )  # fmt: skip
                return self._generate(row, self.lm(row.group, False), False, ids, mask, new_tokens)

        return run

    def speed(self, row: Row, prompts: Sequence[Sequence[int]], new_tokens: int, fixed: bool) -> tuple[Any, Any]:
        """(one call over all ``prompts`` -> its Stats, -> how it ran: "step", "forward", "partly" or "no" for CUDA graphs).

        fixed: no stop, so that rows of a batch end together.
        """
        if row.group == "ar":
            eos = () if fixed else self.base.spec.eos_token_ids
            drafter = self.drafter() if row.drafted else None
            noise = CounterNoise.for_rows(0, len(prompts), self.target.device)
            drafts = drafter.max_drafts if drafter is not None else 0
            request = SpeculateRequest(
                [list(p) for p in prompts], new_tokens, noise, num_drafts=drafts, eos_token_ids=eos
            )

            def label() -> str:
                captured = [one.captured for one in self.rounds.built.values()]
                return "step" if captured and all(c.graph is not None for c in captured) else "no"

            return lambda: speculate_on_device(self.target, drafter, request, self.rounds).stats, label
        row = replace(row, settings={**row.settings, "eos_token_id": ()}) if fixed else row
        ids, mask = padded(prompts)
        lm = self.lm(row.group, False)
        helped = row.guide is not None or row.simsd is not None
        config = lm._config(None, {**self._settings(row, False), "max_new_tokens": new_tokens})
        request_ = lm._request(config, lm._generation_canvas([list(p) for p in prompts], config))
        whole = row.whole_step and lm.engine.refuses(request_) is None
        lm = lm if whole else self.lm(row.group, True)

        models = [] if whole else [lm.model] + ([self.guide(True, {}).model] if helped else [])
        for model in models:
            model.eager = 0

        def how() -> str:
            if whole:
                return "step" if all(s.captured.graph is not None for s in lm.engine.steps.built.values()) else "no"
            graphs = [f.captured for m in models for f in m.graphs.built.values()]
            if any(c is None or c.graph is None for c in graphs):
                return "no"
            return "partly" if any(m.eager for m in models) else "forward"

        return lambda: self._generate(row, lm, not whole, ids, mask, new_tokens).stats, how

    def _settings(self, row: Row, graphed: bool) -> dict[str, Any]:
        """Arguments of ``generate``; graphed: helpers with captured forwards."""
        settings = dict(row.settings)
        if row.guide is not None:
            settings["guide"] = self.guide(graphed, row.guide)
        if row.simsd is not None:
            settings["verifier"] = SimSD(draft=self.guide(graphed, {}), exact=row.simsd)
        if row.naive:
            settings["eos_token_id"] = ()
        return settings

    def _generate(
        self, row: Row, lm: DiffusionLM, graphed: bool, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int
    ) -> GenerationOutput:
        settings = self._settings(row, graphed)
        out = lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, **settings)
        return cut_at_stop(out, lm.spec.eos_token_ids) if row.naive else out


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded input_ids and attention_mask [B, P] of prompts."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)], mask[b, : len(row)] = torch.tensor(list(row)), 1
    return ids, mask


def cut_at_stop(out: GenerationOutput, eos: Sequence[int]) -> GenerationOutput:
    """The output of a decoder that did not stop, with only what stands before the first stop token as useful."""
    lengths = []
    for b, length in enumerate(out.lengths):
        tokens = out.sequences[b, :length].tolist()
        lengths.append(next((i for i, token in enumerate(tokens) if token in eos), length))
    rows = [replace(stats, useful_tokens=n) for stats, n in zip(out.row_stats, lengths, strict=True)]
    return replace(out, lengths=lengths, row_stats=rows, stats=replace(out.stats, useful_tokens=sum(lengths)))


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside: no Triton kernel, so that a large batch of many shapes compiles nothing."""
    before = os.environ.get("DLLM_KERNELS")
    os.environ["DLLM_KERNELS"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DLLM_KERNELS"]
        else:
            os.environ["DLLM_KERNELS"] = before
