"""Where a kernel test runs (the CPU in Triton's interpreter, a CUDA device with ``-m gpu``), and memory that shows what was not written."""

import os
from typing import Any

import pytest
import torch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 to run kernels on the CPU"
)
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch.empty`` give NaN, and integers that are no id: an output that a kernel forgets cannot pass."""
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else True if out.dtype == torch.bool else 97)

    monkeypatch.setattr(torch, "empty", poisoned)
