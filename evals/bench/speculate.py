"""AR decoding against AR with a drafter, both as whole steps in CUDA graphs: tokens per second, accepted length, same text, what pays.

Dataset: held-out conversations (the last of the archive ``--data``), greedy, stop tokens honoured. Metric: useful tokens (up to and
without the stop) of all calls / wall time of decoding, prefill and capture apart; median of ``--runs`` passes over the same prompts
after a warm-up. One entry a batch size, on disk as soon as it is measured:

- ar, drafts: rounds of ``dllm/speculate_device.py`` without and with drafts; ratio: their tokens per second.
- plain: the frozen plain PyTorch step of ``evals/bench/plain.py`` (one row a sequence, same shape, random weights) in a CUDA graph; its
  tokens per second if every step gave the share of useful tokens that ours gives.
- rounds_saved: rounds of AR / rounds with drafts. At batch 1 that is the accepted length; a batch ends with its slowest row.
- costs: replays of the captured round with, of the round without drafts, and of the draft pass alone; they make the ``CostTable`` by
  which "auto" leaves drafting off where it does not pay (ratio 1).
- differ: prompts whose text is not that of the AR run (bf16 rounds otherwise over more rows), and the gap of the two tokens' logits.

A gate comes first: in fp32 the captured rounds must give the tokens of the plain host loop; no figure on a red gate.

    python -m dllm.evals.bench.speculate --drafter smollm2-135m-dfly --data train.npz --batch 1,4,16,64 --out bench.json --time-limit 60
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.draft_cost import CostTable, table_path
from dllm.drafters.config import DraftConfig
from dllm.drafters.dflash import DFlash
from dllm.drafters.dfly import DFly
from dllm.drafters.drafter import Drafter
from dllm.drafters.target import Target
from dllm.evals.atomic_write import write_text_atomic
from dllm.evals.bench.plain import PlainStep
from dllm.evals.bench.record import environment
from dllm.evals.bench.shapes import Shape
from dllm.evals.bench.timing import Deadline, in_graph, timed
from dllm.evals.divergence import divergences
from dllm.graphs import KEY_STEP, capture
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.noise import CounterNoise
from dllm.speculate_device import DeviceRounds, Rounds, rounds_for, speculate_on_device
from dllm.speculate_loop import SpeculateResult, SpeculativeLoop
from dllm.speculate_request import SpeculateRequest

GATE_TOKENS = 32


class Bench:
    """One run: a target, its drafter, prompts, and the entries measured so far."""

    def __init__(
        self, model: Decoder, drafter: Drafter, prompts: Sequence[Sequence[int]], eos: tuple[int, ...], new_tokens: int
    ) -> None:
        """Prompts that do not fit the common bucket of columns are left out, so that every call replays the same graphs."""
        room = KEY_STEP * max(2, -(-new_tokens // KEY_STEP) + 1) - new_tokens - drafter.max_drafts
        self.prompts = [row for row in prompts if len(row) <= room]
        if not self.prompts:
            raise ValueError(
                f"prompts must have some of at most {room} tokens: got lengths {[len(row) for row in prompts]}"
            )
        self.target, self.drafter, self.eos, self.new_tokens = Target.of(model), drafter, eos, new_tokens
        self.rounds = Rounds(8)

    def requests(self, batch: int, count: int, drafts: int) -> list[SpeculateRequest]:
        """Calls of ``batch`` rows over the first ``count`` prompts, more where a batch needs them, repeated where there are too few."""
        calls = max(1, count // batch)
        rows = [self.prompts[i % len(self.prompts)] for i in range(calls * batch)]
        noise = CounterNoise.for_rows(0, batch, self.target.device)
        return [
            SpeculateRequest(rows[i : i + batch], self.new_tokens, noise, num_drafts=drafts, eos_token_ids=self.eos)
            for i in range(0, len(rows), batch)
        ]

    def decode(self, batch: int, count: int, drafts: int) -> list[SpeculateResult]:
        """One pass over the prompts."""
        drafter = self.drafter if drafts else None
        return [speculate_on_device(self.target, drafter, r, self.rounds) for r in self.requests(batch, count, drafts)]

    def measure(self, batch: int, count: int, drafts: int, runs: int, deadline: Deadline) -> dict[str, Any]:
        """Tokens per second of ``runs`` passes, at least one, fewer where the time is over; ``texts`` are taken out by the caller."""
        self.decode(batch, batch, drafts)
        rates: list[float] = []
        results: list[SpeculateResult] = []
        while len(rates) < runs and (not rates or deadline.left() > 0):
            results = self.decode(batch, count, drafts)
            rates.append(sum(r.stats.useful_tokens for r in results) / sum(r.stats.decode_s for r in results))
        lengths = [n for r in results for n in r.stats.accept_lengths]
        return {
            "tokens_per_s": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "runs": len(rates),
            "prompts": batch * len(results),
            "useful_tokens": sum(r.stats.useful_tokens for r in results),
            "decode_s": sum(r.stats.decode_s for r in results),
            "rounds": sum(r.stats.nfe - 1 for r in results),
            "accept_length": sum(lengths) / max(len(lengths), 1),
            "texts": [row for r in results for row in r.tokens],
        }

    def costs(self, batch: int, drafts: int) -> dict[str, float]:
        """Median ms of a replay: the round without drafts, the round with them, the draft pass in it."""
        plain, drafted = (
            rounds_for(self.target, self.drafter if n else None, self.requests(batch, batch, n)[0], batch, self.rounds)
            for n in (0, drafts)
        )
        device = self.target.device
        alone = capture(lambda: draft_pass(drafted), device, owned=(drafted,), name="draft pass")
        ar, whole, draft = (timed(one.replay, device).ms for one in (plain.captured, drafted.captured, alone))
        return {"ar_round_ms": ar, "drafts_round_ms": whole, "draft_pass_ms": draft}

    def differences(
        self, rows: Sequence[Sequence[int]], ours: list[list[int]], truth: list[list[int]]
    ) -> dict[str, Any]:
        """How many texts part from the truth, where, and how far apart the two tokens' logits are there in the target's own law."""
        found = divergences(self.target.model, rows, truth, ours)
        for one in found:
            if one.gap is None:
                lengths = len(truth[one.prompt]), len(ours[one.prompt])
                raise ValueError(f"texts that agree must end together: got {lengths[0]} and {lengths[1]} tokens")
        gaps, places = [one.gap for one in found if one.gap is not None], [one.place for one in found]
        worst = max((abs(gap) for gap in gaps), default=0.0)
        return {"differ": len(gaps), "first_at": places, "logit_gaps": gaps, "largest_gap": worst}


def compile_all(bench: Bench, batches: Sequence[int], jobs: int, wide: bool) -> None:
    """Compile the kernels of every bucket in ``jobs`` processes; wide: those of the gate too. Raises what a process raised."""
    most, device = bench.drafter.max_drafts, bench.target.device
    longest = max(map(len, bench.prompts))
    buckets = [Bucket(b, n, longest, bench.new_tokens, bench.target.dtype) for b in batches for n in (most, 0)]
    if wide:
        rows = bench.prompts[:2]
        buckets += [Bucket(len(rows), n, max(map(len, rows)), GATE_TOKENS, torch.float32) for n in (most, 0)]
    options = {"head_candidates": bench.drafter.head_candidates} if isinstance(bench.drafter, DFly) else {}
    given = (bench.target.model.config, bench.drafter.config, str(device), len(bench.eos), options)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(jobs, len(buckets)), mp_context=context) as pool:
        for task in [pool.submit(compile_bucket, bucket, *given) for bucket in buckets]:
            task.result()


@torch.no_grad()
def draft_pass(rounds: DeviceRounds) -> Tensor:
    """The draft pass of a bucket alone, on whatever its buffers hold."""
    assert rounds.drafter is not None, "a bucket without a drafter"
    state = rounds.buffers
    angles = rounds.draft_angles.look_up(state.place)
    return rounds.drafter.propose(state.anchor, state.limits, state.key_group, *angles)


@torch.no_grad()
def gate(model: Decoder, load: Any, prompts: Sequence[Sequence[int]], eos: tuple[int, ...]) -> str | None:
    """None if captured rounds in fp32 on the model's device give the host loop's tokens, with and without drafts; else what differs.

    load: target -> its drafter.
    """
    from copy import deepcopy

    wide = deepcopy(model).float()
    drafter = load(wide)
    target, rows = Target.of(wide), [list(row) for row in prompts[:2]]
    noise = CounterNoise.for_rows(0, len(rows), target.device)
    request = SpeculateRequest(rows, GATE_TOKENS, noise, eos_token_ids=eos)
    loop = SpeculativeLoop(target, None, request)
    for _ in loop.run():
        pass
    truth = loop.result().tokens
    for drafts in (0, drafter.max_drafts):
        ours = speculate_on_device(target, drafter if drafts else None, replace(request, num_drafts=drafts))
        if ours.tokens != truth:
            return f"fp32 tokens with {drafts} drafts a round differ from those of the host's loop"
    return None


@dataclass(frozen=True)
class Bucket:
    """What a captured bucket's kernels depend on: rows, drafts, prompt tokens, new tokens, dtype."""

    batch: int
    drafts: int
    longest: int
    new_tokens: int
    dtype: torch.dtype


