"""A run that ends when it is told to, at the end of a step, so that what it has learnt is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping(event: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set the event while the block runs; elsewhere than in the main thread nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
