"""Faults that users of other tools report (T10 to T12, T20, T22, T24 of the fault list) on the draft path; lengths, stops, streams,
reuse, arguments.
"""

import pytest
import torch

from dllm.drafters.drafter import Context
from dllm.noise import CounterNoise
from dllm.speculate import speculative_generate, speculative_stream
from tests.speculative import (
    TARGETS,
    Scripted,
    greedy_text,
    hf_target,
    own_target,
    padded,
    prompts,
    random_drafter,
    tokens,
)
from tests.words import byte_tokenizer

# Lengths and policies


class Says:
    def __init__(self, *lengths):
        self.lengths, self.states = lengths, []

    def next(self, state):
        self.states.append(state)
        return self.lengths[(len(self.states) - 1) % len(self.lengths)]


@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize("lengths", [(1,), (8,), (1000,), (3, 1, 8, 2)], ids=str)
def test_t24_a_policy_changes_the_blocks_but_never_the_text(kind, lengths):
    target = TARGETS[kind](7)
    (row,) = prompts(7, (4,))
    text = greedy_text(target, row, 25)
    drafter = Scripted(target, [text])
    policy, seen = Says(*lengths), []

    def note(model, step, timestep, kwargs):
        seen.append(int(kwargs["limits"][0]))

    out = speculative_generate(
        target, drafter, [row], max_new_tokens=25, block_length=policy, callback_on_step_end=note
    )
    assert tokens(out) == text[len(row) :]
    place, expected = 1, list[int]()
    while place < 25:
        drafts = min(lengths[len(expected) % len(lengths)] - 1, 7, 25 - place)
        expected.append(drafts)
        place += min(drafts + 1, 25 - place)
    assert seen[1:] == expected
    if lengths == (1,):
        assert out.stats.nfe == 25 and out.stats.draft_nfe == 0
    state = policy.states[0]
    assert (int(state.position), int(state.remaining), state.default) == (len(row) + 1, 24, 8)
    assert state.hidden.shape == (1, 16) and state.top_logits.shape == (1, 40) and state.confidence is None
    if lengths == (8,):
        assert policy.states[1].confidence.shape == (1, 7)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_every_length_limit_is_met_exactly(kind):
    target = TARGETS[kind](9)
    rows = prompts(9)
    texts = [greedy_text(target, row, 16) for row in rows]
    ids, mask = padded(rows)
    drafter = Scripted(target, texts, wrong=(7, 8, 12))
    for limit in range(17):
        out = speculative_generate(target, drafter, ids, mask, max_new_tokens=limit)
        assert out.sequences.tolist() == [
            text[len(row) : len(row) + limit] for row, text in zip(rows, texts, strict=True)
        ]
        assert out.finish_reasons == ["length"] * 4 and out.lengths == [limit] * 4
        assert (out.stats.nfe == 0) == (limit == 0)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_rounds_without_drafts_in_between_keep_the_drafter_s_context(kind):
    target = TARGETS[kind](2)
    (row,) = prompts(2, (5,))
    drafter = random_drafter("dfly", target)
    committed: list[int] = []
    seen: list[tuple[int, list[int]]] = []

    def note(model, step, timestep, kwargs):
        if kwargs["draft_tokens"].shape[1]:
            seen.append((len(row) + len(committed) - 1, kwargs["draft_tokens"][0].tolist()))
        committed.extend(kwargs["new_ids"][0])

    # More rounds without drafts than are kept before they are fed.
    policy = Says(*[4] + [1] * 20 + [6, 1, 3])
    out = speculative_generate(
        target, drafter, [row], max_new_tokens=40, block_length=policy, callback_on_step_end=note
    )
    whole = row + tokens(out)
    assert whole == row + committed and [len(drafts) for _, drafts in seen[:3]] == [3, 5, 2]
    _, features = drafter.target.read(torch.tensor([whole]), drafter.config.target_layer_ids)
    for place, drafts in seen:
        drafter.reset(1, 64)
        drafter.feed(Context(features[:, :place], torch.ones(1, place, dtype=torch.bool)))
        assert drafter.propose(None, torch.tensor([whole[place]]), len(drafts)).tokens[0].tolist() == drafts


# Stops


