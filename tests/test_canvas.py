"""The canvas: where given tokens and slots stand, and that attention groups are those of training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm.canvas import GAP_GROUP, UNOPENED_GROUP, generation_canvas, infill_canvas
from dllm.denoise import DenoiseLoop
from dllm.samplers.threshold import Threshold
from dllm.training.layout import FIRST_BLOCK_GROUP, Region, block_groups
from dllm.types import LOWEST_GROUP, Attend
from tests.tiny import loop_request, tiny_lm, tiny_spec


def test_rows_are_left_aligned_whatever_their_lengths():
    canvas = generation_canvas([[5, 6, 7], [8]], [2, 3], tiny_spec(), "cpu")
    assert canvas.ids.tolist() == [[5, 6, 7, 0, 0], [8, 0, 0, 0, 0]]
    assert canvas.masked.tolist() == [[False] * 3 + [True] * 2, [False] + [True] * 3 + [False]]
    assert canvas.valid.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert canvas.position.tolist() == [list(range(5))] * 2
    assert canvas.regions == [[(3, 5)], [(1, 4)]]
    assert canvas.lengths.tolist() == [5, 4]


@pytest.mark.parametrize(
    ("origin", "anchors", "groups"),
    [("prompt", [[5]], [-1, -1, -1, -1, -1]), ("zero", [[4]], [-1, -1, -1, -1, UNOPENED_GROUP])],
)
def test_prompt_blocks_count_back_from_the_first_slot_or_up_from_zero(origin, anchors, groups):
    canvas = generation_canvas(
        [[5] * 5], [6], tiny_spec(block_length=4 if origin == "zero" else 8, block_origin=origin), "cpu"
    )
    assert canvas.anchors == anchors
    assert canvas.group[0].tolist() == groups + [UNOPENED_GROUP] * 6


@st.composite
def texts_with_gaps(draw):
    """Lengths of parts and gaps: prefix, gap, part, ..., suffix; the prefix holds a token."""
    num_gaps = draw(st.integers(1, 3))
    parts = [draw(st.integers(1, 20)), *(draw(st.integers(1, 6)) for _ in range(num_gaps - 1)), draw(st.integers(0, 6))]
    return parts, [draw(st.integers(1, 20)) for _ in range(num_gaps)]


@settings(max_examples=20)
@given(texts_with_gaps(), st.integers(2, 9))
def test_infill_by_rank_sees_what_it_saw_in_training(lengths, block_length):
    parts, gaps = lengths
    spec = tiny_spec(block_length=block_length)
    canvas = infill_canvas([[[7] * n for n in parts]], [gaps], spec, "cpu")
    # The groups of a finished decode: run it.
    loop = DenoiseLoop(tiny_lm().model, loop_request(canvas, spec, block_length=block_length, sampler=Threshold(0.0)))
    for _ in loop.run():
        final, low_used = loop.state.group[0].numpy(), loop.state.low[0].numpy()
    total = sum(parts) + sum(gaps)
    regions, at = [], 0
    for part, gap in zip(parts, gaps, strict=False):
        at += part
        # The training region begins with the known row, the last token before the gap.
        regions.append(Region(at - 1, at + gap, 1))
        at += gap
    group, low = block_groups(total, regions, block_length)
    ours = np.where(final >= GAP_GROUP, final - GAP_GROUP + FIRST_BLOCK_GROUP, final)
    np.testing.assert_array_equal(ours, group)
    np.testing.assert_array_equal(low_used, low)


def test_a_gap_of_no_length_joins_its_neighbours():
    spec = tiny_spec()
    for parts, gaps, joined, left in (
        ([[5, 6], [7, 8, 9], [4]], [0, 3], [[5, 6, 7, 8, 9], [4]], [3]),
        ([[5, 6], [7, 8, 9], [4, 3]], [3, 0], [[5, 6], [7, 8, 9, 4, 3]], [3]),
        ([[5], [7], [8], [9]], [0, 2, 0], [[5, 7], [8, 9]], [2]),
    ):
        ours, plain = (infill_canvas([p], [g], spec, "cpu") for p, g in ((parts, gaps), (joined, left)))
        for name in ("ids", "masked", "group", "low", "position"):
            assert torch.equal(getattr(ours, name), getattr(plain, name)), name
        assert (ours.regions, ours.anchors) == (plain.regions, plain.anchors)


def test_without_any_slot_there_is_nothing_to_decode():
    canvas = infill_canvas([[[5, 6], [7]]], [[0]], tiny_spec(), "cpu")
    assert canvas.regions == [[]]
    assert not canvas.masked.any()


def test_a_later_part_sees_only_itself_and_gap_blocks_see_all_before_them():
    # Positions: prefix 0-2, gap 3-5, suffix 6-7; row 2 opens the gap's block.
    canvas = infill_canvas([[[5, 6, 7], [8, 9]]], [[3]], tiny_spec(), "cpu")
    canvas.group[0, 2:6] = GAP_GROUP
    mask = Attend.by_group(canvas.group, canvas.low).mask()[0]
    sees = [row.nonzero().flatten().tolist() for row in mask]
    assert sees == [[0, 1]] * 2 + [list(range(8))] * 4 + [[6, 7]] * 2
    assert canvas.low[0, 2] == LOWEST_GROUP


@pytest.mark.parametrize("rule", ["block_causal", "bidirectional"])
def test_a_shifted_model_needs_a_token_before_a_gap(rule):
    with pytest.raises(ValueError, match="row 1: a gap needs at least one given token before it"):
        infill_canvas([[[5], [6]], [[], [6]]], [[2], [2]], tiny_spec(rule), "cpu")
    aligned = infill_canvas([[[], [6]]], [[2]], tiny_spec(rule, logits_shift=0), "cpu")
    assert aligned.regions == [[(0, 2)]]


def test_parts_and_gaps_must_fit_together():
    with pytest.raises(ValueError, match="a row with 2 gaps needs 3 parts: got 2"):
        infill_canvas([[[5], [6]]], [[2, 2]], tiny_spec(), "cpu")
