"""Block lengths that end where the text does (AdaBlock-dLLM, Lu et al. 2025, arXiv:2509.26432)."""

from __future__ import annotations

from dataclasses import dataclass

from dllm.samplers.quota import number
from dllm.types import DecodeSpec, PolicyState


@dataclass(frozen=True)
class AdaBlock:
    """End a block behind the surest delimiter that its first forward expects, if that is sure enough; else the fixed length.

    Looked at are the coming min(floor(lookahead * gap), slots left) slots whose arg-max is one of delimiter_ids; the one of highest
    confidence (ties: the first) ends the block if its confidence >= threshold. delimiter_ids: 198 is a newline in the vocabularies of
    LLaDA and Dream. threshold: 0.3 published for LLaDA, 0.5 for Dream; above 1 every block has the fixed length. lookahead: part of the
    gap, 0.25 published. default: the fixed length, None: the model's own. The blocks of a gap follow each other without a hole, and the
    last one is cut to it.
    """

    threshold: float = 0.3
    delimiter_ids: tuple[int, ...] = (198,)
    lookahead: float = 0.25
    default: int | None = None

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0)
        number("lookahead", self.lookahead, 0)
        if self.lookahead > 1:
            raise ValueError(f"lookahead must be <= 1, a part of the gap: got {self.lookahead}")
        object.__setattr__(self, "delimiter_ids", tuple(self.delimiter_ids))
        if not self.delimiter_ids or any(
            isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.delimiter_ids
        ):
            raise ValueError(f"delimiter_ids must be ids >= 0, one at least: got {self.delimiter_ids}")
        if self.default is not None and (
            isinstance(self.default, bool) or not isinstance(self.default, int) or self.default < 1
        ):
            raise ValueError(f"default must be an int >= 1 or None: got {self.default!r}")

    def check(self, spec: DecodeSpec) -> None:
        """Raises ValueError for models with blocks of their own, for models without masks, and for ids that there are not."""
        if spec.attention != "bidirectional":
            raise ValueError(
                f"block_length AdaBlock needs bidirectional attention: got {spec.attention}, where a block's length is part of who sees "
                "whom and was fixed in training"
            )
        if spec.mask_token_id is None:
            raise ValueError("block_length AdaBlock needs a model with a mask token: got one without")
        if max(self.delimiter_ids) >= spec.vocab_size:
            raise ValueError(f"delimiter_ids must be in [0, {spec.vocab_size}): got {self.delimiter_ids}")

    def window(self, total: int, remaining: int) -> int:
        """Slots to look at, of a gap of ``total`` slots with ``remaining`` left."""
        return min(int(self.lookahead * total), remaining)

    def next(self, state: PolicyState) -> int:
        """state.delimiter_confidence [1, W] fp32 -> length of the block, at most state.remaining."""
        remaining = int(state.remaining)
        length = min(state.default if self.default is None else self.default, remaining)
        sure = state.delimiter_confidence
        if sure is None or sure.shape[-1] == 0:
            return length
        # argmax takes the first of equals.
        best = int(sure[0].argmax())
        found = float(sure[0, best])
        return best + 1 if found > 0 and found >= self.threshold else length