def compile_bucket(
    bucket: Bucket, config: DecoderConfig, drafts: DraftConfig, device: str, num_eos: int, options: dict[str, Any]
) -> Bucket:
    """Capture a bucket of random weights of the same shapes, so that its kernels lie in Triton's cache on disk."""
    with torch.device(device):
        model = Decoder(config).to(bucket.dtype).eval().requires_grad_(False)
        kind = DFly if drafts.kind == "dfly" else DFlash
        drafter = kind(drafts, model, **options).to(bucket.dtype).eval().requires_grad_(False)
    rows = [[0] * bucket.longest] * bucket.batch
    noise = CounterNoise.for_rows(0, bucket.batch, device)
    request = SpeculateRequest(rows, bucket.new_tokens, noise, num_drafts=bucket.drafts, eos_token_ids=(0,) * num_eos)
    rounds_for(Target.of(model), drafter if bucket.drafts else None, request, bucket.batch, Rounds(1))
    return bucket


def plain_step_ms(model: Decoder, batch: int, keys: int) -> float:
    """Median ms of the frozen plain step at the model's shape: one new row a sequence behind ``keys`` stored ones, in a CUDA graph."""
    c = model.config
    shape = Shape(
        "target", c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size,
        tied=c.tie_embeddings, qk_norm=c.qk_norm, qkv_bias=c.qkv_bias, rope_theta=c.rope_theta,
    )  # fmt: skip
    step = PlainStep(shape, model.device, model.dtype)
    step.prepare(batch, 1, keys)
    return timed(in_graph(step.step, model.device), model.device).ms


