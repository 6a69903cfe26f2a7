"""Tiny targets and drafters that the drafter tests share."""

from pathlib import Path

import pytest

from dllm.target import load_target

GOLDEN = Path(__file__).parents[1] / "data" / "drafters"


@pytest.fixture(scope="session")
def target():
    """The 6-layer Qwen3 target of all golden drafters, a Hugging Face model in fp32."""
    return load_target(GOLDEN / "dflash" / "target", dtype="float32", device="cpu")


@pytest.fixture
def golden():
    return GOLDEN
