"""Losses of drafters against their formulas, written out slot by slot."""

import math

import pytest
import torch

from dllm.training.draft_loss import (
    DraftLoss,
    SlotHead,
    SlotTerms,
    block_loss,
    dpace_weights,
    on_greedy_path,
    slot_terms,
)

BLOCKS, SLOTS, V, D = 3, 4, 11, 6


@pytest.fixture(scope="module")
def laws():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BLOCKS * SLOTS, V, generator=generator) * 2
    teacher = torch.randn(BLOCKS * SLOTS, V, generator=generator) * 2
    token = torch.randint(0, V, (BLOCKS * SLOTS,), generator=generator)
    counted = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    return logits, teacher, token, counted


def one_hot(index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(index, V).float()


def wanted_law(label, teacher, token, temperature=1.0):
    if label == "text":
        return one_hot(token)
    return one_hot(teacher.argmax(-1)) if label == "target" else (teacher / temperature).softmax(-1)


def terms_of(laws, label, temperature=1.0, cross_entropy=False) -> SlotTerms:
    logits, teacher, token, _ = laws
    return SlotTerms(*slot_terms(logits, teacher, token, label, temperature, cross_entropy)).view(BLOCKS, SLOTS)


@pytest.mark.parametrize(("label", "temperature"), [("text", 1.0), ("target", 1.0), ("law", 1.0), ("law", 0.4)])
def test_terms_are_kl_overlap_and_top_tokens(laws, label, temperature):
    logits, teacher, token, _ = laws
    p, q = wanted_law(label, teacher, token, temperature), logits.softmax(-1)
    found = terms_of(laws, label, temperature)
    kl = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - q.log()), 0.0).sum(-1)
    torch.testing.assert_close(found.divergence.flatten(), kl, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.overlap.flatten(), torch.minimum(p, q).sum(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(found.greedy.flatten(), teacher.argmax(-1)) and torch.equal(found.top.flatten(), q.argmax(-1))
    crossed = terms_of(laws, label, temperature, cross_entropy=True)
    torch.testing.assert_close(crossed.divergence.flatten(), -(p * q.log()).sum(-1), atol=1e-5, rtol=1e-5)


def test_without_a_teacher_the_text_is_the_wanted_token(laws):
    logits, _, token, _ = laws
    _, overlap, greedy, _ = slot_terms(logits, None, token, "text", 1.0, False)
    assert torch.equal(greedy, token)
    torch.testing.assert_close(overlap, logits.softmax(-1).gather(-1, token[:, None])[:, 0])


def test_dpace_weights_are_suffix_sums_of_the_smoothed_cumulative_product():
    confidence = torch.tensor([[0.8, 0.5, 0.2]])
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    # m = .9, .75, .6; products .9, .675, .405.
    expected = torch.tensor([[0.9 + 0.675 + 0.405, 0.675 + 0.405, 0.405]])
    torch.testing.assert_close(dpace_weights(confidence, everywhere), expected)
    torch.testing.assert_close(dpace_weights(confidence, everywhere, 0.0), torch.tensor([[1.28, 0.48, 0.08]]))
    torch.testing.assert_close(dpace_weights(confidence, everywhere, 1.0), torch.tensor([[3.0, 2.0, 1.0]]))
    cut = torch.tensor([[True, True, False]])
    torch.testing.assert_close(dpace_weights(confidence, cut), torch.tensor([[1.575, 0.675, 0.0]]))


def test_slots_behind_a_token_that_is_not_greedy_are_off_the_path():
    text, greedy = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]), torch.tensor([[5, 9, 7, 8], [0, 2, 3, 4]])
    assert on_greedy_path(text, greedy).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert on_greedy_path(text, text).all()
    assert on_greedy_path(text[:, :1], greedy[:, :1]).all()


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk"])
@pytest.mark.parametrize("label", ["text", "target", "law"])
@pytest.mark.parametrize("weights", ["uniform", "exponential", "dpace"])
def test_losses_are_weighted_means_of_their_formula(laws, kind, label, weights):
    logits, teacher, token, counted = laws
    loss = DraftLoss(kind=kind, label=label, weights=weights, decay=3.0)
    found = block_loss(terms_of(laws, label, cross_entropy=kind == "ce"), counted, loss)
    p, q = wanted_law(label, teacher, token), logits.softmax(-1)
    total = weight_sum = 0.0
    for n in range(BLOCKS):
        alphas = [float(torch.minimum(p[n * SLOTS + k], q[n * SLOTS + k]).sum()) for k in range(SLOTS)]
        live = [k for k in range(SLOTS) if counted[n, k]]
        for k in live:
            i = n * SLOTS + k
            entropy = float(-(p[i] * q[i].log()).sum())
            kl = entropy + float(torch.where(p[i] > 0, p[i] * p[i].clamp(min=1e-30).log(), 0.0).sum())
            share = math.exp(-3 * alphas[k])
            value = {
                "ce": entropy,
                "kl": kl,
                "tv": 0.5 * float((p[i] - q[i]).abs().sum()),
                "lk": share * kl + (1 - share) * (1 - alphas[k]),
            }[kind]
            weight = {
                "uniform": 1.0,
                "exponential": math.exp(-k / 3.0),
                "dpace": sum(math.prod(0.5 * alphas[i] + 0.5 for i in live if i <= j) for j in live if j >= k),
            }[weights]
            total += weight * value
            weight_sum += weight
    assert float(found) == pytest.approx(total / weight_sum, rel=1e-4)


