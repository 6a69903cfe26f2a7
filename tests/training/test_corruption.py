"""What is drawn for a document: masks, borders, gaps, windows and tails."""

from dataclasses import replace

import numpy as np
import pytest

from dllm.training.corruption import CorruptionConfig, corrupt, draw_gaps, mask_weights, sample_masks
from dllm.training.layout import BOUNDARY, FIRST_BLOCK_GROUP, GENERATION, INFILL

STOP, START, FILLER = 2, 0, 15
BLOCKS = CorruptionConfig("block_causal", max_rows=512)
CANVAS = CorruptionConfig("bidirectional", max_rows=512)


def chat(prompt: int, answer: int, ended: bool = True) -> np.ndarray:
    """Tokens whose value says where they stand: position i holds 100 + i; the last is the stop token."""
    tokens = 100 + np.arange(prompt + answer)
    if ended:
        tokens[-1] = STOP
    return tokens


def rngs(count: int):
    return [np.random.default_rng(seed) for seed in range(count)]


def test_every_block_of_every_copy_has_a_mask_and_pairs_mask_what_the_other_shows() -> None:
    slots = np.ones(29, bool)
    block = np.arange(29) // 8
    for rng in rngs(50):
        masks = sample_masks(slots, block, 4, rng)
        for b in range(4):
            first, second = masks[0, block == b], masks[1, block == b]
            assert masks[:, block == b].any(axis=1).all()
            # Where one of them masks all, the other one must still mask something.
            assert first.all() or second.all() or (first != second).all()


def test_every_number_of_masks_in_a_block_is_about_as_likely() -> None:
    block = np.repeat(np.arange(4000), 8)
    masks = sample_masks(np.ones(32000, bool), block, 1, np.random.default_rng(0))
    counts = np.bincount(np.bincount(block, masks[0]).astype(int), minlength=9) / 4000
    assert counts[0] == 0
    # A rate of (0, 1) gives 1/9 to each number; the case of none became one mask. Five standard errors.
    assert np.abs(counts[2:] - 1 / 9).max() < 5 * np.sqrt(1 / 9 * 8 / 9 / 4000)


def test_slots_outside_are_never_masked() -> None:
    slots = np.array([False, True, True, False, True])
    masks = sample_masks(slots, np.zeros(5), 3, np.random.default_rng(1))
    assert not masks[:, ~slots].any()
    assert sample_masks(np.zeros(5, bool), np.zeros(5), 2, np.random.default_rng(1)).sum() == 0


def test_an_answer_is_trained_from_its_first_token_and_its_last_block_is_filled_with_stops() -> None:
    tokens = chat(5, 11)
    for rng in rngs(10):
        layout = corrupt(tokens, 5, BLOCKS, rng, infill=False)
        clean = layout.ids[layout.copy == 0]
        assert (clean == [*tokens, *[STOP] * 5]).all()
        assert (layout.group[: len(clean)] >= FIRST_BLOCK_GROUP).sum() == 16
        # A complementary pair trains every slot at least once.
        trained = {int(layout.position[row]) + 1 for row in layout.slot_row}
        assert trained == set(range(5, 21))
        assert set(layout.slot_kind) == {GENERATION}


def test_an_answer_cut_at_the_limit_gets_no_tail() -> None:
    layout = corrupt(chat(5, 11, ended=False), 5, BLOCKS, np.random.default_rng(0), infill=False)
    assert layout.num_rows == 16 + 2 * 11
    assert STOP not in layout.slot_token


@pytest.mark.parametrize("config", [BLOCKS, CANVAS])
@pytest.mark.parametrize(("prompt", "answer"), [(5, 2000), (2000, 5), (0, 900), (3, 1), (0, 2), (1, 40)])
def test_no_document_takes_more_rows_than_allowed_or_trains_nothing(
    config: CorruptionConfig, prompt: int, answer: int
) -> None:
    for infill in (False, True):
        for rng in rngs(40):
            layout = corrupt(chat(prompt, answer), prompt, config, rng, np.array([105, 120]), infill)
            assert 0 < layout.num_rows <= config.max_rows
            assert len(layout.slot_row) > 0
            assert layout.slot_row.min() >= 0 and layout.slot_row.max() < layout.num_rows
            assert (layout.slot_weight > 0).all()


def test_gaps_leave_the_text_as_it_was_and_have_a_token_before_them() -> None:
    tokens = chat(6, 120)
    seen = {"empty": 0, "no suffix": 0, "two": 0, "first token": 0, "fillers": 0, "long": 0}
    for rng in rngs(600):
        filled = draw_gaps(tokens, 6, BLOCKS, rng, np.array([110, 131, 150, 190]))
        kept = filled.tokens[filled.tokens != FILLER]
        body = kept[1:] if kept[0] == START else kept
        # What is left without fillers and start token is one stretch of the document.
        assert (np.diff(body[body != STOP]) == 1).all()
        ends = 0
        for start, stop in filled.gaps:
            assert start >= 1 and ends < start <= stop <= len(filled.tokens)
            gap = filled.tokens[start:stop]
            fillers = gap == FILLER
            assert not fillers.any() or fillers[fillers.argmax() :].all()
            assert (filled.weight[start:stop][~fillers] == 1).all()
            assert (~fillers).sum() <= BLOCKS.max_gap and fillers.sum() <= BLOCKS.max_filler
            seen["empty"] += int((~fillers).sum() == 0)
            seen["fillers"] += bool(fillers.any())
            seen["long"] += int((~fillers).sum() > 32)
            ends = stop
        outside = np.ones(len(filled.tokens), bool)
        for start, stop in filled.gaps:
            outside[start:stop] = False
        assert FILLER not in filled.tokens[outside]
        seen["two"] += len(filled.gaps) == 2
        seen["no suffix"] += ends == len(filled.tokens)
        seen["first token"] += filled.gaps[0][0] == 1 and filled.tokens[0] == START
    assert min(seen.values()) >= 10, seen


