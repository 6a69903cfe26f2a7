"""The training forward of a drafter computes what the drafter computes when it drafts."""

import numpy as np
import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.training.data import Documents
from dllm.training.draft_batches import DraftBatches, every_anchor
from dllm.training.draft_forward import DraftForward, TargetReader
from dllm.training.draft_measure import Acceptance, draft_tokens, matching, summary, walk
from tests.drafters.toy import toy_drafter, toy_target

LENGTH, SLOTS = 40, 6


@pytest.fixture(scope="module")
def target():
    return toy_target(vocab=23, layers=4)


def documents(seed=0, sizes=(17, 9, 22, 30, 5), prompt=3, vocab=22) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of((rng.integers(0, vocab, n), min(prompt, n - 2)) for n in sizes)


def a_batch(anchors=7, seed=3):
    return next(iter(DraftBatches([(documents(), 1.0)], 2, LENGTH, anchors, SLOTS, seed)))


def alone(ids: torch.Tensor, batch, b: int, index: int) -> torch.Tensor:
    """The tokens of the document of anchor ``index``, up to the anchor."""
    own = (batch.document[b] == batch.document[b, index]).nonzero().flatten()
    return ids[b, own[own <= index]]


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_packed_documents_read_as_each_would_alone(target, kernel):
    batch = a_batch()
    features, states = TargetReader(target, (0, 2), kernel, False).read(batch)
    for b in range(2):
        for number in range(int(batch.document[b].max()) + 1):
            own = batch.document[b] == number
            logits, taps = toy_read(target, batch.ids[b, own])
            close(features[b, own], taps)
            close(target.head(states[b, own]), logits)


def toy_read(target, ids):
    from dllm.drafters.target import Target

    logits, taps = Target.of(target).read(ids[None], (0, 2))
    return logits[0], taps[0]


RULES = [
    dict(),
    dict(causal=(True, False)),
    dict(windows=(4, None), causal=(False, False)),
    dict(windows=(5, 3), causal=(True, True)),
    dict(input_embedding_scale=1.7),
]


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("kind", ["dflash", "dfly"])
@pytest.mark.parametrize("rules", RULES)
def test_the_training_forward_equals_propose_for_every_anchor(target, kind, rules, kernel):
    drafter = toy_drafter(kind, target, **rules)
    batch = a_batch()
    features, _ = TargetReader(target, (0, 2), kernel, False).read(batch)
    forward = DraftForward(drafter, kernel, False)
    hidden, tokens = forward.hidden(batch, features), draft_tokens(forward, batch, features)
    checked = 0
    for b in range(2):
        for a, index in enumerate(batch.anchor[b].tolist()):
            if not batch.labelled[b, a, 0]:
                continue
            text = alone(batch.ids, batch, b, index)
            _, taps = toy_read(target, text)
            drafter.reset(1, 64)
            context = Context(taps[None, :-1], torch.ones(1, len(text) - 1, dtype=torch.bool))
            draft = drafter.propose(context, text[-1:], SLOTS - 1)
            close(hidden[b, a], drafter.block(text[-1:], SLOTS)[0, 1:])
            assert tokens[b, a].tolist() == draft.tokens[0].tolist()
            checked += 1
    assert checked >= 8


def test_teacher_forcing_with_the_drafts_own_tokens_gives_the_laws_that_were_drawn_from(target):
    drafter = toy_drafter("dfly", target)
    batch = a_batch()
    features, _ = TargetReader(target, (0, 2), "sdpa", False).read(batch)
    forward = DraftForward(drafter, "sdpa", False)
    hidden, tokens = forward.hidden(batch, features), draft_tokens(forward, batch, features)
    start = batch.ids.gather(1, batch.anchor)[..., None]
    logits = drafter.logits(forward.corrected(hidden, torch.cat([start, tokens[..., :-1]], dim=-1)))
    assert torch.equal(logits.argmax(dim=-1), tokens)
    # Another token before a slot changes it, and the first slot looks at the anchor.
    other = drafter.logits(forward.corrected(hidden, torch.cat([(start + 1) % 23, tokens[..., :-1]], dim=-1)))
    assert not torch.allclose(other[:, :, 0], logits[:, :, 0]) and torch.equal(other[:, :, 1:], logits[:, :, 1:])


def test_gradients_reach_every_weight(target):
    for kind in ("dflash", "dfly"):
        drafter = toy_drafter(kind, target).requires_grad_(True)
        batch = a_batch()
        features, _ = TargetReader(target, (0, 2), "sdpa", False).read(batch)
        forward = DraftForward(drafter, "sdpa", False)
        hidden = forward.corrected(
            forward.hidden(batch, features), batch.ids.gather(1, batch.anchor)[..., None].expand(-1, -1, 5)
        )
        drafter.logits(hidden).square().mean().backward()
        still = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert still == [] and not any(p.requires_grad for p in target.parameters())


