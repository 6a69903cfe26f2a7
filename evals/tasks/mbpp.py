"""MBPP, sanitised: write a short Python function from a sentence and its tests.

Dataset: Mostly Basic Python Problems (Austin et al. 2021, arXiv:2108.07732; CC BY 4.0), hand-verified part, on the hub
    google-research-datasets/mbpp, configuration sanitized.
Split: test (257 problems, task ids 11 to 510).
Prompt: the paper's sentence with the task and all its tests, which fix name and arguments; as a chat with a wish for one code block. With
    ``chat=False`` the paper's raw form with [BEGIN] and [DONE], after ``shots`` worked examples (task ids 2, 3, 4 in the paper).
Metric: pass@1 under the asserts.
Source: the paper, section 3 and appendix; three shots as in lm-evaluation-harness and bigcode-evaluation-harness.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import code_of, cut_at, draw, read_rows, run_tests

FIELDS = ("task_id", "prompt", "code", "test_list")
SHOT_IDS = (2, 3, 4)
DONE = "[DONE]"
# The function that an assert calls, as far as the first call of an ordinary name can tell.
CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")
BUILTINS = {
    "set",
    "sorted",
    "list",
    "tuple",
    "round",
    "len",
    "isclose",
    "abs",
    "math",
    "str",
    "int",
    "float",
    "dict",
    "sum",
}


class MBPP:
    """chat: asked in words, or given text to go on with; shots, fewshot: raw form only, up to 3 rows of a JSONL of the prompt split."""

    name = "mbpp"
    kind: Kind = "generate"
    metric = "pass@1"
    needs_execution = True
    dataset = "google-research-datasets/mbpp"
    split = "test"

    def __init__(
        self, chat: bool = True, shots: int = 0, fewshot: Path | str | None = None, max_new_tokens: int = 256
    ) -> None:
        if not 0 <= shots <= len(SHOT_IDS):
            raise ValueError(f"shots must be in [0, {len(SHOT_IDS)}]: got {shots}")
        if chat and shots:
            raise ValueError(f"shots belong to the raw form: chat must be False: got shots={shots}")
        self.chat, self.shots, self.fewshot, self.max_new_tokens = chat, shots, fewshot, max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`."""
        rows = read_rows(data, FIELDS, self.dataset, self.split, "sanitized")
        examples: list[dict[str, Any]] = []
        if self.shots:
            source = Path(self.fewshot) if self.fewshot is not None else None
            known = {row["task_id"]: row for row in read_rows(source, FIELDS, self.dataset, "prompt", "sanitized")}
            missing = [id_ for id_ in SHOT_IDS[: self.shots] if id_ not in known]
            if missing:
                raise ValueError(f"fewshot must hold the task ids {SHOT_IDS[: self.shots]}: {missing} missing")
            examples = [known[id_] for id_ in SHOT_IDS[: self.shots]]
        shown = "".join(f"{_ask(row)}[BEGIN]\n{row['code'].strip()}\n{DONE}\n\n" for row in examples)
        return [self._sample(row, shown) for row in draw(rows, limit, seed)]

    def _sample(self, row: dict[str, Any], shown: str) -> Sample:
        tests = {"imports": list(row.get("test_imports") or []), "tests": list(row["test_list"]), "chat": self.chat}
        common: dict[str, Any] = dict(
            id=f"mbpp/{row['task_id']}",
            kind="generate",
            reference=row["code"],
            max_new_tokens=self.max_new_tokens,
            meta=tests,
        )
        if not self.chat:
            return Sample(prompt=f"{shown}{_ask(row)}[BEGIN]\n", stop=(DONE,), **common)
        content = f"{_ask(row)}Answer with the code in one code block."
        return Sample(messages=({"role": "user", "content": content},), **common)

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """pass@1, 0 or 1."""
        tests = sample.meta["tests"]
        code = code_of(output, _name_called(tests)) if sample.meta["chat"] else cut_at(output, (DONE,))
        if not code or not code.strip():
            return {"pass@1": 0.0}
        # Some tests use a module (math) that only the solution imports besides; the imports come first and again before the tests.
        imports = "\n".join(sample.meta["imports"])
        return {"pass@1": run_tests(self.name, execute, f"{imports}\n{code}", "\n".join([imports, *tests]))}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The reference code passes; nothing, talk, and a function that does nothing fail."""
        name = _name_called(sample.meta["tests"]) or "f"
        wrong = f"def {name}(*args, **kwargs):\n    raise NotImplementedError\n"
        if sample.meta["chat"]:
            fenced = f"Sure.\n\n```python\n{sample.reference}\n```\n"
            return [(fenced, 1.0), (f"```\n{wrong}```", 0.0), ("I do not know.", 0.0), ("", 0.0)]
        return [(f"{sample.reference}\n{DONE}", 1.0), (wrong, 0.0), ("", 0.0)]


def _ask(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['prompt'].strip()} "
        f"Your code should pass these tests:\n\n{tests}\n"
    )


def _name_called(tests: list[str]) -> str:
    """Name of the function under test, "" if the first assert calls none but builtins."""
    return next((name for name in CALLED.findall(tests[0]) if name not in BUILTINS), "") if tests else ""
