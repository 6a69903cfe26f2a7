"""What a drafter may see and what its state does: context, windows, causality, ragged rows, reuse, degenerate heads."""

import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.noise import CounterNoise
from dllm.samplers.verify import chain_rejection, sample_law
from tests.chi_squared import chi_squared_pvalue
from tests.drafters.toy import context, toy_drafter, toy_target

KINDS = ["dflash", "dflash2", "dfly"]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def draft_alone(drafter, features, anchor, length, **options):
    drafter.reset(1, 64)
    valid = torch.ones(1, features.shape[1], dtype=torch.bool)
    return drafter.propose(Context(features, valid), anchor, length, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_feeding_in_pieces_with_rejected_rows_equals_feeding_at_once(kind):
    drafter = toy_drafter(kind)
    whole = context(drafter, 2, 9)
    anchor = torch.tensor([1, 2])
    drafter.reset(2, 64)
    drafter.feed(whole)
    expected = drafter.block(anchor, 5)
    # Row 0 takes 4 + 2 + 3 tokens, row 1 takes 3 + 5 + 1; the rest of each piece is rejected.
    drafter.reset(2, 64)
    fed = [0, 0]
    for counts in ((4, 3), (2, 5), (3, 1)):
        features = torch.randn(2, 6, whole.features.shape[-1])
        valid = torch.zeros(2, 6, dtype=torch.bool)
        for b, count in enumerate(counts):
            features[b, :count] = whole.features[b, fed[b] : fed[b] + count]
            valid[b, :count] = True
            fed[b] += count
        drafter.feed(Context(features, valid))
    assert drafter.lengths.tolist() == [9, 9]
    close(drafter.block(anchor, 5), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_row_drafts_as_it_would_alone(kind, temperature):
    drafter = toy_drafter(kind, windows=(4, None), causal=(False, False))
    noise = CounterNoise.for_rows(11, 3)
    tokens, lengths, anchor = (7, 3, 5), torch.tensor([5, 2, 4]), torch.tensor([1, 2, 3])
    features = torch.randn(3, 7, drafter.config.feature_width)
    # Left, right and inner padding.
    valid = torch.tensor([[1] * 7, [0, 0, 0, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    drafter.reset(3, 64)
    batch = drafter.propose(Context(features, valid), anchor, 5, temperature, noise, lengths)
    for b in range(3):
        count = int(lengths[b])
        alone = draft_alone(
            drafter,
            features[b : b + 1, valid[b]],
            anchor[b : b + 1],
            count,
            temperature=temperature,
            noise=noise.select(torch.tensor([b])),
        )
        assert drafter.lengths.tolist() == [tokens[b]]
        assert batch.tokens[b, :count].tolist() == alone.tokens[0].tolist()
        close(batch.confidence[b, :count], alone.confidence[0])
        if temperature:
            close(batch.probs[b, :count], alone.probs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_reusable_for_a_shorter_second_request(kind):
    drafter, anchor = toy_drafter(kind), torch.tensor([1])
    short = context(drafter, 1, 3, seed=5)
    fresh = draft_alone(drafter, short.features, anchor, 4).tokens
    drafter.propose(context(drafter, 1, 20), anchor, 4)
    store = drafter.store
    again = draft_alone(drafter, short.features, anchor, 4).tokens
    assert drafter.store is store
    assert again.tolist() == fresh.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_with_and_without_drafts_keep_the_context_contiguous(kind):
    drafter, anchor = toy_drafter(kind), torch.tensor([3])
    whole = context(drafter, 1, 8)
    drafter.reset(1, 64)
    for start, end, length in ((0, 4, 3), (4, 5, 0), (5, 8, 3)):
        piece = Context(whole.features[:, start:end], whole.valid[:, start:end])
        if length:
            drafter.propose(piece, anchor, length)
        else:
            drafter.feed(piece)
        assert drafter.lengths.tolist() == [end]
    in_rounds = drafter.block(anchor, 4)
    drafter.reset(1, 64)
    drafter.feed(whole)
    close(in_rounds, drafter.block(anchor, 4))


def test_crop_forgets_the_end_of_each_row():
    drafter, anchor = toy_drafter("dflash"), torch.tensor([3, 4])
    whole = context(drafter, 2, 8)
    drafter.reset(2, 64)
    drafter.feed(whole)
    drafter.crop(torch.tensor([5, 20]))
    assert drafter.lengths.tolist() == [5, 8]
    got = drafter.block(anchor, 4)
    drafter.reset(1, 64)
    drafter.feed(Context(whole.features[:1, :5], whole.valid[:1, :5]))
    close(got[:1], drafter.block(anchor[:1], 4))


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_hides_exactly_the_tokens_outside_it(causal):
    drafter = toy_drafter("dflash", layers=1, windows=(4,), causal=(causal,))
    base = context(drafter, 1, 12)
    anchor = torch.tensor([1])
    drafter.reset(1, 64)
    drafter.feed(base)
    before = drafter.block(anchor, 3)
    for token in range(12):
        changed = base.features.clone()
        changed[:, token] += 1.0
        drafter.reset(1, 64)
        drafter.feed(Context(changed, base.valid))
        moved = (drafter.block(anchor, 3) - before).abs().amax(-1)[0] > 1e-6
        # Slot k stands at 12 + k and sees a context token if it is less than 4 back.
        assert moved.tolist() == [12 + k - token < 4 for k in range(3)]


def test_a_full_layer_beside_a_sliding_one_still_sees_every_token():
    drafter = toy_drafter("dflash", layers=2, windows=(4, None), causal=(True, False))
    base = context(drafter, 1, 12)
    anchor = torch.tensor([1])
    drafter.reset(1, 64)
    drafter.feed(base)
    before = drafter.block(anchor, 3)
    changed = base.features.clone()
    changed[:, 0] += 1.0
    drafter.reset(1, 64)
    drafter.feed(Context(changed, base.valid))
    assert ((drafter.block(anchor, 3) - before).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize(
    ("windows", "causal", "seen_by"),
    [
        ((None,), (False,), lambda q, k: True),
        ((None,), (True,), lambda q, k: k <= q),
        ((2,), (False,), lambda q, k: abs(q - k) < 2),
        ((2,), (True,), lambda q, k: 0 <= q - k < 2),
    ],
)
def test_slots_of_a_block_see_each_other_as_causality_and_window_say(windows, causal, seen_by):
    drafter = toy_drafter("dflash", layers=1, windows=windows, causal=causal)
    drafter.reset(1, 64)
    attend = drafter._attend(5, windows[0], causal[0], None)
    assert attend.mask()[0].tolist() == [[seen_by(q, k) for k in range(5)] for q in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_anchors_future_is_read_and_all_of_its_past_is(kind):
    drafter, anchor = toy_drafter(kind), torch.tensor([1])
    base = context(drafter, 1, 6)
    drafter.reset(1, 64)
    drafter.feed(base)
    before = drafter.block(anchor, 4)
    for token in range(6):
        changed = base.features.clone()
        changed[:, token] += 1.0
        drafter.reset(1, 64)
        drafter.feed(Context(changed, base.valid))
        assert not torch.allclose(drafter.block(anchor, 4), before, atol=1e-6)
    # Rejected rows stand behind the committed ones and must not be seen.
    drafter.reset(1, 64)
    drafter.feed(
        Context(
            torch.cat([base.features, torch.randn(1, 3, base.features.shape[-1])], 1),
            torch.tensor([[True] * 6 + [False] * 3]),
        )
    )
    close(drafter.block(anchor, 4), before)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_drafts_come_from_the_law_that_is_kept(kind):
    rows = 6000
    drafter = toy_drafter(kind)
    drafter.reset(rows, 8)
    one = context(drafter, 1, 4)
    many = Context(one.features.expand(rows, -1, -1), one.valid.expand(rows, -1))
    draft = drafter.propose(many, torch.full((rows,), 2), 2, 1.3, CounterNoise.for_rows(0, rows))
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(rows, 2))
    first = draft.probs[0, 0]
    assert chi_squared_pvalue(draft.tokens[:, 0].bincount(minlength=8), first) > 0.01
    for token in range(8):
        chosen = draft.tokens[:, 0] == token
        if int(chosen.sum()) < 400:
            continue
        laws = draft.probs[chosen, 1]
        close(laws, laws[:1].expand_as(laws))
        assert chi_squared_pvalue(draft.tokens[chosen, 1].bincount(minlength=8), laws[0]) > 0.01
    follows_the_first = not torch.allclose(draft.probs[:, 1], draft.probs[:1, 1], atol=1e-4)
    assert follows_the_first == (kind != "dflash")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verified_output_of_a_real_drafter_has_the_targets_law(kind, temperature):
    rows, vocab = 20_000, 8
    generator = torch.Generator().manual_seed(4)
    p = (torch.randn(vocab, vocab, generator=generator) * 1.2).softmax(-1)
    drafter = toy_drafter(kind)
    drafter.reset(rows, 8)
    one = context(drafter, 1, 3)
    many = Context(one.features.expand(rows, -1, -1), one.valid.expand(rows, -1))
    noise = CounterNoise.for_rows(5, rows)
    anchor = torch.full((rows,), 2)
    draft = drafter.propose(many, anchor, 2, temperature, noise)
    target = p[torch.cat([anchor[:, None], draft.tokens], 1)]
    uniform = torch.rand(rows, 4, generator=generator)
    verdict = chain_rejection(target, draft, uniform[:, :3])
    tokens = verdict.tokens(draft.tokens)
    second = torch.where(verdict.accepted > 0, tokens[:, 1], sample_law(p[tokens[:, 0]], uniform[:, 3]))
    counts = (tokens[:, 0] * vocab + second).bincount(minlength=vocab * vocab)
    assert chi_squared_pvalue(counts, (p[2][:, None] * p).flatten()) > 0.01


def test_noise_depends_on_row_seed_and_round_not_on_the_batch():
    drafter = toy_drafter("dflash")
    drafter.reset(3, 64)
    one = context(drafter, 1, 4)
    many = Context(one.features.expand(3, -1, -1), one.valid.expand(3, -1))
    noise = CounterNoise.for_rows([7, 7, 8], 3)
    draft = drafter.propose(many, torch.tensor([1, 1, 1]), 5, 2.0, noise)
    assert draft.tokens[0].tolist() == draft.tokens[1].tolist() != draft.tokens[2].tolist()


def test_dflash2_with_identity_convolutions_and_an_empty_codebook_is_dflash():
    target = toy_target()
    plain, second = toy_drafter("dflash", target), toy_drafter("dflash2", target)
    second.load_state_dict(plain.state_dict(), strict=False)
    for layer in second.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel.zero_()
            conv.base_kernel[:, 0] = 1
            conv.kernel_projection.weight.zero_()
    second.candidate_selector.successor_codebook.zero_()
    for drafter in (plain, second):
        drafter.reset(2, 64)
        drafter.feed(context(drafter, 2, 6))
    anchor = torch.tensor([1, 5])
    close(second.block(anchor, 6), plain.block(anchor, 6))
    assert second.propose(None, anchor, 5).tokens.tolist() == plain.propose(None, anchor, 5).tokens.tolist()


def test_convolution_taps_do_not_cross_the_blocks_edge():
    drafter = toy_drafter("dflash2")
    conv = drafter.layers[0].attention_conv
    x = torch.randn(1, 5, 16)
    kernel, _ = conv.kernels(x)
    by_hand = torch.zeros_like(x)
    for t in range(5):
        for o in range(conv.taps):
            if t - o >= 0:
                by_hand[:, t] += kernel[:, t, o] * x[:, t - o]
    close(conv.apply_kernel(kernel, x), by_hand)


def test_dfly_without_correction_does_not_look_at_the_token_before():
    drafter = toy_drafter("dfly")
    drafter.reset(1, 64)
    drafter.feed(context(drafter, 1, 5))
    slots = drafter.block(torch.tensor([1]), 6)[:, 1:]
    uniform = torch.rand(1, 5)
    with_anchor = [drafter.choose(slots, torch.tensor([a]), 1.0, uniform).probs[0, 0] for a in (1, 2)]
    assert not torch.allclose(with_anchor[0], with_anchor[1], atol=1e-4)
    drafter.hidden_correction.down_proj.weight.zero_()
    neutral = drafter.choose(slots, torch.tensor([1]), 1.0, uniform)
    close(neutral.probs, drafter.logits(slots).softmax(-1))


def test_dfly_with_one_tap_and_no_projection_feeds_the_normed_tap_to_every_layer():
    drafter = toy_drafter("dfly", taps=(1,))
    drafter.fc.weight.zero_()
    drafter.layer_fusion_weights.normal_(0, 5)
    features = torch.randn(1, 4, 16)
    for fused in drafter.fuse(features):
        close(fused, drafter.hidden_norm(features))


def test_dfly_layers_mix_the_taps_by_their_own_softmax():
    drafter = toy_drafter("dfly", taps=(0, 1, 3))
    drafter.layer_fusion_weights[0] = torch.tensor([0.0, 0.0, 40.0])
    drafter.fc.weight.zero_()
    features = torch.randn(1, 4, 48)
    first, second = drafter.fuse(features)
    close(first, drafter.hidden_norm(features[..., 32:]))
    weights = drafter.layer_fusion_weights[1].softmax(-1)
    close(second, drafter.hidden_norm(sum(w * features[..., 16 * i : 16 * i + 16] for i, w in enumerate(weights))))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_dfly_on_candidates_equals_the_whole_head_where_they_hold_all_that_matters(temperature):
    target = toy_target(vocab=40)
    exact, few = toy_drafter("dfly", target), toy_drafter("dfly", target, head_candidates=6)
    assert (exact.num_candidates, few.num_candidates) == (None, 6)
    noise = CounterNoise.for_rows(3, 2)
    for drafter in (exact, few):
        drafter.reset(2, 64)
        drafter.feed(context(drafter, 2, 6))
    anchor = torch.tensor([1, 5])
    draft = few.propose(None, anchor, 5, temperature, noise)
    slots = few.block(anchor, 6)[:, 1:]
    candidates = few.logits(slots).topk(6).indices
    previous = torch.cat([anchor[:, None], draft.tokens[:, :-1]], 1)
    corrected = few.logits(few.hidden_correction(slots, target.embed(previous)))
    hidden_elsewhere = torch.full_like(corrected, -torch.inf).scatter(-1, candidates, corrected.gather(-1, candidates))
    if temperature:
        close(draft.probs, (hidden_elsewhere / temperature).softmax(-1))
    else:
        assert draft.tokens.tolist() == hidden_elsewhere.argmax(-1).tolist()
    few.head_candidates = 40
    assert few.num_candidates is None
    assert few.propose(None, anchor, 5).tokens.tolist() == exact.propose(None, anchor, 5).tokens.tolist()


def test_confidence_is_the_largest_probability_at_temperature_one_whatever_was_drawn():
    drafter = toy_drafter("dflash")
    drafter.reset(1, 64)
    drafter.feed(context(drafter, 1, 5))
    anchor = torch.tensor([1])
    law = drafter.logits(drafter.block(anchor, 6)[:, 1:]).softmax(-1)
    for temperature in (0.0, 3.0):
        draft = drafter.propose(None, anchor, 5, temperature, CounterNoise.for_rows(9, 1))
        close(draft.confidence, law.amax(-1))


def test_embedding_scale_multiplier_and_cap_are_applied_where_the_checkpoint_says():
    scaled = toy_drafter("dflash", input_embedding_scale=1.5, output_multiplier=0.5, final_logit_softcapping=2.0)
    ids, hidden = torch.tensor([[1, 2]]), torch.randn(1, 2, 16)
    close(scaled.embed(ids), 1.5 * scaled.target.embed(ids))
    close(scaled.logits(hidden), 2.0 * torch.tanh(scaled.target.head(hidden) * 0.5 / 2.0))


def test_a_reduced_head_of_its_own_is_mapped_to_the_targets_ids():
    drafter = toy_drafter("dflash", draft_vocab_size=3)
    drafter.d2t.copy_(torch.tensor([1, 3, 5]))
    hidden = torch.randn(1, 2, 16)
    logits = drafter.logits(hidden)
    close(logits[..., [1, 4, 7]], drafter.lm_head(hidden))
    assert torch.isinf(logits[..., [0, 2, 3, 5, 6]]).all()
    drafter.reset(1, 64)
    draft = drafter.propose(context(drafter, 1, 4), torch.tensor([1]), 5)
    assert set(draft.tokens.flatten().tolist()) <= {1, 4, 7}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.propose(None, torch.tensor([1]), 6), r"length must be in \[1, 5\]"),
        (lambda d: d.propose(None, torch.tensor([1]), 0), r"length must be in \[1, 5\]"),
        (lambda d: d.propose(None, torch.tensor([1]), 2, -1.0), "temperature must be >= 0"),
        (lambda d: d.propose(None, torch.tensor([1]), 2, 1.0), "noise must be given"),
        (lambda d: d.propose(None, torch.tensor([1, 2]), 2), "batch must be 1, as reset"),
        (
            lambda d: d.feed(Context(torch.zeros(1, 2, 7), torch.ones(1, 2, dtype=torch.bool))),
            "features must be 32 wide",
        ),
        (lambda d: d.feed(context(d, 1, 9)), "capacity must hold every committed token, 9: got 8"),
    ],
)
def test_a_call_that_cannot_be_right_is_named(call, message):
    drafter = toy_drafter("dflash")
    drafter.reset(1, 8)
    with pytest.raises(ValueError, match=message):
        call(drafter)


def test_drafting_before_a_request_is_opened_is_an_error():
    with pytest.raises(ValueError, match="reset"):
        toy_drafter("dflash").propose(None, torch.tensor([1]), 2)


def test_the_targets_weights_are_no_parameters_of_its_drafter():
    drafter = toy_drafter("dflash")
    ours = {parameter.data_ptr() for parameter in drafter.parameters()}
    assert not ours & {parameter.data_ptr() for parameter in drafter.target.model.parameters()}
