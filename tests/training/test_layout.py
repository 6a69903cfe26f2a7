"""The training layout: its mask by brute force, what a row can know, and equality with what the decoder computes at decode time."""

import numpy as np
import pytest
import torch

from dllm.model.adapter import add_lora
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.training.layout import (
    BOUNDARY,
    FIRST_BLOCK_GROUP,
    GENERATION,
    Layout,
    Region,
    bidirectional_layout,
    block_causal_layout,
    block_groups,
    dense_mask,
)
from dllm.types import LOWEST_GROUP, PADDING_GROUP, Attend

S, MASK, V = 4, 3, 40


def tiny_model() -> Decoder:
    """A decoder with trained-looking random adapters, fp32."""
    torch.manual_seed(0)
    config = DecoderConfig(V, 32, 48, 3, 4, 2, 8, 128, rope_theta=100.0, tie_embeddings=True)
    base = Decoder(config)
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = add_lora(base, rank=2, alpha=4, mask_token_id=MASK)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def text(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, V, n)


def random_masks(n: int, regions: list[Region], copies: int, seed: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    masks = np.zeros((copies, n), bool)
    for region in regions:
        slots = slice(region.start + region.known, region.stop)
        masks[:, slots] = rng.random((copies, slots.stop - slots.start)) < 0.6
    return masks


CASES = {
    "answer": (23, [Region(6, 23, 0)]),
    "answer after one token": (10, [Region(1, 10, 0)]),
    "gap": (25, [Region(6, 15, 1)]),
    "gap at the first token after a start token": (14, [Region(0, 6, 1)]),
    "gap at the end": (15, [Region(8, 15, 1)]),
    "empty gap": (12, [Region(5, 6, 1)]),
    "two gaps": (31, [Region(4, 11, 1), Region(16, 23, 1)]),
    "two gaps with one token between": (20, [Region(3, 9, 1), Region(9, 15, 1)]),
}


def make(name: str, copies: int = 2) -> tuple[Layout, np.ndarray, list[Region], np.ndarray]:
    n, regions = CASES[name]
    tokens, masks = text(n), random_masks(n, regions, copies)
    layout = block_causal_layout(tokens, regions, masks, S, np.ones(n), boundary_weight=1.0)
    return layout, tokens, regions, masks


def hidden(model: Decoder, layout: Layout) -> torch.Tensor:
    ids = torch.from_numpy(layout.ids.astype(np.int64))[None]
    embeds = model.embed(ids, torch.from_numpy(layout.masked)[None])
    with torch.no_grad():
        return model(None, torch.from_numpy(layout.position)[None], None, dense_mask(layout), embeds=embeds)[0]


def block_of(i: int, n: int, regions: list[Region]) -> tuple[str, int]:
    """The part of the text that row i belongs to, in words: (part, number), spelled without group arithmetic."""
    count = 0
    for j, region in enumerate(regions):
        if i < region.start:
            if j == 0:
                return "prefix", -(-(region.start - i) // S)
            return "suffix", j
        if i < region.stop:
            return "block", count + (i - region.start) // S
        count += -(-(region.stop - region.start) // S)
    return "suffix", len(regions)


def may_look(q: tuple[str, int], k: tuple[str, int], q_noisy: bool, same_copy: bool, k_noisy: bool) -> bool:
    if k_noisy:
        return q_noisy and same_copy and q == k
    if q[0] == "prefix":
        return k[0] == "prefix" and k[1] >= q[1]
    if q[0] == "suffix":
        return q == k
    if k[0] in ("prefix", "suffix"):
        return True
    return k[1] < q[1] or (k[1] == q[1] and not q_noisy)


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_the_rule_spelled_out_pair_by_pair(name: str) -> None:
    layout, tokens, regions, _ = make(name)
    mask = dense_mask(layout)[0].numpy()
    parts = [block_of(int(i), len(tokens), regions) for i in layout.position]
    for q in range(layout.num_rows):
        for k in range(layout.num_rows):
            expected = may_look(
                parts[q], parts[k], layout.copy[q] > 0, layout.copy[q] == layout.copy[k], layout.copy[k] > 0
            )
            assert mask[q, k] == expected, (q, k, parts[q], parts[k])


def test_every_bidirectional_row_sees_every_row() -> None:
    masked = np.arange(12) >= 7
    layout = bidirectional_layout(text(12), masked, masked * 1.0, np.full(12, GENERATION))
    assert dense_mask(layout).all()
    assert (layout.slot_row == np.arange(6, 11)).all()
    assert (layout.slot_token == text(12)[7:]).all()


@pytest.mark.parametrize("name", CASES)
def test_slots_pair_with_the_row_before_them(name: str) -> None:
    layout, tokens, regions, masks = make(name)
    seen = set()
    for row, token, kind in zip(layout.slot_row, layout.slot_token, layout.slot_kind, strict=True):
        slot = int(layout.position[row]) + 1
        assert tokens[slot] == token
        same_block = block_of(slot, len(tokens), regions) == block_of(slot - 1, len(tokens), regions)
        if kind == BOUNDARY:
            assert layout.copy[row] == 0 and slot in [r.stop for r in regions]
            continue
        assert (layout.copy[row] > 0) == same_block
        if same_block:
            assert masks[layout.copy[row] - 1, slot]
            seen.add((int(layout.copy[row]) - 1, slot))
    first_of_block = {(c, s) for c, s in zip(*np.nonzero(masks), strict=True) if (c, s) not in seen}
    for _, slot in first_of_block:
        assert block_of(slot, len(tokens), regions) != block_of(slot - 1, len(tokens), regions)
    kinds = np.bincount(layout.slot_kind, minlength=3)
    assert kinds[:2].sum() == masks.sum()
    assert kinds[BOUNDARY] == sum(1 for r in regions if r.known and r.stop < len(tokens))


def test_a_noisy_row_depends_on_no_clean_token_of_its_own_or_a_later_block() -> None:
    model = tiny_model()
    layout, tokens, regions, masks = make("two gaps", copies=2)
    before = hidden(model, layout)
    group, _ = block_groups(len(tokens), regions, S)
    for number in range(FIRST_BLOCK_GROUP, int(group.max()) + 1):
        changed = layout.ids.copy()
        # Masked tokens of this block and of every later one: their values live in the clean copy alone.
        maskable = np.flatnonzero(masks.any(axis=0))
        hit = (layout.copy == 0) & (layout.group >= number) & np.isin(layout.position, maskable)
        changed[hit] = (changed[hit] - 4 + 7) % (V - 4) + 4
        after = hidden(model, Layout(**{**layout.__dict__, "ids": changed}))
        rows = (layout.copy > 0) & (layout.group == number)
        torch.testing.assert_close(after[rows], before[rows], rtol=0, atol=0)
        later = (layout.copy > 0) & (layout.group > number)
        assert not later.any() or not torch.equal(after[later], before[later])


def test_suffix_rows_depend_on_nothing_but_themselves() -> None:
    model = tiny_model()
    layout, tokens, _, _ = make("two gaps")
    suffix = (layout.copy == 0) & (layout.group >= 1) & (layout.group < FIRST_BLOCK_GROUP)
    assert suffix.sum() == 5 + 8
    changed = layout.ids.copy()
    changed[~suffix] = 4
    after = hidden(model, Layout(**{**layout.__dict__, "ids": changed}))
    torch.testing.assert_close(after[suffix], hidden(model, layout)[suffix], rtol=0, atol=0)
    # The second suffix is as blind to the first one.
    second = suffix & (layout.group == 2)
    changed = layout.ids.copy()
    changed[suffix & ~second] = 4
    after = hidden(model, Layout(**{**layout.__dict__, "ids": changed}))
    torch.testing.assert_close(after[second], hidden(model, layout)[second], rtol=0, atol=0)
    assert len(tokens) == 31


@pytest.mark.parametrize("name", CASES)
def test_training_logits_equal_those_of_the_decoder_with_a_store(name: str) -> None:
    """The state at decode time is rebuilt: given text and finished blocks in a store, then one block with its masks."""
    model = tiny_model()
    layout, tokens, regions, masks = make(name, copies=2)
    trained = model.head(hidden(model, layout)[layout.slot_row])
    n = len(tokens)
    group_np, low_np = block_groups(n, regions, S)
    group, low = torch.from_numpy(group_np)[None], torch.from_numpy(low_np)[None]
    ids, rows = torch.from_numpy(tokens)[None], torch.arange(n)[None]
    in_block = group >= FIRST_BLOCK_GROUP

    def run(store, now, masked=None):
        """One forward over the rows where ``now`` [1, n]; they are stored unless something is masked."""
        index = rows[now][None]
        known = torch.where(store.stored, group, torch.full_like(group, PADDING_GROUP))
        attend = Attend.by_group(group[now][None], low[now][None], key_group=known)
        hide = None if masked is None else masked[now][None]
        embeds = model.embed(ids[now][None], hide)
        keep = torch.full_like(index, hide is None, dtype=torch.bool)
        out = model(None, index, store, attend, embeds=embeds, rows=index, write=keep)
        if hide is None:
            store.mark(index, keep)
        return {int(i): out[0, j] for j, i in enumerate(index[0])}

    expected: dict[tuple[int, int], torch.Tensor] = {}
    with torch.no_grad():
        store = model.new_store(1, n)
        clean = run(store, ~in_block)
        for number in range(FIRST_BLOCK_GROUP, int(group.max()) + 1):
            block = group == number
            for copy, mask in enumerate(masks):
                noisy = run(store, block, torch.from_numpy(mask)[None])
                for slot in np.flatnonzero(mask & block[0].numpy()).tolist():
                    # The first slot of a block has its row in the block before it.
                    expected[copy, slot] = noisy[slot - 1] if slot - 1 in noisy else clean[slot - 1]
            clean |= run(store, block)
    found = {}
    for logits, row, kind in zip(trained, layout.slot_row, layout.slot_kind, strict=True):
        slot = int(layout.position[row]) + 1
        copies = [int(layout.copy[row]) - 1] if layout.copy[row] else range(len(masks))
        for copy in copies:
            if kind == BOUNDARY:
                want = model.head(clean[slot - 1])
            elif masks[copy, slot]:
                want = model.head(expected[copy, slot])
            else:
                continue
            found[copy, slot, int(kind)] = logits
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert {(c, s) for c, s, kind in found if kind != BOUNDARY} == set(expected)


def test_groups_count_the_prefix_backwards_and_blocks_over_all_gaps() -> None:
    group, low = block_groups(20, [Region(5, 11, 1), Region(13, 18, 1)], S)
    assert group.tolist() == [-2, -1, -1, -1, -1, *[1024] * 4, *[1025] * 2, 1, 1, *[1026] * 4, 1027, 2, 2]
    assert set(low[[11, 12]]) == {1} and set(low[18:]) == {2}
    assert set(low[:11]) | set(low[13:18]) == {LOWEST_GROUP}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: block_groups(8, [], S), "regions must hold"),
        (lambda: block_groups(8, [Region(2, 4, 1)], 0), "block_length must be >= 1: got 0"),
        (lambda: block_groups(8, [Region(2, 6, 1), Region(4, 8, 1)], S), "regions must be ordered"),
        (
            lambda: block_causal_layout(text(6), [Region(0, 6, 0)], np.zeros((1, 6), bool), S, np.ones(6)),
            "document-start token",
        ),
        (
            lambda: block_causal_layout(text(6), [Region(2, 6, 1)], np.ones((1, 6), bool), S, np.ones(6)),
            r"masks must be \[copies, 6\]",
        ),
    ],
)
def test_bad_regions_and_masks_are_named(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
