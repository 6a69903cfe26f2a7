"""Training of drafters: a DFlash or DFly learns to write the next tokens of a frozen AR model from that model's own features.

    python -m dllm.training.draft --kind dfly --data conversations.npz --answers answers.npz --out smollm2-135m-dfly --minutes 8

Several --kind train side by side on the same batches and share the target's forward. Anchors: ``draft_batches.py``; forwards:
``draft_forward.py``; losses: ``draft_loss.py``; accepted length: ``draft_measure.py``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dllm.drafters.drafter import Drafter
from dllm.drafters.loading import CLASS_OF_KIND, load_drafter
from dllm.training.adapt import SHIPPED_TOKENS
from dllm.training.base import SHIPPED_BASE, Base, load_base, load_tokenizer
from dllm.training.data import Documents, held_out, load_documents, without_loops
from dllm.training.draft_batches import DraftBatches, draft_loader
from dllm.training.draft_config import DraftTrainConfig, drafter_config
from dllm.training.draft_loss import DraftLoss
from dllm.training.draft_measure import greedy_answers
from dllm.training.draft_trainer import DraftResult, DraftTrainer

logger = logging.getLogger(__name__)


def train_drafter(config: DraftTrainConfig) -> list[DraftResult]:
    """Train the drafters and write each to its folder: shards, ``config.json``, ``log.jsonl`` and ``curves.png``.

    Ends early, and saves, on SIGTERM or Ctrl-C. Raises ValueError for arguments that do not fit the target or the data.
    """
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.target)
    sources, measured = _sources(config, tokenizer)
    dataset = DraftBatches(sources, config.batch, config.length, config.anchors, config.block_length, config.seed)
    # The loader starts its worker processes before CUDA is set up in this one.
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    loader = iter(draft_loader(dataset, config.workers, on_gpu))
    base = load_base(config.target, config.device, None if config.dtype == "auto" else getattr(torch, config.dtype))
    base.decoder.requires_grad_(False)
    drafters = [_drafter(config, kind, base) for kind in config.kinds]
    taps = {d.config.target_layer_ids for d in drafters}
    if len(taps) > 1:
        raise ValueError(
            f"target_layer_ids must be the same for drafters that are trained together: got {sorted(taps)}"
        )
    texts = greedy_answers(
        base.decoder,
        measured,
        config.eval_prompts,
        base.spec.eos_token_ids or (tokenizer.eos_token_id,),
        config.eval_new_tokens,
        config.length,
    )
    return DraftTrainer(config, base, drafters, tokenizer).run(loader, texts)


def _drafter(config: DraftTrainConfig, kind: str, base: Base) -> Drafter:
    """A new drafter, or the one to go on from, on the target's device and in its dtype."""
    decoder = base.decoder
    mask = SHIPPED_TOKENS["mask_token_id"] if config.target == SHIPPED_BASE else None
    mask = mask if config.mask_token_id is None else config.mask_token_id
    if config.resume is not None:
        drafter = load_drafter(config.folder(kind, config.resume), decoder)
        found = drafter.config
        if found.kind != kind or found.block_length != config.block_length:
            raise ValueError(
                f"resume must hold a {kind} with blocks of {config.block_length}: got a {found.kind} with {found.block_length}"
            )
    else:
        if mask is None:
            raise ValueError(
                f"mask_token_id must be given for the target {config.target!r}: an existing token that its texts never use"
            )
        drafter = CLASS_OF_KIND[kind](drafter_config(config, kind, decoder.config, mask), decoder)
        drafter.to(decoder.device, decoder.dtype)
        fusion = getattr(drafter, "layer_fusion_weights", None)
        if fusion is not None:
            # These few numbers stay in fp32, as they are stored.
            fusion.data = fusion.data.float()
    drafter.eval().requires_grad_(True)
    count = sum(p.numel() for p in drafter.parameters())
    logger.info(
        "%s: %d parameters, %.2f MB in bf16, taps %s", kind, count, 2e-6 * count, drafter.config.target_layer_ids
    )
    return drafter


