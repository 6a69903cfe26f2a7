"""Verification rules: exact output laws by rational enumeration, thresholds, ragged lengths, draws."""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dllm.samplers.verify import (
    block_acceptance,
    block_verification,
    chain_acceptance,
    chain_rejection,
    equality,
    greedy,
    match,
    sample_law,
)
from dllm.types import Draft
from tests.chi_squared import chi_squared_pvalue

CASES = Path(__file__).parents[1] / "data" / "drafters" / "dflash" / "cases.safetensors"
F = Fraction
# Target law of the next token after each token (anchor 0), and three ways to draft two tokens.
P = [[F(6, 10), F(3, 10), F(1, 10)], [F(2, 10), F(5, 10), F(3, 10)], [F(1, 10), F(1, 10), F(8, 10)]]
FIRST = [F(5, 10), F(3, 10), F(2, 10)]
SECOND = [F(3, 10), F(3, 10), F(4, 10)]
CORRECTED = [[F(6, 10), F(2, 10), F(2, 10)], [F(2, 10), F(5, 10), F(3, 10)], [F(1, 10), F(2, 10), F(7, 10)]]
ONE_HOT = None
Law = dict[tuple[int, ...], Fraction]
ALMOST_ONE, ALMOST_ZERO = 1 - 1e-12, 1e-12
TRUE_LAW = {(a, b, c): P[0][a] * P[a][b] * P[b][c] for a, b, c in itertools.product(range(3), repeat=3)}


def rational(value):
    """The fraction that a float64 stands for."""
    found = F(float(value)).limit_denominator(10**6)
    assert abs(float(found) - float(value)) < 1e-12
    return found


def drafts(kind):
    """(tokens, their probability under the real draft law, q rows handed to the verifier or None)."""
    if kind == "one-hot":
        return [((0, 2), F(1), ONE_HOT)]
    out = []
    for a, b in itertools.product(range(3), repeat=2):
        row = SECOND if kind == "independent" else CORRECTED[a]
        kept = SECOND if kind == "uncorrected" else row
        out.append(((a, b), FIRST[a] * row[b], [FIRST, kept]))
    return out


def tensors(tokens, q):
    target = torch.tensor([[[float(x) for x in P[t]] for t in (0, *tokens)]], dtype=torch.float64)
    probs = None if q is None else torch.tensor([[[float(x) for x in row] for row in q]], dtype=torch.float64)
    return target, Draft(torch.tensor([list(tokens)]), probs)


def outcomes(rule, tokens, q, lengths=None):
    """(accepted, probability, exact law of the next token) of one drafted string, thresholds and laws read from our code."""
    target, draft = tensors(tokens, q)
    num_drafts = len(tokens)
    if rule is chain_rejection:
        pass_rate = [rational(x) for x in chain_acceptance(target, draft)[0]]
        if lengths is not None:
            pass_rate = [x if k < int(lengths) else F(0) for k, x in enumerate(pass_rate)]
    else:
        pass_rate = [rational(x) for x in block_acceptance(target, draft, lengths)[0][0]]
    for accepted in range(num_drafts + 1):
        uniform = torch.full((1, num_drafts + 1), ALMOST_ONE, dtype=torch.float64)
        if rule is chain_rejection:
            weight = F(1)
            for k in range(accepted):
                weight *= pass_rate[k]
            if accepted < num_drafts:
                weight *= 1 - pass_rate[accepted]
            uniform[:, :accepted] = ALMOST_ZERO
        else:
            weight = pass_rate[accepted - 1] if accepted else F(1)
            for k in range(accepted, num_drafts):
                weight *= 1 - pass_rate[k]
            if accepted:
                uniform[:, accepted - 1] = ALMOST_ZERO
        if weight:
            verdict = rule(target, draft, uniform, lengths)
            assert verdict.accepted.tolist() == [accepted]
            yield accepted, weight, [rational(x) for x in verdict.law[0]]


