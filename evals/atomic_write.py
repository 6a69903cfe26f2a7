"""A file that is either whole or not there: what a killed run leaves behind can always be read."""

from __future__ import annotations

import os
from pathlib import Path


def write_text_atomic(path: str | os.PathLike[str], text: str) -> Path:
    """Writes UTF-8 text to a neighbouring temporary file, then moves it over `path`; returns the path.

    On any failure an existing file keeps its old content and the temporary file is removed. Raises OSError (the folder
    must exist) and UnicodeEncodeError (lone surrogates).
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
