"""What several tasks share: reading data, drawing a subset, finding the code in an answer, running it against tests."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FENCE = re.compile(
    r"^(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:^(?P=ticks)|\Z)", re.M | re.S
)


def read_rows(
    data: Path | None, required: Sequence[str], dataset: str, split: str, config: str | None = None
) -> list[dict[str, Any]]:
    """Rows of a JSONL file (also ``.gz``), or of the hub's data set where ``data`` is None.

    Raises FileNotFoundError where there are none to be had, with what to do about it; ValueError naming file, line and the
    fields that are missing.
    """
    if data is None:
        rows = _from_hub(dataset, split, config)
        source = dataset
    else:
        rows, source = _from_file(Path(data)), str(data)
    for number, row in enumerate(rows, 1):
        missing = [name for name in required if name not in row]
        if missing:
            raise ValueError(
                f"{source}, row {number}: expected the fields {', '.join(required)}: {', '.join(missing)} missing"
            )
    if not rows:
        raise ValueError(f"{source} must hold at least one row: got none")
    return rows


def _from_file(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"data must be a JSONL file: {path} is not a file")
    opener = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: must be JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: must be a JSON object: got {type(row).__name__}")
            rows.append(row)
    return rows


def _from_hub(dataset: str, split: str, config: str | None) -> list[dict[str, Any]]:
    call = f"load_dataset({', '.join(repr(part) for part in (dataset, config) if part)}, split={split!r})"
    help_ = f"once with network, `{call}.to_json('rows.jsonl')` writes a file for `--data rows.jsonl`"
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise FileNotFoundError(
            f"data is not given and the package `datasets` is not installed (pip install 'dllm-toolkit[evals]'); {help_}"
        ) from error
    try:
        return [dict(row) for row in load_dataset(*filter(None, (dataset, config)), split=split)]
    # Offline, without access, or renamed: `datasets` raises one of several kinds, all of which mean that there are no data.
    except (OSError, ValueError, RuntimeError) as error:
        raise FileNotFoundError(f"data is not given and {dataset} could not be loaded ({error}); {help_}") from error


def draw(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most ``limit`` of the rows, drawn by ``seed``, in their own order; a larger limit only adds to a smaller one's.

    Raises ValueError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be >= 1 or None: got {limit}")
    if limit is None or limit >= len(rows):
        return list(rows)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return [rows[i] for i in sorted(order[:limit])]


def code_of(answer: str, name: str = "") -> str | None:
    """The Python code of a chat answer: the first fenced block that defines ``name``, else the first block, else None.

    A fence that is never closed ends with the answer. An answer without a fence is code only if it defines ``name``.
    """
    blocks = [m["code"] for m in FENCE.finditer(answer) if m["language"].lower() in ("", "python", "py", "python3")]
    if not blocks:
        return answer if defines(answer, name) else None
    return next((block for block in blocks if defines(block, name)), blocks[0])


def defines(code: str, name: str = "") -> bool:
    """Does the text define a function of this name, or any function where it is ""?"""
    return (
        re.search(rf"^[ \t]*(async )?def {re.escape(name)}\b" if name else r"^[ \t]*(async )?def ", code, re.M)
        is not None
    )


def cut_at(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    return text[: min((at for at in (text.find(s) for s in stop) if at >= 0), default=len(text))]


def run_tests(task: str, execute: Callable[..., Any] | None, program: str, tests: str) -> float:
    """1.0 if the program passes, else 0.0. Raises ValueError without ``execute``."""
    if execute is None:
        raise ValueError(
            f"{task} runs code that the model wrote: execute must be given (on the command line: --allow-code-execution)"
        )
    return float(execute(program, tests).passed)
