"""When drafting pays: measured times of a target and its drafter by batch size, kept on disk.

A round with n drafts costs one draft pass and one pass over n + 1 rows a sequence; it commits ``accept_length`` tokens
where plain decoding commits one. At small batches the extra rows are nearly free, at large ones they are not.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.drafters.drafter import Context, Drafter
from dllm.environment import cache_folder
from dllm.speculate_targets import open_rows

logger = logging.getLogger(__name__)

FOLDER = "draft_costs"


@dataclass(frozen=True)
class CostTable:
    """Median milliseconds of one pass by batch size (rows of the call still running).

    plain_ms: the target over one row a sequence; verify_ms: over ``num_drafts`` + 1; draft_ms: the drafter, context
    included. accept_length: tokens a pass commits at ``num_drafts`` drafts. device, dtype, columns (stored tokens a
    sequence): what it was measured on. Batch sizes between measured ones are interpolated; outside them the nearest
    one counts.
    """

    num_drafts: int
    accept_length: float
    plain_ms: Mapping[int, float]
    verify_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    device: str = ""
    dtype: str = ""
    columns: int = 0

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts must be >= 1: got {self.num_drafts}")
        if not 1 <= self.accept_length <= self.num_drafts + 1:
            raise ValueError(f"accept_length must be in [1, {self.num_drafts + 1}]: got {self.accept_length}")
        if not self.plain_ms or not set(self.plain_ms) == set(self.verify_ms) == set(self.draft_ms):
            raise ValueError(
                "plain_ms, verify_ms and draft_ms must have the same batch sizes: got "
                f"{sorted(self.plain_ms)}, {sorted(self.verify_ms)}, {sorted(self.draft_ms)}"
            )
        for name in ("plain_ms", "verify_ms", "draft_ms"):
            if not all(value > 0 for value in getattr(self, name).values()):
                raise ValueError(f"{name} must be > 0 for every batch size: got {dict(getattr(self, name))}")

    def speedup(self, batch: int, accept_length: float | None = None) -> float:
        """Tokens per time with drafts over that without, at a batch size."""
        plain, verify, draft = (_at(t, batch) for t in (self.plain_ms, self.verify_ms, self.draft_ms))
        return (self.accept_length if accept_length is None else accept_length) * plain / (verify + draft)

    def pays(self, batch: int) -> bool:
        """Whether a round with drafts is expected to be faster than rounds without."""
        return self.speedup(batch) > 1

    def save(self, path: str | Path) -> None:
        """Write JSON; folders are made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read what ``save`` wrote. Raises ValueError for a file that is no such table."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            for name in ("plain_ms", "verify_ms", "draft_ms"):
                raw[name] = {int(batch): float(value) for batch, value in raw[name].items()}
            return cls(**raw)
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} must be a cost table as CostTable.save writes it: {error!r}") from error

    @classmethod
    def find(cls, drafter: Drafter) -> CostTable | None:
        """The table that ``measure_costs`` kept for this drafter, target and device, or None."""
        path = table_path(drafter)
        if path.is_file():
            return cls.load(path)
        logger.info("no cost table at %s: drafting stays on at every batch size (see measure_costs)", path)
        return None


def table_path(drafter: Drafter) -> Path:
    """Where the table of a drafter with its target on their device is kept: below the cache folder."""
    target, body = drafter.target, drafter.config.body
    kind = "own" if target.is_own else "hf"
    dtype = str(target.dtype).removeprefix("torch.")
    drafts = f"{drafter.config.kind}-{body.num_layers}x{body.hidden_size}-b{drafter.config.block_length}"
    name = f"{target.fingerprint()}-{kind}-{dtype}-{drafts}-{_device_name(target.device)}"
    return cache_folder() / FOLDER / f"{''.join(c if c.isalnum() or c in '-.' else '_' for c in name)}.json"


