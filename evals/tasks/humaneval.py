"""HumanEval: write a Python function from its signature and docstring.

Dataset: HumanEval (Chen et al. 2021, arXiv:2107.03374; openai/human-eval, MIT), on the hub openai/openai_humaneval.
Split: test (164 problems).
Prompt: a chat that shows the function's head and asks for the whole function in one code block. With ``chat=False`` the head alone,
    as in the paper, cut at its stop strings; for base models.
Metric: pass@1 of the code under the data set's tests.
Source: raw form and tests as in openai/human-eval; the chat form as instruct models are measured (head, then a fenced block). The
    head stays before the model's function, since heads hold imports and helper functions that tests use. An answer without code
    fails without being run; the tests' `check` is called by us.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import code_of, cut_at, defines, draw, read_rows, run_tests

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
WISH = "Complete this Python function. Answer with the whole function in one code block."


class HumanEval:
    """chat: whether the model is asked in words, or given the text to go on with."""

    name = "humaneval"
    kind: Kind = "generate"
    metric = "pass@1"
    needs_execution = True
    dataset = "openai/openai_humaneval"
    split = "test"

    def __init__(self, chat: bool = True, max_new_tokens: int = 384) -> None:
        self.chat, self.max_new_tokens = chat, max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`."""
        rows = read_rows(
            data, ("task_id", "prompt", "entry_point", "canonical_solution", "test"), self.dataset, self.split
        )
        return [self._sample(row) for row in draw(rows, limit, seed)]

    def _sample(self, row: dict[str, Any]) -> Sample:
        common: dict[str, Any] = dict(
            id=row["task_id"],
            kind="generate",
            reference=row["canonical_solution"],
            max_new_tokens=self.max_new_tokens,
            meta={"head": row["prompt"], "entry_point": row["entry_point"], "test": row["test"], "chat": self.chat},
        )
        if not self.chat:
            return Sample(prompt=row["prompt"], stop=STOP, **common)
        content = f"{WISH}\n\n```python\n{row['prompt'].strip()}\n```"
        return Sample(messages=({"role": "user", "content": content},), **common)

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """pass@1, 0 or 1."""
        head, name = sample.meta["head"], sample.meta["entry_point"]
        code = code_of(output, name) if sample.meta["chat"] else cut_at(output, STOP)
        if not code or not code.strip():
            return {"pass@1": 0.0}
        # A whole function replaces the head's; a bare body goes on with it.
        program = f"{head}\n{code}" if sample.meta["chat"] and defines(code, name) else head + code
        return {"pass@1": run_tests(self.name, execute, program, f"{sample.meta['test']}\ncheck({name})\n")}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The canonical solution passes; nothing, talk, and a function that returns nothing fail."""
        head, name = sample.meta["head"], sample.meta["entry_point"]
        wrong = "    raise NotImplementedError\n"
        if sample.meta["chat"]:
            answer = f"Here it is:\n\n```python\n{head}{sample.reference}```\nIt works."
            empty = f"```python\ndef {name}(*args, **kwargs):\n{wrong}```"
            return [(answer, 1.0), (empty, 0.0), ("I cannot do that.", 0.0), ("", 0.0)]
        return [(sample.reference, 1.0), (wrong, 0.0), ("", 0.0)]
