"""Parity of the model families with reference generations, through the public ``generate``.

A family folder holds traces.json: settings of the reference, prompt, output. Each family has one map from those settings to ours;
there is no second loop. Tokens are compared exactly, both sides cut at the first stop token. What a reference draws at random is
recorded and comes in through ``noise=``. Traces that are informational (``seeded_unmodified``) are not rows of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm.evals.parity_case import Case, equal
from dllm.evals.parity_families import load_golden
from dllm.pipeline import DiffusionLM
from dllm.resize import Resize
from dllm.samplers.dream_entropy import DreamEntropy
from dllm.samplers.end_last import EndLast
from dllm.samplers.processors import keep_top_k, keep_top_p
from dllm.types import Noise, RowState, RowStats, Step

Trace = Mapping[str, Any]
Settings = dict[str, Any]


def sharpened(
    logits: Tensor,
    slots: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    barred: Sequence[int] = (),
) -> Tensor:
    """The processed law of a reference that takes its arg-max: logits / temperature, then top-k, then top-p."""
    logits = logits.float() / temperature
    for token in barred:
        logits[..., token] = -float("inf")
    if top_k:
        logits = keep_top_k(logits, top_k)
    return keep_top_p(logits, top_p)


@dataclass(frozen=True)
class TiesUpward:
    """A sampler whose ties go to the highest slot, as torch.topk resolved them where the reference ran; ours go to the lowest."""

    inner: DreamEntropy

    needs = DreamEntropy.needs

    def step(self, rows: RowStats, canvas: Tensor, masked: Tensor, state: RowState, noise: Noise) -> Step:
        """As the inner one, on slots in reverse."""
        assert rows.entropy is not None, "needs names entropy"
        turned = replace(rows, token=rows.token.flip(1), entropy=rows.entropy.flip(1))
        chosen = self.inner.step(turned, canvas.flip(1), masked.flip(1), state, noise)
        return Step(chosen.tokens.flip(1), chosen.transfer_index.flip(1))


def llada_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """LLaDA's own sampler and Fast-dLLM's, plain, with the prefix cache and with the dual cache."""
    s = trace["settings"]
    out: Settings = {"max_new_tokens": s["gen_length"], "block_length": s["block_length"], "cache": "none"}
    for name in ("prefix", "dual"):
        if trace["function"].endswith(f"{name}_cache"):
            out["cache"] = name
    if "threshold" in s:
        return out | {"sampler": "threshold", "threshold": s["threshold"]}
    if "factor" in s:
        return out | {"sampler": "factor", "factor": s["factor"], "compat": True}
    out |= {"sampler": "low_confidence", "steps": s["steps"], "cfg_scale": s.get("cfg_scale", 0.0)}
    if s.get("logits_eos_inf"):
        out["logits_processor"] = partial(sharpened, barred=(ids["eos"],))
    if s.get("confidence_eos_eot_inf"):
        out["sampler"] = EndLast((ids["eos"], ids["eot"]))
    return out


def dream_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """Dream's algorithms in one block, Fast-dLLM's threshold, and its blocks with a prefix or a dual cache."""
    s = trace["settings"]
    blocks = "block_length" in s
    length = s["block_length"] if blocks else len(trace["output"][0])
    steps = s["steps"] * length // s["max_new_tokens"] if blocks else s["steps"]
    out: Settings = {
        "max_new_tokens": s["max_new_tokens"],
        "block_length": length,
        "cache": "none" if not blocks else "dual" if s.get("dual_cache") else "prefix",
        "logits_processor": partial(sharpened, top_k=s.get("top_k", 0), top_p=s.get("top_p", 1.0)),
    }
    if s["alg"] == "confidence_threshold":
        cap = None if blocks else s["max_new_tokens"] // s["steps"]
        return out | {"sampler": s["alg"], "threshold": s["threshold"], "cap": cap}
    name = "dream_entropy" if s["alg"] == "entropy" else s["alg"]
    out["max_denoising_steps"] = steps
    if "top_p" in s:
        # A nucleus of one token has entropy 0 exactly, and several slots tie.
        return out | {"sampler": TiesUpward(DreamEntropy())}
    return out | {"sampler": name, "eps": s.get("eps", 1e-3), "alg_temp": s.get("alg_temp")}


def sdar_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """SDAR's strategies; its arg-max is taken from the law after temperature, top-k and top-p."""
    s = trace["settings"]
    out: Settings = {
        "max_new_tokens": len(trace["output"][0]) - len(trace["prompt"][0]),
        "block_length": s["block_length"],
        "max_denoising_steps": s["denoising_steps"],
        "sampler": s["remasking_strategy"],
        "logits_processor": partial(sharpened, **{name: s[name] for name in ("temperature", "top_k", "top_p")}),
    }
    if out["sampler"] == "low_confidence_dynamic":
        out["threshold"] = s.get("confidence_threshold", 0.85)
    return out


