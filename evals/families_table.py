"""The table of model families in docs/families.md, from the code: what each family's ``DecodeSpec`` says, and what it was compared with.

    python -m dllm.evals.families_table [--golden FOLDER] [--write]

Prints the page, or writes it. Every family that is registered is in it or is named as no diffusion model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm.cache.block import BlockCache
from dllm.evals.parity import GROUPS
from dllm.families import families
from dllm.model.adapter import CONFIG_NAME
from dllm.shipped import ASSETS, shipped_names
from dllm.types import DecodeSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
GOLDEN = ROOT / "tests" / "data" / "golden"

PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llada": (
        "LLaDA-8B Base, Instruct; LLaDA-1.5",
        dict(
            d_model=4096,
            n_heads=32,
            n_kv_heads=32,
            n_layers=32,
            mlp_hidden_size=12288,
            vocab_size=126464,
            embedding_size=126464,
            max_sequence_length=4096,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            layer_norm_type="rms",
            block_type="llama",
            activation_type="silu",
        ),
    ),
    "dream": ("Dream-7B, Dream-Coder, DiffuCoder", dict(vocab_size=152064, max_position_embeddings=131072)),
    "dreamon": (
        "DreamOn",
        dict(vocab_size=152064, max_position_embeddings=131072, expand_token_id=151667, eos_token_id=151643),
    ),
    "sdar": ("SDAR 1.7B, 4B, 8B Chat", dict(vocab_size=151936, block_size=4)),
    "fast_dllm_v2": ("Fast-dLLM v2 1.5B, 7B", dict(vocab_size=152064, bd_size=32)),
    "llada2": (
        "LLaDA2.0, 2.1 mini and flash",
        dict(vocab_size=157184, pad_token_id=156892, max_position_embeddings=32768),
    ),
    "mdlm": ("MDLM (OpenWebText)", dict(vocab_size=50258, model_length=1024)),
    "bd3lm": ("BD3-LM (OpenWebText), blocks of 4, 8, 16", dict(vocab_size=50258, model_length=1024, block_size=16)),
    "diffusion_gemma": (
        "DiffusionGemma 26B-A4B",
        dict(text_config=dict(vocab_size=262144, max_position_embeddings=131072), canvas_length=256),
    ),
}
"""Family -> (its published checkpoints, what of their config.json its spec reads)."""

FOLDERS = {"llada2": "llada2_moe"}
"""Golden folders that are not called as their family."""

_SLOT = {
    "free": "as any other",
    "commit_first": "in the first step",
    "commit_full_pass": "with a cache: from the full pass",
    "commit_store_pass": "from the pass that stores the block before",
}
_HEAD = """# Model families

Written by `python -m dllm.evals.families_table --write`; do not edit by hand.

One loader and one loop for all. `lm.spec` says these things of a loaded model; a checkpoint's own config can say others (block
lengths, ids), and `spec_overrides` changes them.

| family | checkpoints | attention | infill | exact cache | shift | first slot of a block | block | sampler | cache |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
_NOTES = """
- attention: *bidirectional* sees the whole text; *block-causal* its own block and every earlier one; blocks count from the prompt's
  end or from position 0.
- infill: *canvas*, the suffix stands in the text like the prefix; *rank*, the suffix comes before the gap in order of visibility and sees
  only itself, as the shipped models were trained; *grows*, gaps of unknown length by expand and delete tokens; *window*, by a token that
  closes the gap.
- exact cache: `block` gives the same tokens as no cache; where there is none, every cache but `none` is an approximation.
- shift: the law of slot i stands in row i - 1 (1) or i (0).
- block, sampler, cache: defaults of `generate`.

## Checked against

Tiny random models with the published layouts, run by the published code (`python -m dllm.evals.parity FOLDER`): logits, and the tokens
that come out of `generate`.

| family | golden files | logit cases | traces | what compares them |
| --- | --- | --- | --- | --- |
"""


def row(name: str, checkpoints: str, spec: DecodeSpec) -> str:
    """One line of the first table."""
    attention = spec.attention.replace("_", "-")
    if spec.attention == "block_causal":
        attention += f", from {'0' if spec.block_origin == 'zero' else 'the prompt'}"
    infill: str = spec.infill
    if spec.mask_token_id is None:
        infill = "none (no mask token)"
    elif spec.expand_token_id is not None:
        infill += ", grows"
    elif spec.filler_token_id is not None:
        infill += ", window"
    sampler = f"`{spec.default_sampler}`"
    if spec.default_sampler == "threshold":
        sampler += f" {spec.default_threshold:g}"
    cells = (
        name,
        checkpoints,
        attention,
        infill,
        "`block`" if _exact(spec) else "none",
        str(spec.logits_shift),
        _SLOT[spec.first_slot],
        str(spec.block_length),
        sampler,
        f"`{spec.default_cache}`",
    )
    return f"| {' | '.join(cells)} |"


def _exact(spec: DecodeSpec) -> bool:
    try:
        BlockCache().check(spec)
    except ValueError:
        return False
    return True


def checked(name: str, golden: Path) -> str:
    """One line of the second table: how many cases and traces of the family's folder are compared, and by what."""
    folder = golden / FOLDERS.get(name, name)
    counts = []
    for file in ("cases.json", "traces.json"):
        path = folder / file
        entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        # What needs the reference's own generator is informational.
        counts.append(sum(not entry["name"].startswith("seeded") for entry in entries))
    modules = [g for g in GROUPS if folder.name in importlib.import_module(g).FAMILIES]
    if not folder.is_dir() or not modules:
        raise ValueError(f"golden must hold the folder of family {name!r}, which something compares: got {folder}")
    by = ", ".join(f"`{module.rsplit('.', 1)[1]}`" for module in modules)
    return f"| {name} | `{folder.name}` | {counts[0]} | {counts[1]} | {by} |"


def page(golden: Path = GOLDEN) -> str:
    """The whole page. Raises ValueError for a registered family that is neither in ``PUBLISHED`` nor causal."""
    known = families()
    lines, missing = [], []
    for name, family in known.items():
        if name in PUBLISHED:
            checkpoints, config = PUBLISHED[name]
            lines.append(row(name, checkpoints, family.spec(config)))
        elif family.spec({"vocab_size": 8}).attention != "causal":
            missing.append(name)
    if missing:
        raise ValueError(f"PUBLISHED must name the checkpoints of every family: {missing} are missing")
    for name in shipped_names("diffusion"):
        values = json.loads((ASSETS / name / CONFIG_NAME).read_text(encoding="utf-8"))
        spec = DecodeSpec(**{**values["spec"], "eos_token_ids": tuple(values["spec"]["eos_token_ids"])})
        lines.append(row("(shipped)", f"`{name}`", spec))
    table = [checked(name, golden) for name in known if name in PUBLISHED]
    return _HEAD + "\n".join(lines) + "\n" + _NOTES + "\n".join(table) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.families_table", description="The table of families.")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of golden files")
    parser.add_argument("--write", action="store_true", help="write docs/families.md instead of printing")
    options = parser.parse_args(arguments)
    text = page(options.golden)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
