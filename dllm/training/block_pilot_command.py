"""`dllm train-block-pilot`: record prompts at every block length, train a BlockPilot on them, draw its curves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from dllm.draft_cost import CostTable
from dllm.samplers.block_pilot import FEATURES, BlockPilotConfig, Head, parameters_of
from dllm.training.base import SHIPPED_BASE, load_base, load_tokenizer
from dllm.training.block_pilot import PilotTrainConfig, plot_pilot_curves, train_pilot
from dllm.training.block_pilot_costs import Costs, ForwardCosts, RoundCosts, measured_forward, measured_tables
from dllm.training.block_pilot_traces import Decode, PromptTrace, denoise_decoder, draft_decoder, record
from dllm.training.data import load_prompts
from dllm.training.stopping import stopping

logger = logging.getLogger(__name__)


def read_group(item: str, tokenizer: Any, max_prompt_tokens: int) -> tuple[str, list[list[int]]]:
    """(group, ids of its prompts) of GROUP=FILE or GROUP=FILE@START:STOP, counted among the prompts that are short enough; START and STOP
    as in Python, so @-500: are the last 500. Raises ValueError for another spelling and where nothing is left.
    """
    group, _, place = item.partition("=")
    file, _, span = place.partition("@")
    parts = span.split(":") if span else ["", ""]
    if not group or not file or len(parts) != 2 or any(p and not p.lstrip("-").isdigit() for p in parts):
        raise ValueError(f"prompts must be GROUP=FILE or GROUP=FILE@START:STOP: got {item!r}")
    found = [p for p in load_prompts(file, tokenizer) if len(p) <= max_prompt_tokens]
    found = found[slice(*(int(p) if p else None for p in parts))]
    if not found:
        raise ValueError(f"prompts {item!r} must hold one of at most {max_prompt_tokens} tokens: got none")
    return group, found


def mixed(groups: Sequence[tuple[str, list[list[int]]]]) -> list[tuple[str, list[int]]]:
    """Prompts of all groups in turn, so that a recording that is cut short holds as many of each."""
    columns = [[(group, prompt) for prompt in found] for group, found in groups]
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def command(
    out: Annotated[Path, typer.Option(help="Folder for the pilot, its traces, costs, log and curves.")],
    prompts: Annotated[
        list[str], typer.Option(help="GROUP=FILE or GROUP=FILE@START:STOP; may be given several times.")
    ],
    drafter: Annotated[str, typer.Option(help="Drafter whose block is to be chosen.")] = "smollm2-135m-dfly",
    target: Annotated[str, typer.Option(help="AR model that it drafts for.")] = SHIPPED_BASE,
    model: Annotated[
        str | None, typer.Option(help="A bidirectional diffusion model instead: its denoising block is to be chosen.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Block lengths, a draft's anchor included.")] = "1,2,4,6,8",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 512,
    cost_table: Annotated[
        list[Path] | None, typer.Option(help="CostTable files, one or one a length; none: measured here and kept.")
    ] = None,
    forward_ms: Annotated[
        float | None, typer.Option(help="With --model: fixed ms of a forward (else measured).")
    ] = None,
    row_ms: Annotated[float | None, typer.Option(help="With --model: ms of each row of a forward.")] = None,
    serving_batch: Annotated[int, typer.Option(help="Requests that run side by side when the pilot is used.")] = 1,
    label: Annotated[str, typer.Option(help="speed, or accept_length (the paper's).")] = "speed",
    objective: Annotated[str, typer.Option(help="label (cross-entropy) or expected (share of the best).")] = "label",
    features: Annotated[
        str, typer.Option(help="Of hidden, top_logits and logits (whole vocabulary).")
    ] = "hidden,top_logits",
    width: Annotated[int, typer.Option(help="Hidden units; 0: logistic regression.")] = 32,
    residual: Annotated[bool, typer.Option(help="A second hidden layer with a residual, as published.")] = False,
    held_out: Annotated[float, typer.Option(help="Share of prompts that decides when to stop.")] = 0.25,
    max_epochs: Annotated[int, typer.Option(help="Most epochs.")] = 400,
    patience: Annotated[int, typer.Option(help="Epochs without a better held-out loss.")] = 40,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 3e-3,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.05,
    batch: Annotated[int, typer.Option(help="Prompts recorded side by side.")] = 8,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of split, initialisation and order.")] = 0,
) -> None:
    """Train a policy that predicts a request's block length. Recording goes on where it was stopped (SIGTERM or Ctrl-C)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = PilotTrainConfig(label, objective, held_out, max_epochs, patience, 32, learning_rate, weight_decay, seed)
    wanted = _lengths(lengths)
    names = tuple(name.strip() for name in features.split(","))
    if not set(names) <= set(FEATURES):
        raise ValueError(f"features must be some of {FEATURES}: got {features!r}")
    if model is None and (forward_ms is not None or row_ms is not None):
        raise ValueError("forward_ms and row_ms go with model; a drafter takes cost_table")
    if model is not None and cost_table:
        raise ValueError("cost_table goes with a drafter; a diffusion model takes forward_ms and row_ms")
    opened = (_open_drafter if model is None else _open_model)(
        target if model is None else model, drafter, wanted, max_new_tokens, device, dtype
    )
    tokenizer, decode, head, settings, drafting = opened
    found = mixed([read_group(item, tokenizer, max_prompt_tokens) for item in prompts])
    event = threading.Event()
    with stopping(event):
        traces = record(out / "traces.jsonl", found, decode, settings, batch, event.is_set)
    if event.is_set():
        logger.info("stopped; the same command goes on from %s", out / "traces.jsonl")
        raise typer.Exit(130)
    if not traces:
        raise ValueError("prompts must give one answer of two tokens at least: got none")
    costs = _costs(drafting, traces, wanted, out, cost_table, forward_ms, row_ms, serving_batch)
    sizes = {"hidden": len(traces[0].hidden), "top_logits": len(traces[0].top_logits)}
    if "logits" in names:
        sizes["logits"] = head(traces[0].hidden[None]).shape[-1]
    side: Literal["draft", "denoise"] = "draft" if model is None else "denoise"
    shape = BlockPilotConfig(wanted, side, names, tuple(sizes[n] for n in names), width, residual)
    logger.info("network: %d parameters, %.2f MB in bf16", parameters_of(shape), 2e-6 * parameters_of(shape))
    pilot = train_pilot(shape, config, traces, costs, head, out / "log.jsonl")
    pilot.save_pretrained(out)
    plot_pilot_curves(out / "log.jsonl", out / "curves.png")
    logger.info("%s\nwritten to %s", pilot.describe(), out)


