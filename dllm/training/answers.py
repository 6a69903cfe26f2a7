"""Answers that the AR base writes itself: targets of low entropy, which can be decoded several at a time.

python -m dllm.training.answers --base smollm2-135m --prompts gsm8k_train.jsonl.gz --out answers.npz
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from dllm.evals.loops import truncate_at_loop
from dllm.graphs import capture
from dllm.kernels._launch import use_triton
from dllm.model.decoder import Decoder
from dllm.model.fast_decoder import FastDecoder, unfit
from dllm.model.kv_store import KVStore
from dllm.training.base import load_base, load_tokenizer
from dllm.training.data import Documents, chat_frame, load_prompts
from dllm.types import LOWEST_GROUP, PADDING_GROUP, Attend

logger = logging.getLogger(__name__)

LEAVE_EVERY = 32
"""Steps between two looks at which rows are finished (each costs a synchronisation)."""
MIN_PART = 24
"""Tokens that must stand before a cut for an unfinished answer to be kept."""
MAX_OPENING = 4
"""Tokens of another prompt with which an invented one may begin."""


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
    *,
    min_p: float = 0.0,
) -> list[list[int]]:
    """The model's answers, in the order of the prompts, each ending with the stop token if it came in time.

    prompts: token ids, at least one each; temperature 0 is greedy; min_p: see ``_pick``; max_cached_rows bounds the keys and values
    held at once (sequences x rows). on_batch(done, total) is called after each batch. Raises ValueError for empty prompts or lengths
    beyond the model's.
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
            model, [prompts[i] for i in batch], stop_token_ids, max_new_tokens, temperature, generator, min_p
        )
        for i, answer in zip(batch, written, strict=True):
            answers[i] = answer
        at += len(batch)
        if on_batch is not None:
            on_batch(at, len(order))
    return answers


