"""MATH-500: competition mathematics, answers compared as mathematics.

Dataset: the 500 test problems of Lightman et al. 2023 (arXiv:2305.20050; openai/prm800k, MIT) out of MATH (Hendrycks et al. 2021,
    arXiv:2103.03874), on the hub HuggingFaceH4/MATH-500.
Split: test.
Prompt: a chat: the problem and the usual wish for a \\boxed{} final answer.
Metric: accuracy by math-verify (`pip install 'dllm-toolkit[evals]'`): equal as LaTeX expressions, intervals, sets, text.
Source: Hugging Face's open-r1 and lighteval score MATH-500 with the same library. Its time limits need a process' main thread, and
    elsewhere it would call every answer wrong; that raises here. An answer whose last \\boxed{} holds the gold text itself is
    right too, whatever the parser makes of it. Known to be lenient in the library: numbers are compared to six decimals, and a
    base in a subscript is not read (52_8 equals 52_9).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw, read_rows

WISH = "Please reason step by step, and put your final answer within \\boxed{}."


class Math500:
    """Raises ModuleNotFoundError when it scores without math-verify."""

    name = "math500"
    kind: Kind = "generate"
    metric = "accuracy"
    needs_execution = False
    dataset = "HuggingFaceH4/MATH-500"
    split = "test"

    def __init__(self, max_new_tokens: int = 512) -> None:
        self.max_new_tokens = max_new_tokens

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`."""
        rows = read_rows(data, ("problem", "answer", "unique_id"), self.dataset, self.split)
        return [
            Sample(
                id=row["unique_id"],
                kind="generate",
                messages=({"role": "user", "content": f"{row['problem']}\n\n{WISH}"},),
                reference=row["answer"],
                max_new_tokens=self.max_new_tokens,
                meta={name: row[name] for name in ("subject", "level") if name in row},
            )
            for row in draw(rows, limit, seed)
        ]

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """accuracy, 0 or 1. Raises RuntimeError outside of the main thread."""
        parse, verify = _math_verify()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("math500 must score in the main thread: math-verify limits its time by a signal")
        given = last_boxed(output)
        if given is not None and _plain(given) == _plain(sample.reference):
            return {"accuracy": 1.0}
        gold = parse(f"\\boxed{{{sample.reference}}}")
        return {"accuracy": float(bool(gold) and bool(verify(gold, parse(output))))}

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """The gold answer in a box is right, in a sentence too; perturbed, or nothing, is wrong."""
        gold = f"\\boxed{{{sample.reference}}}"
        wrong = f"\\boxed{{{_perturb(sample.reference)}}}"
        return [(gold, 1.0), (f"First we think. The answer is ${gold}$.", 1.0), (wrong, 0.0), ("", 0.0)]


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "math500 compares answers with the package math-verify: pip install 'dllm-toolkit[evals]'"
        ) from error
    return parse, verify


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces balanced; None where there is none or it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None


def _plain(latex: str) -> str:
    """Without white space and without what only changes how it looks."""
    return re.sub(
        r"\\left|\\right|\\[,;!]|\\d?t?frac", lambda m: "\\frac" if "frac" in m[0] else "", re.sub(r"\s+", "", latex)
    )


def _perturb(answer: str) -> str:
    """Another answer of the same form: the first digit that is not 0 changes (9 becomes 1); without digits seven is added."""
    found = re.search(r"[1-9]", answer) or re.search(r"\d", answer)
    if found is None:
        return f"{answer}+7"
    return f"{answer[: found.start()]}{int(found[0]) % 9 + 1}{answer[found.end() :]}"
