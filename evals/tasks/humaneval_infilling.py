"""HumanEval-Infilling: fill a gap in a function so that its tests pass.

Dataset: HumanEval-Infilling (Bavarian et al. 2022, arXiv:2207.14255, section 4.1; openai/human-eval-infilling, MIT), on the hub
    loubnabnl/humaneval_infilling. single_line: one line of the solution is missing; multi_line: some consecutive lines; random_span:
    a span of characters; random_span_light: the same, drawn once a problem.
Split: test (1,033, 5,815, 1,640 and 164 gaps).
Prompt: prefix and suffix, apart: a model that is given one joined string cannot know what is missing. The white space behind whole
    missing lines belongs to the suffix, for that is where tokenizers part them; the three texts joined are the data set's own.
Metric: pass@1 of prefix + fill + suffix under the data set's tests; exact_match of the fill besides.
Source: the data set's own rule, stricter where scores came out too high by mistake. The tests' `check` is called by us, after the
    program and compiled apart from it, so that tests that never ran cannot count as passed. An empty fill, and a blank one where
    the true middle is not blank, is no fill and fails: in some gaps (a line that the tests do not need) it would pass. Gaps whose
    true middle is empty (one in a hundred random spans) are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.metrics import exact_match
from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows, run_tests

SPLITS = {
    "single_line": ("HumanEval-SingleLineInfilling", 64),
    "multi_line": ("HumanEval-MultiLineInfilling", 256),
    "random_span": ("HumanEval-RandomSpanInfilling", 256),
    "random_span_light": ("HumanEval-RandomSpanInfillingLight", 256),
}
"""Name -> (configuration on the hub, limit of new tokens where the length is not given)."""

WHOLE_LINES = ("HumanEval-SingleLineInfilling", "HumanEval-MultiLineInfilling")

# Text that no place in a Python program can hold; the first serves in code and comments, the others inside of strings.
NO_PYTHON = ("\n)(\n", '"\n)(\n', "'\n)(\n", '"""\n)(\n', "'''\n)(\n")


class HumanEvalInfilling:
    """One of the four kinds of gap. Raises ValueError for another ``gap``."""

    kind: Kind = "infill"
    metric = "pass@1"
    needs_execution = True
    dataset = "loubnabnl/humaneval_infilling"
    split = "test"

    def __init__(self, gap: str = "single_line") -> None:
        if gap not in SPLITS:
            raise ValueError(f"gap must be one of {', '.join(SPLITS)}: got {gap!r}")
        self.name = f"humaneval_infilling_{gap}"
        self.config, self.max_new_tokens = SPLITS[gap]

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`."""
        fields = ("task_id", "entry_point", "prompt", "suffix", "canonical_solution", "test")
        rows = read_rows(data, fields, self.dataset, self.split, self.config)
        # Where nothing is missing there is nothing to fill.
        return [self._sample(row) for row in draw([row for row in rows if row["canonical_solution"]], limit, seed)]

    def _sample(self, row: dict[str, Any]) -> Sample:
        middle = row["canonical_solution"]
        # Of a span that begins and ends anywhere, nobody but the data set knows that a line break ends it.
        end = len((middle.rstrip() or middle) if self.config in WHOLE_LINES else middle)
        return Sample(
            id=row["task_id"],
            kind="infill",
            prefix=row["prompt"],
            suffix=middle[end:] + row["suffix"],
            reference=middle[:end],
            max_new_tokens=self.max_new_tokens,
            meta={"entry_point": row["entry_point"], "test": row["test"]},
        )

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """pass@1 and exact_match, each 0 or 1."""
        program = sample.prefix + output + sample.suffix
        tests = f"{sample.meta['test']}\ncheck({sample.meta['entry_point']})\n"
        # Some spans are white space themselves.
        filled = output.strip() or (output and not sample.reference.strip())
        passed = run_tests(self.name, execute, program, tests) if filled else 0.0
        return {"pass@1": passed, "exact_match": exact_match(sample.reference, output)}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The true middle passes; nothing, and text that is no Python there, fail."""
        return [(sample.reference, 1.0), ("", 0.0), (_wrong(sample), 0.0)]


def _wrong(sample: Sample) -> str:
    """A fill with which the program does not compile, wherever the gap lies."""
    for text in NO_PYTHON:
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
                compile(sample.prefix + text + sample.suffix, "<wrong>", "exec")
        except SyntaxError:
            return text
    raise ValueError(f"no wrong fill is known for {sample.id}")
