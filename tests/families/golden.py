"""The golden folders that the family tests share."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dllm.pipeline import DiffusionLM

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("transformers.models.diffusion_gemma") is None,
    reason="this transformers has no DiffusionGemma",
)
FOLDERS = [pytest.param(name, marks=needs_gemma if name == "diffusion_gemma" else ()) for name in NAMES]
"""The golden folders as test parameters."""


def golden_lm(folder: str, **options: Any) -> DiffusionLM:
    """A family's tiny model; the mask id comes from unit.json where the config lacks it."""
    path = GOLDEN / folder
    ids = json.loads((path / "unit.json").read_text())["special_ids"] if (path / "unit.json").is_file() else {}
    overrides = {"mask_token_id": ids["mask"]} if "mask" in ids else {}
    return DiffusionLM.from_pretrained(path, device="cpu", spec_overrides=overrides, **options)
