"""Quality and cost of an adapted diffusion LM, from one run: parallel decoding against one token per forward, and infill with a suffix.

Dataset: held-out conversations (the last 500 of an npz are never trained on) and, for infill, a JSONL of five-sentence windows.
Metric: the harness of ``measure.py`` (tokens per forward by ``Stats``, log-likelihood under a judge, length, loops), paired.

    python -m dllm.evals.quality --model smollm2-135m-bd8 --conversations train.npz --stories aesop_infill.jsonl --out results
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.judge import Judge
from dllm.evals.measure import Measurement, compare, measure, render_table
from dllm.evals.statistics import Interval, bootstrap_mean, paired_difference
from dllm.likelihood import chain_log_likelihood
from dllm.pipeline import DiffusionLM
from dllm.prompts import encode_text
from dllm.samplers.free_dave import FreeDave
from dllm.target import load_target
from dllm.training.data import held_out, load_documents

app = typer.Typer(add_completion=False)
PARTS = ("decoding", "suffix", "lengths")


def held_out_prompts(archive: Path, tokenizer: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids without the stop) of the first ``count`` held-out conversations of an npz."""
    _, measured = held_out(load_documents(archive, tokenizer))
    rows = []
    for i in range(min(count, len(measured))):
        ids, prompt = measured[i]
        answer = [int(t) for t in ids[prompt:]]
        rows.append(
            ([int(t) for t in ids[:prompt]], answer[:-1] if answer[-1:] == [tokenizer.eos_token_id] else answer)
        )
    return rows


def decoding(
    lm: DiffusionLM,
    judge: Judge,
    prompts: Sequence[list[int]],
    settings: dict[str, dict[str, Any]],
    max_new_tokens: int,
    batch: int,
) -> list[Measurement]:
    """One measurement a setting, all on the same prompts (lists of ids)."""
    results, console = [], Console(stderr=True)
    for name, options in settings.items():
        console.print(f"{name}: {options}", highlight=False)

        def run(rows: Sequence[list[int]], options: dict[str, Any] = options) -> Any:
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros(len(rows), width, dtype=torch.int64)
            for b, row in enumerate(rows):
                ids[b, : len(row)] = torch.tensor(row)
                mask[b, : len(row)] = 1
            return lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)

        results.append(
            measure(
                run,
                list(prompts),
                judge,
                name=name,
                settings={k: repr(v) if k == "verifier" else v for k, v in options.items()},
                prompt_ids=list(prompts),
                batch_size=batch,
                progress=lambda done, total: console.print(f"  {done} of {total} prompts", highlight=False),
            )
        )
    return results


