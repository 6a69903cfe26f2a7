"""A task and a system of known answers and costs, for tests of the runner and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dllm.evals.systems import Answer
from dllm.evals.task import Sample
from dllm.output import HistoryFrame, Stats


class EchoTask:
    """The reference of sample i is "word i"; the score is exact match, beside a made-up second one."""

    name, metric, needs_execution, dataset, split = "echo", "exact", False, "none", "test"

    def __init__(self, kind: Any = "generate", count: int = 12) -> None:
        self.kind, self.count = kind, count

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        rows = range(self.count if limit is None else min(limit, self.count))
        if self.kind == "infill":
            return [
                Sample(f"e/{i}", "infill", prefix=f"a{i} ", suffix=f" z{i}", reference=f"word {i}", max_new_tokens=9)
                for i in rows
            ]
        return [Sample(f"e/{i}", "generate", prompt=f"say word {i}", reference=f"word {i}") for i in rows]

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        return {"exact": float(output == sample.reference), "length": float(len(output))}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        return [(sample.reference, 1.0), ("", 0.0)]


class FakeTokenizer:
    """One id a character."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(300)}


class OracleSystem:
    """Answers with the reference, wrong where ``wrong(i)``, in ``nfe`` forwards of 5 positions; each call sleeps."""

    def __init__(
        self, wrong: Callable[[int], bool] = lambda i: False, nfe: int = 3, sleep_s: float = 0.0, drafts: bool = False
    ) -> None:
        self.tokenizer, self.wrong, self.nfe, self.sleep_s, self.drafts = FakeTokenizer(), wrong, nfe, sleep_s, drafts
        self.calls: list[list[str]] = []

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "dtype": "none"}

    def context_ids(self, sample: Sample) -> list[int]:
        return self.tokenizer.encode(sample.prompt or sample.prefix)

    def reference_log_likelihood(self, sample: Sample) -> tuple[float, int]:
        return -2.0 * len(sample.reference), len(sample.reference)

    def answer(self, samples: Sequence[Sample], seeds: Sequence[int], history: bool = False) -> list[Answer]:
        self.calls.append([sample.id for sample in samples])
        time.sleep(self.sleep_s)
        return [self._one(sample, len(samples), history) for sample in samples]

    def _one(self, sample: Sample, rows: int, history: bool) -> Answer:
        index = int(sample.id.rpartition("/")[2])
        text = "sorry" if self.wrong(index) else sample.reference
        ids = tuple(self.tokenizer.encode(text))
        cost = Stats(nfe=self.nfe, useful_tokens=len(ids), positions=5 * self.nfe, decode_s=0.5, prefill_s=0.1)
        if self.drafts:
            cost.draft_nfe, cost.accept_lengths = 2, [1 + index % 4, 4]
        frames = [
            HistoryFrame(1, 1, list(ids), [True] * len(ids), [False] * len(ids), list(ids)),
            HistoryFrame(2, 2, list(ids), [False] * len(ids), [True] * len(ids), list(ids)),
        ]
        return Answer(
            text,
            ids,
            "stop",
            cost,
            0.6 + 0.01 * index,
            0.1,
            0.5,
            rows,
            len(sample.reference),
            frames if history else None,
        )
