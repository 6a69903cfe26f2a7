"""From a run's entries to a Markdown table, one JSON file, the fitted cost table and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.bench.steps import fit_costs

Entry = Mapping[str, Any]


def markdown(entries: Sequence[Entry], environment: Mapping[str, str], rates: Mapping[str, float]) -> str:
    """One table a part; red gates are listed, never timed."""
    lines = ["# Benchmark", "", "; ".join(f"{k} {v}" for k, v in environment.items())]
    if rates:
        lines.append(
            f"measured copy rate {rates['copy'] / 1e12:.2f} TB/s (read + write), matrix rate {rates['matmul'] / 1e12:.0f} TFLOP/s; "
            "times are medians in CUDA graphs, p10 to p90 in brackets"
        )
    lines.append("")
    red = [e for e in entries if e.get("red_gate")]
    if red:
        lines += ["## Red gates (no times)", ""] + [f"- {e['name']}: {e['red_gate']}" for e in red] + [""]
    steps = [e for e in entries if e["part"] == "steps" and "ours" in e]
    if steps:
        lines += _table(
            "Steps",
            (
                "shape", "batch", "rows", "keys", "floor ms", "of bytes alone", "ours ms", "/ floor", "plain graph ms", "/ floor",
                "factor",
            ),
            [
                (
                    e["shape"], e["batch"], e["rows"], e["keys"], f"{e['floor_ms']:.3f}", f"{e['byte_floor_ms']:.3f}", _spread(e["ours"]),
                    f"{e['ours_over_floor']:.2f}", _spread(e["plain_graph"]), f"{e['plain_over_floor']:.2f}", f"{e['factor']:.2f}",
                )
                for e in steps
            ],
        )  # fmt: skip
    compiled = [e for e in entries if "plain_compiled" in e]
    eager = [e for e in steps if "plain_eager" in e]
    if compiled or eager:
        rows = [(e["name"], "plain, eager", _spread(e["plain_eager"])) for e in eager]
        rows += [(e["name"], "ours, eager", _spread(e["ours_eager"])) for e in eager]
        rows += [
            (e["name"].removesuffix(" compiled"), "plain, compiled, graph", _spread(e["plain_compiled"]))
            for e in compiled
        ]
        lines += _table("Other baselines", ("step", "run", "ms"), rows)
    kernels = [e for e in entries if e["part"] == "kernels" and "ours" in e]
    if kernels:
        lines += _table(
            "Kernels",
            ("kernel", "us", "GB/s", "share of copy", "baseline", "baseline us", "factor"),
            [
                (
                    e["name"], _spread(e["ours"], 1e3), f"{e['gb_per_s']:.0f}", f"{e['share']:.2f}", e["baseline_name"],
                    _spread(e["baseline"], 1e3), f"{e['factor']:.2f}",
                )
                for e in kernels
            ],
        )  # fmt: skip
    whole = [e for e in entries if e["part"] == "e2e" and "tokens_per_s" in e]
    if whole:
        lines += _table(
            "Generation",
            ("run", "tokens", "forwards", "tokens/s", "ms a forward", "call ms"),
            [
                (
                    e["name"], e["tokens"], e["nfe"], f"{e['tokens_per_s']:.0f}", f"{e['ms_per_forward']:.3f}",
                    f"{e['call_ms']:.1f}",
                )
                for e in whole
            ],
        )  # fmt: skip
    lines += _profiles([e for e in entries if "our_share" in e or "failed" in e])
    published = [e for e in entries if "ms_per_step" in e]
    if published:
        lines += _table(
            "Published LLaDA rule",
            ("run", "shape", "ms a step"),
            [(e["name"], e["shape"], f"{e['ms_per_step']:.2f}") for e in published],
        )
    costs = fit_costs(entries)
    if costs:
        lines += _table(
            "Fitted cost of our step, batch 1: a + b * rows + c * keys",
            ("shape", "a ms", "b us/row", "c us/1k keys", "worst error"),
            [
                (s, f"{c['a_ms']:.3f}", f"{1e3 * c['b_ms']:.2f}", f"{1e6 * c['c_ms']:.1f}", f"{100 * c['worst']:.0f} %")
                for s, c in costs.items()
            ],
        )
    return "\n".join(lines)


def _profiles(entries: Sequence[Entry]) -> list[str]:
    """The methods' shares of GPU time, and the largest kernels of each."""
    traced = [e for e in entries if "our_share" in e]
    lines = []
    if traced:
        kinds = ("ours", "cublas", "attention", "memory", "other")
        lines += _table(
            "GPU time",
            ("run", "steps", "GPU us a step", *(f"{kind} %" for kind in kinds), "graph launches", "host calls while decoding"),
            [
                (
                    e["name"], e["steps"], f"{e['gpu_us_a_step']:.1f}", *(f"{100 * e['shares'].get(kind, 0.0):.1f}" for kind in kinds),
                    e["graph_launches"], _calls(e["host"] if e["decoding"] is None else e["decoding"]),
                )
                for e in traced
            ],
        )  # fmt: skip
        lines += _table(
            "Largest kernels",
            ("run", "kernel", "share %", "us", "runs a step"),
            [
                (e["name"], name, f"{100 * share:.1f}", f"{us:.2f}", f"{runs:.1f}")
                for e in traced
                for name, share, us, runs in e["kernels"]
            ],
        )
    return lines + [line for e in entries if "failed" in e for line in (f"{e['name']}: failed: {e['failed']}", "")]


