"""Every kernel under NVIDIA's compute-sanitizer: ``python -m dllm.evals.bench.sanitize --time-limit 60``.

memcheck finds accesses outside of allocations (each tensor gets an allocation of its own), racecheck races between threads over shared
memory. Both run side by side, each in a process that launches every kernel once on small odd sizes and compares it with its
reference; a plain run comes first, so that nothing is compiled under the tool. The result is one line a tool, and a log each in ``--out``.
Exit status: 0 no errors, 1 errors, 2 no answer (the tool is missing, may not run here, or the time was over).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm.kernels import attention as attending
from dllm.kernels import lm_head_stats as head
from dllm.kernels import norm_rope_kv as small
from dllm.kernels import row_stats as rows_of
from dllm.kernels import skinny_linear as skinny
from dllm.kernels.commit import commit_reference, commit_triton
from dllm.kernels.noise import counter_uniform_reference, counter_uniform_triton
from dllm.kernels.verify import (
    verify_greedy_reference,
    verify_greedy_triton,
    verify_sampled_reference,
    verify_sampled_triton,
)
from dllm.types import Attend

TOOLS = ("memcheck", "racecheck")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
DONE = "every kernel ran"
TOLERANCE = 3e-2
ALL = frozenset({"top1", "entropy", "margin"})

Check = tuple[str, Callable[[], Any], Callable[[], Any]]
"""(name, the kernel, its reference); both give a tensor or several."""


def checks(device: torch.device) -> Iterator[Check]:
    """Every kernel on small odd sizes."""
    generator = torch.Generator(device).manual_seed(0)

    # What the models run on a device: other matrix instructions than fp32's.
    wide = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    x, weight, up = random(5, 96, dtype=wide), random(50, 96, dtype=wide), random(50, 96, dtype=wide)
    split, whole = skinny.LinearConfig(16, 32, 3, 4, 2), skinny.LinearConfig(16, 64, 1, 4, 2)
    for name, config in (("split", split), ("whole", whole)):
        yield (
            f"skinny_linear {name}",
            lambda config=config: skinny.skinny_linear_triton(x, weight, config=config),  # type: ignore[misc]
            lambda: skinny.skinny_linear_reference(x, weight),
        )
        yield (
            f"skinny_swiglu {name}",
            lambda config=config: skinny.skinny_swiglu_triton(x, weight, up, config=config),  # type: ignore[misc]
            lambda: skinny.skinny_swiglu_reference(x, weight, up),
        )
    parts, residual, norm = random(3, 5, 40), random(5, 40), random(40)
    yield (
        "add_rms_norm of parts",
        lambda: small.add_rms_norm_triton(parts, residual, norm, 1e-6, partial=True),
        lambda: small.add_rms_norm_reference(parts, residual, norm, 1e-6, partial=True),
    )
    gate_up = random(5, 74)
    yield "swiglu", (lambda: small.swiglu_triton(gate_up)), (lambda: small.swiglu_reference(gate_up))

    target = torch.arange(3, 8, device=device).expand(2, -1).contiguous()
    valid = torch.ones(2, 5, dtype=torch.bool, device=device)
    valid[1, 3:] = False

    def rope(call: Any, qkv: Tensor, angle: Tensor, qk_norm: Tensor) -> list[Tensor]:
        keys, values = torch.zeros(2, 2, 2, 9, len(qk_norm), device=device)
        given = dict(q_weight=qk_norm, k_weight=qk_norm, rows=target, valid=valid, keys=keys, values=values)
        return [*call(qkv, angle.cos(), angle.sin(), 2, 2, **given), keys, values]

    for width in (16, 128):
        inputs = random(2, 5, 6 * width), random(2, 5, width // 2), random(width)
        yield (
            f"rope_write of width {width}",
            partial(rope, small.rope_write_triton, *inputs),
            partial(rope, small.rope_write_reference, *inputs),
        )

    q, k, v = (random(2, heads, 5, 16, dtype=wide) for heads in (4, 2, 2))
    keys, values = random(2, 2, 130, 16, dtype=wide), random(2, 2, 130, 16, dtype=wide)
    group = torch.arange(130, device=device, dtype=torch.int32).expand(2, -1) // 70
    attend = Attend.bidirectional(valid, group.contiguous())
    for splits in (1, 3):
        tiles = attending.AttentionConfig(16, splits, 4, 2)
        yield (
            f"attention in {splits} parts",
            lambda tiles=tiles: attending.attention_triton(q, k, v, attend, keys, values, config=tiles)[valid],  # type: ignore[misc]
            lambda: attending.attention_reference(q, k, v, attend, keys, values)[valid],
        )
    hidden, matrix = random(5, 48, dtype=wide), random(131, 48, dtype=wide)
    number = torch.rand(5, device=device, generator=generator)
    banned = torch.zeros(131, dtype=torch.bool, device=device)
    banned[7] = True

    def numbers(stats: Any) -> list[Tensor]:
        return [stats.log_total, stats.entropy, stats.margin]

    yield (
        "lm_head_stats",
        lambda: numbers(head.lm_head_stats_triton(hidden, matrix, ALL, banned, number, 0.8)),
        lambda: numbers(head.lm_head_stats_reference(hidden, matrix, ALL, banned, number, 0.8)),
    )
    logits, numbers_2d = random(1, 3, 517), torch.rand(1, 3, device=device, generator=generator)
    yield (
        "row_stats",
        lambda: numbers(rows_of.row_stats_triton(logits, ALL, None, numbers_2d, 0.8)),
        lambda: numbers(rows_of.row_stats_reference(logits, ALL, None, numbers_2d, 0.8)),
    )
    seeds, step = torch.tensor([3, 9], device=device), torch.tensor([0, 4], device=device)
    yield (
        "counter_uniform",
        lambda: counter_uniform_triton(seeds, target, step),
        lambda: counter_uniform_reference(seeds, target, step),
    )
    token, sure = target + 20, torch.rand(2, 5, device=device, generator=generator)
    lo, hi = torch.tensor([3, 3], device=device), torch.tensor([8, 7], device=device)

    def committed(call: Any) -> list[Tensor]:
        canvas, masked = torch.full((2, 11), 1, device=device), torch.ones(2, 11, dtype=torch.bool, device=device)
        call(token, sure, canvas, masked, lo, hi, torch.tensor([24], device=device), threshold=0.5)
        return [canvas, masked]

    yield "commit", (lambda: committed(commit_triton)), (lambda: committed(commit_reference))
    laws, drawn = random(2, 4, 37).softmax(-1), random(2, 3, 37).softmax(-1)
    drafts = drawn.argmax(-1)
    uniform = torch.rand(2, 4, device=device, generator=generator)
    yield (
        "verify_greedy",
        lambda: verify_greedy_triton(laws.argmax(-1), drafts),
        lambda: verify_greedy_reference(laws.argmax(-1), drafts),
    )
    for block in (False, True):
        yield (
            f"verify_sampled {'block' if block else 'chain'}",
            lambda block=block: verify_sampled_triton(laws, drafts, drawn, uniform, None, block),  # type: ignore[misc]
            lambda block=block: verify_sampled_reference(laws, drafts, drawn, uniform, None, block),  # type: ignore[misc]
        )


def run_checks(device: torch.device) -> list[str]:
    """Launch every kernel once; what differs from its reference by more than ``TOLERANCE`` of its largest number."""
    wrong = []
    for name, kernel, reference in checks(device):
        ours, truth = kernel(), reference()
        pairs = [(ours, truth)] if isinstance(ours, Tensor) else list(zip(ours, truth, strict=True))
        for number, (a, b) in enumerate(pairs):
            gap = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6)
            if not gap <= TOLERANCE:
                wrong.append(f"{name}: output {number} differs by {gap.item():.3g}")
    return wrong


def find_tool() -> str | None:
    """The compute-sanitizer on the path or beside the CUDA toolkits, or None."""
    found = shutil.which("compute-sanitizer")
    beside = [str(p) for p in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))]
    return found or next(iter(beside), None)


def verdict(tool: str, text: str) -> tuple[int, str]:
    """(exit status as in the module's docstring, one line) from what a tool printed."""
    found = SUMMARY[tool].search(text)
    if found is None or DONE not in text:
        last = text.strip().splitlines()[-1:] or ["nothing printed"]
        return 2, f"{tool}: no answer: {last[0][:160]}"
    errors = int(found.group(1))
    return int(errors > 0), f"{tool}: {errors} errors, all kernels ran"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools; the worst status."""
    parser = argparse.ArgumentParser(prog="python -m dllm.evals.bench.sanitize", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("sanitize"), help="folder of the logs")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for both tools together")
    parser.add_argument("--child", choices=("cuda", "cpu"), help="launch the kernels here, without a tool")
    options = parser.parse_args(arguments)
    if options.child:
        wrong = run_checks(torch.device(options.child))
        print("\n".join(wrong) or DONE, flush=True)
        return int(bool(wrong))
    command = [sys.executable, "-m", "dllm.evals.bench.sanitize", "--child", "cuda"]
    # Without the caching allocator every tensor is an allocation that memcheck knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tool = find_tool()
    if tool is None:
        print("compute-sanitizer must be on the path or under /usr/local/cuda*/bin: found neither")
        return 2
    began = time.monotonic()
    try:
        plain = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.time_limit, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"the run without a tool must end within {options.time_limit:.0f} s: it did not")
        return 2
    if plain.returncode:
        print(f"the kernels fail without a tool: {(plain.stdout + plain.stderr)[-2000:]}")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    running = {}
    for name in TOOLS:
        log = (options.out / f"{name}.log").open("w", encoding="utf-8")
        # Only this process: Triton's own children (compilers) are not looked at.
        call = [tool, "--tool", name, "--target-processes", "application-only", *command]
        running[name] = subprocess.Popen(call, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)
        log.close()
    worst = 0
    for name, process in running.items():
        try:
            process.wait(timeout=max(1.0, options.time_limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        status, line = verdict(name, (options.out / f"{name}.log").read_text(encoding="utf-8", errors="replace"))
        print(line, flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
