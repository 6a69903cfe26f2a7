"""Golden files against our code: one row a case, ``ok``, ``miss`` or ``skip``.

    python -m dllm.evals.parity FOLDER [--only a,b]

FOLDER holds one folder a family (named in its manifest.json, or else every folder there). Exits 1 on a miss or a skip,
so that 0 means that everything was compared and fits; 2 for a wrong command line.

To add families: write ``FAMILIES: dict[str, Callable[[Path], list[row]]]`` (family folder's name -> function of the folder;
a row is a dataclass of name, status, detail, such as ``parity_case.Case``) in a file ``evals/parity_<group>.py`` and put
the module into ``GROUPS``. Several groups may name one family. Such a file never imports this one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from dllm.evals.parity_case import Case

GROUPS = (
    "dllm.evals.parity_drafters",
    "dllm.evals.parity_families",
    "dllm.evals.parity_traces",
    "dllm.evals.parity_units",
)
"""Modules whose ``FAMILIES`` are compared."""

_FAILURES = (ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def family_folders(root: Path, only: Sequence[str] | None = None) -> list[Path]:
    """The family folders below root, all or those named. Raises ValueError for a root without any and for an unknown
    name.
    """
    manifest = root / "manifest.json"
    if manifest.is_file():
        names = list(json.loads(manifest.read_text(encoding="utf-8"))["families"])
    elif root.is_dir():
        names = sorted(path.name for path in root.iterdir() if path.is_dir())
    else:
        raise ValueError(f"FOLDER must be a folder of golden files: {root} does not exist")
    if not names:
        raise ValueError(f"FOLDER must hold family folders: {root} has none")
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"--only must name families of {root} ({', '.join(names)}): got {', '.join(unknown)}")
    return [root / name for name in (only or names)]


def run_family(folder: Path) -> list[Case]:
    """The rows of one family folder; an error of our code is a miss, a family that nobody compares is a skip."""
    rows: list[Case] = []
    for group in GROUPS:
        compare = importlib.import_module(group).FAMILIES.get(folder.name)
        if compare is None:
            continue
        try:
            rows += [Case(*astuple(row)) for row in compare(folder)]
        except _FAILURES as error:
            rows.append(Case("all", "miss", f"{type(error).__name__}: {error}"))
    return rows or [Case("all", "skip", "nothing compares this family")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.parity", description="Compare golden files.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", help="families, separated by commas")
    options = parser.parse_args(arguments)
    try:
        folders = family_folders(options.folder, options.only.split(",") if options.only else None)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    counts = {"ok": 0, "miss": 0, "skip": 0}
    for folder in folders:
        for case in run_family(folder):
            counts[case.status] += 1
            print(f"{case.status:4}  {folder.name:18} {case.name:36} {case.detail}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 0 if counts["miss"] == counts["skip"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