def test_anchors_are_answer_tokens_and_labels_stay_inside_their_document():
    seen = set()
    stream = iter(DraftBatches([(documents(), 1.0)], 2, LENGTH, 50, SLOTS, 0))
    for _ in range(4):
        batch = next(stream)
        for b in range(2):
            used = batch.labelled[b, :, 0]
            anchors = batch.anchor[b, used]
            assert torch.equal(anchors, anchors.sort().values) and len(anchors.unique()) == len(anchors)
            for a, index in enumerate(anchors.tolist()):
                own = (batch.document[b] == batch.document[b, index]).nonzero().flatten()
                prompt = 3
                assert own[0] + prompt <= index < own[-1]
                wanted = [index + k <= int(own[-1]) for k in range(1, SLOTS)]
                assert batch.labelled[b, a].tolist() == wanted
                seen.add((len(own), int(index - own[0])))
    # With room for all of them every answer token but the last is an anchor.
    assert {(17, i) for i in range(3, 16)} <= seen and {(5, 3)} <= seen and (5, 4) not in seen


def test_all_anchors_of_all_documents_are_measured_once():
    found = every_anchor(documents(), 2, LENGTH, 4, SLOTS)
    counted: dict[int, list[int]] = {}
    for text in found:
        for b, placed in enumerate(text.placed):
            for number, at, _, count in placed:
                indices = [
                    int(i) - at
                    for part in text.parts
                    for i in part.anchor[b, part.labelled[b, :, 0]]
                    if at <= i < at + count
                ]
                counted.setdefault(number, []).extend(indices)
    sizes = (17, 9, 22, 30, 5)
    assert {n: sorted(i) for n, i in counted.items()} == {n: list(range(3, size - 1)) for n, size in enumerate(sizes)}


def test_rounds_follow_each_other_as_in_decoding():
    accepted = np.array([[0, 0, 2, 9, 9, 0, 1, 9, 3, 0, 0, 0]])
    # A prompt of 2 and 10 answer tokens at 2..11: 2 -> 5 -> 6 -> 8 -> the end (3 drafts of 3 left, nothing behind them).
    rounds = [found for _, _, found in walk(accepted, [[(0, 0, 2, 12)]], 4)]
    assert rounds == [[(2, 3, 4), (0, 1, 4), (1, 2, 4), (3, 3, 3)]]
    figures = summary(rounds[0])
    assert figures == {"accept_length": 2.25, "rounds": 4, "tokens": 9, "slots": [0.75, 0.5, 0.25, 0.0]}


def test_the_measured_accept_length_is_that_of_drafting_along_the_text(target):
    drafter = toy_drafter("dfly", target)
    texts = documents(seed=5, sizes=(20, 33), vocab=4)
    reader = TargetReader(target, (0, 2), "sdpa", False)
    measured = Acceptance(texts, reader, 2, LENGTH, 5, SLOTS).measure(DraftForward(drafter, "sdpa", False))
    rounds = []
    for i in range(2):
        tokens, prompt = texts[i]
        ids, at = torch.from_numpy(tokens.astype(np.int64)), prompt
        _, taps = toy_read(target, ids)
        while at < len(ids) - 1:
            drafter.reset(1, 64)
            context = Context(taps[None, :at], torch.ones(1, at, dtype=torch.bool))
            left = min(SLOTS - 1, len(ids) - 1 - at)
            draft = drafter.propose(context, ids[at : at + 1], SLOTS - 1).tokens[0, :left]
            kept = int((draft == ids[at + 1 : at + 1 + left]).long().cumprod(0).sum())
            rounds.append((kept, min(kept + 1, len(ids) - 1 - at), left))
            at += rounds[-1][1]
    assert measured["all"] == summary(rounds)
    assert any(kept for kept, _, _ in rounds)


def test_a_match_ends_at_the_first_wrong_draft_and_at_the_documents_end():
    batch = every_anchor(documents(sizes=(9,)), 1, 12, 8, SLOTS)[0].parts[0]
    text = batch.ids.gather(1, batch.slots().flatten(1)).view(batch.labelled.shape)
    assert matching(text, batch)[0].tolist() == [5, 4, 3, 2, 1, 0, 0, 0] == batch.labelled.sum(-1)[0].tolist()
    wrong = text.clone()
    wrong[0, 0, 2] += 1
    assert matching(wrong, batch)[0, 0] == 2