def run(
    bench: Bench, batches: Sequence[int], count: int, runs: int, deadline: Deadline, report: dict[str, Any], out: Path
) -> None:
    """Measure every batch size that there is time for into ``report`` and the file ``out``."""
    drafts = bench.drafter.max_drafts
    entries: list[dict[str, Any]] = []
    report["entries"] = entries
    for batch in batches:
        if entries and deadline.left() < 3:
            report["left_out"] = [b for b in batches if b not in [e["batch"] for e in entries]]
            write_text_atomic(out, json.dumps(report, indent=1) + "\n")
            break
        began = time.monotonic()
        ar = bench.measure(batch, count, 0, runs, deadline)
        ours = bench.measure(batch, count, drafts, runs, deadline)
        rows = [row for r in bench.requests(batch, count, 0) for row in r.prompts]
        texts = bench.differences(rows, ours.pop("texts"), ar.pop("texts"))
        mean_keys = sum(map(len, rows)) // len(rows) + bench.new_tokens // 2
        plain = plain_step_ms(bench.target.model, batch, mean_keys)
        share = ar["useful_tokens"] / ar["rounds"]
        entries.append(
            {
                "batch": batch,
                "ratio": ours["tokens_per_s"] / ar["tokens_per_s"],
                "rounds_saved": ar["rounds"] / max(ours["rounds"], 1),
                "ar": ar,
                "drafts": ours,
                **bench.costs(batch, drafts),
                "plain_step_ms": plain,
                "plain_tokens_per_s": 1e3 * share / plain,
                **texts,
            }
        )
        entries[-1]["seconds"] = time.monotonic() - began
        # With every entry, so that a cut run says what the sizes measured so far would choose.
        table = cost_table(bench, entries)
        report["cost_table"] = asdict(table)
        for entry in entries:
            on = table.pays(entry["batch"])
            entry["auto"] = {
                "drafts": on,
                "expected": table.speedup(entry["batch"]),
                "ratio": entry["ratio"] if on else 1.0,
            }
        write_text_atomic(out, json.dumps(report, indent=1) + "\n")
        print(line(entries[-1]), flush=True)


