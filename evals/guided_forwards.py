"""Forwards a token of exact AR-guided unmasking, and whether its text is the AR model's own: bars 0.85 and "all of them", in fp32.

Dataset: held-out conversations (the last 500 of an npz). Metric: (forwards of the diffusion model + forwards of the guide) / useful tokens,
prefills included, summed over the prompts by each row's own counts, with a 95 % bootstrap interval; prompts whose text is not what the AR
model gives alone, greedy, and how far apart the two tokens' logits are where such a pair parts. ``guide_passes``: how often the guide
reads one draft (None: until the block is full).

    python -m dllm.evals.guided_forwards --conversations train.npz --count 100 --out guided.json

Plain PyTorch in batches, since only counts and texts matter; saved after each setting.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.bench.record import environment
from dllm.evals.divergence import divergences
from dllm.evals.methods_rows import BLOCK, padded, plain_kernels
from dllm.evals.quality import held_out_prompts
from dllm.evals.statistics import bootstrap_ratio
from dllm.guide import ARGuide
from dllm.output import GenerationOutput
from dllm.pipeline import DiffusionLM
from dllm.speculate import speculative_generate


def in_batches(run: Any, prompts: list[list[int]], size: int) -> list[GenerationOutput]:
    """Outputs of run(ids, mask) over the prompts, ``size`` at a time."""
    return [run(*padded(prompts[at : at + size])) for at in range(0, len(prompts), size)]


def answers(outputs: list[GenerationOutput]) -> list[list[int]]:
    """Useful tokens of each prompt."""
    return [o.sequences[b, : o.lengths[b]].tolist() for o in outputs for b in range(len(o.lengths))]


def command(
    conversations: Annotated[Path, typer.Option(help="npz whose last 500 conversations are held out.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 100,
    model: Annotated[str, typer.Option(help="Shipped name or folder of an adapter over the AR model.")] = BLOCK,
    passes: Annotated[str, typer.Option(help="Comma-separated guide_passes; 0 stands for None.")] = "0,1,2",
    time_limit: Annotated[float, typer.Option(help="Seconds in which settings are begun.")] = 1e9,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
) -> None:
    """Count the forwards and compare the texts."""
    began = time.monotonic()
    lm = DiffusionLM.from_pretrained(model, dtype="float32", device=device)
    guide = ARGuide.of_base(lm, accept="exact", on_reject="ar")
    prompts = [list(p) for p, _ in held_out_prompts(conversations, lm.tokenizer, count)]
    report: dict[str, Any] = {"model": model, "prompts": len(prompts), "new_tokens": max_new_tokens, "dtype": "float32"}
    report |= {"cache": "block", **environment(lm.device), "settings": []}

    def alone(ids: torch.Tensor, mask: torch.Tensor) -> GenerationOutput:
        return speculative_generate(
            guide.model, None, ids.to(lm.device), mask.to(lm.device), max_new_tokens=max_new_tokens,
            eos_token_id=list(guide.eos_token_ids), tokenizer=lm.tokenizer,
        )  # fmt: skip

    with plain_kernels(), torch.no_grad():
        truth = answers(in_batches(alone, prompts, batch_size))
        for number in (int(part) or None for part in passes.split(",")):
            if time.monotonic() - began > time_limit:
                report.setdefault("left_out", []).append(number)
                continue

            def guided(ids: torch.Tensor, mask: torch.Tensor, number: int | None = number) -> GenerationOutput:
                return lm.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    cache="block",
                    guide=guide,
                    guide_passes=number,
                )

            started = time.monotonic()
            outputs = in_batches(guided, prompts, batch_size)
            rows = [row for o in outputs for row in o.row_stats]
            tokens = [row.useful_tokens for row in rows]
            forwards = [row.nfe + row.guide_nfe for row in rows]
            accepts = [n for row in rows for n in row.accept_lengths]
            parted = divergences(guide.model, prompts, truth, answers(outputs), guide.eos_token_ids[0])
            report["settings"].append(
                {
                    "guide_passes": number,
                    "forwards_per_token": asdict(bootstrap_ratio(forwards, tokens)),
                    "diffusion_forwards": sum(row.nfe for row in rows),
                    "guide_forwards": sum(row.guide_nfe for row in rows),
                    "tokens": sum(tokens),
                    "tokens_per_guide_pass": sum(accepts) / max(len(accepts), 1),
                    "differ": [asdict(d) for d in parted],
                    "seconds": time.monotonic() - started,
                }
            )
            write_text_atomic(out, json.dumps(report, indent=1) + "\n")
            share = sum(forwards) / max(sum(tokens), 1)
            print(
                f"guide_passes {number}: {share:.3f} forwards a token, {len(parted)} of {len(prompts)} differ",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(command)