def invent_prompts(
    model: Decoder,
    openings: Sequence[Sequence[int]],
    header: Sequence[int],
    footer: Sequence[int],
    count: int,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    min_p: float = 0.05,
    seed: int = 0,
    max_cached_rows: int = 2**18,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Chat prompts that the model writes itself: the user's turn sampled after the template's header.

    Source: Magpie (Xu et al. 2024, arXiv:2406.08464). openings: existing user turns, ids; each new one begins with 0 to ``MAX_OPENING``
    first tokens of a random one of them. header, footer: what the template puts before and after the user's words; a turn ends with
    footer[0]. At most ``count`` prompts come back: turns that do not end in ``max_new_tokens`` tokens, and those written twice, are
    left out.
    """
    rng = np.random.default_rng(seed)
    starts = []
    for index in rng.integers(0, len(openings), count):
        starts.append([*header, *openings[index][: int(rng.integers(0, MAX_OPENING + 1))]])
    turns = answer_prompts(
        model, starts, footer[:1], max_new_tokens, temperature, seed, max_cached_rows, on_batch, min_p=min_p
    )
    ended = ((*start, *turn[:-1], *footer) for start, turn in zip(starts, turns, strict=True) if turn[-1] == footer[0])
    return [list(prompt) for prompt in dict.fromkeys(ended) if len(prompt) > len(header) + len(footer)]


class _Rows:
    """Rows that are written token by token: their store, and one step of fixed shape over it (a CUDA graph on CUDA)."""

    def __init__(self, model: Decoder, store: KVStore, position: Tensor) -> None:
        """position [B, 1]: of the token that comes next."""
        self.store, self.position = store, position
        device, batch = position.device, len(position)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.columns = torch.arange(store.capacity, dtype=torch.int32, device=device)
        self.low = torch.full((batch, 1), LOWEST_GROUP, dtype=torch.int32, device=device)
        self.itself = torch.ones(batch, 1, 1, dtype=torch.int64, device=device)
        self.write = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.model, self.head = (
            FastDecoder(model) if use_triton(self.low) and unfit(model) is None else model,
            model.head,
        )
        # A graph is made for one extent; the kernels skip the tiles that nobody sees.
        store.extent = store.capacity
        self.step = capture(self.forward, device, (self, model), name="answers")

    def forward(self) -> Tensor:
        """Write the token's keys and values at its position -> logits [B, V] of the one after it."""
        group = self.position.to(torch.int32)
        keys = torch.where(self.columns < group, self.columns, PADDING_GROUP)
        attend = Attend(keys, self.low, group, self.itself)
        hidden = self.model(
            self.token[:, None], self.position, self.store, attend, rows=self.position, write=self.write
        )
        logits: Tensor = self.head(hidden[:, 0])
        return logits


def _answer_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    min_p: float,
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

    token = _pick(model.head(last[:, 0]), temperature, generator, min_p)
    alive = torch.arange(count, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    out = torch.full((count, max_new_tokens), -1, dtype=torch.int64, device=device)
    written: _Rows | None = None
    position = lengths[:, None].clone()
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
                written = None
                store = store.select(keep)
                token, position, alive, done = (x[keep] for x in (token, position, alive, done))
        if written is None:
            # Capturing runs the step on token 0: it writes a row that the first real step writes again.
            written = _Rows(model, store, position)
        written.token.copy_(token)
        token = _pick(written.step.replay(), temperature, generator, min_p)
        position += 1
    return [[t for t in row if t >= 0] for row in out.tolist()]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator, min_p: float) -> Tensor:
    """logits [B, V] -> token [B]; min_p: tokens below that share of the best one's probability are left out before the temperature."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    if min_p > 0:
        floor = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(logits < floor, float("-inf"))
    law = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(law, 1, generator=generator)[:, 0]


def answered_documents(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    stop_token_ids: Sequence[int],
    keep_parts: bool = False,
) -> Documents:
    """Prompts with their answers; answers that loop or never ended are left out.

    keep_parts: of those, what was said before the loop or the limit stays, without a stop token, if it has ``MIN_PART`` tokens.
    """
    stops = set(stop_token_ids)

    def kept() -> Iterator[tuple[list[int], int]]:
        for prompt, answer in zip(prompts, answers, strict=True):
            ended = bool(answer) and answer[-1] in stops
            words = list(answer[:-1]) if ended else list(answer)
            part = truncate_at_loop(words)
            if ended and len(part) == len(words):
                yield [*prompt, *answer], len(prompt)
            elif keep_parts and len(part) >= MIN_PART:
                yield [*prompt, *part], len(prompt)

    return Documents.of(kept())


def command(
    out: Annotated[Path, typer.Option(help="Archive to write.")],
    prompts: Annotated[list[str], typer.Option(help="Files with prompts; FILE:N takes the first N after shuffling.")],
    base: Annotated[str, typer.Option(help="Shipped name or folder of the AR model.")] = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(help="Answers that are longer are dropped.")] = 256,
    keep_parts: Annotated[
        bool, typer.Option(help="Keep what an answer says before it loops or is cut, instead of dropping it.")
    ] = False,
    invent: Annotated[int, typer.Option(help="Further prompts that the model writes itself.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    skip_last: Annotated[int, typer.Option(help="Conversations at the end of an .npz that are held out.")] = 500,
    part: Annotated[str, typer.Option(help="I/N: answer only the I-th of N parts (0-based), one per device.")] = "0/1",
    max_cached_rows: Annotated[int, typer.Option(help="Bound on sequences x rows in memory.")] = 2**18,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the shuffling and of sampling.")] = 0,
) -> None:
    """Let an AR model answer prompts; looping and unfinished answers are dropped, or cut with --keep-parts."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    number, parts = (int(x) for x in part.split("/"))
    tokenizer = load_tokenizer(base)
    chosen: list[list[int]] = []
    held_out: set[tuple[int, ...]] = set()
    for item in prompts:
        file, _, limit = item.partition(":")
        found = load_prompts(file, tokenizer)
        if file.endswith(".npz"):
            held_out |= {tuple(p) for p in found[len(found) - skip_last :]}
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

    if invent > 0:
        header, footer = chat_frame(tokenizer)
        turns = [p[len(header) : len(p) - len(footer)] for p in chosen if p[: len(header)] == header]
        fresh = invent_prompts(
            model, turns, header, footer, -(-invent // parts), seed=seed + 1 + number, max_cached_rows=max_cached_rows
        )
        logger.info("%d prompts of its own in %.0f s", len(fresh), time.perf_counter() - start)
        chosen += [p for p in fresh if len(p) <= max_prompt_tokens]
    # The same question may have been written twice: what is measured on is never trained on.
    chosen = [p for p in chosen if tuple(p) not in held_out]
    answers = answer_prompts(model, chosen, stops, max_new_tokens, temperature, seed, max_cached_rows, report)
    documents = answered_documents(chosen, answers, stops, keep_parts)
    documents.save(out)
    tokens = sum(map(len, answers))
    logger.info(
        "%d tokens in %.0f s; kept %d of %d answers", tokens, time.perf_counter() - start, len(documents), len(chosen)
    )


if __name__ == "__main__":
    typer.run(command)
