"""Loss and accepted length of a drafter's training as one picture."""

from __future__ import annotations

import logging
from pathlib import Path

from dllm.training.curves import read_log

logger = logging.getLogger(__name__)

GROUPS = {"all": ("tab:blue", "held-out answers"), "no_loops": ("tab:green", "those that do not loop")}


def plot_draft_curves(log: Path, picture: Path) -> bool:
    """Training loss, accepted length over steps and acceptance by slot, from ``log.jsonl`` into a PNG; whole or not at all.

    Returns False, and says so at INFO, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no curves are drawn: matplotlib is not installed (pip install 'dllm-toolkit[training]')")
        return False
    lines = read_log(log)
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    training = [line for line in lines if "loss" in line]
    left.plot([x["step"] for x in training], [x["loss"] for x in training], color="0.45")
    measured = [line for line in lines if "held_out" in line]
    for group, (colour, label) in GROUPS.items():
        points = [(x["step"], x["held_out"][group]) for x in measured if group in x["held_out"]]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        middle.plot(steps, [v["accept_length"] for v in values], color=colour, marker="o", markersize=3, label=label)
        last = values[-1]["slots"]
        right.plot(range(1, len(last) + 1), last, color=colour, marker="o", markersize=3)
    left.set(xlabel="optimiser step", ylabel="training loss", title="Loss")
    middle.set(xlabel="optimiser step", ylabel="tokens per target forward", title="Accepted length (greedy)")
    right.set(
        xlabel="slot", ylabel="share of rounds that reach past it", title="Acceptance by slot, at the end", ylim=(0, 1)
    )
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if middle.lines:
        middle.legend(frameon=False)
    partial = picture.with_name(f".{picture.name}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(picture)
    finally:
        partial.unlink(missing_ok=True)
    return True
