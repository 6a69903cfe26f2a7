"""Which runs `docs/results.md` is made from: the shipped models on every task, the most telling runs first.

Generation: SmolLM2 alone (greedy), its block-diffusion adapter one token a forward and at thresholds, guided by the base, the
bidirectional adapter with each cache, drafters. Infill: the adapters at the three length settings against left-to-right infill by the
base, from the prefix alone and from both parts in a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE, BLOCKS, FULL = "smollm2-135m", "smollm2-135m-bd8", "smollm2-135m-full"
LENGTHS = ("oracle", "fixed:16", "auto")

FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "math500": "math500.jsonl",
    "humaneval": "humaneval.jsonl",
    "mbpp": "mbpp_sanitized_test.jsonl",
    "mtbench": "mtbench.jsonl",
    "aesop_infill": "aesop_infill.jsonl",
    "humaneval_infilling_single_line": "humaneval_infilling_singleline.jsonl.gz",
    "humaneval_infilling_multi_line": "humaneval_infilling_multiline.jsonl.gz",
    "humaneval_infilling_random_span": "humaneval_infilling_randomspan.jsonl.gz",
    "humaneval_infilling_random_span_light": "humaneval_infilling_randomspanlight.jsonl.gz",
}
"""Task -> its file in the data folder."""
GENERATE = ("gsm8k", "mtbench", "humaneval", "mbpp", "math500")
INFILL = tuple(name for name in FILES if "infill" in name)


@dataclass(frozen=True)
class Method:
    """How one run decodes.

    name: the run's folder, whose leading number orders the runs of a task (00 is what the others are compared with). model: a shipped
    name; its kind is told by ``drafter``, ``ar_infill`` and whether it is the base. options: of `generate`. guide: rule of
    `ARGuide.of_base`, None for no guide. drafter: shipped name.
    """

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    guide: Mapping[str, Any] | None = None
    drafter: str | None = None
    ar_infill: str = "prefix"

    @property
    def autoregressive(self) -> bool:
        return self.model == BASE

    def settings(self, infill: bool) -> dict[str, Any]:
        """What a saved run of an infill, or of another task, says of this method in its settings."""
        return {
            "model": self.model,
            "kind": "ar" if self.autoregressive else "diffusion",
            "options": dict(self.options),
            "drafter": self.drafter,
            "guide": None if self.guide is None else "base, " + ", ".join(f"{k} {v}" for k, v in self.guide.items()),
            **({"ar_infill": self.ar_infill if self.autoregressive else None} if infill else {}),
        }


@dataclass(frozen=True)
class Entry:
    """One run: a task, a method, and for an infill its length setting."""

    task: str
    method: Method
    length: str | None = None

    @property
    def folder(self) -> str:
        """Below the folder of all runs."""
        setting = "" if self.length is None else f"@{LENGTHS.index(self.length)}-{self.length.replace(':', '')}"
        return f"{self.task}/{self.method.name}{setting}"


def _threshold(value: float) -> dict[str, Any]:
    return {"sampler": "threshold", "threshold": value, "cache": "block"}


AR = Method("00-ar", BASE)
VANILLA = Method("10-bd8-vanilla", BLOCKS, {"sampler": "low_confidence", "cache": "block"})
BD8 = {value: Method(f"11-bd8-{value}", BLOCKS, _threshold(value)) for value in (0.9, 0.8, 0.7)}
GUIDED = {
    # A guide decides which slots are committed: there is no sampler beside it.
    "ar": Method("20-bd8-guided-ar", BLOCKS, {"cache": "block"}, {"accept": "exact", "on_reject": "ar"}),
    "dlm": Method("21-bd8-guided-dlm", BLOCKS, {"cache": "block"}, {"accept": "topk", "on_reject": "dlm"}),
}
CACHES = {
    name: Method(f"30-full-{name}", FULL, {"sampler": "threshold", "threshold": 0.9, "cache": name})
    for name in ("none", "prefix", "dual", "free")
}
DRAFTED = [Method(f"40-ar-{kind}", BASE, drafter=f"{BASE}-{kind}") for kind in ("dfly", "dflash")]

FILL_AR = Method("00-ar-prefix", BASE)
FILL_PROMPT = Method("01-ar-prompt", BASE, ar_infill="prompt")
FILL_BD8 = Method("10-bd8", BLOCKS, _threshold(0.9))
FILL_FULL = Method("20-full", FULL, {"sampler": "threshold", "threshold": 0.9, "cache": "none"})


def plan() -> list[Entry]:
    """All runs, the most valuable first: where time ends, what is missing is the least missed."""

    def on(tasks: tuple[str, ...], *methods: Method) -> list[Entry]:
        return [Entry(task, method) for task in tasks for method in methods]

    def fills(tasks: tuple[str, ...], method: Method, *lengths: str) -> list[Entry]:
        return [Entry(task, method, length) for task in tasks for length in lengths]

    stories = ("aesop_infill", "humaneval_infilling_single_line")
    others = tuple(task for task in INFILL if task not in stories)
    guided, thresholds, code = tuple(GUIDED.values()), (BD8[0.7], BD8[0.8]), ("humaneval", "mbpp", "math500")
    entries = [
        # Every method once somewhere, so that a cut plan still compares all of them.
        *on(("gsm8k",), AR, BD8[0.9], VANILLA),
        *[e for m in (FILL_AR, FILL_BD8, FILL_PROMPT) for e in fills(stories, m, *LENGTHS)],
        *on(("gsm8k",), *guided, CACHES["free"], CACHES["dual"], *thresholds),
        *on(("mtbench",), AR, BD8[0.9], *DRAFTED),
        *on(("humaneval",), AR, BD8[0.9]),
        *[e for m in (FILL_AR, FILL_BD8) for e in fills(others, m, *LENGTHS)],
        *fills(stories, FILL_FULL, *LENGTHS),
        *on(("mbpp", "math500"), AR, BD8[0.9]),
        *on(("mtbench",), VANILLA, *guided, *thresholds, CACHES["free"], CACHES["dual"]),
        *on(code, VANILLA),
        *fills(others, FILL_PROMPT, *LENGTHS),
        *on(("gsm8k", "mtbench"), CACHES["prefix"], CACHES["none"]),
        *fills(others, FILL_FULL, *LENGTHS),
        *on(code, *guided, *thresholds),
        *on(code, *CACHES.values()),
    ]
    assert len({entry.folder for entry in entries}) == len(entries), "each run is asked for once"
    return entries
