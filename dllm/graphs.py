"""CUDA graphs of whole steps: captured once per shape bucket, replayed without the host.

A captured step reads and writes the tensors that it saw at capture, at their addresses, so whoever captures owns them: ``Captured``
keeps them alive as long as itself. Off CUDA, or where a step cannot be captured, the same step runs eagerly and one INFO line says why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KEY_STEP = 256
"""Rows of a store are rounded up to a multiple of this, so that calls of about the same length share a graph."""
CAPTURE_REASONS = ("captur", "not permitted when stream", "cudaErrorStreamCapture", "unsupported during")
"""Words of CUDA's and torch's errors about steps that cannot be captured; any other error is the caller's."""

_said: set[str] = set()
T = TypeVar("T")


def key_bucket(keys: int) -> int:
    """The least multiple of ``KEY_STEP`` that holds ``keys`` rows."""
    if keys < 0:
        raise ValueError(f"keys must be >= 0: got {keys}")
    return max(1, -(-keys // KEY_STEP)) * KEY_STEP


def say_once(text: str) -> None:
    """One INFO line per text and process."""
    if text not in _said:
        _said.add(text)
        logger.info(text)


class Captured:
    """A step of fixed shapes that ``replay`` runs: as a CUDA graph, or eagerly where ``reason`` says why there is none.

    outputs: what the step returned; a replay overwrites these tensors (an eager run replaces them). owned: tensors and modules that the
    graph reads, kept alive with it.
    """

    def __init__(self, step: Callable[[], Any], graph: Any, outputs: Any, owned: tuple[Any, ...], reason: str | None):
        self.step, self.graph, self.outputs, self.owned, self.reason = step, graph, outputs, owned, reason

    def replay(self) -> Any:
        """Run the step once on the current stream, without waiting for it; its outputs."""
        if self.graph is None:
            self.outputs = self.step()
        else:
            self.graph.replay()
        return self.outputs


def capture(
    step: Callable[[], Any],
    device: torch.device,
    owned: tuple[Any, ...] = (),
    warmup: int = 2,
    name: str = "step",
) -> Captured:
    """Capture ``step`` after ``warmup`` runs on a side stream (they compile kernels and fill caches).

    step: no arguments, tensor operations of fixed shape only. It runs ``warmup`` + 1 times at most, so its effects must be harmless
    until the caller has loaded what counts. Raises whatever the step itself raises; only a refusal to be captured falls back.
    """
    if device.type != "cuda":
        reason = f"{name}: no CUDA graph on {device.type}, steps run eagerly"
        say_once(reason)
        return Captured(step, None, None, owned, reason)
    with torch.cuda.device(device):
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(warmup):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph, stream=side):
                outputs = step()
        except RuntimeError as error:
            if not any(word in str(error) for word in CAPTURE_REASONS):
                raise
            torch.cuda.synchronize(device)
            reason = f"{name}: no CUDA graph, steps run eagerly: {str(error).splitlines()[0]}"
            say_once(reason)
            return Captured(step, None, None, owned, reason)
    # The step itself would keep its owner alive in a cycle; only what the graph reads is kept.
    return Captured(graph.replay, graph, outputs, owned, None)


class Buckets(Generic[T]):
    """The most recently used ``capacity`` things that were built for a shape; the least used one is given back first."""

    def __init__(self, capacity: int = 4) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1: got {capacity}")
        self.capacity = capacity
        self.built: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """What was built for ``key``, or ``build()``."""
        if key in self.built:
            self.built.move_to_end(key)
            return self.built[key]
        while len(self.built) >= self.capacity:
            self.built.popitem(last=False)
        self.built[key] = build()
        return self.built[key]


class Poll:
    """Reads a small device tensor ``lag`` posts late, so that the device never waits for the host.

    ``post`` copies it to pinned memory behind the work queued so far; ``read`` waits for the copy posted ``lag`` posts before the last
    one, while the work queued since then keeps the device busy. None until there is such a copy.
    """

    def __init__(self, flag: Tensor, lag: int = 1) -> None:
        if lag < 0:
            raise ValueError(f"lag must be >= 0: got {lag}")
        self.flag, self.lag, self.posts = flag, lag, 0
        self.on_cuda = flag.device.type == "cuda"
        size = lag + 1
        self.copies = [torch.empty(flag.shape, dtype=flag.dtype, pin_memory=self.on_cuda) for _ in range(size)]
        self.events = [torch.cuda.Event() for _ in range(size)] if self.on_cuda else []

    def reset(self) -> None:
        """Forget what was posted."""
        self.posts = 0

    def post(self) -> None:
        """Queue a copy of the flag as it will be after the work queued so far."""
        slot = self.posts % len(self.copies)
        self.copies[slot].copy_(self.flag, non_blocking=True)
        if self.on_cuda:
            self.events[slot].record()
        self.posts += 1

    def read(self) -> list[int] | None:
        """The flag as posted ``lag`` posts before the last one."""
        at = self.posts - 1 - self.lag
        if at < 0:
            return None
        slot = at % len(self.copies)
        if self.on_cuda:
            self.events[slot].synchronize()
        return self.copies[slot].tolist()
