"""White space before a gap, decided by the model as the beginning of the gap's first tokens ("token healing").

Byte-pair tokenizers join white space with what follows it: a line break with the indentation behind it, a blank with its word. A text cut
behind white space therefore ends in tokens such as no model was trained to go on from. So the model sees the text without it, and the
first tokens of the gap are chosen, one at a time, among those that write it: pieces of it, and the token that ends it, which may reach
into the fill.

Only white space is treated so. It nearly always belongs to the token behind it; a cut inside of a word may as well be a word's end.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dllm.byte_vocabulary import ByteVocabulary
from dllm.canvas import infill_canvas
from dllm.likelihood import close_groups
from dllm.noise import STREAM_BORDER
from dllm.output import Stats
from dllm.request import DenoiseRequest
from dllm.samplers.processors import process_logits
from dllm.samplers.verify import sample_law
from dllm.types import Attend, DecodeSpec

Laws = Callable[[list[int]], tuple[Tensor, Tensor, list[int]]]
"""One forward for some rows, by their places: logits [B, G, V] of the first slot of each of their open borders, those slots [B, G]
(rows with fewer are filled up with any), and the rows that the model computed for each."""


class WhiteSpace:
    """What the tokens of a vocabulary write at the end of a text."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self.vocabulary = vocabulary
        known = sorted((piece, token) for token, piece in enumerate(vocabulary.pieces) if piece)
        # In the order of their bytes, so that those with one beginning are neighbours.
        self._pieces = [piece for piece, _ in known]
        self._ids = torch.tensor([token for _, token in known], dtype=torch.int64)

    def split(self, text: str) -> tuple[str, bytes]:
        """(the text without the white space at its end, the bytes of that); (text, b"") where it holds nothing else, has none, or no
        tokens write it."""
        bare = text.rstrip()
        white = text[len(bare) :].encode() if bare else b""
        return (bare, white) if white and self._endings(white)[0] else (text, b"")

    def fits(self, white: bytes) -> Tensor:
        """Ids that may come next where ``white`` is to be written, bool [V]: its pieces after which tokens write the rest, and what
        begins with it."""
        ends = self._endings(white)
        fits = torch.zeros(len(self.vocabulary.pieces), dtype=torch.bool)
        fits[self._ids[self._beginning_with(white)]] = True
        for size in range(1, min(self.vocabulary.longest, len(white) - 1) + 1):
            if ends[size]:
                first = bisect_left(self._pieces, white[:size])
                fits[self._ids[first : bisect_right(self._pieces, white[:size])]] = True
        return fits

    def encode(self, white: bytes, text: str) -> tuple[list[int], int]:
        """Ids of a true fill with the white space before it, and how many of them hold some of the fill's text: its length."""
        ids = self.vocabulary.encode(white + text.encode())
        end, own = 0, 0
        for token in ids:
            end += len(self.vocabulary.pieces[token] or b"")
            own += end > len(white)
        return ids, own

    def decode(self, ids: Sequence[int], held: int = 0) -> str:
        """The text of ids without its first ``held`` bytes."""
        return self.vocabulary.bytes_of(ids)[held:].decode("utf-8", "replace")

    def _endings(self, white: bytes) -> list[bool]:
        """For each place in white, its end included: do some tokens write it from there on, if need be with text behind it?"""
        pieces, longest = self.vocabulary.ids, self.vocabulary.longest
        ends = [False] * len(white) + [True]
        for start in range(len(white) - 1, -1, -1):
            rest = white[start:]
            ends[start] = any(
                ends[start + size] and rest[:size] in pieces for size in range(1, min(longest, len(rest)) + 1)
            )
            if not ends[start]:
                places = self._beginning_with(rest)
                ends[start] = places.start < places.stop
        return ends

    def _beginning_with(self, text: bytes) -> slice:
        """Where the pieces that begin with text stand in their order; text is valid UTF-8, so that no byte of it is the last there is."""
        behind = text[:-1] + bytes([text[-1] + 1])
        return slice(bisect_left(self._pieces, text), bisect_left(self._pieces, behind))