@torch.no_grad()
def measure_costs(
    drafter: Drafter,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    num_drafts: int | None = None,
    columns: int = 256,
    repeats: int = 9,
    accept_length: float | None = None,
    prompt_ids: Tensor | None = None,
    save: bool = True,
) -> CostTable:
    """Time the target and the drafter on this machine.

    num_drafts: None = as many as the drafter drafts; columns: stored tokens a sequence, prompt included; repeats: the
    median of so many passes counts. accept_length: None = measured by ``drafter.check(prompt_ids)``, so give a real
    prompt [1, P]. save: keep it where ``CostTable.find`` looks. Leaves the drafter reset.
    """
    count = drafter.max_drafts if num_drafts is None else num_drafts
    if not 1 <= count <= drafter.max_drafts:
        raise ValueError(f"num_drafts must be in [1, {drafter.max_drafts}]: got {count}")
    if not batches or min(batches) < 1:
        raise ValueError(f"batches must be batch sizes >= 1: got {list(batches)}")
    if columns < 2:
        raise ValueError(f"columns must be >= 2: got {columns}")
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1: got {repeats}")
    if accept_length is None:
        accept_length = min(drafter.check(prompt_ids).accept_length, count + 1.0)
    times = {batch: _times(drafter, batch, count, columns, repeats) for batch in batches}
    table = CostTable(
        num_drafts=count,
        accept_length=accept_length,
        plain_ms={batch: value[0] for batch, value in times.items()},
        verify_ms={batch: value[1] for batch, value in times.items()},
        draft_ms={batch: value[2] for batch, value in times.items()},
        device=_device_name(drafter.target.device),
        dtype=str(drafter.target.dtype).removeprefix("torch."),
        columns=columns,
    )
    if save:
        table.save(table_path(drafter))
    return table


def _times(drafter: Drafter, batch: int, num_drafts: int, columns: int, repeats: int) -> tuple[float, float, float]:
    """Milliseconds of a pass over 1 row, over num_drafts + 1 rows, and of a draft pass."""
    target = drafter.target
    device = target.device
    passes = repeats + 2
    rows = open_rows(target, drafter.config.target_layer_ids, columns + 2 * passes + num_drafts + 1)
    ids = torch.arange(batch * columns).view(batch, columns) * 7919 % target.vocab_size
    start = rows.prefill(ids.tolist(), want_hidden=False)
    assert start.features is not None, "a drafter taps"
    drafter.reset(batch, columns + 2 * passes)
    drafter.feed(Context(start.features.to(drafter.device), start.valid.to(drafter.device)))
    lengths = torch.full((batch,), columns, device=device)
    one = torch.ones_like(lengths)
    medians = []
    for width in (1, num_drafts + 1):
        tokens = ids[:, :1].expand(-1, width).to(device)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        spans = []
        for _ in range(passes):
            begin = _now(device)
            _, features = rows.verify(tokens, lengths, valid, int(lengths[0]))
            spans.append(_now(device) - begin)
            rows.commit(one)
            lengths = lengths + 1
            rows.tidy(int(lengths[0]))
        # The first two passes warm up.
        medians.append(statistics.median(spans[2:]) * 1000)
    assert features is not None, "a drafter taps"
    context = Context(
        features.to(drafter.device), (torch.arange(num_drafts + 1) < 1).expand(batch, -1).to(drafter.device)
    )
    anchor = ids[:, 0].to(drafter.device)
    spans = []
    for _ in range(passes):
        begin = _now(device)
        drafter.propose(context, anchor, num_drafts)
        spans.append(_now(device) - begin)
    drafter.reset(batch, columns)
    return medians[0], medians[1], statistics.median(spans[2:]) * 1000


def _at(times: Mapping[int, float], batch: int) -> float:
    """Interpolated between the measured batch sizes, clamped outside them."""
    sizes = sorted(times)
    if batch <= sizes[0]:
        return times[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if batch <= high:
            part = (batch - low) / (high - low)
            return times[low] * (1 - part) + times[high] * part
    return times[sizes[-1]]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def resolve_costs(value: Any, drafter: Drafter | None) -> CostTable | None:
    """The ``cost_table`` of a request: None, a table, a path, or "auto" (the one kept for this drafter, if any)."""
    if value is None or isinstance(value, CostTable):
        return value
    if value == "auto":
        return None if drafter is None else CostTable.find(drafter)
    if isinstance(value, (str, Path)):
        return CostTable.load(value)
    raise TypeError(f"cost_table must be None, 'auto', a path or a CostTable: got {value!r}")
