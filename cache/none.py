"""The cache that caches nothing: every row is recomputed in every step. The truth that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass(frozen=True)
class NoCache:
    """Recompute the whole canvas, prompt and masked rest included: P + G rows a step. Exact by definition; nothing is stored."""

    uses_store = False

    def check(self, spec: DecodeSpec) -> None:
        """Any model will do."""

    def plan(self, state: DenoiseState) -> Plan:
        """All valid rows of active sequences, none written."""
        compute = state.valid & state.active[:, None]
        length = compute.shape[1]
        stop = compute.sum(-1)
        plan = Plan.of_ranges(stop * 0, stop, length, state.active)
        return Plan(plan.rows, plan.valid, plan.valid & False, plan.decode)