def cost_table(bench: Bench, entries: Sequence[dict[str, Any]]) -> CostTable:
    """What the replays say. accept_length: the least ``rounds_saved``, as a batch ends with its slowest row."""
    most = bench.drafter.max_drafts + 1.0
    return CostTable(
        num_drafts=bench.drafter.max_drafts,
        accept_length=min(most, *(max(entry["rounds_saved"], 1.0) for entry in entries)),
        plain_ms={e["batch"]: e["ar_round_ms"] for e in entries},
        verify_ms={e["batch"]: max(e["drafts_round_ms"] - e["draft_pass_ms"], 1e-6) for e in entries},
        draft_ms={e["batch"]: e["draft_pass_ms"] for e in entries},
        device=environment(bench.target.device)["device"],
        dtype=str(bench.target.dtype).removeprefix("torch."),
        columns=KEY_STEP,
    )


def length_costs(bench: Bench, lengths: Sequence[int], folder: Path, batch: int = 1) -> list[Path]:
    """One ``CostTable`` file a block length (its anchor included), of captured rounds: what ``train-block-pilot --cost-table`` reads.

    Their accept_length is 1, since only times are measured here.
    """
    paths = []
    for length in lengths:
        ms = bench.costs(batch, length - 1)
        table = CostTable(
            num_drafts=length - 1,
            accept_length=1.0,
            plain_ms={batch: ms["ar_round_ms"]},
            verify_ms={batch: max(ms["drafts_round_ms"] - ms["draft_pass_ms"], 1e-6)},
            draft_ms={batch: ms["draft_pass_ms"]},
            device=environment(bench.target.device)["device"],
            dtype=str(bench.target.dtype).removeprefix("torch."),
            columns=KEY_STEP,
        )
        paths.append(folder / f"length_{length}_batch_{batch}.json")
        table.save(paths[-1])
        print(f"length {length}: {', '.join(f'{name} {value:.3f}' for name, value in ms.items())}", flush=True)
    return paths


