"""The drafter's pass on the kernels: the drafts of the plain modules, in plain PyTorch and in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.drafters.fast_drafter import FastDrafter, unfit
from dllm.kernels._launch import interpreted
from dllm.model.decoder import inverse_frequencies
from dllm.types import PADDING_GROUP
from tests.drafters.toy import toy_drafter, toy_target

COLUMNS = 40


def both_passes(drafter, batch=3, tokens=9, drafts=5, seed=0):
    """(drafts of the modules, drafts of the kernels' pass) over the same ragged context, some rows with fewer drafts."""
    g = torch.Generator().manual_seed(seed)
    valid = torch.arange(tokens) < torch.randint(1, tokens + 1, (batch, 1), generator=g)
    features = torch.randn(batch, tokens, drafter.config.feature_width, generator=g)
    anchor = torch.randint(drafter.config.body.vocab_size, (batch,), generator=g)
    limits = torch.randint(1, drafts + 1, (batch,), generator=g)
    drafter.reset(batch, COLUMNS)
    wanted = drafter.propose(Context(features, valid), anchor, drafts, lengths=limits).tokens
    fast = FastDrafter(drafter, batch, COLUMNS, drafts)
    frequencies = inverse_frequencies(drafter.config.body)

    def angles(positions):
        turned = positions[..., None] * frequencies
        return turned.cos(), turned.sin()

    rows = (valid.cumsum(1) - 1).clamp(min=0)
    cos, sin = angles(rows)
    fast.feed(features, cos, sin, rows, valid)
    lengths = valid.sum(1)
    key_group = torch.where(torch.arange(COLUMNS) < lengths[:, None], 0, PADDING_GROUP).to(torch.int32)
    got = fast.propose(anchor, limits, key_group, *angles(lengths[:, None] + torch.arange(drafts + 1)))
    # What stands behind the drafts that count is arbitrary.
    counts = torch.arange(drafts) < limits[:, None]
    return wanted[counts], got[counts]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dflash", {}),
        ("dflash", {"causal": (True, False), "taps": (2, 0, 1)}),
        ("dflash", {"input_embedding_scale": 2.5, "output_multiplier": 0.5}),
        ("dfly", {}),
        ("dfly", {"head_candidates": 4}),
        ("dfly", {"layers": 3, "correction_width": None}),
    ],
)
def test_drafts_are_those_of_the_modules(kind, changes):
    seen: set[int] = set()
    for seed in range(5):
        drafter = toy_drafter(kind, toy_target(vocab=30), seed=seed, **changes)
        wanted, got = both_passes(drafter, seed=seed)
        assert torch.equal(wanted, got)
        seen |= set(got.tolist())
    assert len(seen) > 4


def test_without_room_for_a_table_embedding_rows_are_normed_one_by_one(monkeypatch):
    monkeypatch.setattr("dllm.drafters.fast_drafter.TABLE_BYTES", 0)
    drafter = toy_drafter("dfly", toy_target(vocab=30))
    assert FastDrafter(drafter, 1, 8, 2).table is None
    wanted, got = both_passes(drafter)
    assert torch.equal(wanted, got)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", ["dflash", "dfly"])
def test_the_kernels_give_the_same_drafts(kind, monkeypatch):
    drafter = toy_drafter(kind, toy_target(vocab=30))
    for name, module in list(sys.modules.items()):
        if name.startswith("dllm.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    wanted, got = both_passes(drafter, batch=2, drafts=3)
    assert torch.equal(wanted, got)


def test_drafters_that_do_not_fit_are_named():
    target = toy_target()
    assert unfit(toy_drafter("dflash2", target)) == "a drafter of type DFlash2"
    assert unfit(toy_drafter("dflash", target, final_logit_softcapping=30.0)) == "a drafter with a soft cap"
    assert unfit(toy_drafter("dflash", target, draft_vocab_size=5)) == "a drafter with a head of its own"
    assert (
        unfit(toy_drafter("dflash", target).double()) == "a drafter whose target is no Decoder of its device and dtype"
    )
    with pytest.raises(ValueError, match="a drafter with a window"):
        FastDrafter(toy_drafter("dflash", target, windows=(3, None)), 1, 8, 2)
