"""MT-Bench questions, for speed, acceptance and likelihood: open questions of eight kinds.

Dataset: MT-Bench (Zheng et al. 2023, arXiv:2306.05685; lm-sys/FastChat, Apache-2.0), on the hub HuggingFaceH4/mt_bench_prompts.
Split: train (80 questions, 10 of each category).
Prompt: the first turn, as a chat; the second turn asks about the model's own first answer and is left out.
Metric: none. The paper's score is a large model's opinion; what is measured here is cost, loops and likelihood under a judge.
Source: speculative decoding is measured on these prompts (Spec-Bench, Xia et al. 2024, arXiv:2401.07851).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows


class MTBench:
    """First turns of MT-Bench. Reads FastChat's fields (question_id, turns) and the hub copy's (prompt_id, prompt)."""

    name = "mtbench"
    kind: Kind = "generate"
    metric = ""
    needs_execution = False
    dataset = "HuggingFaceH4/mt_bench_prompts"
    split = "train"

    def __init__(self, max_new_tokens: int = 256) -> None:
        self.max_new_tokens = max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`. The questions are sorted by category: a limit draws from all."""
        rows = read_rows(data, ("category",), self.dataset, self.split)
        return [self._sample(number, row) for number, row in draw(list(enumerate(rows, 1)), limit, seed)]

    def _sample(self, number: int, row: dict[str, Any]) -> Sample:
        turns = row.get("turns", row.get("prompt"))
        id_ = row.get("question_id", row.get("prompt_id"))
        if not isinstance(turns, list) or not turns or id_ is None:
            raise ValueError(
                f"row {number}: expected question_id and turns, or prompt_id and prompt: got {sorted(row)}"
            )
        return Sample(
            id=f"mtbench/{id_}",
            kind="generate",
            messages=({"role": "user", "content": turns[0]},),
            max_new_tokens=self.max_new_tokens,
            meta={"category": row["category"]},
        )

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """Nothing: the task has no score."""
        return {}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """Nothing is known of an open question's answer."""
        return []
