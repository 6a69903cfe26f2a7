"""GSM8K: word problems of primary-school arithmetic.

Dataset: GSM8K (Cobbe et al. 2021, arXiv:2110.14168; openai/grade-school-math, MIT), on the hub openai/gsm8k, configuration main.
Split: test (1,319 questions).
Prompt: as a chat, the question and the wish for a last line "#### number"; ``shots`` worked examples of the train split as earlier
    turns. With ``chat=False``, raw text "Question: ... Answer:" as in lm-evaluation-harness' gsm8k (5 shots there; stop "Question:").
Metric: accuracy of the number, wherever the answer gives it; strict counts only the form "#### number".
Source: strict and accuracy are the strict-match and flexible-extract of lm-evaluation-harness, but accuracy asks the forms in the order
    "####", \\boxed{}, last number: a last number that follows the marked answer (a sentence of small talk) does not replace it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows

NUMBER = r"[-+]?\$?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s*({NUMBER})")
BOXED = re.compile(rf"\\boxed\{{\s*(?:\\\$)?({NUMBER})")
ANY = re.compile(NUMBER)
WISH = "Solve the problem step by step. Write the final answer on a last line of its own, as #### followed by the number alone."


class GSM8K:
    """shots: worked examples; fewshot: a JSONL of train rows that they are the first of (None: the hub's train split)."""

    name = "gsm8k"
    kind: Kind = "generate"
    metric = "accuracy"
    needs_execution = False
    dataset = "openai/gsm8k"
    split = "test"

    def __init__(
        self, shots: int = 0, fewshot: Path | str | None = None, chat: bool = True, max_new_tokens: int = 256
    ) -> None:
        if shots < 0:
            raise ValueError(f"shots must be >= 0: got {shots}")
        self.shots, self.fewshot, self.chat, self.max_new_tokens = shots, fewshot, chat, max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`."""
        fields = ("question", "answer")
        rows = read_rows(data, fields, self.dataset, self.split, "main")
        examples: list[dict[str, Any]] = []
        if self.shots:
            source = Path(self.fewshot) if self.fewshot is not None else None
            examples = read_rows(source, fields, self.dataset, "train", "main")[: self.shots]
            if len(examples) < self.shots:
                raise ValueError(f"shots must be at most the {len(examples)} rows of fewshot: got {self.shots}")
        for number, row in enumerate(rows):
            if MARKED.search(row["answer"]) is None:
                raise ValueError(f"row {number + 1}: answer must end in '#### number': got {row['answer'][-40:]!r}")
        return [self._sample(number, row, examples) for number, row in draw(list(enumerate(rows)), limit, seed)]

    def _sample(self, number: int, row: dict[str, Any], examples: list[dict[str, Any]]) -> Sample:
        common: dict[str, Any] = dict(
            id=f"gsm8k/{self.split}/{number}",
            kind="generate",
            reference=row["answer"],
            max_new_tokens=self.max_new_tokens,
        )
        if not self.chat:
            shown = "".join(f"Question: {e['question']}\nAnswer: {e['answer']}\n\n" for e in examples)
            return Sample(prompt=f"{shown}Question: {row['question']}\nAnswer:", stop=("Question:",), **common)
        turns: list[dict[str, Any]] = []
        for example in examples:
            turns.append({"role": "user", "content": f"{example['question']}\n\n{WISH}"})
            turns.append({"role": "assistant", "content": example["answer"]})
        return Sample(messages=(*turns, {"role": "user", "content": f"{row['question']}\n\n{WISH}"}), **common)

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """accuracy and strict, each 0 or 1."""
        gold = _number(MARKED.search(sample.reference))
        marked = _number(MARKED.search(output))
        loose = marked
        if loose is None:
            loose = _number(next(reversed(list(BOXED.finditer(output))), None))
        if loose is None:
            loose = _number(next(reversed(list(ANY.finditer(output))), None))
        right, strict = (gold is not None and found == gold for found in (loose, marked))
        return {"accuracy": float(right), "strict": float(strict)}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The data set's answer is right; the same one with another number, and nothing, are not."""
        gold = _number(MARKED.search(sample.reference))
        assert gold is not None, "samples() takes no row without a number"
        return [(sample.reference, 1.0), (MARKED.sub(f"#### {gold + 1}", sample.reference), 0.0), ("", 0.0)]


def _number(found: re.Match[str] | None) -> Decimal | None:
    """The number of a match of NUMBER, exactly; None where there is none."""
    if found is None:
        return None
    text = found[1] if found.re.groups else found[0]
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