def test_the_length_loss_is_one_minus_the_expected_share_of_accepted_drafts(laws):
    _, _, _, counted = laws
    terms = terms_of(laws, "law")
    alpha = terms.overlap
    first = sum(math.prod(alpha[0, : j + 1].tolist()) for j in range(4)) / 4
    second = sum(math.prod(alpha[1, : j + 1].tolist()) for j in range(2)) / 2
    found = block_loss(terms, counted, DraftLoss(kind="length", label="law"))
    assert float(found) == pytest.approx(1 - (first + second) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk", "length"])
@pytest.mark.parametrize("label", ["target", "law"])
def test_every_loss_pulls_the_draft_to_what_is_wanted(kind, label):
    torch.manual_seed(1)
    teacher = torch.randn(20, V) * 3
    logits = (teacher * 0.2 + torch.randn(20, V) * 0.2).requires_grad_(True)
    loss = DraftLoss(kind=kind, label=label)
    optimiser = torch.optim.Adam([logits], lr=0.05)
    values = []
    for _ in range(300):
        terms = SlotTerms(*slot_terms(logits, teacher, teacher.argmax(-1), label, 1.0, kind == "ce")).view(4, 5)
        value = block_loss(terms, torch.ones(4, 5, dtype=torch.bool), loss)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] - 0.05
    assert terms.overlap.mean() > 0.97
    assert torch.equal(terms.top, terms.greedy)


def test_chunks_of_the_head_give_the_same_loss_and_gradient():
    torch.manual_seed(2)
    weight, teacher, token = torch.randn(V, D), torch.randn(BLOCKS * SLOTS, D), torch.randint(0, V, (BLOCKS * SLOTS,))
    counted = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    loss = DraftLoss(label="law")
    results = []
    for chunk in (100, 5):
        hidden = torch.randn(BLOCKS * SLOTS, D, generator=torch.Generator().manual_seed(3)).requires_grad_(True)
        head = SlotHead(weight, loss, 1.3, 4.0, chunk, False)
        value = block_loss(head(hidden, teacher, token).view(BLOCKS, SLOTS), counted, loss)
        value.backward()
        results.append((value.detach(), hidden.grad))
    torch.testing.assert_close(results[0], results[1])
    # Multiplier, then cap, as the checkpoint says.
    logits = 4 * torch.tanh(1.3 * torch.nn.functional.linear(hidden, weight) / 4)
    _, overlap, _, _ = slot_terms(logits, teacher @ weight.T, token, "law", 1.0, False)
    torch.testing.assert_close(head(hidden, teacher, token).overlap, overlap)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "mse"}, "loss must be one of ce, kl, tv, lk, length: got 'mse'"),
        ({"label": "soft"}, "label must be one of text, target, law: got 'soft'"),
        ({"weights": "linear"}, "weights must be one of uniform, exponential, dpace: got 'linear'"),
        ({"decay": 0.0}, "decay and label_temperature must be > 0: got 0.0"),
        ({"smoothing": 1.5}, r"smoothing must be in \[0, 1\]: got 1.5"),
    ],
)
def test_bad_losses_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        DraftLoss(**change)