def add_string(law, prefix, weight):
    """Complete a committed prefix to three tokens by the target's own law."""
    if len(prefix) == 3:
        law[tuple(prefix)] = law.get(tuple(prefix), F(0)) + weight
        return
    for token, chance in enumerate(P[prefix[-1]]):
        if chance:
            add_string(law, [*prefix, token], weight * chance)


def enumerate_rule(rule, kind):
    """(expected accepted drafts, exact law of three committed tokens)."""
    expected = F(0)
    law: Law = {}
    for tokens, chance, q in drafts(kind):
        for accepted, weight, next_law in outcomes(rule, tokens, q):
            expected += chance * weight * accepted
            for token, p in enumerate(next_law):
                if p:
                    add_string(law, [*tokens[:accepted], token], chance * weight * p)
    return expected, law


@pytest.mark.parametrize(
    ("kind", "chain", "block"),
    [("independent", F(31, 20), F(159, 100)), ("one-hot", F(33, 50), F(33, 50)), ("corrected", F(87, 50), F(7, 4))],
)
def test_chain_and_block_accept_the_published_number_and_emit_exactly_the_targets_law(kind, chain, block):
    for rule, accepted in ((chain_rejection, chain), (block_verification, block)):
        expected, law = enumerate_rule(rule, kind)
        assert expected == accepted
        assert law == TRUE_LAW


def test_testing_against_a_law_that_the_draft_was_not_drawn_from_is_biased_by_the_published_distance():
    _, law = enumerate_rule(chain_rejection, "uncorrected")
    distance = sum(abs(law.get(s, F(0)) - TRUE_LAW[s]) for s in TRUE_LAW) / 2
    assert distance == F(51, 400)


@pytest.mark.parametrize(("kind", "accepted"), [("independent", 0.5403), ("one-hot", 0.66), ("corrected", 0.588)])
def test_equality_accepts_the_published_number_and_emits_exactly_the_targets_law(kind, accepted):
    expected = F(0)
    law: Law = {}
    for tokens, chance, _ in drafts(kind):
        for drawn in itertools.product(range(3), repeat=3):
            weight = chance
            for previous, token in zip((0, *tokens), drawn, strict=True):
                weight *= P[previous][token]
            verdict = match(torch.tensor([drawn]), torch.tensor([tokens]))
            count = int(verdict.accepted)
            expected += weight * count
            add_string(law, verdict.tokens(torch.tensor([tokens]))[0, : count + 1].tolist(), weight)
    assert float(expected) == pytest.approx(accepted, abs=1e-9)
    assert law == TRUE_LAW


def test_a_length_that_looks_at_the_drafted_token_is_biased_and_one_that_looks_at_the_row_is_not():
    p = q = torch.tensor([[[0.6, 0.4]]], dtype=torch.float64)
    target = torch.cat([p, p], dim=1)
    for looks_at_token, expected in ((True, F(84, 100)), (False, F(6, 10))):
        first_is_zero = F(0)
        for token, chance in ((0, F(6, 10)), (1, F(4, 10))):
            seen = q[0, 0, token] if looks_at_token else q.max()
            lengths = torch.tensor([int(seen >= 0.5)])
            draft = Draft(torch.tensor([[token]]), q)
            for uniform, weight in ((ALMOST_ZERO, F(6, 10)), (0.6 + ALMOST_ZERO, F(4, 10))):
                # The test of a perfect draft always passes; the last uniform draws the token after it.
                verdict = chain_rejection(target, draft, torch.tensor([[0.5, uniform]], dtype=torch.float64), lengths)
                first = verdict.tokens(draft.tokens)[0, 0]
                first_is_zero += chance * weight * int(first == 0)
        assert first_is_zero == expected


