"""What each kernel costs beside plain PyTorch, against the copy rate of the same run.

Every entry first compares the kernel with its reference on the very inputs (the gate), then times both in CUDA graphs over several
copies of the inputs, together larger than the second-level cache, so that memory is really read. ``bytes`` are the least that the
operation must move; share = bytes / time / copy rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm.evals.bench.record import Record
from dllm.evals.bench.timing import Deadline, Rates, Timing, in_graph, timed
from dllm.kernels._launch import ceil_div
from dllm.kernels.attention import attention, attention_reference, plan_tiles
from dllm.kernels.lm_head_stats import lm_head_stats
from dllm.kernels.norm_rope_kv import add_rms_norm, add_rms_norm_reference, swiglu, swiglu_reference
from dllm.kernels.row_stats import row_stats, row_stats_reference
from dllm.kernels.skinny_linear import skinny_linear
from dllm.types import Attend, pack_bits

CACHE_BYTES = 500 * 2**20
"""Inputs of one graph together: ten times the second-level cache of an H200, so that what one run reads is gone when it is read again."""
MIN_COPIES = 4
MIN_RUNS = 16
"""Runs of one graph at least, the copies in turn, so that the launch of the graph does not count."""
COMPILE_S = 20.0
TOP1 = frozenset({"top1"})


@dataclass(frozen=True)
class Sizes:
    """Sizes of the entries: vocabulary, width, feed-forward width, stored keys, rows of the tall case, head counts of attention."""

    vocab: int = 126464
    width: int = 4096
    ffn: int = 12288
    small_vocab: int = 49152
    small_width: int = 576
    keys: int = 16384
    tall: int = 4096
    rows: int = 32
    head_dim: int = 128
    heads: tuple[tuple[int, int], ...] = ((32, 32), (32, 8))


TINY = Sizes(257, 64, 96, 130, 32, 200, 9, 5, 16, ((4, 4), (4, 2)))


@dataclass(frozen=True)
class Case:
    """One entry: ``make`` gives (kernel, baseline, reference) over fresh inputs; tolerance: largest error allowed, relative to the
    reference's largest magnitude; slow: its baseline is compiled first, so it is left out unless ``COMPILE_S`` seconds are left."""

    name: str
    bytes_moved: int
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]]
    tolerance: float
    baseline: str
    slow: bool = False


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """All entries, the most important first."""
    wide = 1e-3 if dtype == torch.float32 else 2e-2

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, scale)

    def head(vocab: int, width: int) -> Any:
        x, w = random(1, sizes.rows, width), random(vocab, width, scale=width**-0.5)

        def plain() -> Any:
            return F.linear(x, w).float().softmax(-1).max(-1)

        def reference() -> Tensor:
            return F.linear(x.float(), w.float()).logsumexp(-1)

        return (lambda: lm_head_stats(x, w, TOP1).log_total), plain, reference

    for name, vocab, width in (("llada", sizes.vocab, sizes.width), ("smollm2", sizes.small_vocab, sizes.small_width)):
        yield Case(
            f"lm_head_stats {name} [{sizes.rows}, {width}] x {vocab}",
            2 * vocab * width,
            lambda vocab=vocab, width=width: head(vocab, width),  # type: ignore[misc]
            wide,
            "cuBLAS + softmax + max",
        )

    def stats(rows: int) -> Any:
        logits = random(1, rows, sizes.vocab, scale=3.0)
        return (
            lambda: row_stats(logits, TOP1).log_total,
            lambda: likeliest(logits),
            lambda: row_stats_reference(logits, TOP1).log_total,
        )

    for rows in (sizes.rows, sizes.tall):
        yield Case(
            f"row_stats [{rows}, {sizes.vocab}]",
            2 * rows * sizes.vocab,
            lambda rows=rows: stats(rows),  # type: ignore[misc]
            1e-3,
            "softmax + max",
        )

    flexible: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def mixed(heads: int, kv_heads: int, tree: bool, flex: bool = False) -> Any:
        q, k, v = (random(1, h, sizes.rows, sizes.head_dim) for h in (heads, kv_heads, kv_heads))
        # One tensor holds both, as in a layer of the KV store.
        keys, values = random(2, 1, kv_heads, sizes.keys, sizes.head_dim)
        group = torch.zeros(1, sizes.keys, dtype=torch.int32, device=device)
        attend = Attend.bidirectional(torch.ones(1, sizes.rows, dtype=torch.bool, device=device), group)
        if tree:
            # Each new row sees its ancestors in a binary tree.
            parents = torch.eye(sizes.rows, dtype=torch.bool, device=device)
            for row in range(1, sizes.rows):
                parents[row] |= parents[(row - 1) // 2]
            attend = Attend(attend.key_group, attend.low, attend.group, pack_bits(parents[None]))
        mask = attend.mask()
        plan = plan_tiles(attend)
        # The baselines find the new rows behind the stored ones already, as in a cache that holds both.
        wide_k, wide_v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        gqa = heads != kv_heads
        if flex:
            # One for all copies: every further mask would be compiled again, and its keys alone exceed the cache.
            if (heads, kv_heads) not in flexible:
                flexible[heads, kv_heads] = flex_attention_of(q, wide_k, wide_v, mask, gqa)
            plain = flexible[heads, kv_heads]
        else:
            plain = lambda: F.scaled_dot_product_attention(  # noqa: E731
                q, wide_k, wide_v, attn_mask=mask[:, None], enable_gqa=gqa
            )
        return (
            lambda: attention(q, k, v, attend, keys, values, plan=plan),
            plain,
            lambda: attention_reference(q.float(), k.float(), v.float(), attend, keys.float(), values.float()),
        )

    for heads, kv_heads in sizes.heads:
        for tree in (False, True):
            yield Case(
                f"attention {'tree' if tree else 'full'} {sizes.rows} rows over {sizes.keys}, {heads}/{kv_heads} heads",
                4 * kv_heads * sizes.keys * sizes.head_dim,
                lambda heads=heads, kv_heads=kv_heads, tree=tree: mixed(heads, kv_heads, tree),  # type: ignore[misc]
                wide,
                "SDPA with a bool mask",
            )

    def product(rows: int, into: int, out: int) -> Any:
        x, w = random(1, rows, into), random(out, into, scale=into**-0.5)
        return (
            lambda: skinny_linear(x, w),
            lambda: F.linear(x, w),
            lambda: F.linear(x.float(), w.float()),
        )

    products = [
        ("llada qkv", sizes.rows, sizes.width, 3 * sizes.width),
        ("llada out", sizes.rows, sizes.width, sizes.width),
        ("llada gate/up", sizes.rows, sizes.width, 2 * sizes.ffn),
        ("llada down", sizes.rows, sizes.ffn, sizes.width),
        ("llada down", 1, sizes.ffn, sizes.width),
        ("smollm2 qkv", sizes.rows, sizes.small_width, 5 * sizes.small_width // 3),
        ("smollm2 down", sizes.rows, 8 * sizes.small_width // 3, sizes.small_width),
    ]
    for name, rows, into, out in products:
        yield Case(
            f"skinny_linear {name} [{rows}, {into}] x {out}",
            2 * into * out,
            lambda rows=rows, into=into, out=out: product(rows, into, out),  # type: ignore[misc]
            wide,
            "cuBLAS",
        )

    def norm() -> Any:
        x, residual, weight = random(sizes.rows, sizes.width), random(sizes.rows, sizes.width), random(sizes.width)
        return (
            lambda: add_rms_norm(x, residual, weight, 1e-6)[1],
            lambda: F.rms_norm(x + residual, (sizes.width,), weight, 1e-6),
            lambda: add_rms_norm_reference(x, residual, weight, 1e-6)[1],
        )

    yield Case(f"add_rms_norm [{sizes.rows}, {sizes.width}]", 8 * sizes.rows * sizes.width, norm, wide, "PyTorch")

    def gated() -> Any:
        x = random(sizes.rows, 2 * sizes.ffn)

        def plain() -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

        return (lambda: swiglu(x)), plain, (lambda: swiglu_reference(x))

    yield Case(f"swiglu [{sizes.rows}, {2 * sizes.ffn}]", 6 * sizes.rows * sizes.ffn, gated, wide, "PyTorch")

    for heads, kv_heads in sizes.heads:
        yield Case(
            f"attention tree {sizes.rows} rows over {sizes.keys}, {heads}/{kv_heads} heads, against FlexAttention",
            4 * kv_heads * sizes.keys * sizes.head_dim,
            lambda heads=heads, kv_heads=kv_heads: mixed(heads, kv_heads, True, flex=True),  # type: ignore[misc]
            wide,
            "FlexAttention, compiled",
            slow=True,
        )

    def stats_compiled() -> Any:
        logits = random(1, sizes.rows, sizes.vocab, scale=3.0)
        return (
            lambda: row_stats(logits, TOP1).log_total,
            lambda: compiled(likeliest, device)(logits),
            lambda: row_stats_reference(logits, TOP1).log_total,
        )

    yield Case(
        f"row_stats [{sizes.rows}, {sizes.vocab}], against torch.compile",
        2 * sizes.rows * sizes.vocab,
        stats_compiled,
        1e-3,
        "softmax + max, compiled",
        slow=True,
    )


def likeliest(logits: Tensor) -> Any:
    """(probability, id) of each row's likeliest id, as plain PyTorch finds them."""
    return logits.float().softmax(-1).max(-1)


@lru_cache(maxsize=8)
def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``torch.compile`` of a function on CUDA; the function itself on the CPU, where only its result is looked at."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def flex_attention_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, gqa: bool) -> Callable[[], Tensor]:
    """FlexAttention over keys and values [B, K, N, D] with mask [B, Q, N] bool as data; its block mask is made here, once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[b, query, key]

    blocks = create_block_mask(seen, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device))
    call = compiled(flex_attention, q.device)
    return lambda: call(q, k, v, block_mask=blocks, enable_gqa=gqa)


def error_of(ours: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to the truth's largest magnitude; infinite where ours is not finite."""
    gap = (ours.float() - truth.float()).abs().max() / truth.float().abs().max().clamp(min=1e-30)
    return gap.item() if bool(torch.isfinite(ours.float()).all()) else float("inf")


@torch.no_grad()
def bench_kernels(
    sizes: Sizes, device: torch.device, rates: Rates, record: Record, deadline: Deadline, dtype: torch.dtype
) -> None:
    """Gate and time every case; adds one entry each. A red gate gives an entry without times."""
    for case in cases(sizes, device, dtype):
        if deadline.left() < 1.0:
            break
        if case.slow and deadline.left() < COMPILE_S:
            continue
        try:
            _bench_case(case, device, rates, record)
        except Exception as error:  # noqa: BLE001
            # A baseline that this version cannot compile must not cost the other entries.
            record.add("kernels", case.name, failed=f"{type(error).__name__}: {error}"[:300])


def _bench_case(case: Case, device: torch.device, rates: Rates, record: Record) -> None:
    wanted = ceil_div(CACHE_BYTES, max(case.bytes_moved, 1)) if device.type == "cuda" else 1
    made = [case.make() for _ in range(max(1 if device.type == "cpu" else MIN_COPIES, min(wanted, 24)))]
    kernel, _, reference = made[0]
    error = error_of(kernel(), reference())
    if not error <= case.tolerance:
        record.add("kernels", case.name, red_gate=f"error {error:.3g}, allowed {case.tolerance}")
        return
    ours = _each([entry[0] for entry in made], device)
    plain = _each([entry[1] for entry in made], device)
    record.add(
        "kernels",
        case.name,
        ours={"ms": ours.ms, "p10": ours.p10, "p90": ours.p90},
        baseline={"ms": plain.ms, "p10": plain.p10, "p90": plain.p90},
        baseline_name=case.baseline,
        gb_per_s=case.bytes_moved / ours.ms / 1e6,
        share=case.bytes_moved / (ours.ms / 1e3) / rates.copy,
        factor=plain.ms / ours.ms,
        error=error,
    )


def _each(runs: list[Callable[[], Any]], device: torch.device) -> Timing:
    """Time of one of several equal runs, all of them in one graph."""
    repeat = ceil_div(MIN_RUNS, len(runs)) if device.type == "cuda" else 1
    whole = timed(in_graph(lambda: [run() for run in runs], device, repeat), device, budget_s=0.2)
    count = len(runs) * repeat
    return Timing(whole.ms / count, whole.p10 / count, whole.p90 / count, whole.runs)
