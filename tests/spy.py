"""A cache that writes down what another one plans, and the state that it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dllm.types import DecodeSpec, DenoiseState, Plan


@dataclass
class Forward:
    """One forward: for each row its computed and its written canvas rows; beside them the state before it."""

    computed: list[list[int]]
    written: list[list[int]]
    masked: Tensor
    stored: Tensor
    step: list[int]
    lo: list[int]
    row_lo: list[int]
    prev_lo: list[int]
    decode: list[bool]


@dataclass
class Spy:
    """Plans as ``cache`` does."""

    cache: Any
    forwards: list[Forward] = field(default_factory=list)

    @property
    def uses_store(self) -> bool:
        return self.cache.uses_store

    def check(self, spec: DecodeSpec) -> None:
        self.cache.check(spec)

    def plan(self, state: DenoiseState) -> Plan:
        plan = self.cache.plan(state)
        self.forwards.append(
            Forward(
                computed=[rows[valid].tolist() for rows, valid in zip(plan.rows, plan.valid, strict=True)],
                written=[rows[write].tolist() for rows, write in zip(plan.rows, plan.write, strict=True)],
                masked=state.masked.clone(),
                stored=state.stored.clone(),
                step=state.step.tolist(),
                lo=state.lo.tolist(),
                row_lo=state.row_lo.tolist(),
                prev_lo=state.prev_lo.tolist(),
                decode=plan.decode.tolist(),
            )
        )
        assert not (plan.write & ~plan.valid).any(), "a row is written that is not computed"
        for rows in self.forwards[-1].computed:
            assert sorted(rows) == rows, "rows are not in canvas order"
        return plan

    def counts(self, row: int = 0) -> list[int]:
        """Computed rows of each forward."""
        return [len(f.computed[row]) for f in self.forwards]