@pytest.mark.parametrize("rule", [chain_rejection, block_verification])
@pytest.mark.parametrize("q", [ONE_HOT, [FIRST, SECOND]])
def test_a_row_with_fewer_drafts_behaves_like_one_that_drafted_only_those(rule, q):
    generator = torch.Generator().manual_seed(3)
    target, draft = tensors((0, 2), q)
    for count in (0, 1, 2):
        short = Draft(draft.tokens[:, :count], None if draft.probs is None else draft.probs[:, :count])
        for _ in range(50):
            uniform = torch.rand(1, 3, generator=generator, dtype=torch.float64)
            whole = rule(target, draft, uniform, torch.tensor([count]))
            alone = rule(target[:, : count + 1], short, uniform[:, [*range(count), 2]])
            assert whole.accepted.tolist() == alone.accepted.tolist()
            assert whole.next_token.tolist() == alone.next_token.tolist()
            torch.testing.assert_close(whole.law, alone.law)


def test_acceptance_is_strict_at_the_threshold():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    draft = Draft(torch.tensor([[0]]), torch.tensor([[[0.5, 0.5]]]))
    for u, accepted in ((0.4999, 1), (0.5, 0)):
        assert int(chain_rejection(target, draft, torch.tensor([[u, 0.5]])).accepted) == accepted


def test_a_draft_outside_the_targets_support_is_always_rejected_and_never_emitted():
    target = torch.tensor([[[0.0, 0.3, 0.7], [1.0, 0.0, 0.0]]]).repeat(999, 1, 1)
    uniform = torch.linspace(1e-6, 1 - 1e-6, 999)[:, None].repeat(1, 2)
    for probs in (None, torch.tensor([[[0.9, 0.1, 0.0]]]).repeat(999, 1, 1)):
        draft = Draft(torch.zeros(999, 1, dtype=torch.int64), probs)
        for rule in (chain_rejection, block_verification, equality):
            verdict = rule(target, draft, uniform)
            assert not verdict.accepted.any()
            assert not (verdict.next_token == 0).any()


def test_block_verification_takes_a_longer_prefix_although_a_shorter_one_failed():
    target, draft = tensors((2, 2), [FIRST, SECOND])
    threshold, _ = block_acceptance(target, draft)
    first, second = threshold[0].tolist()
    assert first < 0.9 and second > 0.1
    uniform = torch.tensor([[0.95, 0.05, 0.5]], dtype=torch.float64)
    assert block_verification(target, draft, uniform).accepted.tolist() == [2]
    assert chain_rejection(target, draft, uniform).accepted.tolist() == [0]


def test_greedy_takes_the_lowest_id_of_a_tie_and_counts_each_row_apart():
    logits = torch.zeros(3, 3, 4)
    logits[:, 1, 2] = 1.0
    draft = Draft(torch.tensor([[0, 2], [0, 1], [1, 2]]))
    verdict = greedy(logits, draft)
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.accept_length.tolist() == [3, 2, 1]
    assert verdict.next_token.tolist() == [0, 2, 0]
    assert verdict.tokens(draft.tokens).tolist() == [[0, 2, 0], [0, 2, 2], [0, 0, 0]]
    assert greedy(logits, draft, torch.tensor([1, 0, 2])).accepted.tolist() == [1, 0, 0]


def test_no_drafts_is_plain_decoding():
    law = torch.tensor([[[0.2, 0.5, 0.3]]])
    draft = Draft(torch.zeros(1, 0, dtype=torch.int64), None)
    for rule in (chain_rejection, block_verification, equality):
        verdict = rule(law, draft, torch.tensor([[0.6]]))
        assert verdict.accepted.tolist() == [0]
        assert verdict.next_token.tolist() == [1]


def test_equal_laws_leave_no_residual_and_fall_back_to_the_targets_own():
    law = torch.tensor([[[0.1, 0.9], [0.5, 0.5]]])
    draft = Draft(torch.tensor([[1]]), law[:, :1])
    verdict = chain_rejection(law, draft, torch.tensor([[0.5, 0.05]]), torch.tensor([1]))
    assert verdict.accepted.tolist() == [1]
    # A rejection here is impossible but for rounding; the law must stay one.
    from dllm.samplers import verify

    rest = verify._residual(law, draft, torch.tensor([0]), torch.tensor([[True]]), torch.ones(1))
    torch.testing.assert_close(rest, law[:, 0])