@lru_cache(maxsize=4)
def white_space_of(tokenizer: Any, vocab_size: int, never: tuple[int, ...] = ()) -> WhiteSpace | None:
    """The tokenizer's, without special tokens and the ids ``never``; None where its tokens are no bytes."""
    try:
        return WhiteSpace(ByteVocabulary.from_tokenizer(tokenizer, vocab_size, never))
    except ValueError:
        return None


@dataclass
class Border:
    """Where the given text before a gap ends.

    whole: its ids as they are without healing; bare: without the white space at its end; rest: bytes of that which are still to be
    written (b"" from the start: nothing to heal); white: tokens of white space alone that were chosen; first: the token that ended the
    white space and begins the fill, or None, held: how many bytes of it are white space, log_prob: nats of it among those that fit;
    healed: all of it is written.
    """

    whole: list[int]
    bare: list[int]
    rest: bytes = b""
    white: list[int] = field(default_factory=list)
    first: int | None = None
    held: int = 0
    log_prob: float = 0.0
    healed: bool = False

    @property
    def before(self) -> list[int]:
        """What stands before the gap's open slots."""
        return [*self.bare, *self.white, *self.begun] if self.rest or self.healed else self.whole

    @property
    def begun(self) -> list[int]:
        """The first tokens of the fill, if any is decided."""
        return [] if self.first is None else [self.first]

    def take(self, token: int, piece: bytes, log_prob: float) -> None:
        """Write the next token."""
        if len(piece) > len(self.rest):
            self.first, self.held, self.log_prob = token, len(self.rest), log_prob
        else:
            self.white.append(token)
        self.rest = self.rest[len(piece) :]
        self.healed = not self.rest

    def give_up(self) -> None:
        """Back to the text as it is without healing."""
        self.rest, self.white, self.first, self.held, self.log_prob, self.healed = b"", [], None, 0, 0.0, False


@dataclass
class HealedRow:
    """One row: the border of each gap, the tokens of each fill, what is given behind the last gap, and what its borders cost."""

    borders: list[Border]
    lengths: list[int]
    end: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def parts(self) -> list[list[int]]:
        """The given tokens around the open slots."""
        return [*(border.before for border in self.borders), self.end]

    @property
    def open_lengths(self) -> list[int]:
        """Slots of each gap that are still open."""
        return [n - len(border.begun) for n, border in zip(self.lengths, self.borders, strict=True)]

    @property
    def open_starts(self) -> list[int]:
        """The first open slot behind each border that is not done."""
        at, starts = 0, []
        for border, length in zip(self.borders, self.open_lengths, strict=True):
            at += len(border.before)
            starts += [at] if border.rest else []
            at += length
        return starts

    @property
    def total(self) -> int:
        """Tokens and open slots."""
        return sum(map(len, self.parts)) + sum(self.open_lengths)


@torch.no_grad()
def heal(
    rows: Sequence[HealedRow],
    laws: Laws,
    white_space: WhiteSpace,
    noise: Any,
    temperature: float,
    filters: dict[str, Any],
    limit: int,
) -> Stats:
    """Write the white space of every border, one token a forward; mutates the rows; the cost of the call.

    The likeliest token that fits, or at a temperature > 0 one drawn among those that fit after the filters (top_k, top_p, min_p), by
    numbers of a stream of its own. limit: tokens that a row may have. A border whose row would exceed it, or where a processor bars
    every token that fits, goes back to the text as it is. Raises ValueError for logits that are not finite.
    """
    total, started, number = Stats(), time.perf_counter(), 0
    while True:
        for row in rows:
            if row.total > limit:
                for border in row.borders:
                    border.give_up()
        places = [b for b, row in enumerate(rows) if any(border.rest for border in row.borders)]
        if not places:
            break
        logits, slots, counts = laws(places)
        chosen = [[border for border in rows[b].borders if border.rest] for b in places]
        fits = torch.zeros(logits.shape, dtype=torch.bool)
        for i, borders in enumerate(chosen):
            for k, border in enumerate(borders):
                fits[i, k] = white_space.fits(border.rest)
            # Columns that fill a row up are its first border once more.
            fits[i, len(borders) :] = fits[i, 0]
        fits = fits.to(logits.device)
        select = getattr(noise, "select", None)
        mine = noise if select is None else select(torch.tensor(places, device=logits.device))
        tokens, log_probs, possible, broken = _choose(logits, fits, slots, mine, number, temperature, filters)
        for i, (b, borders) in enumerate(zip(places, chosen, strict=True)):
            rows[b].stats.nfe += 1
            rows[b].stats.positions += counts[i]
            for k, border in enumerate(borders):
                if broken[i][k]:
                    raise ValueError(f"logits must be finite: got NaN or infinity in row {b}, before a gap")
                if not possible[i][k]:
                    border.give_up()
                    continue
                piece = white_space.vocabulary.pieces[tokens[i][k]]
                assert piece, "a token that fits has bytes"
                border.take(tokens[i][k], piece, log_probs[i][k])
        total.nfe += 1
        total.positions += sum(counts)
        total.prefill_s = time.perf_counter() - started
        for b in places:
            rows[b].stats.prefill_s = total.prefill_s
        number += 1
    return total


