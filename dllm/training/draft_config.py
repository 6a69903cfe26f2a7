"""What one training of drafters is made of, and the shape of a new drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dllm.drafters.config import DraftConfig, default_target_layer_ids
from dllm.model.decoder import DecoderConfig
from dllm.training.base import SHIPPED_BASE
from dllm.training.draft_loss import DraftLoss

KINDS = ("dflash", "dfly")


@dataclass(frozen=True)
class DraftTrainConfig:
    """One training of one drafter, or of several on the same batches.

    out: the drafter's folder (with several kinds: one folder a kind inside it). target: shipped name or folder of the AR model. data,
    answers, answer_share, held_out: as in ``AdaptConfig``; documents whose answer loops are not trained on. num_layers,
    intermediate_size, correction_width: the drafter's shape (None: the target's widths). num_taps tapped layers by the published rule,
    or target_layer_ids. Either steps or minutes (compilation and the answers to measure on are not counted). A step takes ``batch``
    sequences of ``length`` tokens with ``anchors`` blocks each. learning_rate falls on a cosine after ``warmup`` steps. balance_taps: see
    ``tap_scales``. eval_prompts held-out prompts are answered by the target, with eval_new_tokens at most. resume: a drafter's folder
    (laid out like ``out``) to go on from: weights only, so that warm-up and schedule start again.
    """

    out: Path
    data: tuple[Path, ...]
    kinds: tuple[str, ...] = ("dfly",)
    target: str = SHIPPED_BASE
    answers: tuple[Path, ...] = ()
    answer_share: float = 0.6
    num_layers: int = 2
    intermediate_size: int | None = None
    correction_width: int | None = None
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    block_length: int = 8
    mask_token_id: int | None = None
    steps: int | None = None
    minutes: float | None = None
    batch: int = 16
    length: int = 1024
    anchors: int = 128
    loss: DraftLoss = field(default_factory=DraftLoss)
    optimiser: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: int = 100
    balance_taps: bool = True
    clip: float = 1.0
    chunk: int = 16384
    held_out: int = 500
    eval_prompts: int = 200
    eval_new_tokens: int = 256
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
        if not self.kinds or len(set(self.kinds)) != len(self.kinds) or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be distinct ones of {', '.join(KINDS)}: got {', '.join(self.kinds)}")
        for name in ("num_layers", "batch", "anchors", "chunk", "held_out", "eval_prompts", "eval_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if self.block_length < 2 or self.length <= self.block_length:
            raise ValueError(
                f"block_length must be >= 2 and length above it: got {self.block_length} and {self.length}"
            )
        if not 0 <= self.answer_share <= 1:
            raise ValueError(f"answer_share must be in [0, 1]: got {self.answer_share}")
        for name, accepted in (
            ("optimiser", ("muon", "adamw")),
            ("dtype", ("auto", "bfloat16", "float32")),
            ("attention_kernel", ("auto", "sdpa", "flex")),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}: got {getattr(self, name)!r}")

    def folder(self, kind: str, root: Path) -> Path:
        """Where the drafter of a kind lies under ``root``."""
        return root if len(self.kinds) == 1 else root / kind


def drafter_config(config: DraftTrainConfig, kind: str, target: DecoderConfig, mask_token_id: int) -> DraftConfig:
    """The shape of a new drafter for a target: the target's widths, heads with QK-norm, as many layers as asked for."""
    ids = config.target_layer_ids or tuple(default_target_layer_ids(target.num_layers, config.num_taps))
    body = DecoderConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_layers=config.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        qk_norm=True,
        tie_embeddings=True,
        rope_scaling=target.rope_scaling,
    )
    return DraftConfig(
        kind="dfly" if kind == "dfly" else "dflash",
        layout="angelspec" if kind == "dfly" else "z-lab",
        body=body,
        target_layer_ids=tuple(ids),
        mask_token_id=mask_token_id,
        block_length=config.block_length,
        windows=(None,) * config.num_layers,
        causal=(False,) * config.num_layers,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        correction_width=(config.correction_width or target.hidden_size) if kind == "dfly" else None,
    )
