"""A guide with another tokenizer: both models read and write the same bytes, each in tokens of its own.

Of every row the guide has read ``ids``, its own tokens; what is on the canvas beyond them is ``rest`` (bytes of the diffusion model's
tokens that end inside one of the guide's), and what the guide has written that did not fit in the open block is ``queue``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllm.byte_vocabulary import ByteVocabulary
from dllm.hooks import CausalRun, Decision, Proposal, account, account_accepts, check_guided, law_of, refuse
from dllm.noise import STREAM_ACCEPT, STREAM_RESIDUAL
from dllm.samplers.guided import Guided
from dllm.samplers.verify import sample_law


@dataclass
class Piece:
    """One guide token of a draft: its id, and where its bytes end in ``rest`` and draft; stop: it ends the text."""

    token: int
    end: int
    stop: bool = False


@dataclass
class RowText:
    """What the guide knows of one row: ids it has settled on, of which ``cached`` have keys; rest, queue: see the module."""

    ids: list[int]
    cached: int = 0
    rest: bytes = b""
    queue: list[int] = field(default_factory=list)


@dataclass
class Verdict:
    """Tokens to write into the row's next slots, how sure each was, and whether the guide was asked."""

    tokens: list[int]
    confidence: list[float]
    asked: bool


class ForeignGuideHook:
    """``Guided`` across two vocabularies; kind "intersection" or "text", see ``ARGuide``."""

    extends = False
    needs = frozenset({"top1"})

    def __init__(
        self, loop: Any, model: Any, rule: Guided, kind: str, guide: ByteVocabulary, own: ByteVocabulary
    ) -> None:
        check_guided(loop, rule)
        refuse(
            "a guide with another vocabulary",
            accept=(
                rule.accept in ("speculative", "log_ratio"),
                f"{rule.accept!r} compares probabilities of the same token in both models",
            ),
            guide_passes=(rule.guide_passes != 1, "one reading already cuts the draft into the guide's tokens"),
            min_new_tokens=(loop.closed_slots is not None, "the two models count tokens differently"),
        )
        if not guide.stops or not loop.request.eos_token_ids:
            # A text without an end is legal; an end that only one model knows is not.
            refuse(
                "a guide with another vocabulary",
                eos_token_id=(bool(guide.stops) != bool(len(loop.eos)), "only one model has a stop token"),
            )
        self.loop, self.model, self.rule, self.kind, self.guide = loop, model, rule, kind, guide
        closed = set(loop.banned.nonzero()[:, 0].tolist()) | set(loop.request.eos_token_ids)
        # What the guide cannot write it does not see, as a special token of the diffusion model.
        self.own = ByteVocabulary(
            [None if token in closed or not guide.writes(piece) else piece for token, piece in enumerate(own.pieces)],
            loop.request.eos_token_ids,
            own.names,
            own.tokenizer,
        )
        # What the diffusion model cannot write the guide must not say, for its text goes to the canvas.
        writable = [piece is not None and (rule.on_reject == "dlm" or own.writes(piece)) for piece in guide.pieces]
        self.barred = torch.tensor(
            [not ok and token not in guide.stops for token, ok in enumerate(writable)], device=loop.device
        )
        canvas = loop.state.canvas.tolist()
        self.rows = [
            RowText(guide.encode_prompt(canvas[b][: row.begin], own) if row.regions else [0])
            for b, row in enumerate(loop.rows)
        ]
        for row, text in zip(loop.rows, self.rows, strict=True):
            if not text.ids:
                raise ValueError(
                    f"the guide needs a token to start from: the prompt of row {row.index} has none for it"
                )
        self.capacity = max((len(text.ids) for text in self.rows), default=1) + 2 * loop.state.canvas.shape[1]
        self.run = CausalRun(model, len(self.rows), self.capacity)

    def select(self, keep: Tensor) -> None:
        self.run.select(keep)
        self.rows = [self.rows[b] for b in keep.tolist()]

    def decide(self, proposal: Proposal) -> Decision:
        """Write what was decided before, then the accepted part of the draft; every row with an offered slot writes at least one."""
        offered = proposal.offered
        count, offset = offered.sum(-1).tolist(), offered.long().argmax(-1).tolist()
        draft, sure = proposal.laws.token.tolist(), proposal.laws.confidence.tolist()
        forced = [min(len(text.queue), n) for text, n in zip(self.rows, count, strict=True)]
        drafts = [draft[b][offset[b] + forced[b] : offset[b] + count[b]] for b in range(len(self.rows))]
        pieces = [self._pieces(text, ids) for text, ids in zip(self.rows, drafts, strict=True)]
        asked = [bool(ids) for ids in drafts]
        passed, own, chance = self._score(pieces, asked)
        tokens, confidence = proposal.laws.token.clone(), proposal.laws.confidence.clone()
        transfer, committed = torch.zeros_like(offered), torch.zeros_like(self.loop.decode_steps)
        for b, text in enumerate(self.rows):
            queued, text.queue = text.queue[: forced[b]], text.queue[forced[b] :]
            if not count[b]:
                continue
            written = Verdict([], [], False)
            if asked[b]:
                first = sure[b][offset[b] + forced[b] :]
                settle = self._keep_own if self.rule.on_reject == "dlm" else self._follow
                written = settle(text, drafts[b], pieces[b], passed[b], own[b], chance[b], first)
            ids = (queued + written.tokens)[: count[b]]
            text.queue += (queued + written.tokens)[count[b] :]
            stops = [i for i, token in enumerate(ids) if token in self.own.stops]
            ids = ids[: stops[0] + 1] if stops else ids
            at = slice(offset[b], offset[b] + len(ids))
            tokens[b, at] = torch.tensor(ids, device=tokens.device)
            values = ([1.0] * len(queued) + written.confidence)[: len(ids)]
            confidence[b, at] = torch.tensor(values, device=tokens.device)
            transfer[b, at] = True
            committed[b] = len(ids)
        account_accepts(self.loop, committed, torch.tensor(asked, device=committed.device))
        return Decision(tokens, transfer, confidence)

    def _pieces(self, text: RowText, draft: list[int]) -> list[Piece]:
        """The guide's tokens for ``rest`` and the draft, up to the first drafted token that has no bytes or is unknown to the guide."""
        data, cuts, stop = b"", [], False
        for token in draft:
            if token in self.own.stops:
                stop = True
                break
            piece = self.own.pieces[token]
            if piece is None or (self.kind == "intersection" and piece not in self.guide.ids):
                break
            data += piece
            cuts.append(self.guide.ids.get(piece))
        if self.kind == "intersection":
            ids: list[Any] = self.guide.encode(text.rest) + cuts
        else:
            ids = self.guide.encode(text.rest + data)
        pieces, end = [], 0
        for token in ids:
            end += len(self.guide.pieces[token] or b"")
            pieces.append(Piece(token, end))
        if stop and self.guide.stops:
            pieces.append(Piece(self.guide.stops[0], end, stop=True))
        return pieces

    def _score(
        self, pieces: list[list[Piece]], asked: list[bool]
    ) -> tuple[list[list[bool]], list[list[int]], list[list[float]]]:
        """For each piece, and the token after none: does it pass, the guide's own token, and that token's probability."""
        loop, request, rule = self.loop, self.loop.request, self.rule
        empty: list[list[Any]] = [[] for _ in self.rows]
        if not any(asked):
            return empty, empty, empty
        fed, laws = [], []
        for text, row, here in zip(self.rows, pieces, asked, strict=True):
            # The law after the last settled token is needed even if its keys are there.
            text.cached = min(text.cached, len(text.ids) - 1)
            fed.append((text.ids[text.cached :] + [p.token for p in row[:-1]]) if here else [])
            laws.append(max(len(row), 1) if here else 0)
        device = loop.device
        length, most = max(map(len, fed)), max(laws)
        start = torch.tensor([text.cached for text in self.rows], device=device)
        ids = torch.tensor([row + [0] * (length - len(row)) for row in fed], device=device)
        lengths = torch.tensor([len(row) for row in fed], device=device)
        self._grow(int((start + lengths).max()))
        valid = torch.arange(length, device=device) < lengths[:, None]
        hidden = self.run.forward(ids, start, valid)
        account(loop, "guide_nfe", valid.any(-1))
        base = torch.tensor([len(text.ids) - 1 - text.cached for text in self.rows], device=device)
        number = torch.arange(most, device=device)
        source = (base[:, None] + number).clamp(max=length - 1)
        logits = self.model.head(hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1])))
        real = number < torch.tensor(laws, device=device)[:, None]
        if not bool((~logits.isnan().any(-1) | ~real).all()):
            raise ValueError("the guide's logits must be finite: got NaN")
        law = law_of(request, logits[..., : len(self.guide.pieces)], self.barred[: logits.shape[-1]])
        place = torch.tensor([len(text.ids) for text in self.rows], device=device)[:, None] + number
        fixed = torch.zeros_like(loop.decode_steps)
        own = law.argmax(-1)
        if request.temperature > 0:
            own = sample_law(law, loop.noise.uniform(place, fixed, STREAM_ACCEPT))
        drafted = torch.zeros_like(own)
        for b, row in enumerate(pieces):
            for j, piece in enumerate(row[:most]):
                token = int(own[b, j]) if piece.stop and int(own[b, j]) in self.guide.stops else piece.token
                drafted[b, j] = token
        uniform = loop.noise.uniform(place, fixed, STREAM_RESIDUAL)
        passed = rule.accepts(drafted, own, law, torch.ones_like(uniform), uniform)
        return passed.tolist(), own.tolist(), law.gather(-1, own[..., None])[..., 0].tolist()

    def _follow(
        self,
        text: RowText,
        draft: list[int],
        pieces: list[Piece],
        passed: list[bool],
        own: list[int],
        chance: list[float],
        sure: list[float],
    ) -> Verdict:
        """on_reject "ar": accepted pieces, then the guide's token, in the diffusion model's tokens; the guide settles on all of it."""
        accepted = _run(passed, len(pieces))
        settled = [piece.token for piece in pieces[:accepted]]
        data = self.guide.bytes_of(settled)
        stop = any(piece.stop for piece in pieces[:accepted])
        kept, at = [], 0
        for token in draft:
            piece = self.own.pieces[token]
            if piece is None or at + len(piece) > len(data):
                break
            kept.append(token)
            at += len(piece)
        confidence = sure[: len(kept)]
        if accepted < len(pieces) or not pieces:
            token = own[accepted]
            settled.append(token)
            stop = token in self.guide.stops
            data += b"" if stop else self.guide.bytes_of([token])
            tail = self.own.encode(data[at:])
            confidence = confidence + [chance[accepted]] + [1.0] * len(tail)
        else:
            tail = self.own.encode(data[at:])
            confidence = confidence + [1.0] * (len(tail) + 1)
        tokens = kept + tail + ([self.own.stops[0]] if stop else [])
        text.cached = len(text.ids) + min(accepted, max(len(pieces) - 1, 0))
        text.ids = text.ids + settled
        return Verdict(tokens, confidence[: len(tokens)], True)

    def _keep_own(
        self,
        text: RowText,
        draft: list[int],
        pieces: list[Piece],
        passed: list[bool],
        own: list[int],
        chance: list[float],
        sure: list[float],
    ) -> Verdict:
        """on_reject "dlm": the drafted tokens all of whose bytes lie in accepted pieces, one at least."""
        before = len(text.rest)
        # A piece of committed bytes alone is past judging.
        passed = [ok or (not piece.stop and piece.end <= before) for ok, piece in zip(passed, pieces, strict=False)]
        accepted = _run(passed, len(pieces))
        limit = pieces[accepted - 1].end if accepted else 0
        stopped = any(piece.stop for piece in pieces[:accepted])
        kept, data = [], text.rest
        for token in draft:
            piece = self.own.pieces[token]
            if token in self.own.stops and stopped and len(data) == limit:
                kept.append(token)
                break
            if piece is None or len(data) + len(piece) > limit:
                break
            kept.append(token)
            data += piece
        if not kept:
            kept = draft[:1]
            data += self.own.pieces[kept[0]] or b""
        settled = [piece for piece in pieces if piece.end <= len(data) and not piece.stop]
        text.cached = len(text.ids) + min(len(settled), max(len(pieces) - 1, 0))
        text.ids = text.ids + [piece.token for piece in settled]
        text.rest = data[settled[-1].end if settled else 0 :]
        return Verdict(kept, sure[: len(kept)], True)

    def _grow(self, needed: int) -> None:
        """Room for ``needed`` guide tokens; the guide may need more of them than the canvas has slots."""
        limit = getattr(getattr(self.model, "config", None), "max_positions", None)
        if limit is not None and needed > limit:
            raise ValueError(f"the guide's text must fit in its {limit} positions: it needs {needed}")
        if needed <= self.capacity:
            return
        old, self.capacity = self.run.store, 2 * needed
        fresh = CausalRun(self.model, len(self.rows), self.capacity)
        fresh.store.data[..., : old.capacity, :] = old.data[..., : old.capacity, :]
        self.run = fresh


def _run(passed: list[bool], count: int) -> int:
    """Length of the leading run of True among the first ``count``."""
    for index in range(count):
        if not passed[index]:
            return index
    return count
