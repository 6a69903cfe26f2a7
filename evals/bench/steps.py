"""What one step costs: the runtime's forward on its kernels beside the frozen plain step, for each shape, row count, context and batch.

A step is T new rows that see N stored keys and each other, down to the likeliest token and its probability of every row. Both steps have
the same weights; before anything is timed their results are compared on the very shape (the gate). The floor counts each weight and
each stored key once, see ``shapes.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm.evals.bench.plain import PlainStep
from dllm.evals.bench.record import Record
from dllm.evals.bench.shapes import Shape, floor_ms
from dllm.evals.bench.timing import Deadline, Rates, Timing, in_graph, matrix_rate, timed
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.model.fast_decoder import FastDecoder
from dllm.types import Attend

SETUP_S = 0.5
"""Seconds that preparing and capturing one entry takes at most on the benchmarked devices; an entry without that much time is skipped."""


@dataclass(frozen=True)
class Point:
    """One measured place: batch, new rows a sequence, stored keys a sequence."""

    batch: int
    rows: int
    keys: int


def grid(full: bool = True) -> list[Point]:
    """The row, context and batch sweeps around (batch 1, 32 rows, 1,024 keys), the most important first."""
    points = [Point(1, 32, 1024), Point(8, 32, 1024), Point(1, 16, 1024), Point(1, 64, 1024), Point(1, 1, 1024)]
    if full:
        points += [Point(1, 8, 1024), Point(1, 32, 4096), Point(1, 32, 16384), Point(1, 32, 256), Point(64, 32, 1024)]
    return points


def fused_decoder(shape: Shape, plain: PlainStep) -> Decoder:
    """A ``Decoder`` with the plain step's weights, q, k, v and gate, up laid together (copies; the embedding and head are shared)."""
    config = DecoderConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=1 << 17,
        rope_theta=shape.rope_theta,
        rms_norm_eps=1e-6,
        qkv_bias=shape.qkv_bias,
        qk_norm=shape.qk_norm,
        tie_embeddings=shape.tied,
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    state: dict[str, Tensor] = {"embed_tokens.weight": plain.embedding, "norm.weight": plain.norm}
    if not shape.tied:
        state["lm_head.weight"] = plain.head
    for index, w in enumerate(plain.layers):
        at = f"layers.{index}."
        state[at + "attention.qkv.weight"] = torch.cat([w["q"], w["k"], w["v"]])
        state[at + "attention.out.weight"] = w["o"]
        state[at + "mlp.gate_up.weight"] = torch.cat([w["gate"], w["up"]])
        state[at + "mlp.down.weight"] = w["down"]
        state[at + "attention_norm.weight"], state[at + "mlp_norm.weight"] = w["norm1"], w["norm2"]
        if shape.qkv_bias:
            state[at + "attention.qkv.bias"] = torch.cat([w["q_bias"], w["k_bias"], w["v_bias"]])
        if shape.qk_norm:
            state[at + "attention.q_norm.weight"] = w["q_norm"]
            state[at + "attention.k_norm.weight"] = w["k_norm"]
    decoder.load_state_dict(state, assign=True)
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=plain.device) / shape.head_dim
    decoder.inv_freq = 1.0 / shape.rope_theta**half
    return decoder.eval().requires_grad_(False)


class FastStep:
    """The runtime's step at one point: reads a store of ``keys`` rows, writes the new rows, gives token and probability."""

    def __init__(self, decoder: FastDecoder, point: Point, kv: Tensor, ids: Tensor) -> None:
        """kv [layers, 2, B, K, keys + rows, D]: copied into the store; ids [B, T]."""
        self.decoder, self.ids = decoder, ids
        device = ids.device
        self.store = decoder.new_store(point.batch, point.keys + point.rows)
        self.store.data[:, :, :, :, : kv.shape[4]] = kv
        self.store.extent = point.keys
        self.rows = (
            torch.arange(point.keys, point.keys + point.rows, device=device).expand(point.batch, -1).contiguous()
        )
        group = torch.zeros(point.batch, point.keys, dtype=torch.int32, device=device)
        valid = torch.ones(point.batch, point.rows, dtype=torch.bool, device=device)
        self.attend, self.valid = Attend.bidirectional(valid, group), valid

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor]:
        """One forward -> (probability [B, T], token [B, T])."""
        embeds = self.decoder.embed(self.ids)
        hidden = self.decoder(None, self.rows, self.store, self.attend, embeds=embeds, rows=self.rows, write=self.valid)
        laws = self.decoder.head_stats(hidden, frozenset({"top1"}), None)
        return laws.confidence, laws.token


def gate(ours: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor], dtype: torch.dtype) -> str | None:
    """None if two steps agree, else what differs.

    fp32: probabilities within 1e-3 relative, and the same tokens. bf16: the roundings of a layer move a logit of a random model by some
    hundredths, and the plain step rounds logits to bf16, so that near ties fall either way: probabilities within 25 % in every row, and
    the same token in half of 8 rows or more.
    """
    relative = ((ours[0] - plain[0]).abs() / plain[0]).flatten()
    same = (ours[1] == plain[1]).float().mean().item()
    allowed, wanted = (1e-3, 1.0) if dtype == torch.float32 else (0.25, 0.5 if relative.numel() >= 8 else 0.0)
    gap = relative.max().item()
    if not gap <= allowed:
        return f"probabilities differ by {gap:.3g} relative, allowed {allowed}"
    return None if same >= wanted else f"tokens agree in {same:.3f} of the rows, wanted {wanted}"


