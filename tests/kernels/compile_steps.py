"""Compiles the bookkeeping kernels for compute capability 9.0, without a GPU; run by ``test_compile.py`` outside the interpreter."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dllm.kernels import denoise_step, guide_step
from dllm.types import PADDING_GROUP

SMALL = {
    "*u8": ("masked", "stored", "active", "stopped", "fault", "banned", "flag", "reading", "write", "broken"),
    "*i32": ("group", "low", "query", "key_group", "reveal", "branches", "accepts", "status"),
    "*fp32": ("confidence", "log_total", "log_confidence"),
}
TYPES = {f"{name}_ptr": kind for kind, names in SMALL.items() for name in names} | {"threshold": "fp32"}
"""Argument -> type; other pointers are int64, other numbers int32."""


def build(kernel: Any, num_warps: int, **constants: Any) -> None:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return TYPES.get(name, "*i64" if name.endswith("_ptr") else "i32")

    source = ASTSource(fn=kernel, signature={name: kind(name) for name in kernel.arg_names}, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    sys.stdout.write(f"{kernel.__name__} {len(made.asm['cubin'])}\n")


def main() -> None:
    """One line a kernel."""
    step: dict[str, Any] = dict(STORE_PASS=False, SLOTS=8)
    for branches in (0, 3):
        queries = 8 * max(2, branches + 1)
        none = {} if branches else {f"{name}_ptr": None for name in ("reveal", "guess", "branches")}
        build(
            denoise_step._plan_kernel, 4, **step, **none, PADDING=PADDING_GROUP, BRANCHES=branches, SHIFT=1, QUERIES=queries, WORDS=1,
            BLOCK_Q=queries, BLOCK_W=1024,
        )  # fmt: skip
        for threshold in (True, False):
            build(
                denoise_step._commit_kernel, 1, **step, **none, COMMIT_FIRST=True, GROUPED=True, THRESHOLD=threshold, NUM_EOS=2,
                BRANCHES=branches, TOKENS_PER_STEP=1, BLOCK_S=8,
            )  # fmt: skip
    build(guide_step._draft_kernel, 1, SLOTS=8, BLOCK_S=8)
    build(guide_step._plan_kernel, 4, PADDING=PADDING_GROUP, SLOTS=8, BLOCK_S=8, BLOCK_W=1024)
    for once in (True, False):
        build(guide_step._commit_kernel, 1, GROUPED=True, ONE_READING=once, NUM_EOS=2, SLOTS=8, BLOCK_S=8)


if __name__ == "__main__":
    main()
