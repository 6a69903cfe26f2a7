"""What the interpreter lets pass: types that differ between turns of a loop, arguments that a device cannot take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dllm.kernels._launch import HAS_TRITON

SCRIPT = Path(__file__).with_name("compile_steps.py")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_bookkeeping_kernels_compile_for_a_device(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 10
    assert min(sizes) > 1000
