"""Training of a BlockPilot: which block length is fastest for a request, learnt from recorded prompts (arXiv:2606.31315).

    dllm train-block-pilot --out pilot --drafter smollm2-135m-dfly --prompts chat=chat.jsonl --prompts maths=gsm8k.jsonl@0:60

The label of a prompt is the length with most tokens per second under the machine's cost table; the paper's label, the length with the
longest mean accepted length, is an option. Recording: ``block_pilot_traces.py``; costs: ``block_pilot_costs.py``; the command:
``block_pilot_command.py``.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.samplers.block_pilot import BlockPilot, BlockPilotConfig, Head, PilotNetwork, pilot_features
from dllm.training.block_pilot_costs import Costs, milliseconds, useful_tokens
from dllm.training.block_pilot_traces import PromptTrace

logger = logging.getLogger(__name__)

LABELS = ("speed", "accept_length")
OBJECTIVES = ("label", "expected")


@dataclass(frozen=True)
class PilotTrainConfig:
    """label: "speed" (tokens per second under the costs) or "accept_length" (the paper's). objective: "label" is cross-entropy with the
    best length; "expected" the expected share of the best length's figure, so that a near miss is cheap and a far one is not.
    held_out: share of each group's prompts that decides when to stop; patience: epochs without a better held-out loss.
    """

    label: str = "speed"
    objective: str = "label"
    held_out: float = 0.25
    max_epochs: int = 400
    patience: int = 40
    batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label must be one of {LABELS}: got {self.label!r}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {OBJECTIVES}: got {self.objective!r}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1): got {self.held_out}")
        for name in ("max_epochs", "patience", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1: got {getattr(self, name)}")
        if not self.learning_rate > 0 or self.weight_decay < 0:
            raise ValueError(
                f"learning_rate must be > 0 and weight_decay >= 0: got {self.learning_rate} and {self.weight_decay}"
            )


def merits(traces: Sequence[PromptTrace], lengths: Sequence[int], label: str, costs: Costs | None) -> Tensor:
    """[N, C] what is maximised: tokens per second, or mean accepted length. Ties of the label go to the shorter block.

    Raises ValueError without traces, without costs where they are needed, and for a trace that lacks a length.
    """
    if not traces:
        raise ValueError("traces must hold one prompt at least: got none")
    for trace in traces:
        if not set(lengths) <= set(trace.counts):
            raise ValueError(
                f"traces must hold the lengths {list(lengths)}: prompt {trace.key} has {sorted(trace.counts)}"
            )
    if label == "accept_length":
        return torch.tensor([[t.counts[n].accept_length for n in lengths] for t in traces], dtype=torch.float64)
    if costs is None:
        raise ValueError("costs must be given for label 'speed': got None")
    return torch.from_numpy(1000 * useful_tokens(traces, lengths) / milliseconds(traces, lengths, costs))


def split_prompts(groups: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(for training, held out): ``share`` of every group, of two prompts one at least. Raises ValueError where no group has two."""
    rng = np.random.default_rng(seed)
    kept: list[int] = []
    held: list[int] = []
    for group in sorted(set(groups)):
        order = rng.permutation([i for i, g in enumerate(groups) if g == group]).tolist()
        cut = min(max(round(share * len(order)), 1), len(order) - 1)
        held += order[:cut]
        kept += order[cut:]
    if not kept or not held:
        raise ValueError(f"traces must hold two prompts of a group at least: got groups {sorted(groups)}")
    return sorted(kept), sorted(held)


def train_pilot(
    shape: BlockPilotConfig,
    config: PilotTrainConfig,
    traces: Sequence[PromptTrace],
    costs: Costs | None,
    head: Head | None = None,
    log: Path | None = None,
) -> BlockPilot:
    """The network of the epoch with the lowest held-out loss; one JSON line an epoch into ``log``. Deterministic."""
    torch.manual_seed(config.seed)
    merit = merits(traces, shape.lengths, config.label, costs)
    relative = (merit / merit.max(dim=1, keepdim=True).values).float()
    labels = merit.argmax(dim=1)
    with torch.no_grad():
        inputs = pilot_features(
            shape, torch.stack([t.hidden for t in traces]), torch.stack([t.top_logits for t in traces]), head
        )
    kept, held = split_prompts([t.group for t in traces], config.held_out, config.seed)
    network = PilotNetwork(shape)
    network.mean.copy_(inputs[kept].mean(0))
    # A feature that is all but constant in training must not become large elsewhere.
    spread = inputs[kept].std(0, correction=0)
    network.scale.copy_(spread.clamp(min=float(spread.median()) * 0.1 + 1e-6))
    optimiser = torch.optim.AdamW(network.parameters(), config.learning_rate, weight_decay=config.weight_decay)

    def loss_of(rows: Sequence[int]) -> Tensor:
        scores = network(inputs[list(rows)])
        if config.objective == "label":
            return F.cross_entropy(scores, labels[list(rows)])
        return 1 - (torch.softmax(scores, -1) * relative[list(rows)]).sum(-1).mean()

    best, best_loss, best_epoch, lines = copy.deepcopy(network.state_dict()), float("inf"), 0, []
    generator = torch.Generator().manual_seed(config.seed)
    for epoch in range(config.max_epochs + 1):
        total = 0.0
        if epoch:
            network.train()
            order = [kept[i] for i in torch.randperm(len(kept), generator=generator).tolist()]
            for at in range(0, len(order), config.batch):
                part = order[at : at + config.batch]
                optimiser.zero_grad()
                loss = loss_of(part)
                loss.backward()
                optimiser.step()
                total += float(loss.detach()) * len(part) / len(order)
        network.eval()
        line: dict[str, Any] = {"epoch": epoch, **({"loss": total} if epoch else {})}
        with torch.no_grad():
            held_loss = float(loss_of(held))
            for name, rows in (("training", kept), ("held_out", held)):
                chosen = network(inputs[rows]).argmax(-1)
                line[name] = {
                    "loss": float(loss_of(rows)),
                    "accuracy": float((chosen == labels[rows]).float().mean()),
                    "of_best": float(relative[rows].gather(1, chosen[:, None]).mean()),
                }
        lines.append(line)
        if held_loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(network.state_dict()), held_loss, epoch
        if epoch - best_epoch >= config.patience:
            break
    network.load_state_dict(best)
    if log is not None:
        log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    final = lines[best_epoch]
    counts = np.bincount(labels.numpy(), minlength=len(shape.lengths)).tolist()
    training = {
        **asdict(config),
        "prompts": len(kept),
        "held_out_prompts": len(held),
        "best_epoch": best_epoch,
        "epochs": len(lines) - 1,
        "labels": {str(n): c for n, c in zip(shape.lengths, counts, strict=True)},
        "held_out_result": final["held_out"],
    }
    logger.info(
        "best epoch %d of %d: held-out loss %.4f, accuracy %.3f, %.3f of the best length's figure; labels %s",
        best_epoch,
        len(lines) - 1,
        best_loss,
        final["held_out"]["accuracy"],
        final["held_out"]["of_best"],
        training["labels"],
    )
    return BlockPilot(shape, network, head, training)


def plot_pilot_curves(log: Path, picture: Path) -> bool:
    """Loss, accuracy and share of the best length's figure over epochs, from ``log.jsonl`` into a PNG; whole or not at all.

    Returns False, and says so at INFO, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no curves are drawn: matplotlib is not installed (pip install 'dllm-toolkit[training]')")
        return False
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"loss": "Loss", "accuracy": "Best length named", "of_best": "Share of the best length's figure"}
    for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for name, colour in (("training", "0.45"), ("held_out", "tab:blue")):
            axes.plot(
                [x["epoch"] for x in lines], [x[name][key] for x in lines], color=colour, label=name.replace("_", "-")
            )
        axes.set(xlabel="epoch", title=title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    partial = picture.with_name(f".{picture.name}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(picture)
    finally:
        partial.unlink(missing_ok=True)
    return True