def bench_shape(
    shape: Shape,
    points: Iterable[Point],
    device: torch.device,
    rates: Rates,
    record: Record,
    deadline: Deadline,
    compile_plain: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Measure a shape at each point; adds one entry a point and gives the memory back. A red gate gives an entry without times."""
    plain = PlainStep(shape, device, dtype)
    decoder = FastDecoder(fused_decoder(shape, plain))
    first = True
    for point in points:
        if deadline.left() < SETUP_S:
            break
        plain.prepare(point.batch, point.rows, point.keys)
        fast = FastStep(decoder, point, plain.kv, plain.ids)
        reason = gate(fast.step(), plain.step(), dtype)
        where = dict(shape=shape.name, batch=point.batch, rows=point.rows, keys=point.keys)
        name = f"{shape.name} b{point.batch} r{point.rows} n{point.keys}"
        if reason is not None:
            record.add("steps", name, **where, red_gate=reason)
            continue
        floor = floor_ms(
            shape.step_bytes(point.batch, point.rows, point.keys),
            shape.step_flops(point.batch, point.rows, point.keys),
            rates.copy,
            rates.matmul,
        )
        ours = _time(fast.step, device)
        graph = _time(plain.step, device)
        values: dict[str, Any] = dict(ours=_dict(ours), plain_graph=_dict(graph), floor_ms=floor)
        # The floor of memory alone, for comparison with figures that count nothing else.
        values["byte_floor_ms"] = 1e3 * shape.step_bytes(point.batch, point.rows, point.keys) / rates.copy
        if floor > values["byte_floor_ms"]:
            # Bound by arithmetic, where the clock decides: what the device holds at this temperature, right after the step.
            side, runs = (8192, 200) if device.type == "cuda" else (256, 5)
            rate = matrix_rate(device, side, runs)
            hot = floor_ms(1.0, shape.step_flops(point.batch, point.rows, point.keys), rates.copy, rate)
            values.update(sustained_matmul=rate, sustained_floor_ms=hot, ours_over_sustained=ours.ms / hot)
        values.update(ours_over_floor=ours.ms / floor, plain_over_floor=graph.ms / floor, factor=graph.ms / ours.ms)
        if first:
            values["plain_eager"] = _dict(timed(plain.step, device, runs=10, budget_s=0.3))
            values["ours_eager"] = _dict(timed(fast.step, device, runs=10, budget_s=0.3))
        record.add("steps", name, **where, **values)
        if first and compile_plain and deadline.left() > 30:
            plain.compile()
            record.add(
                "steps", name + " compiled", **where, plain_compiled=_dict(_time(plain.step, device)), floor_ms=floor
            )
            plain = _uncompiled(plain)
        first = False
        del fast
    del decoder, plain
    _free(device)


def _uncompiled(plain: PlainStep) -> PlainStep:
    from dllm.evals.bench.plain import plain_head, plain_layer

    plain._layer, plain._head = plain_layer, plain_head
    return plain


def _time(step: Callable[[], Any], device: torch.device) -> Timing:
    return timed(in_graph(step, device), device)


def _dict(timing: Timing) -> dict[str, float]:
    return {"ms": timing.ms, "p10": timing.p10, "p90": timing.p90, "runs": timing.runs}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def fit_costs(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Least squares of ours = a + b * rows + c * keys over the batch-1 entries of each shape: ms, ms a row, ms a stored key.

    worst: the largest relative error of the fit. Shapes whose entries do not tell the three apart (all of one context, say) are left out.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for entry in entries:
        if entry.get("part") == "steps" and entry.get("batch") == 1 and "ours" in entry:
            found.setdefault(entry["shape"], []).append((entry["rows"], entry["keys"], entry["ours"]["ms"]))
    table = {}
    for shape, rows in found.items():
        data = torch.tensor(rows, dtype=torch.float64)
        # Scaled, so that keys in the thousands and the constant are of one size.
        scale = data[:, :2].amax(0).clamp(min=1.0)
        columns = torch.cat([torch.ones(len(rows), 1, dtype=torch.float64), data[:, :2] / scale], dim=1)
        if len(rows) < 3 or torch.linalg.matrix_rank(columns) < 3:
            continue
        solution = torch.linalg.lstsq(columns, data[:, 2:], driver="gelsd").solution[:, 0]
        fitted = columns @ solution
        worst = ((fitted - data[:, 2]).abs() / data[:, 2]).max().item()
        a, b, c = solution.tolist()
        table[shape] = {"a_ms": a, "b_ms": b / scale[0].item(), "c_ms": c / scale[1].item(), "worst": worst}
    return table
