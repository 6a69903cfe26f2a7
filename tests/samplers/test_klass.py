"""KLASS over several steps: stability counts, a block's first steps, the width of blocks, rows of a batch."""

from __future__ import annotations

import torch

from dllm.kernels.row_stats import row_stats
from dllm.samplers.klass import Klass
from tests.samplers.situations import EVERYTHING, call

SURE = torch.tensor([4.0, 0.0, 0.0])
OTHER = torch.tensor([0.0, 4.0, 0.0])


def walk(sampler, laws, masked=None, start=0):
    """Commits of the steps whose logits [S, V] are given, one row."""
    history: dict[str, torch.Tensor] = {}
    chosen, before = [], torch.zeros_like(laws[0])
    for i, logits in enumerate(laws):
        rows = row_stats(logits[None], EVERYTHING, previous=before[None])
        mask = torch.ones(1, logits.shape[0], dtype=torch.bool) if masked is None else masked
        chosen.append(call(sampler, rows, mask, start + i, history=history)[0].tolist())
        before = logits
    return chosen


def test_a_slot_is_committed_once_its_law_has_stood_still_for_n_steps():
    still, moving = torch.stack([SURE, SURE]), torch.stack([SURE, OTHER])
    chosen = walk(Klass(0.5, 0.01, n=2), [still, moving, moving, moving])
    # The first law is compared with the uniform one, so it counts as a move.
    assert chosen == [[True, False], [True, False], [True, False], [True, True]]


def test_a_sure_slot_that_still_moves_is_not_committed_by_the_rule():
    a, b = torch.stack([SURE, 2 * SURE, SURE]), torch.stack([OTHER, 2 * SURE, OTHER])
    assert walk(Klass(0.5, 0.01, n=1), [a, b, a])[1] == [False, True, False]


def test_a_new_block_forgets_the_last_one_and_may_be_wider():
    history: dict[str, torch.Tensor] = {}
    for step, width in ((1, 2), (2, 2), (0, 3), (1, 3)):
        rows = row_stats(SURE.expand(1, width, -1), EVERYTHING, previous=SURE.expand(1, width, -1))
        chosen = call(Klass(0.5, 0.01, n=2), rows, torch.ones(1, width, dtype=torch.bool), step, history=history)
        # In step 0 the rule is closed: one fallback.
        assert chosen.sum().item() == (1 if step == 0 else width)


def test_a_forbidden_token_in_one_law_gives_no_nan():
    barred = SURE.clone()
    barred[2] = -torch.inf
    rows = row_stats(barred.expand(1, 2, -1), EVERYTHING, previous=barred.expand(1, 2, -1))
    assert call(Klass(0.5, 0.01, n=1), rows, torch.ones(1, 2, dtype=torch.bool)).all()
