"""What one adaptation is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dllm.training.base import SHIPPED_BASE


@dataclass(frozen=True)
class AdaptConfig:
    """One adaptation.

    base: shipped name or folder; data: files that ``load_documents`` reads, the last ``held_out`` documents of the first one are never
    trained on; answers: files with answers of the base itself, drawn with probability answer_share.
    mask_token_id, filler_token_id, start_token_id: existing tokens that the texts do not use (known for the shipped base).
    Either steps or minutes (training alone, compilation not counted). batch sequences of ``rows`` rows make a step.
    learning_rate is for LoRA, norm_learning_rate for norms and mask row; both fall on a cosine after ``warmup`` steps.
    tail_share, slot_decay: see ``CorruptionConfig``; certainty_weight: see ``slot_loss``.
    merged_updates: add LoRA's updates to the weights, not to the outputs (see ``LoRALinear``).
    resume: folder of an adapter to go on from (weights only). attention_kernel: "auto" times SDPA and FlexAttention on CUDA.
    """

    out: Path
    data: tuple[Path, ...]
    attention: Literal["block_causal", "bidirectional"] = "block_causal"
    base: str = SHIPPED_BASE
    answers: tuple[Path, ...] = ()
    answer_share: float = 0.5
    rank: int = 24
    alpha: float | None = None
    merged_updates: bool = False
    block_length: int = 8
    mask_token_id: int | None = None
    filler_token_id: int | None = None
    start_token_id: int | None = None
    steps: int | None = None
    minutes: float | None = None
    batch: int = 16
    rows: int = 2048
    learning_rate: float = 1.5e-3
    norm_learning_rate: float = 3e-4
    warmup: int = 60
    clip: float = 1.0
    infill_share: float = 0.5
    noisy_copies: int = 2
    complementary: bool = True
    tail_share: float = 0.0
    slot_decay: float = 1.0
    certainty_weight: float = 0.0
    boundary_weight: float | None = None
    held_out: int = 500
    eval_batches: int = 4
    eval_every_s: float = 30.0
    save_every_s: float = 120.0
    workers: int = 4
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    attention_kernel: Literal["auto", "sdpa", "flex"] = "auto"
    compiled: bool | None = None
    resume: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"exactly one of steps and minutes must be given: got {self.steps} and {self.minutes}")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise ValueError(f"steps must be >= 1, minutes > 0: got {self.steps} and {self.minutes}")
        if not self.data:
            raise ValueError("data must name at least one file: got none")
        for name in ("rank", "batch", "rows", "eval_batches", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if not 0 <= self.answer_share <= 1:
            raise ValueError(f"answer_share must be in [0, 1]: got {self.answer_share}")
        if self.certainty_weight < 0:
            raise ValueError(f"certainty_weight must be >= 0: got {self.certainty_weight}")
        for name, accepted in (
            ("attention", ("block_causal", "bidirectional")),
            ("dtype", ("auto", "bfloat16", "float32")),
            ("attention_kernel", ("auto", "sdpa", "flex")),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}: got {getattr(self, name)!r}")

    @property
    def lora_alpha(self) -> float:
        """``alpha``, twice the rank where none was given."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
