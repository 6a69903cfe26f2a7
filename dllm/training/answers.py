"""Answers that the AR base writes itself: targets of low entropy, which can be decoded several at a time.

python -m dllm.training.answers --base smollm2-135m --prompts gsm8k_train.jsonl.gz --out answers.npz
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from dllm.evals.loops import loops
from dllm.model.decoder import Decoder
from dllm.training.base import load_base, load_tokenizer
from dllm.training.data import Documents, load_prompts

logger = logging.getLogger(__name__)

LEAVE_EVERY = 32
"""Steps between two looks at which rows are finished (each costs a synchronisation)."""


@torch.no_grad()
def answer_prompts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    max_cached_rows: int = 2**18,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The model's answers, in the order of the prompts, each ending with the stop token if it came in time.

    prompts: token ids, at least one each; temperature 0 is greedy; max_cached_rows bounds the keys and values held at once (sequences x
    rows). on_batch(done, total) is called after each batch. Raises ValueError for empty prompts or lengths beyond the model's.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1: got {max_new_tokens}")
    longest = max((len(p) for p in prompts), default=1)
    if any(len(p) == 0 for p in prompts) or longest + max_new_tokens > model.config.max_positions:
        raise ValueError(
            f"prompts must have 1 to {model.config.max_positions - max_new_tokens} tokens each: got lengths "
            f"{min(len(p) for p in prompts)} to {longest}"
        )
    # Prompts of like length share a batch, so that little of a prefill is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    answers: list[list[int]] = [[] for _ in prompts]
    generator = torch.Generator(model.device).manual_seed(seed)
    at = 0
    while at < len(order):
        rows = len(prompts[order[at]]) + max_new_tokens
        batch = order[at : at + max(1, max_cached_rows // rows)]
        written = _answer_batch(
            model, [prompts[i] for i in batch], stop_token_ids, max_new_tokens, temperature, generator
        )
        for i, answer in zip(batch, written, strict=True):
            answers[i] = answer
        at += len(batch)
        if on_batch is not None:
            on_batch(at, len(order))
    return answers


def _answer_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[list[int]]:
    device, count = model.device, len(prompts)
    lengths = torch.tensor([len(p) for p in prompts])
    width = int(lengths.max())
    padded = np.zeros((count, width), np.int64)
    for i, prompt in enumerate(prompts):
        padded[i, : len(prompt)] = prompt
    ids, lengths = torch.from_numpy(padded).to(device), lengths.to(device)
    stops = torch.tensor(list(stop_token_ids), device=device)
    store = model.new_store(count, width + max_new_tokens)

    # Prefill: left-aligned, every row at its own positions; padded rows are written and never read.
    columns = torch.arange(width, device=device)
    mask = (columns[:, None] >= columns).expand(count, -1, -1)
    rows = columns.expand(count, -1)
    store.extent = 0
    hidden = model(ids, rows, store, mask, rows=rows, write=torch.ones_like(ids, dtype=torch.bool))
    last = hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1]))
    del hidden, mask

    token = _pick(model.head(last[:, 0]), temperature, generator)
    position, alive = lengths[:, None].clone(), torch.arange(count, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    out = torch.full((count, max_new_tokens), -1, dtype=torch.int64, device=device)
    always = torch.ones(count, 1, dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        out[alive, step] = torch.where(done, -1, token)
        done = done | torch.isin(token, stops)
        if step + 1 == max_new_tokens:
            break
        if step % LEAVE_EVERY == LEAVE_EVERY - 1:
            keep = (~done).nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < 0.8 * len(done):
                store = store.select(keep)
                token, position, alive, done, always = (x[keep] for x in (token, position, alive, done, always))
        # Rows up to the longest sequence, in steps of 64.
        store.extent = min(store.capacity, (width + step + 63) // 64 * 64)
        stored = torch.arange(store.extent, device=device) < position[..., None]
        seen = torch.cat([stored, always[..., None]], dim=-1)
        last = model(token[:, None], position, store, seen, rows=position, write=always)
        token = _pick(model.head(last[:, 0]), temperature, generator)
        position = position + 1
    return [[t for t in row if t >= 0] for row in out.tolist()]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """logits [B, V] -> token [B]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    law = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(law, 1, generator=generator)[:, 0]


def answered_documents(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], stop_token_ids: Sequence[int]
) -> Documents:
    """Prompts with their answers; answers that loop or never ended are left out."""
    pairs = zip(prompts, answers, strict=True)
    return Documents.of(
        ([*p, *a], len(p)) for p, a in pairs if a and a[-1] in set(stop_token_ids) and not loops(a[:-1])
    )


def command(
    out: Annotated[Path, typer.Option(help="Archive to write.")],
    prompts: Annotated[list[str], typer.Option(help="Files with prompts; FILE:N takes the first N after shuffling.")],
    base: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(help="Answers that are longer are dropped.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    skip_last: Annotated[int, typer.Option(help="Conversations at the end of an .npz that are held out.")] = 500,
    part: Annotated[str, typer.Option(help="I/N: answer only the I-th of N parts (0-based), one per device.")] = "0/1",
    max_cached_rows: Annotated[int, typer.Option(help="Bound on sequences x rows in memory.")] = 2**18,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the shuffling and of sampling.")] = 0,
) -> None:
    """Let an AR model answer prompts; looping and unfinished answers are dropped."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    number, parts = (int(x) for x in part.split("/"))
    tokenizer = load_tokenizer(base)
    chosen: list[list[int]] = []
    for item in prompts:
        file, _, limit = item.partition(":")
        found = load_prompts(file, tokenizer)
        if file.endswith(".npz"):
            found = found[: len(found) - skip_last]
        found = [p for p in found if len(p) <= max_prompt_tokens]
        order = np.random.default_rng(seed).permutation(len(found))[: int(limit) if limit else None]
        chosen += [found[i] for i in order]
    chosen = chosen[number::parts]
    model = load_base(base, device).decoder
    stops = [tokenizer.eos_token_id]
    start = time.perf_counter()

    def report(done: int, total: int) -> None:
        logger.info("answered %d of %d prompts, %.0f s", done, total, time.perf_counter() - start)

    answers = answer_prompts(model, chosen, stops, max_new_tokens, temperature, seed, max_cached_rows, report)
    documents = answered_documents(chosen, answers, stops)
    documents.save(out)
    tokens = sum(map(len, answers))
    logger.info(
        "%d tokens in %.0f s; kept %d of %d answers", tokens, time.perf_counter() - start, len(documents), len(chosen)
    )


if __name__ == "__main__":
    typer.run(command)
