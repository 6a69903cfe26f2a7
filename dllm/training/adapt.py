"""Adaptation: an autoregressive checkpoint becomes a diffusion LM by training a low-rank adapter on masked slots.

    python -m dllm.training.adapt --attention block_causal --data conversations.npz --out smollm2-135m-bd8 --minutes 8

Layout and mask: ``layout.py``; what is masked: ``corruption.py``; the loop: ``trainer.py``. Only LoRA pairs, norms and the input row of
the mask are trained.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dllm.model.adapter import add_lora, load_adapter_state
from dllm.model.weights import load_state
from dllm.training.adapt_config import AdaptConfig
from dllm.training.base import SHIPPED_BASE, Base, load_base, load_tokenizer
from dllm.training.corruption import CorruptionConfig
from dllm.training.data import Documents, held_out, load_documents, without_loops
from dllm.training.packing import Batch, PackedBatches, batch_loader
from dllm.training.trainer import AdaptResult, Trainer

__all__ = ["AdaptConfig", "AdaptResult", "adapt", "command"]

logger = logging.getLogger(__name__)

SHIPPED_TOKENS = {"mask_token_id": 16, "filler_token_id": 15, "start_token_id": 0}
"""Existing tokens of SmolLM2 that its chats never use, and the one that stands before a document."""


def adapt(config: AdaptConfig) -> AdaptResult:
    """Train an adapter and write it to ``config.out``: shards, ``adapter_config.json``, ``log.jsonl`` and ``curves.png``.

    Ends early, and saves, on SIGTERM or Ctrl-C. Raises ValueError for arguments that do not fit the base or the data.
    """
    torch.manual_seed(config.seed)
    tokens = _tokens(config)
    tokenizer = load_tokenizer(config.base)
    corruption = _corruption(config, tokens, tokenizer.eos_token_id)
    sources, measured = _sources(config, tokenizer)
    # The loader starts its worker processes before CUDA is set up in this one.
    loader = iter(
        batch_loader(PackedBatches(sources, corruption, config.batch, config.rows, config.seed), *_loading(config))
    )
    base = load_base(config.base, config.device, None if config.dtype == "auto" else getattr(torch, config.dtype))
    _check_tokens(tokens, base)
    model = add_lora(base.decoder, config.rank, config.lora_alpha, tokens["mask_token_id"], config.merged_updates)
    if config.resume is not None:
        load_adapter_state(model, load_state(config.resume, "adapter"))
    trainer = Trainer(config, base, model, corruption, tokens)
    return trainer.run(loader, _fixed_batches(measured, corruption, config, base.decoder.device))


def _tokens(config: AdaptConfig) -> dict[str, int]:
    known = SHIPPED_TOKENS if config.base == SHIPPED_BASE else {}
    tokens = {}
    for name in SHIPPED_TOKENS:
        value = getattr(config, name)
        value = known.get(name) if value is None else value
        if value is None:
            raise ValueError(
                f"{name} must be given for the base {config.base!r}: an existing token that its texts never use"
            )
        tokens[name] = int(value)
    if tokens["mask_token_id"] == tokens["filler_token_id"]:
        raise ValueError(f"filler_token_id must differ from mask_token_id: both are {tokens['mask_token_id']}")
    return tokens


def _check_tokens(tokens: dict[str, int], base: Base) -> None:
    for name, value in tokens.items():
        if not 0 <= value < base.decoder.config.vocab_size:
            raise ValueError(f"{name} must be in [0, {base.decoder.config.vocab_size}): got {value}")


def _corruption(config: AdaptConfig, tokens: dict[str, int], stop_token_id: int) -> CorruptionConfig:
    # In a bidirectional row a gap brings one boundary slot beside few others: a full weight would be a tenth of the loss.
    usual = 1.0 if config.attention == "block_causal" else 0.1
    return CorruptionConfig(
        attention=config.attention,
        block_length=config.block_length,
        stop_token_id=stop_token_id,
        start_token_id=tokens["start_token_id"],
        filler_token_id=tokens["filler_token_id"],
        infill_share=config.infill_share,
        noisy_copies=config.noisy_copies,
        complementary=config.complementary,
        tail_share=config.tail_share,
        slot_decay=config.slot_decay,
        boundary_weight=usual if config.boundary_weight is None else config.boundary_weight,
        max_rows=config.rows,
    )


def _sources(config: AdaptConfig, tokenizer: Any) -> tuple[list[tuple[Documents, float]], Documents]:
    """(collections with their shares, held-out documents), looping answers left out."""
    loaded = [load_documents(path, tokenizer) for path in config.data]
    loaded[0], measured = held_out(loaded[0], config.held_out)
    loaded = [without_loops(documents) for documents in loaded]
    answers = [load_documents(path, tokenizer) for path in config.answers]
    sources = []
    for group, share in ((loaded, 1 - config.answer_share if answers else 1.0), (answers, config.answer_share)):
        total = sum(len(documents) for documents in group)
        sources += [(documents, share * len(documents) / total) for documents in group if share > 0]
    logger.info(
        "documents: %d from data, %d answers of the base, %d held out",
        sum(map(len, loaded)),
        sum(map(len, answers)),
        len(measured),
    )
    return sources, without_loops(measured)


def _loading(config: AdaptConfig) -> tuple[int, bool]:
    return config.workers, torch.cuda.is_available() and config.device != "cpu"


def _fixed_batches(
    documents: Documents, corruption: CorruptionConfig, config: AdaptConfig, device: torch.device
) -> list[Batch]:
    """Batches of held-out documents that stay the same through the run and between runs."""
    stream = iter(PackedBatches([(documents, 1.0)], corruption, config.batch, config.rows, seed=2**31))
    return [next(stream).to(device) for _ in range(config.eval_batches)]


def command(
    out: Annotated[Path, typer.Option(help="Folder for the adapter.")],
    data: Annotated[list[Path], typer.Option(help="Training files: .npz, .jsonl(.gz) or text.")],
    attention: Annotated[str, typer.Option(help="block_causal or bidirectional.")] = "block_causal",
    base: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = SHIPPED_BASE,
    answers: Annotated[list[Path] | None, typer.Option(help="Answers of the base (see dllm.training.answers).")] = None,
    greedy_share: Annotated[float, typer.Option(help="Share of documents drawn from --answers.")] = 0.5,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 24,
    alpha: Annotated[float | None, typer.Option(help="LoRA alpha (default: twice the rank).")] = None,
    merged_updates: Annotated[
        bool, typer.Option(help="Add LoRA's updates to the weights, not to the outputs.")
    ] = False,
    block_length: Annotated[int, typer.Option(help="Tokens of a block.")] = 8,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Existing token that stands for the mask (default: known for the shipped base).")
    ] = None,
    filler_token_id: Annotated[
        int | None, typer.Option(help="Existing token that closes a gap (default: known for the shipped base).")
    ] = None,
    start_token_id: Annotated[
        int | None, typer.Option(help="Token before a text without a prefix (default: known for the shipped base).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps (or --minutes).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training (or --steps).")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 16,
    rows: Annotated[int, typer.Option(help="Rows of a sequence.")] = 2048,
    learning_rate: Annotated[float, typer.Option(help="Peak rate of LoRA.")] = 1.5e-3,
    norm_learning_rate: Annotated[float, typer.Option(help="Peak rate of norms and mask row.")] = 3e-4,
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.")] = 60,
    infill_share: Annotated[float, typer.Option(help="Share of documents with gaps.")] = 0.5,
    noisy_copies: Annotated[int, typer.Option(help="Noisy copies beside a clean one.")] = 2,
    tail_share: Annotated[float, typer.Option(help="Blocks masked from a random slot on.")] = 0.0,
    slot_decay: Annotated[float, typer.Option(help="Loss weight per mask before a slot in its block.")] = 1.0,
    certainty_weight: Annotated[float, typer.Option(help="Weight of the entropy of right slots.")] = 0.0,
    boundary_weight: Annotated[
        float | None, typer.Option(help="Weight of the first token after a gap (default: 1; bidirectional: 0.1).")
    ] = None,
    held_out: Annotated[int, typer.Option(help="Documents at the end of the first file kept for measuring.")] = 500,
    workers: Annotated[int, typer.Option(help="Processes that build batches.")] = 4,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    attention_kernel: Annotated[str, typer.Option(help="auto, sdpa or flex.")] = "auto",
    compiled: Annotated[bool | None, typer.Option(help="torch.compile of a layer (default: on CUDA).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Adapter folder to go on from.")] = None,
    seed: Annotated[int, typer.Option(help="Of initialisation, masks and order.")] = 0,
) -> None:
    """Turn an AR checkpoint into a diffusion LM."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(locals())
    given["answer_share"] = given.pop("greedy_share")
    given["data"], given["answers"] = tuple(data), tuple(answers or ())
    try:
        config = AdaptConfig(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    adapt(config)


if __name__ == "__main__":
    typer.run(command)
