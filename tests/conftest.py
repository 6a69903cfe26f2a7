"""What every test shares: no network; off the GPU, kernels in Triton's interpreter and `gpu` tests skipped."""

import os
from importlib.util import find_spec

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read by Triton when a kernel is defined, so it has to be there before the first import of dllm.kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The shapes are tiny, so threads would only contend (four of two workers on two cores take ten times as long); and equalities bit for
# bit hold for one thread.
torch.set_num_threads(1)

# The GPU machine runs the `gpu` tests with what it has.
if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run; a loaded machine is no failure.
    settings.register_profile("dllm", deadline=None, derandomize=True, max_examples=30)
    settings.load_profile("dllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
