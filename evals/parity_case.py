"""Rows of the parity table and the two comparisons that they are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One row: name of the case, "ok" | "miss" | "skip", and what was measured or why it was skipped."""

    name: str
    status: Literal["ok", "miss", "skip"]
    detail: str


def tolerance(folder: Path) -> tuple[float, float]:
    """(atol, rtol) that the manifest beside a family folder states; 2e-4 and 1e-4 without a manifest."""
    manifest = folder.parent / "manifest.json"
    entry: dict[str, Any] = {}
    if manifest.is_file():
        entry = json.loads(manifest.read_text(encoding="utf-8"))["families"].get(folder.name, {})
    return float(entry.get("atol", 2e-4)), float(entry.get("rtol", 1e-4))


def close(name: str, got: Tensor, expected: Tensor, atol: float, rtol: float, valid: Tensor | None = None) -> Case:
    """Numbers within atol + rtol * |expected|, in fp64; valid: bool, broadcastable, positions that count."""
    if got.shape != expected.shape:
        return Case(name, "miss", f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.double().cpu(), expected.double().cpu()
    error = (got - expected).abs()
    if valid is not None:
        error = error.masked_fill(~valid.cpu().expand_as(error), 0.0)
    # NaN compares false, so that it is a miss.
    fits = bool((error <= atol + rtol * expected.abs()).all())
    return Case(name, "ok" if fits else "miss", f"max abs error {float(error.max()):.1e}")


def equal(name: str, got: Any, expected: Any, what: str = "ids") -> Case:
    """Lists (or nested lists) that must be the same; a miss shows the first place where they differ."""
    if got == expected:
        return Case(name, "ok", f"{what} equal")
    if isinstance(got, list) and isinstance(expected, list):
        place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if place is None:
            return Case(name, "miss", f"{what}: {len(got)} entries, expected {len(expected)}")
        return Case(name, "miss", f"{what} differ at {place}: got {got[place]}, expected {expected[place]}")
    return Case(name, "miss", f"{what}: got {got}, expected {expected}")