def _sources(config: DraftTrainConfig, tokenizer: Any) -> tuple[list[tuple[Documents, float]], Documents]:
    """(collections with their shares, held-out documents), looping answers left out of the first."""
    loaded = [load_documents(path, tokenizer) for path in config.data]
    loaded[0], measured = held_out(loaded[0], config.held_out)
    loaded = [without_loops(documents) for documents in loaded]
    answers = [without_loops(load_documents(path, tokenizer)) for path in config.answers]
    sources = []
    for group, share in ((loaded, 1 - config.answer_share if answers else 1.0), (answers, config.answer_share)):
        total = sum(len(documents) for documents in group)
        sources += [(documents, share * len(documents) / total) for documents in group if share > 0]
    logger.info(
        "documents: %d from data, %d answers of the target, %d held out",
        sum(map(len, loaded)),
        sum(map(len, answers)),
        len(measured),
    )
    return sources, measured


def command(
    out: Annotated[Path, typer.Option(help="Folder for the drafter; with several kinds, one folder each inside it.")],
    data: Annotated[list[Path], typer.Option(help="Training files: .npz, .jsonl(.gz) or text.")],
    kind: Annotated[list[str], typer.Option(help="dfly or dflash; give both to train them on the same batches.")],
    target: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = SHIPPED_BASE,
    answers: Annotated[list[Path] | None, typer.Option(help="Greedy answers of the target.")] = None,
    answer_share: Annotated[float, typer.Option(help="Share of documents drawn from --answers.")] = 0.6,
    num_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 2,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the drafter's feed-forward (default: the target's).")
    ] = None,
    correction_width: Annotated[
        int | None, typer.Option(help="Width of DFly's correction head (default: the target's hidden size).")
    ] = None,
    num_taps: Annotated[int, typer.Option(help="Tapped layers of the target, spread by the published rule.")] = 5,
    target_layer_ids: Annotated[
        list[int] | None, typer.Option(help="0-based layers to tap instead (default: by that rule).")
    ] = None,
    block_length: Annotated[
        int, typer.Option(help="Tokens of a block: the anchor (the last accepted token) and the drafts behind it.")
    ] = 8,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Existing token that stands for the mask (default: known for the shipped target)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps (or --minutes).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training (or --steps).")] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    anchors: Annotated[int, typer.Option(help="Blocks of a sequence.")] = 128,
    loss: Annotated[str, typer.Option(help="ce, kl, tv, lk or length.")] = "lk",
    label: Annotated[str, typer.Option(help="text, target (its greedy token) or law.")] = "target",
    weights: Annotated[
        str, typer.Option(help="How slots are weighed in the loss: uniform, exponential or dpace.")
    ] = "dpace",
    label_temperature: Annotated[
        float, typer.Option(help="Temperature of the target's law (label law): below 1 sharpens it.")
    ] = 1.0,
    greedy_path: Annotated[bool, typer.Option(help="Leave out slots behind a token that is not greedy.")] = True,
    optimiser: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    learning_rate: Annotated[float, typer.Option(help="Peak rate.")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.1,
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.")] = 100,
    balance_taps: Annotated[bool, typer.Option(help="Learn from all features of the target alike.")] = True,
    held_out: Annotated[int, typer.Option(help="Documents at the end of the first file kept for measuring.")] = 500,
    eval_prompts: Annotated[int, typer.Option(help="Held-out prompts that the target answers.")] = 200,
    eval_new_tokens: Annotated[int, typer.Option(help="Tokens of these answers.")] = 256,
    eval_every_s: Annotated[float, typer.Option(help="Seconds between measurements.")] = 30.0,
    workers: Annotated[int, typer.Option(help="Processes that build batches.")] = 4,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    attention_kernel: Annotated[str, typer.Option(help="auto, sdpa or flex.")] = "auto",
    compiled: Annotated[bool | None, typer.Option(help="torch.compile of layers and head (default: on CUDA).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder to go on from (weights only).")] = None,
    seed: Annotated[int, typer.Option(help="Of initialisation, anchors and order.")] = 0,
) -> None:
    """Train a diffusion drafter for an AR model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = dict(locals())
    given["data"], given["answers"], given["kinds"] = tuple(data), tuple(answers or ()), tuple(given.pop("kind"))
    given["target_layer_ids"] = tuple(target_layer_ids) if target_layer_ids else None
    options = {"weights": given.pop("weights"), "label": given.pop("label"), "kind": given.pop("loss")}
    options |= {name: given.pop(name) for name in ("label_temperature", "greedy_path")}
    try:
        config = DraftTrainConfig(**given, loss=DraftLoss(**options))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    train_drafter(config)


if __name__ == "__main__":
    typer.run(command)
