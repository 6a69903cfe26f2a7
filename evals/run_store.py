"""A run's folder: one line a sample, appended and synced as it is made, so that a killed run goes on where it stopped.

    run.json              what runs: settings and versions; a folder of another run is refused
    shard-00000.jsonl     lines of rank 0 as they were made; each holds the sample's record and, apart, its times
    samples.jsonl         all records in sample order, once the run is complete
    times.jsonl           all times in sample order
    result.json           settings, versions, summary and the digest of samples.jsonl

samples.jsonl and result.json hold no clock and no trace of how the work was cut, so an interrupted run ends with the bytes
of an unbroken one. A line that a kill tore is cut off when its rank opens the folder again, and its sample is run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.run_fields import Fields, checked, read_json

FORMAT = "dllm.evals.run/1"
RUN, SAMPLES, TIMES, RESULT = "run.json", "samples.jsonl", "times.jsonl", "result.json"


@dataclass(frozen=True)
class Line:
    """One sample of a run: its place in the task, its record (the same however the run was cut), and its times."""

    index: int
    record: dict[str, Any]
    time: dict[str, Any]


class RunStore:
    """The folder of one run, open for the shard of one rank (a context manager: the shard is locked while it is open).

    run: JSON values that say what runs, settings and versions. num_samples: how many samples make it complete. fields: what a line's
    "record" and "time" must hold.
    Raises ValueError where the folder holds another run, naming the fields that differ, or a damaged line; RuntimeError where
    another process has this rank's shard open.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        num_samples: int,
        rank: int = 0,
        fields: Mapping[str, Fields] | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be >= 1: got {num_samples}")
        self.folder, self.num_samples, self.rank, self.fields = Path(folder), num_samples, rank, fields or {}
        self.run = json.loads(json.dumps({"format": FORMAT, "num_samples": num_samples, **run}, allow_nan=False))
        self.folder.mkdir(parents=True, exist_ok=True)
        _claim(self.folder / RUN, self.run)
        self.shard = self.folder / f"shard-{rank:05d}.jsonl"
        self.lock = FileLock(self.folder / f".shard-{rank:05d}.lock")
        try:
            self.lock.acquire(blocking=False)
        except Timeout as error:
            raise RuntimeError(
                f"{self.shard} is open in another process: wait for it or give another --output"
            ) from error
        self.file = self.shard.open("ab")
        _cut_torn_line(self.shard)

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.lock.release()

    def done(self) -> set[int]:
        """Indices of the samples that some rank has written."""
        return {index for index, _, _ in _places(self.folder, self.num_samples, self.fields)}

    def append(self, line: Line) -> None:
        """Write one sample; when this returns, a kill or a power cut cannot take it back."""
        value = {"index": line.index, "record": line.record, "time": line.time}
        self.file.write(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self, summarise: Callable[[Iterator[dict[str, Any]]], Mapping[str, Any]]) -> bool:
        """If every sample is there, write the result files and return True; the last rank to come does it.

        summarise: the records in sample order -> summary (JSON values, no clock).
        """
        with FileLock(self.folder / ".lock"):
            places = _places(self.folder, self.num_samples, self.fields)
            if len(places) < self.num_samples:
                return False
            digest = _copy(places, self.folder / SAMPLES, "record")
            _copy(places, self.folder / TIMES, "time")
            summary = dict(summarise(read_lines(self.folder / SAMPLES)))
            result = {**self.run, "summary": summary, "samples_sha256": digest}
            write_text_atomic(self.folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
        return True


@dataclass(frozen=True)
class SavedRun:
    """A run read back: complete, or as far as it came (``len(records) < run["num_samples"]``)."""

    name: str
    run: dict[str, Any]
    records: list[dict[str, Any]]
    times: list[dict[str, Any]]


def load_run(folder: Path, fields: Mapping[str, Fields] | None = None) -> SavedRun:
    """Read a run's folder; the shards of all ranks are merged. fields: what each "record" and "time" must hold.

    Raises ValueError where it holds no run or no sample yet, and for a damaged file, which it names.
    """
    folder, fields = Path(folder), fields or {}
    if not (folder / RUN).is_file():
        raise ValueError(f"run must be a folder that `dllm eval` wrote ({RUN} in it): got {folder}")
    run = checked(read_json(folder / RUN), {"num_samples": int}, folder / RUN)
    if run.get("format") != FORMAT:
        raise ValueError(f"{folder / RUN}: format must be {FORMAT!r}: got {run.get('format')!r}")
    if (folder / RESULT).is_file():
        records, times = (_whole(folder / name, run["num_samples"]) for name in (SAMPLES, TIMES))
        for name, part, values in ((SAMPLES, "record", records), (TIMES, "time", times)):
            for number, value in enumerate(values, 1):
                checked(value, fields.get(part, {}), f"{folder / name}, line {number}")
        result = checked(read_json(folder / RESULT), {"samples_sha256": str}, folder / RESULT)
        found = hashlib.sha256((folder / SAMPLES).read_bytes()).hexdigest()
        if found != result["samples_sha256"]:
            raise ValueError(
                f"{folder / SAMPLES}: sha256 must be the one in {RESULT}, {result['samples_sha256']}: got {found}"
            )
    else:
        places = _places(folder, run["num_samples"], fields)
        records, times = list(_values(places, "record")), list(_values(places, "time"))
    if not records:
        raise ValueError(f"run must hold at least one sample: {folder} holds none yet")
    return SavedRun(folder.name, run, records, times)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line, never more than one in memory. Raises ValueError naming a line that is none."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                yield checked(_parsed(raw), {"index": int}, f"{path}, line {number}")
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: must be JSON: {error}") from error


def _whole(path: Path, num_samples: int) -> list[dict[str, Any]]:
    """All lines of a file of a complete run, which are its samples in order."""
    if not path.is_file():
        raise ValueError(f"{path}: must be there beside {RESULT}")
    values = list(read_lines(path))
    if [value["index"] for value in values] != list(range(num_samples)):
        raise ValueError(f"{path}: must hold samples 0 to {num_samples - 1}, a line each: got {len(values)} lines")
    return values


def _parsed(raw: bytes) -> Any:
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def _claim(path: Path, run: Mapping[str, Any]) -> None:
    """Write run.json if nobody has; raise where it says something else."""
    with FileLock(path.parent / ".lock"):
        if not path.is_file():
            write_text_atomic(path, json.dumps(run, indent=1) + "\n")
            return
    found = checked(read_json(path), {}, path)
    differing = sorted(_differences(found, run))
    if differing:
        raise ValueError(
            f"{path.parent} holds a run of other settings ({'; '.join(differing)}): give another --output, "
            "or the settings it was begun with"
        )


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(wanted, Mapping):
        for key in {*found, *wanted}:
            yield from _differences(found.get(key), wanted.get(key), f"{name}.{key}" if name else str(key))
    elif found != wanted:
        yield f"{name}: there {found!r}, asked for {wanted!r}"


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last line end: a kill came before the rest of the line was written."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        kept = size
        while kept > 0:
            start = max(0, kept - 65536)
            file.seek(start)
            at = file.read(kept - start).rfind(b"\n")
            if at >= 0:
                kept = start + at + 1
                break
            kept = start
        if kept < size:
            file.truncate(kept)
            file.flush()
            os.fsync(file.fileno())


def _places(folder: Path, num_samples: int, fields: Mapping[str, Fields]) -> list[tuple[int, Path, int]]:
    """(index, file, offset) of each whole line of all shards, in sample order, first writer of an index first."""
    found: dict[int, tuple[Path, int]] = {}
    for shard in sorted(folder.glob("shard-*.jsonl")):
        with shard.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, 1):
                # Another rank may be in the middle of its line.
                if raw.endswith(b"\n"):
                    where = f"{shard}, line {number}"
                    try:
                        value = _parsed(raw)
                    except ValueError as error:
                        raise ValueError(f"{where}: not a sample of a run: {raw[:60]!r}") from error
                    index = checked(value, {"index": int, "record": dict, "time": dict}, where)["index"]
                    for part in ("record", "time"):
                        checked(value[part], fields.get(part, {}), f"{where}, {part}")
                    if not 0 <= index < num_samples:
                        raise ValueError(f"{where}: index must be in [0, {num_samples}): got {index}")
                    found.setdefault(index, (shard, offset))
                offset += len(raw)
    return [(index, *found[index]) for index in sorted(found)]


def _values(places: list[tuple[int, Path, int]], part: str) -> Iterator[dict[str, Any]]:
    """One part of each place's line, in order; one line in memory at a time."""
    files: dict[Path, Any] = {}
    try:
        for index, path, offset in places:
            if path not in files:
                files[path] = path.open("rb")
            files[path].seek(offset)
            yield {"index": index, **_parsed(files[path].readline())[part]}
    finally:
        for file in files.values():
            file.close()


def _copy(places: list[tuple[int, Path, int]], target: Path, part: str) -> str:
    """Write one part of all lines to a file, whole or not at all; returns the file's sha256."""
    digest = hashlib.sha256()
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("wb") as file:
        for value in _values(places, part):
            raw = json.dumps(value, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n"
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    return digest.hexdigest()
