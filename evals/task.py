"""What an eval task is: samples with an id, and a score for the text that a model put there.

A task owns the data set, the prompt and the metric; it never calls a model. The runner asks for `samples`, hands each to a model
by its `kind` (``generate``: ``messages`` or ``prompt``; ``infill``: ``prefix`` and ``suffix``, passed apart), and asks for the
`score` of the text that came back. `check` gives outputs whose score is known beforehand: a task that gives its reference less
than everything, or an empty output anything, measures its own mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Kind = Literal["generate", "infill"]


@dataclass(frozen=True)
class Sample:
    """One question to a model.

    id: unique within the task and the same in every run. kind: which of the fields below are set.
    generate: ``messages`` (a chat whose last turn is the user's) or else ``prompt`` (raw text).
    infill: ``prefix`` and ``suffix``, text before and after the gap, unchanged; ``reference`` is the true middle.
    reference: the answer as the data set has it, "" where there is none. max_new_tokens: the task's own limit.
    stop: strings at which the output ends. meta: what `score` needs, plain JSON values. question: id of the question where this is
    one of several samples of it (`dllm.evals.grouping.repeated`), else "".
    """

    id: str
    kind: Kind
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    prefix: str = ""
    suffix: str = ""
    reference: str = ""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    question: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id must not be empty")
        if self.kind not in ("generate", "infill"):
            raise ValueError(f"kind must be 'generate' or 'infill': got {self.kind!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1: got {self.max_new_tokens}")
        if self.kind == "generate" and bool(self.prompt) == bool(self.messages):
            raise ValueError(f"a generate sample has either prompt or messages: {self.id} has {_which(self)}")
        if self.kind == "generate" and (self.prefix or self.suffix):
            raise ValueError(f"a generate sample has no prefix and no suffix: {self.id} has")
        if self.kind == "infill" and (self.prompt or self.messages):
            raise ValueError(
                f"an infill sample has prefix and suffix, not prompt or messages: {self.id} has {_which(self)}"
            )


def _which(sample: Sample) -> str:
    """For errors: which of prompt and messages are set."""
    return " and ".join(name for name in ("prompt", "messages") if getattr(sample, name)) or "neither"


@runtime_checkable
class Task(Protocol):
    """One eval.

    name: as in the registry. metric: key of the headline score in what `score` returns, "" where the task has none (its
    outputs are then judged by likelihood, loops and cost alone). needs_execution: `score` runs the model's code and needs
    ``execute``. dataset, split: where the data come from on the Hugging Face hub.
    """

    name: str
    kind: Kind
    metric: str
    needs_execution: bool
    dataset: str
    split: str

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """The samples in a fixed order.

        data: a JSONL file (also ``.gz``) in the data set's own fields; None asks the `datasets` library for the hub's copy.
        limit: at most so many, drawn evenly by ``seed`` (data sets are often sorted by kind or difficulty) and kept in file
        order; a larger limit with the same seed holds the smaller one's samples. None: all.

        Raises FileNotFoundError where the data cannot be had, saying how to get them; ValueError naming the line that does
        not hold what the task needs.
        """
        ...

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """Metrics of one output, in [0, 1] unless the task says otherwise; the same for the same arguments.

        execute: `dllm.evals.execution.execute` or one with its signature. Raises ValueError where `needs_execution` and
        ``execute`` is None.
        """
        ...

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """Known answers of this sample: (output, headline score that it has to get)."""
        ...
