"""A block's first slot whose law cannot change is committed in the block's first step, whatever the sampler ranks by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_lm

NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"threshold": 2.0}),
    ("factor", {"factor": 0.0}),
    ("frechet", {"delta": 1.0}),
    ("entropy_bound", {"bound": 0.0}),
]
IDS = torch.randint(3, 60, (1, 11), generator=torch.Generator().manual_seed(3))


def run(**options: Any) -> Any:
    lm = tiny_lm("block_causal", first_slot="commit_first", eos_token_ids=())
    return lm.generate(input_ids=IDS, max_new_tokens=20, output_history=True, **options)


@pytest.mark.parametrize("cache", ["none", "block"])
def test_the_first_slot_of_every_block_goes_first(cache: str) -> None:
    out = run(sampler="low_confidence", cache=cache)
    assert out.history is not None
    order = [frame.new.index(True) for frame in out.history[0]]
    assert [order.index(slot) % 8 for slot in (0, 8, 16)] == [0, 0, 0]
    assert all(sum(frame.new) == 1 for frame in out.history[0])


@pytest.mark.parametrize(("sampler", "numbers"), NEUTRAL)
def test_neutral_settings_still_commit_one_token_a_step(sampler: str, numbers: dict[str, Any]) -> None:
    out = run(sampler=sampler, cache="none", **numbers)
    assert out.history is not None
    assert [sum(frame.new) for frame in out.history[0]] == [1] * 20
