"""How far a training run is: a bar with the time that is left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class Progress:
    """Clock and display of a run that ends after ``steps`` steps or ``limit_s`` seconds."""

    def __init__(self, steps: int | None, limit_s: float | None) -> None:
        if (steps is None) == (limit_s is None):
            raise ValueError(f"exactly one of steps and limit_s must be given: got {steps} and {limit_s}")
        self.steps, self.limit_s = steps, limit_s
        self.start = time.perf_counter()
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.bar = RichProgress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("compiling", total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self) -> None:
        """Start the clock: what came before (compilation, first measurement) does not count."""
        self.start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since ``begin``."""
        return time.perf_counter() - self.start

    def share(self, step: int) -> float:
        """Part of the run that is over, in [0, 1]."""
        whole = self.seconds() / self.limit_s if self.limit_s is not None else step / (self.steps or 1)
        return min(1.0, whole)

    def done(self, step: int) -> bool:
        """Whether the run is over."""
        return self.share(step) >= 1.0

    def show(self, step: int, line: dict[str, float], held_out: dict[str, dict[str, float]]) -> None:
        """Put the newest figures on the display."""
        measured = ", ".join(f"{kind} {value['cross_entropy']:.2f}" for kind, value in held_out.items())
        text = (
            f"step {step}: loss {line['loss']:.3f}, accuracy {line['accuracy']:.3f}, {line['steps_per_second']:.2f} steps/s; "
            f"held out: {measured}"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=self.share(step), description=text)
            return
        share = self.share(step)
        left = self.seconds() * (1 - share) / max(share, 1e-9)
        logger.info("%s; %.0f s left", text, left)
