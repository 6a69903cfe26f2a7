"""The accept rules of guided unmasking, on laws written by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dllm.samplers.guided import ACCEPT, Guided, leading, rank

LAW = torch.tensor([[[0.4, 0.3, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.2, 0.05]]])


def accepts(draft, confidence=(0.5, 0.5), uniform=(0.5, 0.5), **rule):
    draft = torch.tensor([draft])
    return (
        Guided(**rule)
        .accepts(draft, LAW.argmax(-1), LAW, torch.tensor([confidence]), torch.tensor([uniform]))[0]
        .tolist()
    )


@pytest.mark.parametrize(
    ("rule", "draft", "expected"),
    [
        ({"accept": "exact"}, [0, 1], [True, False]),
        ({"accept": "topk", "accept_top_k": 2}, [1, 1], [True, True]),
        ({"accept": "topk", "accept_top_k": 2}, [2, 2], [False, False]),
        ({"accept": "topk_relative", "accept_top_k": 3, "accept_ratio": 0.6}, [2, 2], [False, True]),
        ({"accept": "topk_relative", "accept_top_k": 2, "accept_ratio": 0.6}, [1, 2], [True, False]),
        ({"accept": "dynamic_threshold", "accept_prob": 0.1}, [2, 4], [True, False]),
        ({"accept": "original"}, [0, 0], [False, False]),
        ({"accept": "always"}, [4, 4], [True, True]),
        ({"accept": "never"}, [0, 0], [False, False]),
    ],
)
def test_each_rule_by_hand(rule, draft, expected):
    assert accepts(draft, **rule) == expected


def test_original_accepts_with_the_guides_probability():
    assert accepts([0, 0], uniform=(0.39, 0.26), accept="original") == [True, False]


def test_log_ratio_compares_the_two_models_log_probabilities():
    # ln 0.5 > 1 * ln 0.4 and > 1 * ln 0.25; ln 0.3 is not above ln 0.4.
    assert accepts([0, 0], accept="log_ratio", accept_ratio=1.0) == [True, True]
    assert accepts([0, 0], confidence=(0.3, 0.3), accept="log_ratio", accept_ratio=1.0) == [False, True]


def test_aggressive_takes_the_five_likeliest_and_likely_ones_and_the_nucleus():
    law = torch.full((1, 1, 40), 0.0006)
    law[0, 0, :6] = torch.tensor([0.5, 0.2, 0.1, 0.06, 0.04, 0.0702])
    law[0, 0, 6:] = (1 - float(law[0, 0, :6].sum())) / 34

    def one(token):
        rule = Guided("aggressive")
        return bool(rule.accepts(torch.tensor([[token]]), law.argmax(-1), law, torch.ones(1, 1), torch.ones(1, 1)))

    assert [one(t) for t in (0, 4, 5)] == [True, True, True]
    # All before it hold 0.97 already, it is the seventh, and it is rare.
    assert not one(6)


def test_ties_rank_by_id_so_that_topk_of_one_is_the_argmax():
    draft = torch.tensor([[0, 1]])
    assert rank(LAW, draft).tolist() == [[0, 1]]
    for token in range(5):
        assert accepts([token] * 2, accept="topk", accept_top_k=1) == accepts([token] * 2, accept="exact")


def test_g5_a_larger_k_accepts_no_fewer():
    chance = torch.Generator().manual_seed(0)
    law = torch.rand(6, 8, 32, generator=chance).softmax(-1)
    draft = torch.randint(0, 32, (6, 8), generator=chance)
    offered = torch.ones(6, 8, dtype=torch.bool)
    lengths = []
    for k in (1, 2, 5, 12, 32):
        passed = Guided("topk", accept_top_k=k).accepts(draft, law.argmax(-1), law, law[..., 0], law[..., 0])
        lengths.append(leading(passed, offered))
    for fewer, more in pairwise(lengths):
        assert (more >= fewer).all()
    assert (lengths[-1] == 8).all()


def test_the_prefix_counts_offered_slots_only_and_begins_at_the_first_of_them():
    passed = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    offered = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert leading(passed, offered).tolist() == [2, 1, 0]


def test_what_is_lossless_says_so():
    assert [r for r in ACCEPT if r != "speculative" and Guided(r).lossless] == []
    assert [r for r in ACCEPT if Guided(r, "ar").lossless] == ["exact", "speculative"]


@pytest.mark.parametrize(
    "numbers",
    [
        {"accept": "best"},
        {"on_reject": "stop"},
        {"accept_top_k": 0},
        {"accept_ratio": -1},
        {"accept_prob": "x"},
        {"verify_batch_size": 0},
        {"guide_passes": 0, "on_reject": "ar"},
        {"guide_passes": 2},
    ],
)
def test_bad_numbers_raise_naming_the_number(numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        Guided(**numbers)