def quality_settings(
    attention: str, thresholds: Sequence[float], free_dave: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Name -> options of ``generate``: one token per forward first, each threshold, with FreeDave of each size, and for a bidirectional
    model its approximate caches at the first threshold.
    """
    cache = "block" if attention == "block_causal" else "none"
    settings: dict[str, dict[str, Any]] = {"vanilla": {"sampler": "low_confidence", "k": 1, "cache": cache}}
    for threshold in thresholds:
        plain = {"sampler": "threshold", "threshold": threshold, "cache": cache}
        settings[f"threshold {threshold:g}"] = plain
        for number in free_dave:
            settings[f"threshold {threshold:g}, FreeDave {number}"] = {**plain, "verifier": FreeDave(number)}
    if attention == "bidirectional":
        for name, extra in {"dual": {}, "free": {}, "free delay 1": {"freeze_delay": 1}}.items():
            settings[name] = {"sampler": "threshold", "threshold": thresholds[0], "cache": name.split()[0], **extra}
    return settings


def _numbers(text: str, kind: type) -> list[Any]:
    return [kind(part) for part in text.split(",") if part.strip()]


@dataclasses.dataclass(frozen=True)
class SuffixGain:
    """Mean log-likelihood per token of the true span, with and without its suffix, and the paired difference (nats per token)."""

    name: str
    with_suffix: Interval
    without_suffix: Interval
    difference: Interval
    num_spans: int


def suffix_gain(
    lm: DiffusionLM, spans: Sequence[tuple[list[int], list[int], list[int]]], name: str, batch: int = 16
) -> SuffixGain:
    """spans: (prefix, span, suffix) ids; the same infill layout with the suffix and with an empty one."""
    seen, blind = [], []
    for prefix, span, suffix in track(spans, description=name, console=Console(stderr=True)):
        seen.append(float(np.mean(chain_log_likelihood(lm.model, lm.spec, prefix, span, suffix, batch, lm.device))))
        blind.append(float(np.mean(chain_log_likelihood(lm.model, lm.spec, prefix, span, [], batch, lm.device))))
    return SuffixGain(name, bootstrap_mean(seen), bootstrap_mean(blind), paired_difference(seen, blind), len(spans))


@dataclasses.dataclass(frozen=True)
class LengthChoice:
    """Infill at one length setting: share of exact matches, chosen minus true length, judge's nats per token of fill + suffix."""

    name: str
    exact: Interval
    length_error: Interval
    absolute_length_error: Interval
    log_likelihood: Interval
    tokens_per_forward: float


def length_choices(
    lm: DiffusionLM,
    judge: Judge,
    rows: Sequence[tuple[str, str, str]],
    settings: dict[str, dict[str, Any]],
    max_length: int,
    batch: int,
) -> list[LengthChoice]:
    """rows: (prefix, true middle, suffix) texts; settings: name -> infill options, "oracle" takes the true token count."""
    true_ids = [encode_text(lm.tokenizer, middle) for _, middle, _ in rows]
    results = []
    for name, options in settings.items():
        fills: list[list[int]] = []
        tokens = forwards = 0
        for start in track(range(0, len(rows), batch), description=name, console=Console(stderr=True)):
            part = rows[start : start + batch]
            lengths = (
                [len(t) for t in true_ids[start : start + batch]]
                if options.get("length") == "oracle"
                else options.get("length", "auto")
            )
            rest = {k: v for k, v in options.items() if k != "length"}
            out = lm.infill([r[0] for r in part], [r[2] for r in part], lengths, max_length=max_length, **rest)
            fills += [ids[0] for ids in out.fill_ids]
            tokens += sum(s.useful_tokens for s in out.row_stats)
            forwards += sum(s.nfe for s in out.row_stats)
        # The story is scored whole behind its prefix, so that a short fill cannot win by leaving things out.
        contexts = [encode_text(lm.tokenizer, r[0]) for r in rows]
        scores = judge.score(contexts, [f + encode_text(lm.tokenizer, r[2]) for f, r in zip(fills, rows, strict=True)])
        errors = [len(f) - len(t) for f, t in zip(fills, true_ids, strict=True)]
        results.append(
            LengthChoice(
                name,
                bootstrap_mean([float(f == t) for f, t in zip(fills, true_ids, strict=True)]),
                bootstrap_mean([float(e) for e in errors]),
                bootstrap_mean([float(abs(e)) for e in errors]),
                bootstrap_mean([s.total / max(s.num_tokens, 1) for s in scores]),
                tokens / max(forwards, 1),
            )
        )
    return results


def stories(path: Path) -> list[tuple[str, str, str]]:
    """(before, middle, after) of each line of a story-infill JSONL; the space between sentences begins the later one."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["prefix"], " " + row["target"], " " + row["suffix"]) for row in rows]


def answer_spans(
    rows: Sequence[tuple[list[int], list[int]]], seed: int = 0
) -> list[tuple[list[int], list[int], list[int]]]:
    """A middle of 4 to 32 tokens cut out of each held-out answer that is long enough: (prompt + head, span, tail)."""
    rng = np.random.default_rng(seed)
    spans = []
    for prompt, answer in rows:
        if len(answer) < 24:
            continue
        length = int(rng.integers(4, min(32, len(answer) // 3) + 1))
        start = int(rng.integers(1, len(answer) - length - 4))
        spans.append((prompt + answer[:start], answer[start : start + length], answer[start + length :]))
    return spans


@app.command()
def command(
    model: Annotated[str, typer.Option(help="Shipped name or adapter folder.")] = "smollm2-135m-bd8",
    conversations: Annotated[Path, typer.Option(help="npz of conversations; its last 500 are measured.")] = Path(
        "train.npz"
    ),
    story_file: Annotated[Path | None, typer.Option("--stories", help="Story-infill JSONL.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    count: Annotated[int, typer.Option(help="Held-out conversations.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    batch: Annotated[int, typer.Option(help="Rows of a batch.")] = 200,
    thresholds: Annotated[str, typer.Option(help="Comma-separated thresholds beside vanilla.")] = "0.9",
    free_dave: Annotated[
        str, typer.Option(help="Comma-separated draft counts of FreeDave, beside each threshold.")
    ] = "",
    parts: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(PARTS)}.")] = ",".join(PARTS),
    dtype: str = "auto",
    device: str = "auto",
    judge_dtype: str = "float32",
) -> None:
    """Measure an adapted model; writes quality.json and quality.txt into OUT."""
    wanted = [part.strip() for part in parts.split(",")]
    if unknown := sorted(set(wanted) - set(PARTS)):
        raise typer.BadParameter(f"parts must be of {', '.join(PARTS)}: got {', '.join(unknown)}")
    if "lengths" in wanted and story_file is None:
        wanted.remove("lengths")
    lm = DiffusionLM.from_pretrained(model, dtype=dtype, device=device)
    judge = Judge(load_target("smollm2-135m", dtype=judge_dtype, device=device), batch_size=32)
    rows = held_out_prompts(conversations, lm.tokenizer, count)
    settings = quality_settings(lm.spec.attention, _numbers(thresholds, float), _numbers(free_dave, int))
    console = Console(record=True, width=180)
    report: dict[str, Any] = {
        "model": model,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
    }
    if "decoding" in wanted:
        measured = decoding(lm, judge, [p for p, _ in rows], settings, max_new_tokens, batch)
        console.print(render_table(measured, baseline="vanilla"))
        report["measurements"] = [json.loads(m.to_json()) for m in measured]
        report["comparisons"] = [dataclasses.asdict(compare(m, measured[0])) for m in measured[1:]]
        for m in measured[1:]:
            console.print(compare(m, measured[0]))
        # Saved after each part: a run that is cut short keeps what it has measured.
        _save(out, report, console)
    gains = {"held-out answers": answer_spans(rows)}
    texts = stories(story_file) if story_file is not None else []
    if story_file is not None:
        encoded = [tuple(encode_text(lm.tokenizer, part) for part in row) for row in texts]
        gains[story_file.stem] = [(before, middle, after) for before, middle, after in encoded]
    report["suffix_gains"] = []
    for name, spans in gains.items() if "suffix" in wanted else ():
        gain = suffix_gain(lm, spans, name, batch=32)
        report["suffix_gains"].append(dataclasses.asdict(gain))
        console.print(gain)
        _save(out, report, console)
    lengths: dict[str, dict[str, Any]] = {
        "oracle length": {"length": "oracle"},
        "auto (window)": {"length_method": "window"},
        "auto (score)": {"length_method": "score"},
        "fixed 16": {"length": 16},
    }
    report["lengths"] = []
    for name, options in lengths.items() if "lengths" in wanted else ():
        choice = length_choices(lm, judge, texts, {name: options}, 64, 32)[0]
        report["lengths"].append(dataclasses.asdict(choice))
        console.print(choice)
        _save(out, report, console)


def _save(folder: Path, report: dict[str, Any], console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / "quality.json", json.dumps(report))
    write_text_atomic(folder / "quality.txt", console.export_text(clear=False))


if __name__ == "__main__":
    app()