@pytest.mark.parametrize("kind", sorted(TARGETS))
@pytest.mark.parametrize("stop", [1, 2, 5, 8, 9, 15])
def test_t10_a_stop_token_inside_a_block_ends_the_row_there(kind, stop):
    target = TARGETS[kind](4)
    rows = prompts(4, (3, 5))
    texts = [greedy_text(target, row, 24) for row in rows]
    new = texts[0][3:]
    eos = new[stop]
    first = new.index(eos)
    drafter = Scripted(target, texts)
    ids, mask = padded(rows)
    out = speculative_generate(target, drafter, ids, mask, max_new_tokens=24, eos_token_id=eos)
    assert tokens(out) == new[:first]
    assert out.finish_reasons[0] == "stop"
    stats = out.row_stats[0]
    assert stats.useful_tokens == first
    # The prefill gives the first token, each pass 8: later blocks are not computed, the stop counts as committed.
    assert stats.nfe == 1 + -(-first // 8)
    assert 1 + sum(stats.accept_lengths) == first + 1


def test_t22_three_forwards_five_useful_tokens():
    target = own_target(4)
    (row,) = prompts(4, (3,))
    text = greedy_text(target, row, 8)
    eos = next(token for token in range(40) if token not in text)
    # The target says the stop as its sixth token.
    out = speculative_generate(
        target,
        Scripted(target, [text], wrong=(len(row) + 3,)),
        [row],
        max_new_tokens=8,
        num_drafts=3,
        eos_token_id=eos,
        logits_processor=lambda ids, scores: (
            scores.index_fill(1, torch.tensor([eos]), 99.0) if ids.shape[1] == 8 else scores
        ),
    )
    assert tokens(out) == text[len(row) :][:5]
    assert (out.stats.nfe, out.stats.useful_tokens, out.stats.accept_lengths) == (3, 5, [3, 2])
    assert out.stats.tokens_per_forward == pytest.approx(5 / 3)
    # The prompt, then blocks of 4.
    assert out.stats.positions == 3 + 4 + 4


def text_target(seed=0):
    target = hf_target(seed, vocab_size=64)
    target.tokenizer = byte_tokenizer()
    return target


@pytest.mark.parametrize("seed", range(4))
def test_t11_a_stop_string_is_found_inside_and_across_blocks(seed):
    target = text_target(seed)
    rows = prompts(seed, (3, 5))
    ids, mask = padded(rows)
    full = speculative_generate(target, None, ids, mask, max_new_tokens=30)
    texts = [row + tokens(full, b) for b, row in enumerate(rows)]
    clean = full.texts[0].rstrip("\ufffd")
    assert len(clean) > 8
    for start in range(seed, len(clean) - 3, 6):
        stop = clean[start : start + 3]
        for count in (1, 3, 7):
            out = speculative_generate(
                target,
                Scripted(target, texts, wrong=(11, 17)),
                ids,
                mask,
                max_new_tokens=30,
                num_drafts=count,
                stop_strings=["not there", stop],
            )
            assert out.texts[0] == full.texts[0][: full.texts[0].index(stop)]
            assert out.finish_reasons[0] == "stop"
            plain = speculative_generate(target, None, ids, mask, max_new_tokens=30, stop_strings=["not there", stop])
            assert plain.texts == out.texts and plain.lengths == out.lengths
            # Up to the token that completes the stop.
            assert sum(out.row_stats[0].accept_lengths) == sum(plain.row_stats[0].accept_lengths)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_t12_no_stop_token_before_the_least_length(kind):
    target = TARGETS[kind](4)
    rows = prompts(4, (3, 5))
    ids, mask = padded(rows)
    eos = greedy_text(target, rows[0], 3)[-1]
    free = speculative_generate(target, None, ids, mask, max_new_tokens=20, eos_token_id=eos)
    assert free.lengths[0] < 11
    drafter = random_drafter("dflash2", target)
    for least in (11, 20):
        outs = [
            speculative_generate(target, d, ids, mask, max_new_tokens=20, min_new_tokens=least, eos_token_id=eos)
            for d in (None, drafter)
        ]
        assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
        assert min(outs[1].lengths) >= least and eos not in tokens(outs[1])[:least]


# Streams


def test_a_stream_adds_up_to_the_texts_and_a_streamer_gets_the_ids():
    target = text_target(1)
    rows = prompts(1, (3, 5))
    ids, mask = padded(rows)
    drafter = random_drafter("dfly", target)
    options = dict(max_new_tokens=30, stop_strings=[". "], eos_token_id=2)
    whole = speculative_generate(target, drafter, ids, mask, **options)
    joined, done = ["", ""], {}
    for event in speculative_stream(target, drafter, ids, mask, **options):
        if event.kind == "committed":
            assert event.row not in done
            joined[event.row] += event.text
        else:
            done[event.row] = event.finish_reason
    assert joined == whole.texts
    assert [done[b] for b in range(2)] == whole.finish_reasons

    class Streamer:
        def __init__(self):
            self.pieces, self.ended = [], False

        def put(self, value):
            self.pieces.append(value.reshape(-1).tolist())

        def end(self):
            self.ended = True

    streamer = Streamer()
    out = speculative_generate(target, drafter, [rows[0]], streamer=streamer, **options)
    assert streamer.ended and streamer.pieces[0] == rows[0]
    assert [token for piece in streamer.pieces[1:] for token in piece] == tokens(out)
    with pytest.raises(ValueError, match="streamer takes one row"):
        speculative_generate(target, drafter, ids, mask, streamer=Streamer(), **options)


# Reuse


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_t20_a_drafter_serves_one_request_after_another_and_says_so_if_two_overlap(kind):
    target = TARGETS[kind](1)
    drafter = random_drafter("dfly", target)
    long, short = prompts(1, (9, 2))
    fresh = speculative_generate(target, random_drafter("dfly", target), [short], max_new_tokens=15)
    speculative_generate(target, drafter, *padded([long, short]), max_new_tokens=30)
    again = speculative_generate(target, drafter, [short], max_new_tokens=15)
    assert tokens(again) == tokens(fresh)
    assert again.stats.accept_lengths == fresh.stats.accept_lengths
    tokenizer = byte_tokenizer()
    first = speculative_stream(target, drafter, [long], max_new_tokens=60, tokenizer=tokenizer)
    next(first)
    second = speculative_stream(target, drafter, [short], max_new_tokens=60, tokenizer=tokenizer)
    next(second)
    with pytest.raises(RuntimeError, match="reset by another request"):
        list(first)
    list(second)


# Arguments


def test_bad_arguments_are_named():
    target = own_target()
    drafter, other = random_drafter("dflash", target), random_drafter("dflash", own_target(1))
    cases: list[tuple[dict, type[Exception], str]] = [
        (dict(foo=1), TypeError, "unknown argument 'foo'; accepted: .*num_drafts"),
        (dict(threshold=0.9), TypeError, "unknown argument 'threshold'"),
        (dict(sampler="threshold"), ValueError, "sampler belongs to diffusion LMs"),
        (dict(cache="block"), ValueError, "cache belongs to diffusion LMs"),
        (dict(steps=4), ValueError, "steps belongs to diffusion LMs"),
        (dict(num_drafts=8), ValueError, r"num_drafts must be in \[0, 7\] \(block_size 8\): got 8"),
        (dict(num_drafts=-1), ValueError, "num_drafts must be"),
        (dict(num_drafts=2.0), TypeError, "num_drafts must be an int"),
        (dict(num_drafts=2, block_length=3), ValueError, "must not both be given"),
        (dict(block_length=9), ValueError, "num_drafts must be in"),
        (dict(verifier="typical"), ValueError, "verifier must be 'auto' or one of"),
        (dict(verifier="rejection"), ValueError, "verifier must be 'greedy' at temperature 0"),
        (dict(verifier="greedy", temperature=1.0), ValueError, "verifier must be 'greedy' at temperature 0"),
        (dict(draft_temperature=-1), ValueError, "draft_temperature must be a number >= 0"),
        (dict(eos_token_id=40), ValueError, r"eos_token_id must be in \[0, 40\): got 40"),
        (dict(stop_strings="a"), ValueError, "stop_strings need a tokenizer"),
        (dict(logits_processor=3), TypeError, "logits_processor must be a callable"),
        (dict(max_new_tokens=128), ValueError, "must fit in 128 positions"),
        (dict(cost_table=3), TypeError, "cost_table must be"),
        (dict(repetition_penalty=0.0), ValueError, "repetition_penalty must be > 0"),
        (dict(block_length=Says(0)), ValueError, "a block policy must return an int >= 1"),
        (dict(noise=3), TypeError, "noise must have uniform"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            speculative_generate(target, drafter, [[1, 2]], **{"max_new_tokens": 9, **options})
    for options, message in (
        (dict(num_drafts=1), "without a drafter"),
        (dict(draft_temperature=1.0), "needs a drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            speculative_generate(target, None, [[1, 2]], max_new_tokens=9, **options)
    with pytest.raises(ValueError, match="drafter must be bound to this model"):
        speculative_generate(target, other, [[1, 2]])
    with pytest.raises(TypeError, match="drafter must be a Drafter or None: got str"):
        speculative_generate(target, "dfly", [[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input_ids must be token ids"):
        speculative_generate(target, drafter, "hello")
    with pytest.raises(ValueError, match=r"input_ids must hold ids in \[0, 40\)"):
        speculative_generate(target, drafter, [[1, 40]])
    with pytest.raises(ValueError, match="speculative_stream needs a tokenizer"):
        speculative_stream(target, drafter, [[1, 2]], max_new_tokens=9)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_a_law_that_is_not_finite_is_an_error_that_names_row_and_round(kind):
    target = TARGETS[kind]()

    def break_later(ids, scores):
        return scores * float("nan") if ids.shape[1] == 9 else scores

    with pytest.raises(ValueError, match=r"NaN or infinity in row 1, by round \d+"):
        speculative_generate(target, None, *padded(prompts(0, (2, 6))), max_new_tokens=5, logits_processor=break_later)


def test_a_noise_of_the_user_s_own_decides_what_is_drawn():
    target = own_target()
    options = dict(max_new_tokens=9, temperature=1.0)
    seeded = speculative_generate(target, None, [[1, 2]], seed=5, **options)
    given = speculative_generate(target, None, [[1, 2]], noise=CounterNoise.for_rows(5, 1), **options)
    assert tokens(seeded) == tokens(given)