def test_draws_invert_the_cumulative_sum_and_skip_tokens_without_mass():
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniform = torch.tensor([1e-7, 0.2499, 0.2501, 0.9999999])
    assert sample_law(law.expand(4, -1), uniform).tolist() == [1, 1, 3, 3]
    assert sample_law(4 * law.expand(4, -1), uniform).tolist() == [1, 1, 3, 3]


def test_the_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should():
    size = 150_000
    law = torch.full((size,), 0.5 / (size - 1))
    law[0] = 0.5
    tokens = sample_law(law.expand(4, -1), torch.tensor([0.4, 0.6, 0.9, 0.9999999]))
    expected = [0, 0.1 / 0.5 * size, 0.4 / 0.5 * size, size - 1]
    assert tokens[0] == 0
    for got, want in zip(tokens[1:].tolist(), expected[1:], strict=True):
        assert abs(got - want) < 30


@pytest.mark.parametrize("rule", [chain_rejection, block_verification, equality])
@pytest.mark.parametrize("sampled", [True, False])
def test_two_tokens_of_a_toy_have_the_targets_law(rule, sampled):
    rows, generator = 20_000, torch.Generator().manual_seed(7)
    p = torch.tensor([[float(x) for x in row] for row in P])
    q = torch.tensor([[float(x) for x in row] for row in CORRECTED])
    first = torch.tensor([float(x) for x in FIRST]).expand(rows, -1)
    uniform = torch.rand(rows, 6, generator=generator)
    d1 = sample_law(first, uniform[:, 0]) if sampled else first.argmax(-1)
    d2 = sample_law(q[d1], uniform[:, 1]) if sampled else q[d1].argmax(-1)
    draft = Draft(torch.stack([d1, d2], 1), torch.stack([first, q[d1]], 1) if sampled else None)
    target = torch.stack([p[torch.zeros_like(d1)], p[d1], p[d2]], 1)
    verdict = rule(target, draft, uniform[:, 2:5])
    tokens = verdict.tokens(draft.tokens)
    second = torch.where(verdict.accepted > 0, tokens[:, 1], sample_law(p[tokens[:, 0]], uniform[:, 5]))
    counts = torch.bincount(tokens[:, 0] * 3 + second, minlength=9)
    assert chi_squared_pvalue(counts, (p[0][:, None] * p).flatten()) > 0.01


def test_rows_of_a_batch_are_judged_as_alone():
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(5, 4, 7, generator=generator).softmax(-1)
    tokens, q = torch.randint(7, (5, 3), generator=generator), torch.rand(5, 3, 7, generator=generator).softmax(-1)
    draft = Draft(tokens, q)
    uniform, lengths = torch.rand(5, 4, generator=generator), torch.tensor([3, 2, 0, 1, 3])
    for rule in (chain_rejection, block_verification, equality):
        whole = rule(target, draft, uniform, lengths)
        for b in range(5):
            row = slice(b, b + 1)
            one = rule(target[row], Draft(tokens[row], q[row]), uniform[row], lengths[row])
            assert one.tokens(draft.tokens[row]).tolist() == [whole.tokens(draft.tokens)[b].tolist()]


def test_target_rows_must_be_one_more_than_the_drafts():
    with pytest.raises(ValueError, match="target rows must be one more than the drafts"):
        greedy(torch.zeros(1, 2, 4), Draft(torch.zeros(1, 2, dtype=torch.int64)))


@pytest.mark.parametrize("index", range(6))
def test_published_verdicts_for_given_uniforms(index):
    case = {k.split(".")[1]: v for k, v in load_file(CASES).items() if k.startswith(f"reject{index}.")}
    uniform = torch.nn.functional.pad(case["uniform"], (0, 1), value=0.5)
    verdict = chain_rejection(case["target_probs"], Draft(case["draft_tokens"], case["draft_probs"]), uniform)
    assert verdict.accepted.tolist() == case["accepted"].tolist()
    assert verdict.law is not None
    torch.testing.assert_close(verdict.law[0], case["next_token_probs"], atol=1e-6, rtol=1e-5)