def _lengths(text: str) -> tuple[int, ...]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdigit() for p in parts):
        raise ValueError(f"lengths must be numbers with commas between: got {text!r}")
    return tuple(sorted({int(p) for p in parts}))


Opened = tuple[Any, Decode, Head, dict[str, Any], Any]


def _open_drafter(target: str, drafter: str, lengths: tuple[int, ...], tokens: int, device: str, dtype: str) -> Opened:
    from dllm.drafters.loading import load_drafter

    tokenizer = load_tokenizer(target)
    base = load_base(target, device, None if dtype == "auto" else getattr(torch, dtype))
    drafting = load_drafter(drafter, base.decoder)
    eos = base.spec.eos_token_ids or (tokenizer.eos_token_id,)
    settings = dict(
        target=target,
        drafter=drafter,
        dtype=str(base.decoder.dtype).removeprefix("torch."),
        lengths=list(lengths),
        max_new_tokens=tokens,
    )
    return tokenizer, draft_decoder(drafting, lengths, eos, tokens), _float_head(drafting.target), settings, drafting


def _open_model(model: str, drafter: str, lengths: tuple[int, ...], tokens: int, device: str, dtype: str) -> Opened:
    from dllm.pipeline import DiffusionLM

    lm = DiffusionLM.from_pretrained(model, dtype=dtype, device=device)
    if lm.spec.attention != "bidirectional":
        raise ValueError(
            f"model must have bidirectional attention, else its block length is fixed: {model!r} has {lm.spec.attention}"
        )
    if lm.tokenizer is None:
        raise ValueError(f"model must have a tokenizer: {model!r} has none")
    settings = dict(
        model=model, dtype=str(lm.model.dtype).removeprefix("torch."), lengths=list(lengths), max_new_tokens=tokens
    )
    return lm.tokenizer, denoise_decoder(lm, lengths, tokens, {}), _float_head(lm.model), settings, lm


def _float_head(model: Any) -> Head:
    """hidden [B, D] fp32 on any device -> logits [B, V] fp32 on the CPU."""

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return model.head(hidden.to(model.device, model.dtype)).float().cpu()

    return head


def _costs(
    model: Any,
    traces: Sequence[PromptTrace],
    lengths: tuple[int, ...],
    out: Path,
    tables: Sequence[Path] | None,
    forward_ms: float | None,
    row_ms: float | None,
    batch: int,
) -> Costs:
    if hasattr(model, "propose"):
        found = (
            [CostTable.load(path) for path in tables]
            if tables
            else measured_tables(model, traces, lengths, out / "costs", batch)
        )
        costs: Costs = RoundCosts.of_tables(found, lengths, batch)
    elif forward_ms is not None or row_ms is not None:
        costs = ForwardCosts(forward_ms or 0.0, row_ms or 0.0)
    else:
        costs = measured_forward(model)
    logger.info("costs: %s", costs)
    return costs


if __name__ == "__main__":
    typer.run(command)
