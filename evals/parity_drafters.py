"""Parity of the drafter families: DFlash, DFlash2, DFly beside their target, the filters of a law, rejection sampling,
whole greedy generations.

Golden fields: ``one_shot`` is one drafter pass, ``incremental`` the same context fed in two pieces (7 and 4 tokens),
``probs<i>`` filtered laws, ``reject<i>`` verdicts for given uniforms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm.drafters.dflash2 import DFlash2
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Context, Drafter
from dllm.evals.parity_case import Case, close, equal, tolerance
from dllm.output import GenerationOutput
from dllm.samplers.processors import Processors
from dllm.samplers.verify import chain_rejection
from dllm.speculate import speculative_generate
from dllm.target import load_target
from dllm.types import Draft

_FILTER = re.compile(r"out_T([\d.]+)_p([\d.]+)_k(\d+)")


def run(folder: Path) -> list[Case]:
    """All cases of one drafter folder (target/, draft/, cases.safetensors), in fp32 on the CPU."""
    atol, rtol = tolerance(folder)
    target = load_target(folder / "target", dtype="float32", device="cpu")
    drafter = Drafter.from_pretrained(folder / "draft", target)
    if isinstance(drafter, DFly):
        drafter = Drafter.from_pretrained(folder / "draft", target, head_candidates=None)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "cases.safetensors").items():
        case, field = name.split(".", 1)
        groups.setdefault(case, {})[field] = tensor
    cases = one_shot(drafter, groups.pop("one_shot"), atol, rtol)
    first = groups.pop("incremental")
    cases += incremental(drafter, load_file(folder / "cases.safetensors"), first, atol, rtol)
    for name, fields in sorted(groups.items()):
        if name.startswith("probs"):
            cases += filtered_laws(name, fields)
        elif name.startswith("reject"):
            cases += rejection(name, fields)
        else:
            cases.append(Case(name, "skip", "no comparison for this kind of case"))
    for trace in json.loads((folder / "traces.json").read_text(encoding="utf-8")):
        cases.append(trace_case(drafter, trace))
    return cases


def trace_case(drafter: Drafter, trace: dict[str, Any]) -> Case:
    """A whole greedy generation: its text with and without drafts, every verified block and what each pass committed."""
    blocks: list[list[int]] = []

    def note(model: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> None:
        if step > 0:
            count = int(kwargs["limits"][0])
            blocks.append([int(kwargs["anchors"][0]), *kwargs["draft_tokens"][0, :count].tolist()])

    prompt, stops = trace["prompt"], trace["stop_token_ids"] or []
    options: dict[str, Any] = dict(
        max_new_tokens=trace["max_new_tokens"], temperature=trace["temperature"], eos_token_id=stops
    )
    model = drafter.target.model
    drafted = speculative_generate(
        model, drafter, [prompt], block_length=trace["block_size"], callback_on_step_end=note, **options
    )
    plain = speculative_generate(model, None, [prompt], **options)
    name = f"trace {trace['name']}"
    rows = [
        equal(name, text(drafted, prompt, stops), trace["output"][0]),
        equal(name, text(plain, prompt, stops), trace["greedy_target_ids"], "greedy ids"),
        equal(name, drafted.stats.accept_lengths, trace["acceptance_lengths"], "acceptance lengths"),
        equal(name, blocks, trace["verified_blocks"], "verified blocks"),
    ]
    missed = next((row for row in rows if row.status != "ok"), None)
    return missed or Case(name, "ok", f"ids, greedy ids and {len(blocks)} verified blocks equal")


def text(output: GenerationOutput, prompt: list[int], stops: list[int]) -> list[int]:
    """Prompt and output as the files hold them, the stop token included (there is one kind in each)."""
    new = output.sequences[0, : output.lengths[0]].tolist()
    return prompt + new + (stops[:1] if output.finish_reasons[0] == "stop" else [])


def one_shot(drafter: Drafter, case: dict[str, Tensor], atol: float, rtol: float) -> list[Case]:
    """Taps of the target, block inputs, hidden states, logits and greedy drafts of one pass."""
    logits, features = drafter.target.read(case["context_ids"], drafter.config.target_layer_ids)
    block = case["block_ids"]
    anchor = block[:, 0]
    feed(drafter, case["target_features"])
    hidden = drafter.block(anchor, block.shape[1])
    draft = drafter.propose(None, anchor, block.shape[1] - 1)
    rows = [
        close("one_shot target_features", features, case["target_features"], atol, rtol),
        close("one_shot target_logits", logits, case["target_logits"], atol, rtol),
        close("one_shot noise_embedding", drafter.embed(block), case["noise_embedding"], atol, rtol),
        close("one_shot draft_hidden", hidden, case["draft_hidden"], atol, rtol),
        close("one_shot draft_logits", slot_logits(drafter, hidden, anchor, draft), case["draft_logits"], atol, rtol),
        equal("one_shot draft_tokens", draft.tokens.tolist(), case["draft_tokens"].tolist()),
    ]
    if isinstance(drafter, DFlash2):
        _, ids = drafter.candidates(hidden[:, 1:])
        rows.append(equal("one_shot candidates", ids.sort().values.tolist(), case["candidates_sorted"].tolist()))
    return rows


def slot_logits(drafter: Drafter, hidden: Tensor, anchor: Tensor, draft: Draft) -> Tensor:
    """Logits [B, n, V] of the slots; of DFly those of the corrected rows, each after the token drafted before it."""
    slots = hidden[:, 1:]
    if isinstance(drafter, DFly) and drafter.hidden_correction is not None:
        previous = torch.cat([anchor[:, None], draft.tokens[:, :-1]], dim=1)
        slots = drafter.hidden_correction(slots, drafter.target.embed(previous))
    return drafter.logits(slots)


def incremental(
    drafter: Drafter, everything: dict[str, Tensor], case: dict[str, Tensor], atol: float, rtol: float
) -> list[Case]:
    """The context of ``one_shot`` in two pieces; the same block behind each."""
    features, block = everything["one_shot.target_features"], everything["one_shot.block_ids"]
    rows, fed = [], 0
    for name in sorted(case, key=lambda field: int(field.rsplit("_", 1)[1])):
        end = int(name.rsplit("_", 1)[1])
        feed(drafter, features[:, fed:end], reset=fed == 0)
        fed = end
        rows.append(close(f"incremental {name}", drafter.block(block[:, 0], block.shape[1]), case[name], atol, rtol))
    return rows


def feed(drafter: Drafter, features: Tensor, reset: bool = True) -> None:
    """Hand over context features [B, C, F], all valid."""
    if reset:
        drafter.reset(features.shape[0], 512)
    drafter.feed(Context(features, torch.ones(features.shape[:2], dtype=torch.bool)))


def filtered_laws(name: str, case: dict[str, Tensor]) -> list[Case]:
    """Temperature, then top-k, then top-p: every ``out_T.._p.._k..`` beside ``logits``."""
    rows = []
    for field, expected in case.items():
        if field == "logits":
            continue
        found = _FILTER.fullmatch(field)
        if found is None:
            rows.append(Case(f"{name} {field}", "skip", "the field's name says no settings"))
            continue
        options: dict[str, Any] = dict(temperature=float(found[1]), top_p=float(found[2]), top_k=int(found[3]) or None)
        rows.append(close(f"{name} {field}", Processors(**options).law(case["logits"]), expected, 1e-6, 1e-5))
    return rows


def rejection(name: str, case: dict[str, Tensor]) -> list[Case]:
    """Number of accepted drafts for given uniforms, and the law of the next token."""
    draft = Draft(case["draft_tokens"], case["draft_probs"])
    # The last uniform draws the next token, which the files leave open.
    verdict = chain_rejection(case["target_probs"], draft, torch.nn.functional.pad(case["uniform"], (0, 1), value=0.5))
    assert verdict.law is not None
    return [
        equal(f"{name} accepted", verdict.accepted.tolist(), case["accepted"].tolist(), "count"),
        close(f"{name} next_token_probs", verdict.law[0], case["next_token_probs"], 1e-6, 1e-5),
    ]


FAMILIES: dict[str, Callable[[Path], list[Case]]] = dict.fromkeys(
    ("dflash", "dflash_swa_scaled", "dflash2", "dfly"), run
)
"""Family folder name -> function(folder) -> rows."""
