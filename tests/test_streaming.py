"""Streams: committed text only ever grows and adds up to the output; guesses replace each other; transformers' streamers fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TextIteratorStreamer, TextStreamer

from dllm.resize import Resize
from dllm.streaming import StreamEvent, TextDelta, settled_text, tokens_within
from tests.oracle import oracle_lm, sentence
from tests.tiny import EOS, MASK, tiny_lm
from tests.words import byte_tokenizer, speaking, text_lm

PROMPTS = ["the cab", "a", "ab cd ab cd é"]


def ids_of(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


def talker(text, prompt="x", sure=0.95, **changes):
    """An oracle that writes ``text`` behind ``prompt``."""
    return speaking(oracle_lm(sentence(len(ids_of(prompt)), ids_of(text), sure), **changes))


def committed(events, row=0):
    return [e.text for e in events if e.row == row and e.kind == "committed"]


@pytest.mark.parametrize("stops", [None, ["a"], ["the", " c", "é"]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("rule", "cache"), [("block_causal", "block"), ("bidirectional", "none")])
def test_committed_texts_of_every_row_add_up_to_what_generate_gives(rule, cache, temperature, stops):
    lm = text_lm(rule)
    options: dict[str, Any] = dict(
        max_new_tokens=30,
        temperature=temperature,
        seed=3,
        cache=cache,
        stop_strings=stops,
        threshold=0.6,
        eos_token_id=[EOS, 40],
    )
    out = lm.generate(PROMPTS, **options)
    events = list(lm.stream(PROMPTS, **options))
    for row in range(3):
        assert "".join(committed(events, row)) == out.texts[row]
        done = [e for e in events if e.row == row and e.kind == "done"]
        assert [e.finish_reason for e in done] == [out.finish_reasons[row]]
    assert {e.kind for e in events} <= {"committed", "done"}
    assert all(e.text for e in events if e.kind == "committed")


REVISERS: list[dict[str, Any]] = [
    dict(sampler="token_editing"),
    dict(sampler="token_editing", threshold=0.3, editing_threshold=0.2),
    dict(sampler="wino", threshold=0.05, verify_threshold=0.6),
]


@pytest.mark.parametrize("sampler", REVISERS, ids=str)
@pytest.mark.parametrize("rule", ["block_causal", "bidirectional"])
def test_what_a_reviser_may_still_change_is_not_streamed(rule, sampler):
    for seed in range(4):
        lm = text_lm(rule, seed, logits_shift=0)
        options: dict[str, Any] = dict(max_new_tokens=20, cache="none", seed=seed, **sampler)
        out = lm.generate(PROMPTS, **options)
        events = list(lm.stream(PROMPTS, **options))
        puts = Puts()
        lm.generate(PROMPTS[0], streamer=puts, **options)
        assert ["".join(committed(events, row)) for row in range(3)] == out.texts
        assert [t for v in puts.values[1:] for t in v.tolist()] == out.sequences[0, : out.lengths[0]].tolist()


def test_a_token_that_changes_the_length_of_a_gap_is_not_streamed():
    lm = text_lm("bidirectional", logits_shift=0, expand_token_id=60, delete_token_id=61)
    ids, masked = [[5, *[MASK] * 4, 9]], [[False, *[True] * 4, False]]

    def process(logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        # The first slots grow, the last ones shrink.
        logits[..., 60] += torch.where(slots < 3, 20.0, 0.0)
        logits[..., 61] += torch.where(slots > 4, 20.0, 0.0)
        return logits

    puts = Puts()
    out = lm.generate(
        input_ids=ids,
        masked=masked,
        max_new_tokens=0,
        resize=Resize(8),
        logits_processor=process,
        block_length=16,
        sampler="sequential",
        streamer=puts,
    )
    assert [t for v in puts.values[1:] for t in v.tolist()] == out.sequences[0, : out.lengths[0]].tolist()


def test_text_comes_as_soon_as_it_is_final():
    lm = talker("abc the end. ab cd", sure=0.5, block_length=4)
    events = list(lm.stream("x", max_new_tokens=30, use_chat_template=False))
    steps = [e.step for e in events if e.kind == "committed"]
    assert "".join(committed(events)) == "abc the end. ab cd"
    # One token a step, left to right: each step but the stop's brings its token's text.
    assert steps == list(range(1, len(ids_of("abc the end. ab cd")) + 1))


def test_a_multi_byte_character_comes_whole_or_not_at_all():
    for text in ("aé€😀b", "😀", "ab😀"):
        events = list(talker(text, sure=0.5, block_length=3).stream("x", max_new_tokens=30))
        assert "".join(committed(events)) == text
        assert not any("\ufffd" in piece for piece in committed(events))


def test_a_character_that_is_never_finished_is_shown_as_generate_shows_it():
    half = ids_of("é")[:1]
    lm = speaking(oracle_lm(sentence(1, [*ids_of("ab"), *half])))
    out = lm.generate("x", max_new_tokens=20)
    events = list(lm.stream("x", max_new_tokens=20))
    assert out.texts == ["ab\ufffd"]
    assert committed(events) == ["ab", "\ufffd"]


def test_only_what_may_begin_a_stop_string_is_held_back():
    lm = talker("ccc abx ab", sure=0.5)
    events = list(lm.stream("x", max_new_tokens=30, stop_strings=["abcd", "q"]))
    pieces = committed(events)
    assert "".join(pieces) == "ccc abx ab"
    # "ab" waits for what follows; "x" settles it.
    assert pieces[:5] == ["c", "c", "c", " ", "abx"]
    assert pieces[-1] == "ab"


def test_a_stop_string_cut_inside_a_token_leaves_the_tokens_first_part():
    lm = talker("xyabz", sure=0.5)
    events = list(lm.stream("x", max_new_tokens=30, stop_strings="b"))
    assert "".join(committed(events)) == "xya" == lm.generate("x", max_new_tokens=30, stop_strings="b").texts[0]
    assert events[-1] == StreamEvent(0, "done", "", events[-1].step, "stop")


def test_provisional_events_show_the_guess_behind_the_committed_text():
    table = {
        1 + i: (token, sure)
        for i, (token, sure) in enumerate(zip(ids_of("abcdthe."), [0.5, 0.95, 0.5, 0.5], strict=False))
    }
    lm = speaking(oracle_lm(table, block_length=4))
    events = list(lm.stream("x", max_new_tokens=4, provisional=True))
    final, shown = "", []
    for event in events:
        if event.kind == "committed":
            final += event.text
        elif event.kind == "provisional":
            shown.append(final + event.text)
    whole = lm.generate("x", max_new_tokens=4).texts[0]
    # What is final and what is guessed is the whole block at every step, for the oracle never changes its mind.
    assert shown == [whole] * 4
    assert final == whole


def test_a_guess_ends_at_a_guessed_stop_and_there_is_none_once_the_row_has_stopped():
    table = sentence(1, ids_of("xyz"), 0.5)
    lm = speaking(oracle_lm(table))
    events = list(lm.stream("x", max_new_tokens=8, provisional=True))
    assert [e.text for e in events if e.kind == "provisional"] == ["yz", "z", ""]


@pytest.mark.parametrize("stops", [None, "ab"])
def test_guesses_do_not_change_what_is_committed(stops):
    lm = text_lm()
    options: dict[str, Any] = dict(max_new_tokens=24, threshold=0.5, stop_strings=stops)
    plain, guessed = list(lm.stream(PROMPTS, **options)), list(lm.stream(PROMPTS, provisional=True, **options))
    assert [e for e in guessed if e.kind != "provisional"] == plain
    assert any(e.kind == "provisional" for e in guessed)


def test_a_stream_needs_a_tokenizer_and_takes_no_streamer_and_no_resize():
    with pytest.raises(ValueError, match="stream needs a tokenizer"):
        tiny_lm().stream(input_ids=[[5]])
    with pytest.raises(ValueError, match="streamer goes with generate"):
        text_lm().stream("a", max_new_tokens=4, streamer=Puts())
    with pytest.raises(ValueError, match="resize needs masked, .* goes with generate"):
        text_lm().stream("a", max_new_tokens=4, resize=Resize(12))


def test_nothing_to_write_is_only_done():
    events = list(text_lm().stream("ab", max_new_tokens=0))
    assert events == [StreamEvent(0, "done", "", 0, "length")]


# The pieces


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_settled_text_holds_back_just_enough_for_every_stop_string(text, stops):
    settled = settled_text(text, stops)
    assert text.startswith(settled)
    held = text[len(settled) :]
    assert not held or any(s.startswith(held) and s != held for s in stops)
    # No longer end of the text could be the beginning of a stop string.
    for start in range(len(settled)):
        assert not any(s.startswith(text[start:]) and s != text[start:] for s in stops)


def test_text_deltas_never_take_text_back():
    table = {1: "a", 2: "b\ufffd", 3: "bé"}
    delta = TextDelta(lambda ids: table.get(len(ids), "other"))
    assert [delta.push([0] * n) for n in (1, 2, 3)] == ["a", "", ""]
    assert delta.sent == "a"


def test_final_ids_that_change_and_text_that_is_read_otherwise_at_the_end_are_errors():
    delta = TextDelta("".join)  # type: ignore[arg-type]
    assert delta.push(["a", "b"]) == "ab"  # type: ignore[list-item]
    assert delta.rest("abc") == "c"
    with pytest.raises(RuntimeError, match="must begin the output: 'ab' was, the output is 'acb'"):
        delta.rest("acb")
    with pytest.raises(AssertionError, match="final ids must stay"):
        delta.push(["a", "c", "b"])  # type: ignore[list-item]


def test_tokens_within_counts_whole_tokens():
    ids = ids_of("xaby")
    tokenizer = byte_tokenizer()
    assert [tokens_within(ids, cut, tokenizer.decode) for cut in ("", "x", "xa", "xab", "xaby")] == [0, 1, 1, 2, 3]


# Transformers' streamers


class Puts:
    """Keeps what it is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("sure", [0.5, 0.95])
