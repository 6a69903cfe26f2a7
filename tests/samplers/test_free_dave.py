"""FreeDave: several steps of the same sampler in one forward, and the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.samplers.free_dave import FreeDave
from tests.tiny import padded, prompt, tiny_lm, tokens

RULES = ["bidirectional", "block_causal"]


def run(lm, length=12, **options):
    return lm.generate(input_ids=[prompt(length)], **{"max_new_tokens": 19, "threshold": 2.0, **options})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache", ["none", "block", "dual", "prefix", "free"])
def test_the_text_is_the_plain_samplers_for_every_number_of_branches(rule, shift, cache):
    if cache == "block" and rule == "bidirectional":
        pytest.skip("the block cache is for block-causal models")
    lm = tiny_lm(rule, logits_shift=shift)
    cached = {"cache": cache} | ({"freeze_delay": 1} if cache == "free" else {})
    for length, threshold in ((5, 2.0), (12, 0.5)):
        plain = run(lm, length, threshold=threshold, **cached)
        counts = []
        for steps in (1, 2, 8):
            fast = run(lm, length, threshold=threshold, verifier=FreeDave(steps), **cached)
            assert tokens(fast) == tokens(plain)
            assert fast.finish_reasons == plain.finish_reasons
            counts.append(fast.stats.nfe)
        assert counts[0] == plain.stats.nfe
        assert counts[2] <= counts[0]


def test_it_saves_forwards_and_counts_what_each_committed_and_computed():
    lm = tiny_lm("block_causal", eos_token_ids=())
    plain, fast = run(lm, cache="block"), run(lm, cache="block", verifier="free_dave", draft_steps=4)
    assert fast.stats.nfe < plain.stats.nfe
    assert sum(fast.stats.accept_lengths) == 19
    assert len(fast.stats.accept_lengths) == fast.stats.nfe - 1, "all but the prefill verify"
    # Three slots, no cache: 15 rows, then 15 and a branch of three block rows (two masks leave one that does not fill the block).
    short = lm.generate(input_ids=[prompt(12)], max_new_tokens=3, threshold=2.0, cache="none", verifier=FreeDave(4))
    assert short.stats.positions in ([15 + 18, 15 + 18 + 15][short.stats.nfe - 2],)


@pytest.mark.parametrize("sampler", ["margin", "entropy", "random", "sequential", "low_confidence"])
def test_every_sampler_that_looks_at_the_state_alone_keeps_its_text(sampler):
    lm = tiny_lm("block_causal")
    options: dict[str, Any] = {"sampler": sampler, "seed": 3}
    plain = lm.generate(input_ids=[prompt(6)], max_new_tokens=15, **options)
    fast = lm.generate(input_ids=[prompt(6)], max_new_tokens=15, verifier="free_dave", **options)
    assert tokens(fast) == tokens(plain)
    assert fast.stats.nfe <= plain.stats.nfe


@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_a_ragged_batch_equals_its_single_run_with_its_counts(rule):
    lm, rows = tiny_lm(rule), [prompt(3), prompt(12), prompt(5)]
    options: dict[str, Any] = {"max_new_tokens": 17, "threshold": 2.0, "verifier": FreeDave(4)}
    both = lm.generate(**padded(rows), **options)
    for b, ids in enumerate(rows):
        single = lm.generate(input_ids=[ids], **options)
        assert tokens(both, b) == tokens(single)
        assert both.row_stats[b].nfe == single.stats.nfe
        assert both.row_stats[b].positions == single.stats.positions
        assert both.row_stats[b].accept_lengths == single.stats.accept_lengths


def test_the_subset_rule_goes_on_from_states_with_fewer_tokens_and_ends():
    lm = tiny_lm("bidirectional", eos_token_ids=())
    for threshold in (0.3, 0.6):
        out = run(lm, threshold=threshold, verifier=FreeDave(8, rule="subset"))
        assert len(tokens(out)) == 19
        assert 63 not in tokens(out)


def test_branches_are_nested_and_never_reveal_everything():
    revealed, exists = FreeDave(4, 2).draft(torch.tensor([[0.1, 0.9, 0.5, 0.7, 0.2]]), torch.tensor([[True] * 5]))
    assert revealed.int().sum(-1).tolist() == [[2, 4, 5]]
    assert exists.tolist() == [[True, True, False]]
    assert revealed[0, 0].tolist() == [False, True, False, True, False]


def test_a_branch_matches_the_state_that_it_is_or_in_the_subset_rule_one_with_more_tokens():
    branch = torch.tensor([[[5, 0, 7], [5, 6, 7], [4, 0, 7]]])
    still = torch.tensor([[[False, True, False], [False, False, False], [False, True, False]]])
    target, target_open = torch.tensor([[5, 6, 7]]), torch.tensor([[False, False, False]])
    assert FreeDave().matches(branch, still, target, target_open).tolist() == [[False, True, False]]
    assert FreeDave(rule="subset").matches(branch, still, target, target_open).tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"cfg_scale": 1.0}, "cfg_scale"),
        ({"sampler": "klass", "threshold": 0.9}, "looks at the path"),
        ({"sampler": "wino", "threshold": 0.9}, "Wino takes accepted tokens back"),
        ({"cache": "free"}, "depend on the path"),
        ({"cache": "dkv"}, "depend on the path"),
        ({"cache": "dual", "refresh_interval": 2}, "depend on the path"),
        ({"max_denoising_steps": 3}, "max_denoising_steps"),
        ({"verifier": FreeDave, "threshold": 0.9}, "verifier must"),
    ],
)
def test_combinations_without_meaning_raise_and_say_why(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        run(tiny_lm("bidirectional", logits_shift=0), **{"verifier": "free_dave", **options})


@pytest.mark.parametrize("numbers", [{"draft_steps": 0}, {"tokens_per_step": 0}, {"rule": "best"}])
def test_bad_numbers_raise_naming_the_number(numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        FreeDave(**numbers)