def test_whole_sentences_are_cut_out_where_their_ends_are_known() -> None:
    tokens, ends = chat(0, 120, ended=False), np.array([110, 131, 150, 190])
    config = replace(BLOCKS, window_share=0.0, two_gap_share=0.0)

    def whole_sentences(known: np.ndarray | None) -> int:
        whole = 0
        for rng in rngs(300):
            filled = draw_gaps(tokens, 0, config, rng, known)
            (start, stop), ids = filled.gaps[0], filled.tokens
            whole += bool(stop > start and ids[start - 1] in ends and ids[stop - 1] in ends)
        return whole

    assert whole_sentences(ends) > 30
    assert whole_sentences(None) < 5


def test_the_last_gap_row_predicts_the_first_token_after_the_gap() -> None:
    found = 0
    for rng in rngs(60):
        layout = corrupt(chat(6, 120), 6, BLOCKS, rng, infill=True)
        for row, token in zip(layout.slot_row, layout.slot_token, strict=True):
            clean = layout.ids[layout.copy == 0]
            assert clean[layout.position[row] + 1] == token
        boundary = layout.slot_kind == BOUNDARY
        found += boundary.sum()
        assert (layout.copy[layout.slot_row[boundary]] == 0).all()
        assert (layout.slot_kind[~boundary] == INFILL).all()
    assert found > 30


def test_a_canvas_masks_everything_after_the_current_block_and_weighs_by_distance() -> None:
    tokens = chat(5, 60)
    longer = 0
    for rng in rngs(60):
        layout = corrupt(tokens, 5, CANVAS, rng, infill=False)
        n = layout.num_rows
        weight = np.zeros(n)
        weight[layout.slot_row + 1] = layout.slot_weight
        current = np.flatnonzero(weight == 1)
        begin = 5 + (current[0] - 5) // 8 * 8
        stop = min(begin + 8, n)
        assert (current < stop).all() and not layout.masked[:begin].any() and layout.masked[stop:].all()
        assert set(np.flatnonzero(layout.masked[:stop])) == set(current)
        for i in range(stop, n):
            distance = (i - begin) // 8
            assert weight[i] == (0.5**distance if distance <= 4 and i < 65 else 0)
        assert (layout.ids[65:] == STOP).all()
        longer += n > 72
    assert longer > 20


def test_a_canvas_gap_reveals_what_comes_before_its_current_block() -> None:
    for rng in rngs(80):
        layout = corrupt(chat(6, 120), 6, replace(CANVAS, boundary_weight=0.0), rng, infill=True)
        first = layout.slot_row[layout.slot_weight == layout.slot_weight.max()][0] + 1
        assert layout.masked[layout.slot_row + 1].all()
        assert layout.masked[first]
        assert (layout.group == 0).all() and (layout.copy == 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": "causal"}, "attention must be"),
        ({"block_length": 0}, "block_length must be >= 1: got 0"),
        ({"max_rows": 8}, "max_rows must be >="),
        ({"infill_share": 1.5}, r"infill_share must be in \[0, 1\]: got 1.5"),
    ],
)
def test_bad_numbers_are_named(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CorruptionConfig(**{"attention": "block_causal", **change})


def test_a_document_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens must hold at least 2 tokens: got 1"):
        corrupt(np.array([5]), 0, BLOCKS, np.random.default_rng(0))


def test_a_tail_block_masks_everything_from_a_random_slot_on_and_differs_between_copies():
    slots = np.zeros(83, bool)
    slots[3:] = True
    block = (np.arange(83) - 3) // 8
    masks = sample_masks(slots, block, 4, np.random.default_rng(3), tail_share=1.0)
    assert not masks[:, :3].any()
    starts = []
    for copy in masks[:, 3:].reshape(4, 10, 8):
        first = copy.argmax(1)
        assert (copy == (np.arange(8) >= first[:, None])).all()
        starts.append(first)
    assert len({tuple(s) for s in starts}) == 4
    assert set(np.concatenate(starts)) > {0, 7}


def test_blocks_that_are_no_tails_stay_complementary():
    slots, block = np.ones(8000, bool), np.arange(8000) // 8
    masks = sample_masks(slots, block, 2, np.random.default_rng(4), tail_share=0.5).reshape(2, 1000, 8)
    tail = (masks[0] == (np.arange(8) >= masks[0].argmax(1)[:, None])).all(1)
    others = masks[:, ~tail]
    full = others.all(2)  # a copy without a mask would get one, so the pair of a full block is no complement
    pure = ~full.any(0)
    assert (others[0, pure] != others[1, pure]).all()
    assert 300 < (~tail).sum() < 700


def test_mask_weights_fall_with_the_masks_before_in_the_same_block():
    masks = np.array([[0, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1]], bool)
    weights = mask_weights(masks, np.array([0, 0, 0, 1, 1, 1]), 0.5)
    assert weights[masks].tolist() == [1, 0.5, 1, 0.5, 1, 1, 0.5, 0.25]
