"""Parity of schedules, draws and single scheduler steps with reference tables, by the functions that they test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm.evals.parity_case import Case, close, equal
from dllm.kernels.row_stats import row_stats
from dllm.samplers.block_refinement import BlockRefinement
from dllm.samplers.dream_schedule import dream_quota
from dllm.samplers.gumbel import gumbel_max
from dllm.samplers.quota import even_quota
from dllm.samplers.token_editing import TokenEditing
from dllm.types import RowState


def state_of(sample: Tensor, step: int, steps: int, block_length: int) -> RowState:
    """The state of a step of one whole block [B, S]."""
    batch, slots = sample.shape

    def column(value: int) -> Tensor:
        return torch.full((batch,), value, dtype=torch.int64)

    return RowState(
        step=column(step),
        steps=column(steps),
        masks_at_start=column(block_length),
        slots=torch.arange(slots).expand(batch, -1),
        block_length=column(block_length),
    )


def schedule_cases(folder: Path) -> list[Case]:
    """unit.json and unit.safetensors: tokens per step, and draws from given uniforms."""
    unit = json.loads((folder / "unit.json").read_text())
    rows = []
    for entry in unit.get("num_transfer_tokens", []):
        masked, steps = entry["masked"], entry["steps"]
        got = [int(even_quota(state_of(torch.zeros(1, 1), i, steps, masked))) for i in range(steps)]
        rows.append(equal(f"num_transfer_tokens {masked}/{steps}", got, entry["per_step"], "counts"))
    for entry in unit.get("schedule", []):
        left, got = entry["masked"], []
        for i in range(entry["steps"]):
            step, steps = torch.tensor([i]), torch.tensor([entry["steps"]])
            got.append(int(dream_quota(torch.tensor([left]), step, steps, entry["eps"])))
            left -= got[-1]
        rows.append(
            equal(f"schedule {entry['masked']}/{entry['steps']}/{entry['eps']}", got, entry["per_step"], "counts")
        )
    tables = load_file(folder / "unit.safetensors") if (folder / "unit.safetensors").is_file() else {}
    for name, expected in tables.items():
        if name.startswith("gumbel.argmax_T"):
            temperature = float(name.removeprefix("gumbel.argmax_T"))
            got_ids = gumbel_max(tables["gumbel.logits"], tables["gumbel.uniform"], temperature)
            rows.append(equal(name, got_ids.tolist(), expected.tolist()))
    return rows


def scheduler_cases(folder: Path) -> list[Case]:
    """Single calls of diffusers' BlockRefinementScheduler, with a mask token and without one."""
    tables = load_file(folder / "scheduler_steps.safetensors")
    rows = []
    for entry in json.loads((folder / "scheduler_steps.json").read_text()):
        compare = masked_step if entry["mask_id"] is not None else uniform_steps
        rows.append(compare(entry, {k: v for k, v in tables.items() if k.startswith(f"{entry['name']}.")}))
    return rows


def masked_step(entry: Mapping[str, Any], tables: Mapping[str, Tensor]) -> Case:
    """One step of threshold, top-k fallback and editing."""
    name = entry["name"]
    sample, logits = tables[f"{name}.sample"], tables[f"{name}.logits"]
    masked, editing = sample == entry["mask_id"], entry.get("editing_threshold")
    sampler = TokenEditing(entry["threshold"], 2.0 if editing is None else editing)
    state = state_of(sample, entry["timestep"], entry["num_inference_steps"], entry["block_length"])
    laws = row_stats(logits)
    step = sampler.step(laws, sample, masked, state, _Silent())
    given = tables.get(f"{name}.prompt_mask", torch.zeros(sample.shape[1])).bool()
    edit = sampler.revise(laws, sample, ~masked & ~given, state, _Silent()).edit
    found = {
        "transfer_index": step.transfer_index,
        "editing_transfer_index": edit,
        "sampled_tokens": laws.token,
        "prev_sample": torch.where(step.transfer_index | edit, laws.token, sample),
    }
    for field, value in found.items():
        row = equal(name, value.long().tolist(), tables[f"{name}.{field}"].long().tolist(), field)
        if row.status != "ok":
            return row
    return close(name, laws.confidence, tables[f"{name}.sampled_probs"], 1e-6, 1e-5)


def uniform_steps(entry: Mapping[str, Any], tables: Mapping[str, Tensor]) -> Case:
    """The steps of one block without a mask token, with the random tokens given."""
    name = entry["name"]
    sampler = BlockRefinement(entry["threshold"], entry.get("editing_threshold"))
    open_ = torch.ones_like(tables[f"{name}.t0.sample"], dtype=torch.bool)
    for i in range(entry["num_inference_steps"]):
        at = f"{name}.t{i}."
        sample, logits = tables[at + "sample"], tables[at + "logits"]
        state = state_of(sample, i, entry["num_inference_steps"], entry["block_length"])
        laws, noise = row_stats(logits, sampler.needs), _Given(tables[at + "random_tokens"], logits.shape[-1])
        step = sampler.step(laws, sample, open_, state, noise)
        edit = sampler.revise(laws, sample, ~open_, state, noise).edit
        open_ = open_ & ~step.transfer_index
        assert step.canvas is not None, "uniform corruption fills open slots"
        after = torch.where(step.transfer_index | edit, laws.token, sample)
        found = {
            "transfer_index": step.transfer_index,
            "editing_transfer_index": edit,
            "prev_sample": torch.where(open_, step.canvas, after),
        }
        for field, value in found.items():
            row = equal(name, value.long().tolist(), tables[at + field].long().tolist(), f"step {i} {field}")
            if row.status != "ok":
                return row
    return Case(name, "ok", f"{entry['num_inference_steps']} steps equal")


class _Silent:
    """Noise of rules that draw nothing."""

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        raise ValueError("this rule must draw nothing")


class _Given:
    """Numbers whose product with the vocabulary's size falls into the cell of the given token."""

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens, vocab_size

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        return (self.tokens.double() + 0.5) / self.vocab_size


FAMILIES: dict[str, Callable[[Path], list[Case]]] = {
    "llada": schedule_cases,
    "dream": schedule_cases,
    "llada2_moe": scheduler_cases,
}
"""Family folder name -> function(folder) -> results."""
