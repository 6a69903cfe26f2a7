"""What a benchmark leaves behind: one JSON line per entry as it is measured, so that a cut run keeps what it has."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Record:
    """Entries of one run, in memory and appended to ``folder/entries.jsonl`` at once."""

    def __init__(self, folder: Path, echo: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.echo = folder / "entries.jsonl", echo
        self.entries: list[dict[str, Any]] = []

    def add(self, part: str, name: str, **values: Any) -> dict[str, Any]:
        """Keep one entry; values: plain numbers, strings, or dataclasses' dicts."""
        entry = {"part": part, "name": name, **values}
        self.entries.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self.echo:
            print(_line(entry), flush=True)
        return entry


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of a folder, in the order in which they were measured."""
    lines = (folder / "entries.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def environment(device: torch.device) -> dict[str, str]:
    """Device, versions and precision that the numbers belong to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions


def _line(entry: Mapping[str, Any]) -> str:
    values = (
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in entry.items() if k not in ("part", "name")
    )
    return f"[{entry['part']}] {entry['name']}: " + " ".join(values)