def _calls(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counted.items()) or "none"


def write(
    folder: Path, entries: Sequence[Entry], environment: Mapping[str, str], rates: Mapping[str, float], picture: bool
) -> list[Path]:
    """Write report.md, results.json (entries, environment, rates, costs) and, where asked, steps.png; the paths."""
    whole = {
        "environment": dict(environment),
        "rates": dict(rates),
        "costs": fit_costs(entries),
        "entries": list(entries),
    }
    paths = [
        write_text_atomic(folder / "report.md", markdown(entries, environment, rates)),
        write_text_atomic(folder / "results.json", json.dumps(whole, indent=1)),
    ]
    if picture and any("ours" in e for e in entries if e["part"] == "steps"):
        paths.append(draw(entries, folder / "steps.png"))
    return paths


def draw(entries: Sequence[Entry], path: Path) -> Path:
    """Bars against the floor (one a shape), and cost against context and batch. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [e for e in entries if e["part"] == "steps" and "ours" in e]
    figure, (bars, context, batch) = plt.subplots(1, 3, figsize=(15, 4.5))
    shapes = list(dict.fromkeys(e["shape"] for e in steps))
    chosen = [next(e for e in steps if e["shape"] == s) for s in shapes]
    places = range(len(chosen))
    for offset, key, label in ((-0.2, "plain_over_floor", "plain PyTorch, graph"), (0.2, "ours_over_floor", "dllm")):
        bars.bar([p + offset for p in places], [e[key] for e in chosen], 0.38, label=label)
    bars.axhline(1.0, color="black", linewidth=1)
    bars.set_yscale("log")
    bars.set_xticks(list(places), [f"{e['shape']}\n{e['rows']} rows, {e['keys']} keys" for e in chosen], fontsize=7)
    bars.set_title("time of a step / floor")
    bars.legend()
    for axes, varied, fixed, label in ((context, "keys", "batch", "stored keys"), (batch, "batch", "keys", "batch")):
        for shape in shapes:
            mine = [e for e in steps if e["shape"] == shape and e["rows"] == chosen[shapes.index(shape)]["rows"]]
            base = chosen[shapes.index(shape)][fixed]
            points = sorted((e[varied], e["ours"]["ms"], e["plain_graph"]["ms"]) for e in mine if e[fixed] == base)
            if len(points) > 1:
                (line,) = axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=shape)
                axes.plot([p[0] for p in points], [p[2] for p in points], linestyle=":", color=line.get_color())
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_title(f"ms a step against {label} (dotted: plain)")
        if axes.get_lines():
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _spread(timing: Mapping[str, float], scale: float = 1.0) -> str:
    digits = 2 if scale > 1 else 3
    low, middle, high = (f"{scale * timing[k]:.{digits}f}" for k in ("p10", "ms", "p90"))
    return f"{middle} [{low}, {high}]"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows] + [""]