def line(entry: dict[str, Any]) -> str:
    """One entry for the eye."""
    ar, ours = entry["ar"], entry["drafts"]
    return (
        f"batch {entry['batch']}: AR {ar['tokens_per_s']:.0f} tok/s ({ar['spread'][0]:.0f}-{ar['spread'][1]:.0f}), with drafts "
        f"{ours['tokens_per_s']:.0f} ({ours['spread'][0]:.0f}-{ours['spread'][1]:.0f}), ratio {entry['ratio']:.2f}, auto "
        f"{entry['auto']['ratio']:.2f}; accepted {ours['accept_length']:.2f}; rounds ms {entry['ar_round_ms']:.3f} / "
        f"{entry['drafts_round_ms']:.3f} (draft {entry['draft_pass_ms']:.3f}), plain step {entry['plain_step_ms']:.3f}; differ "
        f"{entry['differ']} of {ours['prompts']}, largest gap {entry['largest_gap']:.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 1 where the gate was red."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device must exist: got cuda, and CUDA is not available")
    batches = [int(part) for part in options.batch.split(",")]
    if min(batches) < 1 or options.prompts < 1:
        raise SystemExit(f"--batch and --prompts must be >= 1: got {options.batch} and {options.prompts}")
    lengths = [int(part) for part in options.lengths.split(",") if part]
    if lengths and options.length_costs is None:
        raise SystemExit("--length-costs must name a folder where --lengths is given: got none")
    model, load, prompts, eos = _tiny(options) if options.tiny else _loaded(options)
    drafter = load(model)
    if not set(lengths) <= set(range(2, drafter.max_drafts + 2)):
        raise SystemExit(f"--lengths must be in 2..{drafter.max_drafts + 1}: got {options.lengths}")
    began = time.monotonic()
    report: dict[str, Any] = {
        "drafter": options.drafter, "target": "tiny" if options.tiny else options.target, "new_tokens": options.new_tokens,
        "dtype": str(model.dtype), "head_candidates": options.head_candidates, "num_drafts": drafter.max_drafts,
        **environment(model.device),
    }  # fmt: skip
    bench = Bench(model, drafter, prompts, eos, options.new_tokens)
    if options.jobs and model.device.type == "cuda":
        compile_all(bench, batches, options.jobs, options.gate)
        report["compile_seconds"] = time.monotonic() - began
    if options.gate:
        report["red_gate"] = gate(model, load, bench.prompts, eos)
        report["seconds_before_figures"] = time.monotonic() - began
        if report["red_gate"] is not None:
            write_text_atomic(options.out, json.dumps(report, indent=1) + "\n")
            print(report["red_gate"])
            return 1
    run(bench, batches, options.prompts, options.runs, Deadline(options.time_limit), report, options.out)
    if lengths:
        length_costs(bench, lengths, options.length_costs)
    if options.keep_costs:
        cost_table(bench, report["entries"]).save(table_path(drafter))
    return 0


def _loaded(options: Any) -> tuple[Decoder, Any, list[list[int]], tuple[int, ...]]:
    """(target, target -> drafter, prompts, stop tokens) from the command line."""
    from dllm.evals.quality import held_out_prompts
    from dllm.training.base import load_base, load_tokenizer

    base = load_base(options.target, options.device)
    need = 2 * max(options.prompts, *map(int, options.batch.split(",")))
    rows = held_out_prompts(options.data, load_tokenizer(options.target), need)
    candidates: Any = "auto" if options.head_candidates == "auto" else int(options.head_candidates) or None

    def load(model: Decoder) -> Drafter:
        return Drafter.from_pretrained(
            options.drafter, target=model, dtype=model.dtype, device=model.device, head_candidates=candidates
        )

    return base.decoder, load, [prompt for prompt, _ in rows], base.spec.eos_token_ids


def _tiny(options: Any) -> tuple[Decoder, Any, list[list[int]], tuple[int, ...]]:
    """A random target and drafter, to see that everything runs; its times mean nothing."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(40, 16, 24, 4, 2, 1, 8, 512, tie_embeddings=True)).to(options.device).eval()
    body = DecoderConfig(40, 16, 24, 1, 2, 1, 8, 512, tie_embeddings=True)
    config = DraftConfig("dfly", "angelspec", body, (0, 2), 39, 4, (None,), (False,), 16, correction_width=12)

    def load(target: Decoder) -> Drafter:
        return DFly(config, target, None).to(target.device).eval().requires_grad_(False)

    return model.requires_grad_(False), load, [[1 + i % 7, 2, 3 + i % 5][: 1 + i % 3] for i in range(8)], (5,)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.bench.speculate", description=__doc__)
    parser.add_argument("--drafter", default="smollm2-135m-dfly", help="a shipped name, a folder or a hub id")
    parser.add_argument("--target", default="smollm2-135m", help="a shipped name, a folder or a hub id")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/smollm2_selfgen/train.npz"))
    parser.add_argument(
        "--prompts", type=int, default=16, help="prompts at every batch size; a larger batch takes its own number"
    )
    parser.add_argument("--batch", default="1,4,16,64", help="comma-separated batch sizes")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3, help="passes over the prompts, after a warm-up")
    parser.add_argument("--head-candidates", default="auto", help="K: DFly's slots decide among so many tokens; 0: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument(
        "--time-limit", type=float, default=None, help="seconds of measuring, after compiling and the gate"
    )
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile kernels first, on CUDA; 0: none")
    parser.add_argument(
        "--no-gate", dest="gate", action="store_false", help="leave the fp32 comparison out (it compiles kernels)"
    )
    parser.add_argument("--keep-costs", action="store_true", help='keep the table where cost_table="auto" finds it')
    parser.add_argument(
        "--lengths", default="", help="comma-separated block lengths whose rounds are timed too, at batch 1"
    )
    parser.add_argument(
        "--length-costs", type=Path, default=None, help="folder of their cost tables, one file a length"
    )
    parser.add_argument("--tiny", action="store_true", help="a random model of four layers")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
