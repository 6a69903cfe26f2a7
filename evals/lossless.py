"""Whether drafts leave a target's own text alone, on real prompts: every number of drafts, batch size and way in.

Dataset: the first prompts of ``--prompts`` (an archive's held-out conversations, or JSON lines), ragged batches in the file's order. The
reference is transformers' greedy ``generate``, one prompt at a time. Ways: ``generate`` with ``custom_generate`` on the same model, and
``speculative_generate`` on our decoder with the same weights. Metric: prompts whose tokens are not the reference's; for each the first
place, and how far apart the model's own logits of the two tokens are there. In float32 the number must be 0 (exit code 1 otherwise);
in bfloat16 a pass over several rows may round a near-tie otherwise, and the gaps show that it is one.

    python -m dllm.evals.lossless --prompts train.npz --drafter smollm2-135m-dfly --count 200 --out runs/lossless
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor

from dllm.drafters.drafter import Drafter
from dllm.evals.acceptance import read_prompts
from dllm.evals.bench.record import Record, environment
from dllm.evals.divergence import divergences
from dllm.families.placement import resolve_device, resolve_dtype
from dllm.speculate import speculative_generate
from dllm.target import load_target, stop_ids_of
from dllm.training.base import load_base

WAYS = ("generate", "loop")


def pad_left(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts -> ids [B, P] int64 and attention mask [B, P] int64, padding before the text."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(p)) + list(p) for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def reference_answers(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[list[int]]:
    """The model's own greedy tokens, up to and without the stop."""
    for prompt in prompts:
        ids, mask = pad_left([prompt], 0, model.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
        yield _until_stop(out[0, len(prompt) :].tolist(), stop_ids_of(model))


def drafted_answers(
    way: str,
    model: Any,
    drafter: Drafter,
    batch: Sequence[Sequence[int]],
    num_drafts: int,
    max_new_tokens: int,
    stops: frozenset[int],
) -> list[list[int]]:
    """One ragged batch by one way: tokens of each row, up to and without the stop. model: of the way's kind, the drafter's target;
    stops: its stop tokens, which a decoder of ours does not know.
    """
    ids, mask = pad_left(batch, 0, model.device)
    if way == "loop":
        settings = {"num_drafts": num_drafts, "max_new_tokens": max_new_tokens, "eos_token_id": sorted(stops)}
        found = speculative_generate(model, drafter, ids, mask, **settings)
        return [row[:length].tolist() for row, length in zip(found.sequences, found.lengths, strict=True)]
    drafts = drafter.as_custom_generate(num_drafts=num_drafts)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, custom_generate=drafts, **settings)
    return [_until_stop(row, stops) for row in out[:, ids.shape[1] :].tolist()]


def _until_stop(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])


def _numbers(text: str, name: str, least: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) >= least for part in parts):
        raise ValueError(f"{name} must be numbers of at least {least} with commas between: got {text!r}")
    return [int(part) for part in parts]


def command(
    prompts: Annotated[Path, typer.Option(help="Archive of conversations (npz: its held-out ones) or JSON lines.")],
    out: Annotated[Path, typer.Option(help="Folder for entries.jsonl.")],
    drafter: Annotated[str, typer.Option(help="Shipped name or folder.")] = "smollm2-135m-dfly",
    target: Annotated[
        str, typer.Option(help="Shipped name or folder of a Llama- or Qwen-type model.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 200,
    drafts: Annotated[str, typer.Option(help="Drafts a round.")] = "0,1,2,7",
    batch: Annotated[str, typer.Option(help="Rows of a call.")] = "1,4",
    way: Annotated[list[str] | None, typer.Option(help=f"Of: {', '.join(WAYS)}; all if not given.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Of an answer.")] = 32,
) -> None:
    """Compare drafted text with the target's own."""
    ways, counts, sizes = way or list(WAYS), _numbers(drafts, "drafts", 0), _numbers(batch, "batch", 1)
    if unknown := set(ways) - set(WAYS):
        raise ValueError(f"way must be of {', '.join(WAYS)}: got {', '.join(sorted(unknown))}")
    place, kind = resolve_device(device), resolve_dtype(dtype)
    plain = load_target(target, dtype=kind, device=place)
    ids = read_prompts(prompts, plain.tokenizer, count)
    record, wrong = Record(out, echo=False), 0
    setting = {"dtype": dtype, "drafter": drafter, "prompts": len(ids), "max_new_tokens": max_new_tokens}
    record.add("setting", target, **environment(place), **setting)
    with Progress() as bar:
        task = bar.add_task("reference", total=len(ids) * (1 + len(ways) * len(counts) * len(sizes)))
        expected = []
        for answer in reference_answers(plain, ids, max_new_tokens):
            expected.append(answer)
            bar.advance(task)
        for name in ways:
            model = plain if name == "generate" else load_base(target, str(place), kind).decoder
            bound = Drafter.from_pretrained(drafter, target=model)
            for size in sizes:
                for number in counts:
                    bar.update(task, description=f"{name}, batch {size}, {number} drafts")
                    got: list[list[int]] = []
                    for start in range(0, len(ids), size):
                        rows = ids[start : start + size]
                        got += drafted_answers(name, model, bound, rows, number, max_new_tokens, stop_ids_of(plain))
                        bar.advance(task, len(rows))
                    found = divergences(plain, ids, expected, got)
                    wrong += len(found)
                    entry = {"batch": size, "drafts": number, "tokens": sum(map(len, got)), "differ": len(found)}
                    record.add("way", name, **entry, divergences=[asdict(d) for d in found])
                    bar.console.print(f"{name}, batch {size}, {number} drafts: {len(found)} of {len(ids)} differ")
    if wrong and kind == torch.float32:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