def test_a_streamer_gets_the_prompt_and_then_each_new_token_once_in_order(sure):
    puts = Puts()
    out = talker("abc the end. ab cd", sure=sure, block_length=4).generate("x", max_new_tokens=30, streamer=puts)
    first, *rest = puts.values
    assert first.tolist() == [ids_of("x")]
    assert all(v.dim() == 1 and v.dtype == torch.int64 and len(v) for v in rest)
    assert torch.cat(rest).tolist() == out.sequences[0].tolist() == ids_of("abc the end. ab cd")
    assert len(rest) == (len(ids_of("abc the end. ab cd")) if sure == 0.5 else 4)
    assert puts.ended == 1


@pytest.mark.parametrize("cache", ["none", "block"])
def test_a_streamer_never_sees_a_token_that_the_output_does_not_hold(cache):
    for stops in (None, "b", ["cd", "é"], ["e. ab"]):
        for sure in (0.5, 0.95):
            puts = Puts()
            lm = talker("abc the end. ab cdé", sure=sure)
            out = lm.generate("x", max_new_tokens=40, streamer=puts, stop_strings=stops, cache=cache)
            written = [t for v in puts.values[1:] for t in v.tolist()]
            assert written == out.sequences[0, : out.lengths[0]].tolist()


def test_a_streamer_works_without_a_tokenizer_and_for_no_tokens():
    puts = Puts()
    tiny_lm(eos_token_ids=()).generate(input_ids=[[5, 6]], max_new_tokens=9, streamer=puts)
    assert sum(len(v) for v in puts.values[1:]) == 9
    empty = Puts()
    tiny_lm().generate(input_ids=[[5, 6]], max_new_tokens=0, streamer=empty)
    assert ([v.tolist() for v in empty.values], empty.ended) == ([[[5, 6]]], 1)


def test_a_streamer_takes_one_row_and_says_so_before_anything_is_computed():
    lm = oracle_lm({})
    for kwargs in (dict(input_ids=[[5], [6]]), dict(input_ids=[[5]], num_return_sequences=2)):
        with pytest.raises(ValueError, match="streamer takes one row: got 2"):
            lm.generate(max_new_tokens=4, streamer=Puts(), **kwargs)
    assert lm.model.calls == 0


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_transformers_own_text_streamer_prints_the_text(capsys, skip_prompt):
    lm = talker("abc the end", sure=0.5)
    lm.generate("x", max_new_tokens=30, streamer=TextStreamer(lm.tokenizer, skip_prompt=skip_prompt))
    assert capsys.readouterr().out == ("" if skip_prompt else "x") + "abc the end\n"


def test_transformers_own_iterator_streamer_yields_the_text():
    lm = talker("abc the end", sure=0.95, block_length=4)
    streamer = TextIteratorStreamer(lm.tokenizer, skip_prompt=True, timeout=5)
    lm.generate("x", max_new_tokens=30, streamer=streamer)
    assert "".join(streamer) == "abc the end"
