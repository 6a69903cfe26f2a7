"""What is masked in a training document: an answer that is written block by block, or gaps that are filled between given texts.

Everything random about a document is drawn here from a ``numpy.random.Generator``; ``layout.py`` then turns the choice into rows.
A gap of unknown length is trained as a window: the gap's tokens, then filler tokens up to the window's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dllm.training.layout import (
    BOUNDARY,
    GENERATION,
    INFILL,
    Layout,
    Region,
    bidirectional_layout,
    block_causal_layout,
    block_groups,
)

FILLER_WEIGHTS = (1.0, 0.5, 0.2)
"""Loss weight of the first, the second and each further filler of a window: where it starts matters most."""


@dataclass(frozen=True)
class CorruptionConfig:
    """How documents are masked. Lengths in tokens, shares in [0, 1].

    stop_token_id ends an answer; start_token_id stands before a text whose first token is a slot; filler_token_id ends a gap inside a
    longer window. infill_share: documents that train a gap; raw_share: of those, text without chat markup; window_share: gaps with
    fillers, 1 to max_filler of them; two_gap_share: infill documents with two gaps.
    noisy_copies: noisy copies of an answer (block-causal), a gap gets up to three times as many, as long as they are shorter than the
    clean copy; complementary: copies come in pairs of which each masks what the other shows. tail_share: blocks of an answer whose
    masks are everything behind a random slot, the states that decoding from left to right meets; slot_decay: the loss weight of an
    answer's mask is slot_decay ** (masks before it in its block), since far slots are seldom committed at once (block-causal).
    boundary_weight: loss weight of the first token after a gap.
    max_extra: further masked positions after an answer's end (bidirectional); lookahead_decay: loss weight of masks d blocks after the
    current one is lookahead_decay ** d, 0 beyond lookahead_blocks.
    max_rows: rows that one document may take; longer ones are cut.
    """

    attention: Literal["block_causal", "bidirectional"]
    block_length: int = 8
    stop_token_id: int = 2
    start_token_id: int = 0
    filler_token_id: int = 15
    infill_share: float = 0.5
    raw_share: float = 0.5
    window_share: float = 0.3
    max_filler: int = 32
    two_gap_share: float = 0.15
    max_gap: int = 64
    noisy_copies: int = 2
    complementary: bool = True
    tail_share: float = 0.0
    slot_decay: float = 1.0
    boundary_weight: float = 1.0
    max_extra: int = 192
    lookahead_decay: float = 0.5
    lookahead_blocks: int = 4
    max_rows: int = 2048

    def __post_init__(self) -> None:
        if self.attention not in ("block_causal", "bidirectional"):
            raise ValueError(f"attention must be 'block_causal' or 'bidirectional': got {self.attention!r}")
        for name in ("block_length", "noisy_copies", "max_filler", "max_gap"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.max_rows < 16 * self.block_length:
            raise ValueError(f"max_rows must be >= {16 * self.block_length}: got {self.max_rows}")
        shares = ("infill_share", "raw_share", "window_share", "two_gap_share", "lookahead_decay", "tail_share")
        for name in (*shares, "slot_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1]: got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class Filled:
    """A text with gaps: tokens int [n], windows as Regions without their known row, weight float [n] of each slot."""

    tokens: np.ndarray
    gaps: list[tuple[int, int]]
    weight: np.ndarray


def corrupt(
    tokens: np.ndarray,
    prompt_length: int,
    config: CorruptionConfig,
    rng: np.random.Generator,
    sentence_ends: np.ndarray | None = None,
    infill: bool | None = None,
) -> Layout:
    """Draw one training layout of a document.

    tokens int [n], n >= 2; prompt_length: given tokens, 0 for plain text; sentence_ends: ids that end a sentence, for gaps that are
    whole sentences; infill: force (True) or forbid (False) a gap.
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens must hold at least 2 tokens: got {len(tokens)}")
    tokens = tokens.astype(np.int64)
    if rng.random() < config.infill_share if infill is None else infill:
        filled = draw_gaps(tokens, prompt_length, config, rng, sentence_ends)
        return _infill_blocks(filled, config, rng) if _is_block(config) else _infill_canvas(filled, config, rng)
    if prompt_length == 0:
        tokens = np.concatenate([[config.start_token_id], tokens])
        prompt_length = int(rng.integers(1, max(2, len(tokens) // 2)))
    draw = _generation_blocks if _is_block(config) else _generation_canvas
    return draw(tokens, prompt_length, config, rng)


def sample_masks(
    slots: np.ndarray,
    block: np.ndarray,
    copies: int,
    rng: np.random.Generator,
    complementary: bool = True,
    tail_share: float = 0.0,
) -> np.ndarray:
    """Masks of each copy, bool [copies, n]: in each block a rate t ~ U(0, 1), at least one mask.

    slots bool [n]; block int [n]: block number of each slot (read at slots only). With a uniform rate every number of masks in a block
    is equally likely. With probability tail_share a block masks all slots from a random one on instead, in each copy from another.
    """
    where = np.flatnonzero(slots)
    masks = np.zeros((copies, len(slots)), bool)
    if not len(where):
        return masks
    _, number = np.unique(block[where], return_inverse=True)
    num_blocks = int(number[-1]) + 1
    size = np.bincount(number)
    rank = np.arange(len(where)) - (np.cumsum(size) - size)[number]
    tail = np.zeros(num_blocks, bool)
    for i in range(copies):
        draw = rng.random(len(where))
        if tail_share > 0 and not (complementary and i % 2):
            # The two copies of a pair agree on which blocks they are complementary in.
            tail = rng.random(num_blocks) < tail_share
        if complementary and i % 2:
            chosen = ~masks[i - 1, where]
        else:
            chosen = draw < rng.random(num_blocks)[number]
        empty = np.bincount(number, chosen, num_blocks) == 0
        if empty.any():
            # The slot with the smallest draw of each block stands first among its block.
            order = np.lexsort((draw, number))
            first = order[np.searchsorted(number, np.arange(num_blocks))]
            chosen[first[empty]] = True
        if tail_share > 0:
            first_mask = (rng.random(num_blocks) * size).astype(np.int64)
            chosen = np.where(tail[number], rank >= first_mask[number], chosen)
        masks[i, where] = chosen
    return masks


def mask_weights(masks: np.ndarray, block: np.ndarray, decay: float) -> np.ndarray:
    """decay ** (masks before this one in its block), float [copies, n]; masks bool [copies, n], block int [n] ascending."""
    before = np.cumsum(masks, axis=1) - masks
    starts = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
    size = np.diff(np.r_[starts, len(block)])
    return decay ** (before - np.repeat(before[:, starts], size, axis=1)).astype(np.float64)


def draw_gaps(
    tokens: np.ndarray,
    prompt_length: int,
    config: CorruptionConfig,
    rng: np.random.Generator,
    sentence_ends: np.ndarray | None = None,
) -> Filled:
    """One or two random gaps in a chat document or in its plain text, with their windows; every gap has a token before it."""
    floor = 1
    if prompt_length == 0 or rng.random() < config.raw_share:
        text = tokens[prompt_length:]
        if len(text) > 2 and text[-1] == config.stop_token_id:
            text = text[:-1]
        if rng.random() < 0.4 and len(text) > 32:
            text = text[_start_of_sentence(text, int(rng.integers(0, len(text) - 24)), sentence_ends) :]
        if rng.random() < 0.4 and len(text) > 48:
            text = text[: int(rng.integers(48, len(text) + 1))]
        # A start token in front allows a gap at the text's first token.
        if rng.random() < 0.5 or len(text) < 2:
            text = np.concatenate([[config.start_token_id], text])
    else:
        text = tokens
        if rng.random() < 0.85:
            floor = max(1, prompt_length)
    text = text[: config.max_rows // 2]
    n = len(text)
    floor = min(floor, n - 1)
    start = int(rng.integers(floor, n)) if rng.random() < 0.92 else floor
    start, length = _gap(text, start, config, rng, sentence_ends)
    spans = [(start, length)]
    if rng.random() < config.two_gap_share and start + length + 2 < n:
        second, length = _gap(text, int(rng.integers(start + length + 1, n)), config, rng, sentence_ends)
        # Moving to a sentence's start may have gone back into the first gap.
        spans.append((max(second, spans[0][0] + spans[0][1] + 1), length))
    # What stays of the suffix: nothing, a part or all; a gap without a token is only seen by what follows it.
    end = spans[-1][0] + max(1, spans[-1][1])
    cut = rng.random()
    text = text[:end] if cut < 0.1 else text[: int(rng.integers(end, n + 1))] if cut < 0.35 and end < n else text

    pieces, weights, gaps, at, done = [], [], [], 0, 0
    for start, length in spans:
        length = min(length, max(0, len(text) - start))
        fillers = int(rng.integers(1, config.max_filler + 1)) if rng.random() < config.window_share else 0
        pieces += [text[done : start + length], np.full(fillers, config.filler_token_id)]
        tail = np.array(FILLER_WEIGHTS + FILLER_WEIGHTS[-1:] * max(0, fillers - len(FILLER_WEIGHTS)))[:fillers]
        weights += [np.ones(start + length - done), tail]
        at += start - done
        gaps.append((at, at + length + fillers))
        at += length + fillers
        done = start + length
    pieces.append(text[done:])
    weights.append(np.ones(len(text) - done))
    return Filled(np.concatenate(pieces).astype(np.int64), gaps, np.concatenate(weights))


def _is_block(config: CorruptionConfig) -> bool:
    return config.attention == "block_causal"


def _gap(
    text: np.ndarray, start: int, config: CorruptionConfig, rng: np.random.Generator, sentence_ends: np.ndarray | None
) -> tuple[int, int]:
    """Start and length of a gap near ``start``: none, a few tokens, a phrase, whole sentences, or a long one."""
    if sentence_ends is not None and rng.random() < 0.35:
        ends = np.flatnonzero(np.isin(text, sentence_ends)) + 1
        before, after = ends[ends <= start], ends[ends > start]
        first = int(before[-1]) if len(before) else 0
        stop = int(after[min(int(rng.integers(0, 2)), len(after) - 1)]) if len(after) else len(text)
        if first >= 1 and 0 < stop - first <= config.max_gap:
            return first, stop - first
    kind = rng.random()
    low, high = (0, 0) if kind < 0.06 else (1, 8) if kind < 0.45 else (9, 32) if kind < 0.78 else (33, config.max_gap)
    length = int(rng.integers(min(low, config.max_gap), min(high, config.max_gap) + 1))
    return start, min(length, len(text) - start)


def _start_of_sentence(text: np.ndarray, near: int, sentence_ends: np.ndarray | None) -> int:
    if sentence_ends is None:
        return near
    ends = np.flatnonzero(np.isin(text[: len(text) - 16], sentence_ends)) + 1
    return int(ends[np.argmin(np.abs(ends - near))]) if len(ends) else 0


def _generation_blocks(tokens: np.ndarray, prompt: int, config: CorruptionConfig, rng: np.random.Generator) -> Layout:
    copies, S = config.noisy_copies, config.block_length
    prompt = min(prompt, config.max_rows // 2)
    tokens = np.concatenate([tokens[:prompt], tokens[prompt:]])
    room = (config.max_rows - prompt) // (1 + copies) // S * S
    ended = tokens[-1] == config.stop_token_id and len(tokens) - prompt <= room
    tokens = tokens[: prompt + room]
    if ended:
        # After the stop the last block is filled with more stops, so that its masks have something to become.
        tokens = np.concatenate([tokens, np.full(-(len(tokens) - prompt) % S, config.stop_token_id)])
    n = len(tokens)
    if n == prompt:
        prompt -= 1
    slots, block = np.arange(n) >= prompt, (np.arange(n) - prompt) // S
    masks = sample_masks(slots, block, copies, rng, config.complementary, config.tail_share)
    weights = mask_weights(masks, block, config.slot_decay)
    return block_causal_layout(tokens, [Region(prompt, n, 0)], masks, S, weights)


def _infill_blocks(filled: Filled, config: CorruptionConfig, rng: np.random.Generator) -> Layout:
    tokens, S = filled.tokens, config.block_length
    regions = [Region(start - 1, stop, 1) for start, stop in filled.gaps]
    n, noisy = len(tokens), sum(r.stop - r.start for r in regions)
    slots = np.zeros(n, bool)
    for r in regions:
        slots[r.start + 1 : r.stop] = True
    copies = 0
    if slots.any():
        copies = int(np.clip(n // noisy, config.noisy_copies, 3 * config.noisy_copies))
        copies = max(1, min(copies, (config.max_rows - n) // noisy))
        last = regions[-1].stop
        # The suffix gives way where even one noisy copy would not fit.
        tokens = tokens[: max(last, config.max_rows - copies * noisy)]
        n = len(tokens)
    group, _ = block_groups(n, regions, S)
    masks = sample_masks(slots[:n], group, copies, rng, config.complementary)
    return block_causal_layout(tokens, regions, masks, S, filled.weight[:n], config.boundary_weight)


def _generation_canvas(tokens: np.ndarray, prompt: int, config: CorruptionConfig, rng: np.random.Generator) -> Layout:
    S = config.block_length
    prompt = min(prompt, config.max_rows // 2, len(tokens) - 1)
    ended = tokens[-1] == config.stop_token_id
    tokens = tokens[: config.max_rows]
    n = len(tokens)
    ended = ended and tokens[-1] == config.stop_token_id
    block = int(rng.integers(0, -(-(n - prompt) // S)))
    begin, stop = prompt + block * S, prompt + (block + 1) * S
    if ended:
        end = max(n, stop) + int(rng.integers(0, config.max_extra + 1))
    else:
        end, stop = n, min(n, stop)
    if rng.random() < 0.3:
        # A canvas that is shorter than what the model would like to write.
        end = int(rng.integers(stop, end + 1))
    end = min(end, config.max_rows)
    stop = min(stop, end)
    canvas = np.concatenate([tokens[:end], np.full(max(0, end - n), config.stop_token_id)])
    masked = np.arange(end) >= stop
    masked[begin:stop] = sample_masks(np.ones(stop - begin, bool), np.zeros(stop - begin), 1, rng)[0]
    distance = np.maximum(np.arange(end) - begin, 0) // S
    weight = np.where(distance <= config.lookahead_blocks, config.lookahead_decay**distance, 0.0) * masked
    weight[max(stop, n) :] = 0.0
    return bidirectional_layout(canvas, masked, weight, np.full(end, GENERATION))


def _infill_canvas(filled: Filled, config: CorruptionConfig, rng: np.random.Generator) -> Layout:
    S, tokens, gaps = config.block_length, filled.tokens, list(filled.gaps)
    if all(start == stop for start, stop in gaps):
        # Nothing to fill: the gap takes the token before it, or after it where that is the first.
        start = gaps[0][0]
        gaps[0] = (start - 1, start) if start > 1 else (start, min(start + 1, len(tokens)))
    end = min(len(tokens), config.max_rows)
    blocks = [
        (at, min(at + S, stop, end))
        for start, stop in gaps
        for at in range(start, stop, S)
        if at < end and stop > start
    ]
    current = int(rng.integers(0, len(blocks)))
    masked, weight, kinds = np.zeros(end, bool), np.zeros(end), np.full(end, INFILL)
    for number, (begin, stop) in enumerate(blocks[current:]):
        chosen = np.ones(stop - begin, bool)
        if number == 0:
            chosen = sample_masks(chosen, np.zeros(stop - begin), 1, rng)[0]
        masked[begin:stop] = chosen
        if number <= config.lookahead_blocks:
            weight[begin:stop] = chosen * config.lookahead_decay**number * filled.weight[begin:stop]
    for start, stop in gaps:
        if stop < end and not masked[stop] and config.boundary_weight > 0 and start < stop:
            weight[stop], kinds[stop] = config.boundary_weight, BOUNDARY
    return bidirectional_layout(tokens[:end], masked, weight, kinds)
