"""A request's block length, predicted from its prefill (BlockPilot, arXiv:2606.31315).

A small classifier reads what the prefill leaves behind the last prompt token and names one of a few lengths. It sees nothing of the
drafts, so a drafter's text stays the target's own. Letters: C lengths, D hidden width, k best logits, F features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dllm.types import DecodeSpec, PolicyState

CONFIG_NAME = "block_pilot.json"
WEIGHTS_NAME = "block_pilot.safetensors"
FEATURES = ("hidden", "top_logits", "logits")
Head = Callable[[Tensor], Tensor]
"""hidden [B, D] -> logits [B, V]."""


@dataclass(frozen=True)
class BlockPilotConfig:
    """Shape of a pilot.

    lengths: block lengths to choose from, ascending, a draft's anchor included (1: plain decoding). side: "draft" or "denoise".
    features: of "hidden" (last hidden state), "top_logits" (best logits), "logits" (the published input: the whole vocabulary).
    sizes: width of each feature. width: hidden units (0: logistic regression). residual: a second hidden layer around which the first is
    added, as published. dropout: in training.
    """

    lengths: tuple[int, ...] = (1, 2, 4, 6, 8)
    side: Literal["draft", "denoise"] = "draft"
    features: tuple[str, ...] = ("hidden", "top_logits")
    sizes: tuple[int, ...] = (576, 64)
    width: int = 32
    residual: bool = False
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in ("lengths", "features", "sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = [isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in (*self.lengths, *self.sizes)]
        if not self.lengths or not all(whole) or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(
                f"lengths must be ascending ints >= 1, and sizes ints >= 1: got lengths {self.lengths}, sizes {self.sizes}"
            )
        if self.side not in ("draft", "denoise"):
            raise ValueError(f"side must be 'draft' or 'denoise': got {self.side!r}")
        if not self.features or len(set(self.features)) < len(self.features) or not set(self.features) <= set(FEATURES):
            raise ValueError(f"features must be some of {FEATURES}, each once: got {self.features}")
        if len(self.sizes) != len(self.features):
            raise ValueError(f"sizes must have one width a feature of {self.features}: got {self.sizes}")
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 0:
            raise ValueError(f"width must be an int >= 0: got {self.width!r}")
        if self.residual and not self.width:
            raise ValueError("residual needs width > 0: got 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1): got {self.dropout}")


class PilotNetwork(nn.Module):
    """Standardised features [B, F] fp32 -> scores [B, C]. mean, scale [F]: buffers, set from the training requests."""

    mean: Tensor
    scale: Tensor

    def __init__(self, config: BlockPilotConfig) -> None:
        super().__init__()
        size, width, out = sum(config.sizes), config.width, len(config.lengths)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.first = nn.Linear(size, width) if width else None
        self.second = nn.Linear(width, width) if config.residual else None
        self.last = nn.Linear(width or size, out)
        self.dropout = config.dropout

    def forward(self, features: Tensor) -> Tensor:
        x = (features - self.mean) / self.scale
        if self.first is not None:
            x = F.dropout(F.relu(self.first(x)), self.dropout, self.training)
        if self.second is not None:
            x = x + self.second(x)
        return self.last(x)


def pilot_features(
    config: BlockPilotConfig, hidden: Tensor | None, top_logits: Tensor | None, head: Head | None = None
) -> Tensor:
    """What the network reads, [B, F] fp32, from hidden [B, D] and top_logits [B, k], best first.

    Logits count up to a constant, so they are taken relative to their log-sum. Raises ValueError for a feature that is missing, has
    another width, or is not finite.
    """
    parts = []
    for name, size in zip(config.features, config.sizes, strict=True):
        value = top_logits if name == "top_logits" else hidden
        if value is None:
            raise ValueError(f"a BlockPilot that reads {name} needs what the prefill gave: got None")
        if name == "logits":
            if head is None:
                raise ValueError("a BlockPilot that reads the whole vocabulary needs head, hidden -> logits: got None")
            value = head(value)
        value = value.float()
        if value.shape[-1] != size:
            raise ValueError(f"{name} must be {size} wide, as in training: got {value.shape[-1]}")
        parts.append(value if name == "hidden" else torch.log_softmax(value, dim=-1))
    features = torch.cat(parts, dim=-1)
    if not bool(torch.isfinite(features).all()):
        raise ValueError("features of a BlockPilot must be finite: got NaN or infinity")
    return features


@dataclass(frozen=True, eq=False)
class BlockPilot:
    """One length for a request, from its prefill; a ``BlockPolicy``.

    As ``block_length=`` of ``speculative_generate`` (side "draft"): never more than the drafter's own block, asked each round and, as
    the prefill stays what it is, the same each time. The output is that without a policy. As ``block_length=`` of a bidirectional
    ``DiffusionLM`` (side "denoise"): asked for each block from the row before the gap as last computed, at most the slots left. There
    the length changes the text, and which text is better is not among what it learnt.

    head: what makes logits of hidden states, needed where features name "logits" (a decoder's ``head``, a model's ``lm_head``).
    training: what it was trained on, for the record.
    """

    config: BlockPilotConfig
    network: PilotNetwork
    head: Head | None = None
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "logits" in self.config.features and self.head is None:
            raise ValueError("head must be given (hidden [B, D] -> logits [B, V]): features name 'logits'")
        self.network.eval().requires_grad_(False)

    def check(self, spec: DecodeSpec) -> None:
        """Raises ValueError for a diffusion model whose block length is not free, and for a pilot of drafts."""
        if self.config.side != "denoise":
            raise ValueError(
                "block_length of a diffusion model needs a BlockPilot of side 'denoise': got one of 'draft'"
            )
        if spec.attention != "bidirectional":
            raise ValueError(
                f"block_length BlockPilot needs bidirectional attention: got {spec.attention}, where a block's length is part of who "
                "sees whom and was fixed in training"
            )

    @torch.no_grad()
    def choose(self, hidden: Tensor | None, top_logits: Tensor | None) -> Tensor:
        """Lengths [B] int64 of requests whose prefill left hidden [B, D] and top_logits [B, k]."""
        features = pilot_features(self.config, hidden, top_logits, self.head)
        best = self.network(features.to(self.network.mean.device)).argmax(-1)
        return torch.tensor(self.config.lengths)[best.cpu()]

    def next(self, state: PolicyState) -> int:
        """Length of the coming block of one request."""
        # A gap of known size is what only the denoising loop has.
        side = "draft" if state.total is None else "denoise"
        if side != self.config.side:
            raise ValueError(f"this BlockPilot was trained for side {self.config.side!r}: got a state of side {side!r}")
        length = int(self.choose(state.hidden, state.top_logits)[0])
        return min(length, state.default if side == "draft" else int(state.remaining))

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        return sum(p.numel() for p in self.network.parameters())

    def describe(self) -> str:
        """One line: what it reads, chooses from and weighs."""
        inputs = " + ".join(f"{n} ({s})" for n, s in zip(self.config.features, self.config.sizes, strict=True))
        return (
            f"BlockPilot for {self.config.side}: {inputs} -> lengths {list(self.config.lengths)}, {self.num_parameters:,} parameters, "
            f"{4e-6 * self.num_parameters:.2f} MB in fp32"
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``block_pilot.json`` and ``block_pilot.safetensors``; the folder is made. head is the model's and is not kept."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.network.state_dict().items()}, folder / WEIGHTS_NAME)
        text = json.dumps({**asdict(self.config), "training": dict(self.training)}, indent=2)
        (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, head: Head | None = None, device: torch.device | str = "cpu"
    ) -> BlockPilot:
        """What ``save_pretrained`` wrote. Raises FileNotFoundError, or ValueError naming the file and what is wrong with it."""
        folder = Path(folder)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"folder must hold {name}: {folder} has none")
        raw = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        training = raw.pop("training", {})
        unknown = sorted(set(raw) - {f.name for f in fields(BlockPilotConfig)})
        if unknown:
            raise ValueError(f"{folder / CONFIG_NAME} has the unknown field {unknown[0]!r}")
        config = BlockPilotConfig(**raw)
        network = PilotNetwork(config)
        found, wanted = load_file(folder / WEIGHTS_NAME), network.state_dict()
        shapes = {k: tuple(v.shape) for k, v in found.items()}
        if shapes != {k: tuple(v.shape) for k, v in wanted.items()}:
            raise ValueError(
                f"{folder / WEIGHTS_NAME} must hold { ({k: tuple(v.shape) for k, v in wanted.items()}) }: got {shapes}"
            )
        for name, value in found.items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{folder / WEIGHTS_NAME}: {name} must be finite")
        network.load_state_dict(found)
        return cls(config, network.to(device), head, training)


def published_config(
    vocab_size: int, lengths: tuple[int, ...] = (14, 15, 16, 17, 18), side: Literal["draft", "denoise"] = "draft"
) -> BlockPilotConfig:
    """The original's network: the whole vocabulary in, two layers of 2048 with a residual; 0.32 G parameters at 151,936 entries."""
    return BlockPilotConfig(lengths, side, ("logits",), (vocab_size,), 2048, True, 0.2)


def parameters_of(config: BlockPilotConfig) -> int:
    """Weights and biases of a shape, without building it."""
    size, width, out = sum(config.sizes), config.width, len(config.lengths)
    inner = (size + 1) * width + ((width + 1) * width if config.residual else 0)
    return inner + (math.prod((width or size, out)) + out)
