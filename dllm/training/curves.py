"""Loss and accuracy curves of an adaptation as one picture."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

COLOURS = {"training": "0.65", "generation": "tab:blue", "infill": "tab:orange", "boundary": "tab:green"}
LABELS = {
    "training": "training batches",
    "generation": "held-out answers",
    "infill": "held-out gaps",
    "boundary": "first token after a gap",
}


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``log.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def plot_curves(log: Path, picture: Path) -> bool:
    """Masked cross-entropy and masked accuracy over steps, from ``log.jsonl`` into a PNG; whole or not at all.

    Returns False, and says so at INFO, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no curves are drawn: matplotlib is not installed (pip install 'dllm-toolkit[training]')")
        return False
    lines = read_log(log)
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [line["step"] for line in lines if "loss" in line]
    left.plot(steps, [x["loss"] for x in lines if "loss" in x], color=COLOURS["training"], label=LABELS["training"])
    right.plot(
        steps, [x["accuracy"] for x in lines if "loss" in x], color=COLOURS["training"], label=LABELS["training"]
    )
    measured = [line for line in lines if "held_out" in line]
    for kind in ("generation", "infill", "boundary"):
        points = [(line["step"], line["held_out"][kind]) for line in measured if kind in line["held_out"]]
        if not points:
            continue
        style: dict[str, Any] = {"color": COLOURS[kind], "marker": "o", "markersize": 3, "label": LABELS[kind]}
        if kind == "boundary":
            style |= {"linestyle": ":", "marker": None}
        left.plot([s for s, _ in points], [v["cross_entropy"] for _, v in points], **style)
        right.plot([s for s, _ in points], [v["accuracy"] for _, v in points], **style)
    left.set(xlabel="optimiser step", ylabel="masked cross-entropy (nats per token)", title="Loss")
    right.set(xlabel="optimiser step", ylabel="masked accuracy", title="Top token is right", ylim=(0, 1))
    # The first tenth is far above the rest and would flatten it; every curve's later part must be inside.
    last = max((line["step"] for line in lines), default=0)
    late = [x["loss"] for x in lines if "loss" in x and x["step"] >= last / 10]
    late += [v["cross_entropy"] for x in measured if x["step"] >= last / 10 for v in x["held_out"].values()]
    if late:
        left.set_ylim(0, max(1.1 * max(late), 1.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, loc="upper right")
    partial = picture.with_name(f".{picture.name}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(picture)
    finally:
        partial.unlink(missing_ok=True)
    return True
