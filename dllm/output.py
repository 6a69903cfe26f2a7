"""What a generation produced and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Stats:
    """Honest counts of one call or of one row of it.

    nfe: every forward of the main model (prefill, store and refresh included); guide_nfe, draft_nfe: forwards of helpers;
    useful_tokens: new tokens up to and without the stop; positions: valid query rows that the main model computed (a bucket's padding
    not counted); prefill_s, decode_s: seconds; accept_lengths: tokens committed per verify pass, bonus included.
    """

    nfe: int = 0
    guide_nfe: int = 0
    draft_nfe: int = 0
    useful_tokens: int = 0
    positions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """useful_tokens / nfe (0 when nothing ran)."""
        return self.useful_tokens / self.nfe if self.nfe else 0.0

    @property
    def tokens_per_second(self) -> float:
        """useful_tokens / decode_s (0 when nothing was timed)."""
        return self.useful_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived rates, for reports."""
        return {
            "nfe": self.nfe,
            "guide_nfe": self.guide_nfe,
            "draft_nfe": self.draft_nfe,
            "useful_tokens": self.useful_tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "positions": self.positions,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_second": self.tokens_per_second,
            "accept_lengths": list(self.accept_lengths),
        }


@dataclass
class HistoryFrame:
    """One denoise step of one row: ids of the generated slots, which are still masked, and which were committed in this step.

    step: denoise steps so far; nfe: the row's forwards so far (prefill, store and refresh included).
    """

    step: int
    nfe: int
    token_ids: list[int]
    masked: list[bool]
    new: list[bool]
    provisional_ids: list[int]


@dataclass
class GenerationOutput:
    """Result of ``generate``.

    texts: decoded new text, one a row (empty without a tokenizer); sequences [B, T] int64: new tokens without the stop token,
    right-padded; lengths: useful tokens of each row; finish_reasons: "stop" or "length"; stats: one for the call; row_stats: one a row;
    history: frames of each row if asked for.
    """

    texts: list[str]
    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[str]
    stats: Stats
    row_stats: list[Stats]
    history: list[list[HistoryFrame]] | None = None


@dataclass
class InfillOutput:
    """Result of ``infill``.

    texts: whole texts, the given parts unchanged; fills: the filled spans, one list a row (a plain str where there is one gap);
    fill_ids: their tokens, of which the first may begin with white space of the text before the gap (fills leave that out, for it is
    given); lengths: chosen lengths in tokens; scores: model score of the chosen fill, mean nats per predicted token;
    white_space_ids: for each gap the tokens before fill_ids that the model chose to write white space of the given text and nothing else,
    None where the text before the gap stood whole.
    """

    texts: list[str]
    fills: list[Any]
    fill_ids: list[list[list[int]]]
    lengths: list[list[int]]
    scores: list[float]
    stats: Stats
    row_stats: list[Stats]
    history: list[list[HistoryFrame]] | None = None
    white_space_ids: list[list[list[int] | None]] = field(default_factory=list)
