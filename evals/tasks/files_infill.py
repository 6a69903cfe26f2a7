"""Line and span infill over any folder of text or code: how well a model restores what was there.

Dataset: the text files below a folder or one file (``--files DIR``). Skipped: hidden names, what is not UTF-8, files over 1 MB.
Split: all; `per_file` gaps a file at most, drawn by the seed.
Prompt: the file's text before and after the gap, apart, each cut to ``context`` characters next to the gap.
    line: a whole line without its line break, at least 4 characters beside white space.
    span: 8 to ``max_span`` characters that begin and end anywhere, over line breaks too, with at least 4 beside white space.
Metric: exact_match (white space counts as one blank), edit_similarity (characters), rouge_l (words).
Source: the gaps of Bavarian et al. 2022 (arXiv:2207.14255) without their tests; exact match and edit similarity as in CodeXGLUE
    (Lu et al. 2021, arXiv:2102.04664). Numbers of two folders cannot be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from dllm.evals.metrics import edit_similarity, exact_match, rouge_l
from dllm.evals.task import Kind, Sample
from dllm.evals.tasks._common import draw

MAX_FILE_BYTES = 1_000_000
MIN_VISIBLE = 4


class FilesInfill:
    """Gaps in the files of a folder.

    files: folder or file (``data`` of `samples` says the same). unit: ``line`` or ``span``. extensions: for instance
    (".py", ".md"); None takes every text file. context, max_span: characters. Raises ValueError for numbers out of range.
    """

    name = "files_infill"
    kind: Kind = "infill"
    metric = "exact_match"
    needs_execution = False
    dataset = ""
    split = ""

    def __init__(
        self,
        files: Path | str | None = None,
        unit: Literal["line", "span"] = "line",
        extensions: tuple[str, ...] | None = None,
        context: int = 2000,
        max_span: int = 120,
        per_file: int = 8,
    ) -> None:
        if unit not in ("line", "span"):
            raise ValueError(f"unit must be 'line' or 'span': got {unit!r}")
        for name, value, least in (("context", context, 1), ("max_span", max_span, 8), ("per_file", per_file, 1)):
            if value < least:
                raise ValueError(f"{name} must be >= {least}: got {value}")
        if isinstance(extensions, str):
            raise ValueError(f'extensions must be a list such as [".py", ".md"]: got {extensions!r}')
        self.files, self.unit, self.extensions = files, unit, extensions
        self.context, self.max_span, self.per_file = context, max_span, per_file

    def samples(self, data: Path | None = None, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """See `Task`; ``data`` is a folder or a text file. Raises ValueError where no file holds a gap."""
        root = data if data is not None else self.files
        if root is None:
            raise FileNotFoundError("files_infill needs a folder or a file: --files DIR")
        root = Path(root)
        if not root.exists():
            raise FileNotFoundError(f"files must be a folder or a file: {root} does not exist")
        found = []
        for path, text in _texts(root, self.extensions):
            name = path.relative_to(root).as_posix() if root.is_dir() else path.name
            # Bytes of a name that are no UTF-8 become escapes: an id is text.
            name = name.encode("utf-8", "backslashreplace").decode("utf-8")
            # Each file has its own numbers: a file that comes or goes leaves the gaps of the others alone.
            numbers = random.Random(f"{seed}/{name}")
            gaps = _lines(text, numbers) if self.unit == "line" else _spans(text, self.max_span, self.per_file, numbers)
            for start, end in sorted(gaps[: self.per_file]):
                found.append(self._sample(name, text, start, end))
        if not found:
            raise ValueError(f"files must hold text with a {self.unit} to fill: {root} has none")
        return draw(found, limit, seed)

    def _sample(self, name: str, text: str, start: int, end: int) -> Sample:
        return Sample(
            id=f"{name}:{start}-{end}",
            kind="infill",
            prefix=text[max(0, start - self.context) : start],
            suffix=text[end : end + self.context],
            reference=text[start:end],
            max_new_tokens=64 if self.unit == "line" else max(16, self.max_span // 2),
            meta={"line": text.count("\n", 0, start) + 1},
        )

    def score(self, sample: Sample, output: str, execute: Callable[..., Any] | None = None) -> dict[str, float]:
        """exact_match, edit_similarity and rouge_l against the text that was there."""
        return {
            "exact_match": exact_match(sample.reference, output),
            "edit_similarity": edit_similarity(sample.reference, output),
            "rouge_l": rouge_l(sample.reference, output),
        }

    def check(self, sample: Sample) -> list[tuple[str, float]]:
        """What was there is right; nothing, and the same text with a character more, are not."""
        return [(sample.reference, 1.0), ("", 0.0), (sample.reference.rstrip() + "~", 0.0)]


def _texts(root: Path, extensions: tuple[str, ...] | None) -> Iterator[tuple[Path, str]]:
    """Text files with their text, in the order of their names."""
    paths = sorted(root.rglob("*"), key=lambda path: path.as_posix()) if root.is_dir() else [root]
    for path in paths:
        hidden = root.is_dir() and any(part.startswith(".") for part in path.relative_to(root).parts)
        if hidden or not path.is_file() or (extensions is not None and path.suffix not in extensions):
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            yield path, text


def _visible(text: str) -> int:
    return len("".join(text.split()))


def _lines(text: str, numbers: random.Random) -> list[tuple[int, int]]:
    """(start, end) of every line that can be a gap, shuffled."""
    found, start = [], 0
    for line in text.splitlines(keepends=True):
        content = line.rstrip("\r\n")
        if _visible(content) >= MIN_VISIBLE:
            found.append((start, start + len(content)))
        start += len(line)
    numbers.shuffle(found)
    return found


def _spans(text: str, max_span: int, count: int, numbers: random.Random) -> list[tuple[int, int]]:
    """Up to ``count`` different spans. A file of blanks gives none: tries are bounded."""
    found: set[tuple[int, int]] = set()
    for _ in range(20 * count):
        length = numbers.randint(8, max_span)
        if length >= len(text):
            continue
        start = numbers.randrange(len(text) - length + 1)
        if _visible(text[start : start + length]) >= MIN_VISIBLE:
            found.add((start, start + length))
        if len(found) == count:
            break
    return sorted(found)