def fast_dllm_v2_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """Sub-blocks with a threshold, with and without the cache inside the block; one token more than whole blocks."""
    s = trace["settings"]
    size, lengths = s["block_size"], [len(prompt) for prompt in trace["prompt"]]
    end = (max(lengths) // size + s["max_new_tokens"] // size) * size + 1
    return {
        "max_new_tokens": end - min(lengths),
        "block_length": size,
        "sampler": "sub_block",
        "sub_block_length": s["small_block_size"],
        "threshold": s.get("threshold", 1.0),
        "cache": "sub_block" if s.get("use_block_cache") else "block",
    }


def llada2_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """LLaDA2.0, 2.1 with editing (both see the whole last block), and diffusers' pipeline (which hides what lies beyond)."""
    s = trace["settings"]
    size, length, prompt = s["block_length"], s["gen_length"], len(trace["prompt"][0])
    pipe = trace["name"].startswith("pipe")
    if not pipe:
        length = -(-(prompt + length) // size) * size - prompt
    out: Settings = {"max_new_tokens": length, "block_length": size, "threshold": s["threshold"]}
    if s.get("editing_threshold") is not None:
        posts = s.get("max_post_steps", 16) + pipe
        out |= {"sampler": "token_editing", "editing_threshold": s["editing_threshold"], "max_post_steps": posts}
        out["k"] = s.get("num_to_transfer", 1)
    else:
        out["sampler"] = "low_confidence_dynamic"
    if "steps" in s or pipe:
        steps = s["num_inference_steps"] if pipe else s["steps"]
        out["max_denoising_steps"] = min(steps, s["gen_length"] // s.get("minimal_topk", 1))
    return out


class RecordedDraws:
    """Noise of a recorded run: one table of uniforms a step, [B, block, V], and the hit slots of first-hitting, in call order."""

    def __init__(self, tables: Sequence[Tensor], hits: Sequence[float], block: int) -> None:
        self.tables, self.hits, self.block = iter(tables), iter(hits), block

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        """The next number that falls on the recorded slot."""
        return torch.full(positions.shape, next(self.hits), dtype=torch.float64)

    def uniform_lanes(self, positions: Tensor, step: Tensor, lanes: int, stream: int = 0) -> Tensor:
        """The next table at these positions; the reference's lane of "stays a mask" is the mask id, its last one, ours comes after it."""
        table = next(self.tables)
        rows = table.gather(1, (positions % self.block)[..., None].expand(-1, -1, table.shape[-1]))
        return rows if lanes == rows.shape[-1] else torch.cat([rows, rows[..., -1:]], dim=-1)

    def select(self, keep: Tensor) -> RecordedDraws:
        """Rows finish together in these runs, so that nothing is ever selected from them."""
        raise ValueError(f"rows of a recorded run must stay together: got a selection of {len(keep)}")


def nucleus(logits: Tensor, slots: Tensor, p: float, mask_id: int) -> Tensor:
    """BD3-LM's nucleus: the tokens whose cumulative probability, their own included, is at most p, and the first."""
    logits = logits.clone()
    logits[..., mask_id] = -float("inf")
    ranked, order = logits.softmax(-1).sort(-1, descending=True)
    keep = ranked.cumsum(-1) <= p
    keep[..., 0] = True
    return logits.masked_fill(~keep.scatter(-1, order, keep), -float("inf"))


class FedCanvases:
    """Uniform numbers that give recorded canvases [B, C] in order: the first one of each block, then one a step."""

    def __init__(self, canvases: Sequence[Any], starts: Tensor, vocab_size: int) -> None:
        self.canvases, self.starts, self.vocab_size = iter(canvases), starts, vocab_size

    def uniform(self, positions: Tensor, step: Tensor, stream: int = 0) -> Tensor:
        """The next canvas at these positions, as the middle of each id's cell."""
        table = torch.tensor(next(self.canvases))
        place = (positions - self.starts[:, None]) % table.shape[1]
        return (table.gather(1, place).double() + 0.5) / self.vocab_size

    def select(self, keep: Tensor) -> FedCanvases:
        """The same canvases for some of the rows."""
        picked = (torch.tensor(canvas)[keep].tolist() for canvas in self.canvases)
        return FedCanvases(picked, self.starts[keep], self.vocab_size)  # type: ignore[arg-type]


def dreamon_settings(trace: Trace, ids: Mapping[str, int]) -> Settings:
    """DreamOn: masks that double and vanish; without a budget the reference allows three expansions a new token."""
    s = trace["settings"]
    budget = s.get("expand_budget", 3 * s["max_new_tokens"])
    top_p = s.get("top_p", 1.0)
    return {
        "max_new_tokens": 0,
        "block_length": len(trace["prompt"][0]),
        "resize": Resize(s["max_new_tokens"], budget, s.get("pad_delete_to_right", False)),
        "sampler": "dream_entropy" if s["alg"] == "entropy" else s["alg"],
        "logits_processor": partial(sharpened, top_p=top_p),
    }


def gemma_settings(trace: Trace, vocab_size: int) -> Settings:
    """DiffusionGemma with its random canvases given and its draws replaced by arg-maxes."""
    s = dict(trace["settings"])
    mask = trace["attention_mask"] or [[1] * len(row) for row in trace["prompt"]]
    starts = torch.tensor([sum(row) for row in mask])
    return {
        "max_new_tokens": s.pop("max_new_tokens"),
        "max_denoising_steps": s.pop("max_denoising_steps"),
        "sampler": "uniform_canvas",
        "sample": False,
        "bound": s.pop("entropy_bound"),
        **s,
        "noise": FedCanvases(trace["random_canvases"], starts, vocab_size),
        # A block is committed at once, so that its stop ends the run as it does there.
        "eos_token_id": [trace["eos_id"]],
    }


def gemma_traces(folder: Path) -> list[Case]:
    """Every fed trace of DiffusionGemma; the one with torch's own generator is informational."""
    lm = load_golden(folder)
    traces = json.loads((folder / "traces.json").read_text())
    fed = [trace for trace in traces if trace["name"].startswith("fed")]
    return [run_trace(lm, trace, gemma_settings(trace, lm.spec.vocab_size), [trace["eos_id"]]) for trace in fed]


def drawn_settings(trace: Trace, draws: Mapping[str, Tensor]) -> Settings:
    """MDLM and BD3-LM: recorded uniforms; the first token of a BD3-LM text is given."""
    s, name = trace["settings"], trace["name"]
    count = sum(key.startswith(f"{name}.uniform") for key in draws)
    tables = [draws[f"{name}.uniform{i}"] for i in range(count)]
    block, hits = tables[0].shape[1], trace["uniform_index"]
    masks = [*range(block - 1, 0, -1), *(list(range(block, 0, -1)) * len(hits))][: len(hits)]
    uniforms = [(hit[0] + 0.5) / left for hit, left in zip(hits, masks, strict=True)]
    out: Settings = {"noise": RecordedDraws(tables, uniforms, block), "block_length": block}
    if "num_strides" in s:
        out |= {"max_new_tokens": block * s["num_strides"] - 1, "cache": "block" if s["kv_cache"] else "none"}
        if "nucleus_p" in s:
            out["logits_processor"] = partial(nucleus, p=s["nucleus_p"], mask_id=trace["mask_id"])
        if s["first_hitting"]:
            return out | {"sampler": "first_hitting"}
        return out | {"sampler": "ancestral", "num_steps": s["num_steps"], "eps": 0.0, "endpoint": True}
    scale = 1.0 if s["sampler"] == "ddpm_cache" else 1 - 1e-3
    return out | {"max_new_tokens": block, "sampler": "ancestral", "num_steps": s["steps"], "scale": scale}


def cut(tokens: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Tokens before the first stop."""
    place = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:place])


def run_trace(lm: DiffusionLM, trace: Trace, settings: Settings, stops: Sequence[int]) -> Case:
    """One generation; rows are padded on the left where prompts differ in length."""
    prompts = trace.get("prompt") or [row[: len(row) - settings["max_new_tokens"]] for row in trace["output"]]
    if not any(prompts):
        # Nothing is given: a window of masks.
        prompts = [[trace["mask_id"]] * len(row) for row in trace["output"]]
        settings = settings | {"max_new_tokens": 0}
    width = max(map(len, prompts))
    mask = trace.get("attention_mask") or [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    ids = [[0] * (width - len(p)) + p for p in prompts]
    # The reference fills a block to its end, also behind a stop; so the stop is cut afterwards.
    holes = [[token == trace.get("mask_id") for token in row] for row in ids]
    if any(map(any, holes)):
        settings = settings | {"masked": holes}
    out = lm.generate(input_ids=ids, attention_mask=mask, **{"eos_token_id": [], **settings})
    got, want = [], []
    for b, (prompt, output) in enumerate(zip(prompts, trace["output"], strict=True)):
        start = row.index(True) if any(row := holes[b]) else len(prompt)
        new = output if len(output) <= trace["settings"].get("gen_length", -1) else output[start:]
        want.append(cut(new, stops))
        found = out.sequences[b, : out.lengths[b]].tolist()[: len(new)]
        got.append(cut(found, stops))
    case = equal(trace["name"], got, want, "tokens")
    return Case(case.name, case.status, f"{case.detail}, {out.stats.nfe} forwards")


def drawn_traces(folder: Path) -> list[Case]:
    """Every trace of MDLM and BD3-LM."""
    lm, draws = load_golden(folder), load_file(folder / "trace_noise.safetensors")
    traces = json.loads((folder / "traces.json").read_text())
    return [run_trace(lm, trace, drawn_settings(trace, draws), ()) for trace in traces]


MAPS: dict[str, Callable[[Trace, Mapping[str, int]], Settings]] = {
    "llada": llada_settings,
    "dream": dream_settings,
    "sdar": sdar_settings,
    "fast_dllm_v2": fast_dllm_v2_settings,
    "llada2_moe": llada2_settings,
    "dreamon": dreamon_settings,
}


def trace_cases(folder: Path) -> list[Case]:
    """Every trace of a family folder."""
    traces = json.loads((folder / "traces.json").read_text()) if (folder / "traces.json").is_file() else []
    if not traces:
        return []
    lm = load_golden(folder)
    unit = json.loads((folder / "unit.json").read_text()) if (folder / "unit.json").is_file() else {}
    ids = unit.get("special_ids", {})
    results = []
    for trace in traces:
        stops = trace["settings"].get("stopping_criteria_idx") or [
            trace.get("eos_id") or trace.get("stop_token") or ids["eos"]
        ]
        # DreamOn's eos deletes, or is given.
        stops = [] if "delete_id" in trace else stops
        try:
            results.append(run_trace(lm, trace, MAPS[folder.name](trace, ids), stops))
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            results.append(Case(trace["name"], "miss", f"{type(error).__name__}: {error}"))
    return results


FAMILIES: dict[str, Callable[[Path], list[Case]]] = {
    **dict.fromkeys(MAPS, trace_cases),
    "mdlm": drawn_traces,
    "bd3lm": drawn_traces,
    "diffusion_gemma": gemma_traces,
}
"""Family folder name -> function(folder) -> results."""
