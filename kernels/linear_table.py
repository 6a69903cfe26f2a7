"""Which product for which shape: a table of measured times on this device, kept on disk, and a fixed rule where nothing was measured.

For a shape (kind, rows bucket, outputs, inputs, dtype) the candidates are a few configurations of ``skinny_linear`` and PyTorch's product
(cuBLAS). Each is captured in a CUDA graph that walks through copies of the weight larger together than the L2 cache, so that every
product reads its weight from memory, as in a model; the median of several replays counts. A choice is only as good as its device and
compiler, so the file is named for the device, torch and triton.

Nothing is measured unless somebody calls ``measure`` or ``LinearTable.fill``: measuring inside a model's first step would break the
capture of its graph.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dllm.environment import cache_folder
from dllm.kernels._launch import HAS_TRITON, multiprocessors, triton, use_triton
from dllm.kernels.skinny_linear import (
    MAX_ROWS,
    SMALL_BYTES,
    LinearConfig,
    choose_config,
    skinny_linear,
    skinny_linear_partial,
    skinny_linear_reference,
    skinny_swiglu,
    skinny_swiglu_reference,
)

Kind = Literal["linear", "swiglu"]
ROW_BUCKETS = (1, 8, 16, 32, 64)
CUBLAS = "cublas"
L2_BYTES = 256 * 2**20
"""Weights of one measurement together: several times the largest L2 cache in use."""


@dataclass(frozen=True)
class LinearShape:
    """kind "linear": weight [outputs, inputs]; "swiglu": gate and up, each [outputs, inputs]. rows: of x; dtype: as in
    ``torch.bfloat16``."""

    kind: Kind
    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "swiglu"):
            raise ValueError(f"kind must be linear or swiglu: got {self.kind!r}")
        if min(self.rows, self.outputs, self.inputs) < 1:
            raise ValueError(f"rows, outputs and inputs must be >= 1: got {self.rows}, {self.outputs}, {self.inputs}")

    @property
    def key(self) -> str:
        """Its name in the table; rows rounded up to a bucket."""
        return f"{self.kind}/{bucket(self.rows)}/{self.outputs}/{self.inputs}/{str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Choice:
    """config: of the kernel, or None for cuBLAS; time_us: measured median of one product, or None where the fixed rule chose."""

    config: LinearConfig | None
    time_us: float | None = None


def bucket(rows: int) -> int:
    """The smallest bucket that holds ``rows``. Raises ValueError above 64, where there is no choice to make."""
    for size in ROW_BUCKETS:
        if rows <= size:
            return size
    raise ValueError(f"rows must be <= {MAX_ROWS}: got {rows}")


def candidates(shape: LinearShape, processors: int = 132) -> list[LinearConfig]:
    """Configurations worth measuring: the fixed rule's, and tile heights and splits around it."""
    itemsize = shape.dtype.itemsize
    pair = shape.kind == "swiglu"
    found = [choose_config(shape.rows, shape.outputs, shape.inputs, itemsize, pair, processors)]
    for block_o in (16, 32, 64, 128):
        tiles = -(-shape.outputs // block_o)
        if tiles > 16 * processors or (pair and block_o == 128):
            continue
        for block_i, stages in ((64, 5), (128, 4), (256, 3)):
            # Two stages of both operands must fit the shared memory.
            held = (block_o * (2 if pair else 1) + max(16, bucket(shape.rows))) * block_i * itemsize * stages
            if block_i > max(64, shape.inputs) or held > 200 * 1024:
                continue
            wanted = {1, max(1, processors // tiles), max(1, 2 * processors // tiles)}
            for splits in sorted(wanted):
                if splits == 1 or (splits <= 16 and shape.inputs // splits >= 2 * block_i):
                    found.append(LinearConfig(block_o, block_i, splits, 8 if block_o == 128 else 4, stages))
    return list(dict.fromkeys(found))


class LinearTable:
    """Choices by shape for one device; unknown shapes follow ``choose_config``. Mutated by ``fill``; ``save`` writes it to ``path``."""

    def __init__(self, path: Path, processors: int = 132) -> None:
        self.path = path
        self.processors = processors
        self.choices: dict[str, Choice] = {}

    @classmethod
    def load(cls, device: torch.device | str, folder: Path | None = None) -> LinearTable:
        """The table of ``device`` from ``folder`` (default: below the cache folder); empty if there is no file yet.

        Raises ValueError if the file is not a table.
        """
        device = torch.device(device)
        table = cls(table_path(device, folder), multiprocessors(device))
        if table.path.exists():
            table.choices = _read(table.path)
        return table

    def choose(self, shape: LinearShape) -> Choice:
        """The measured choice, or the fixed rule's."""
        known = self.choices.get(shape.key)
        if known is not None:
            return known
        pair = shape.kind == "swiglu"
        return Choice(
            choose_config(shape.rows, shape.outputs, shape.inputs, shape.dtype.itemsize, pair, self.processors)
        )

    def fill(
        self,
        shapes: Iterable[LinearShape],
        device: torch.device | str,
        replays: int = 5,
        again: bool = False,
        time_of: Callable[[LinearShape, LinearConfig | None], float] | None = None,
    ) -> None:
        """Measure the shapes that the table lacks (again: all of them) and keep the fastest of each; a bucket is measured once, at its
        full size.

        time_of(shape, config or None) -> us per product: what measures, for tests; default ``measure`` on ``device``.
        """
        time_of = time_of or (lambda shape, config: measure(shape, config, device, replays))
        for given in shapes:
            if given.key in self.choices and not again:
                continue
            shape = LinearShape(given.kind, bucket(given.rows), given.outputs, given.inputs, given.dtype)
            tried = [None, *candidates(shape, self.processors)]
            times = [(time_of(shape, config), index) for index, config in enumerate(tried)]
            best, index = min(times)
            self.choices[shape.key] = Choice(tried[index], best)

    def save(self) -> None:
        """Write the table, by a rename, so that a reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entries = {
            key: {"config": CUBLAS if c.config is None else asdict(c.config), "time_us": c.time_us}
            for key, c in sorted(self.choices.items())
        }
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entries, file, indent=1)
            Path(name).replace(self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """``skinny_linear`` by the table's choice."""
        config, product = self._pick("linear", x, weight)
        if product:
            return skinny_linear_reference(x, weight, bias, residual)
        return skinny_linear(x, weight, bias, residual, config)

    def partial(self, x: Tensor, weight: Tensor) -> Tensor:
        """``skinny_linear_partial`` by the table's configuration; by the fixed rule's where cuBLAS was faster, where nothing was
        measured, and for small weights, since the measured time of a split product contains the launch that sums it."""
        config, _ = self._pick("linear", x, weight)
        if weight.numel() * weight.element_size() <= SMALL_BYTES or not self._measured(x, weight):
            config = None
        return skinny_linear_partial(x, weight, config)

    def _measured(self, x: Tensor, weight: Tensor) -> bool:
        rows = x.shape[:-1].numel()
        if not 1 <= rows <= MAX_ROWS:
            return False
        return LinearShape("linear", rows, weight.shape[0], weight.shape[1], x.dtype).key in self.choices

    def swiglu(
        self, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> Tensor:
        """``skinny_swiglu`` by the table's choice."""
        config, product = self._pick("swiglu", x, gate)
        if product:
            return skinny_swiglu_reference(x, gate, up, gate_bias, up_bias)
        return skinny_swiglu(x, gate, up, gate_bias, up_bias, config)

    def _pick(self, kind: Kind, x: Tensor, weight: Tensor) -> tuple[LinearConfig | None, bool]:
        """(configuration, whether PyTorch's product is the choice)."""
        rows = x.shape[:-1].numel()
        if not use_triton(x) or not 1 <= rows <= MAX_ROWS:
            return None, False
        choice = self.choose(LinearShape(kind, rows, weight.shape[0], weight.shape[1], x.dtype))
        return choice.config, choice.config is None


def measure(
    shape: LinearShape, config: LinearConfig | None, device: torch.device | str = "cuda", replays: int = 5
) -> float:
    """Median time of one product in us on a CUDA device, in a graph over copies of the weight that do not fit the L2 cache; config
    None: cuBLAS.

    A configuration that the device cannot run (shared memory) counts as infinitely slow. Raises ValueError off CUDA.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device to measure on: got {device}")
    pair = shape.kind == "swiglu"
    size = shape.outputs * shape.inputs * shape.dtype.itemsize * (2 if pair else 1)
    copies = max(2, min(64, -(-L2_BYTES // size)))
    x = torch.randn(shape.rows, shape.inputs, device=device).to(shape.dtype)
    height = shape.outputs * (2 if pair else 1)
    weights = torch.randn(copies, height, shape.inputs, device=device, dtype=shape.dtype)
    fused: list[tuple[Tensor, ...]] = [w.chunk(2) if pair else (w,) for w in weights]

    def run() -> list[Tensor]:
        if pair:
            if config is None:
                return [skinny_swiglu_reference(x, *w) for w in fused]
            return [skinny_swiglu(x, w[0], w[1], config=config) for w in fused]
        if config is None:
            return [skinny_linear_reference(x, *w) for w in fused]
        return [skinny_linear(x, w[0], config=config) for w in fused]

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            run()
        except triton.runtime.errors.OutOfResources:
            return float("inf")
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies)
    del kept
    return sorted(times)[len(times) // 2]


@lru_cache(maxsize=8)
def current_table(device: torch.device) -> LinearTable:
    """The table of ``device``, read from disk once a process; what ``fill`` adds to it is seen by every caller."""
    return LinearTable.load(device)


def table_path(device: torch.device, folder: Path | None = None) -> Path:
    """File of a device's table: named for the device, torch and triton, since each of them changes the times."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = f"torch-{torch.__version__}_triton-{triton.__version__ if HAS_TRITON else 'none'}"
    safe = re.sub(r"[^A-Za-z0-9.+-]+", "-", name)
    return (folder or cache_folder() / "linear_table") / f"{safe}_{versions}.json"


def _read(path: Path) -> dict[str, Choice]:
    try:
        entries = json.loads(path.read_text())
        return {
            key: Choice(
                None if entry["config"] == CUBLAS else LinearConfig(**entry["config"]),
                None if entry["time_us"] is None else float(entry["time_us"]),
            )
            for key, entry in entries.items()
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a table of measured products: {error}; delete it to start anew") from error