def _choose(
    logits: Tensor, fits: Tensor, slots: Tensor, noise: Any, number: int, temperature: float, filters: dict[str, Any]
) -> tuple[list[list[int]], list[list[float]], list[list[bool]], list[list[bool]]]:
    """A token that fits at each slot, its nats among those that fit, whether there is any, and whether the logits are no law."""
    raw = logits.float()
    held = raw.masked_fill(~fits, float("-inf"))
    possible = held.amax(-1) > float("-inf")
    # A law over nothing has no arg-max and no sum; any finite numbers do, since nobody reads the token.
    held = torch.where(possible[..., None], held, 0.0)
    if temperature > 0:
        law = process_logits(held, temperature=temperature, **filters).double().softmax(-1)
        step = torch.full((len(slots),), number, dtype=torch.int64, device=slots.device)
        tokens = sample_law(law, noise.uniform(slots, step, STREAM_BORDER))
    else:
        tokens = held.argmax(-1)
    log_probs = held.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    broken = ~raw.logsumexp(-1).isfinite()
    return tokens.tolist(), log_probs.tolist(), possible.tolist(), broken.tolist()


def gap_laws(model: Any, request: DenoiseRequest, rows: Sequence[HealedRow], spec: DecodeSpec) -> Laws:
    """Forwards of a diffusion LM over whole canvases: given tokens, and nothing but masks in the gaps.

    request: its guidance and its processor of logits are applied as in the loop; spec: lays out the given tokens.
    """
    block_length = request.block_length if isinstance(request.block_length, int) else spec.block_length

    def laws(places: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        chosen = [rows[b] for b in places]
        device = request.canvas.ids.device
        canvas = infill_canvas([row.parts for row in chosen], [row.open_lengths for row in chosen], spec, device)
        if spec.attention != "bidirectional":
            close_groups(canvas, block_length)
        ids, masked, position, group, low, valid = (
            getattr(canvas, name) for name in ("ids", "masked", "position", "group", "low", "valid")
        )
        guided = request.cfg_scale > 0
        if guided:
            # Guidance runs every row a second time, with its given tokens masked.
            masked = torch.cat([masked, valid])
            ids, position, group, low, valid = (x.repeat(2, 1) for x in (ids, position, group, low, valid))
        embeds = model.embed(ids, masked, spec.mask_token_id)
        hidden = model(None, position, None, Attend.by_group(group, low, valid), embeds=embeds)
        starts = [row.open_starts for row in chosen]
        width = max(map(len, starts))
        slots = torch.tensor([row + row[:1] * (width - len(row)) for row in starts], device=device)
        source = (slots - spec.logits_shift).repeat(len(hidden) // len(slots), 1)
        logits = model.head(hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1])))
        if guided:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + (request.cfg_scale + 1) * (conditional - unconditional)
        if request.logits_processor is not None:
            logits = request.logits_processor(logits, slots)
        return logits, slots, canvas.lengths.tolist()

    return laws
