"""Infilling: given parts stay what they are, gaps get their length, and every row is its own affair (T16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm.pipeline import DiffusionLM
from tests.oracle import oracle_lm
from tests.tiny import EOS, FILLER, MASK, START, tiny_lm
from tests.words import byte_tokenizer, speaking, text_lm

CACHES = {"block_causal": ["none", "block", "dual", "free"], "bidirectional": ["none", "dual", "free"]}
EACH = [(rule, cache) for rule in sorted(CACHES) for cache in CACHES[rule]]
RULES = sorted(CACHES)


def ids_of(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


class Given:
    """A callback that checks in every step that the given ids stand where they stood."""

    def __init__(self, ids):
        self.ids, self.calls = ids, 0

    def __call__(self, lm, step, timestep, kw):
        self.calls += 1
        for row, canvas, masked in zip(kw["rows"], kw["canvas"], kw["masked"], strict=True):
            for slot, token in enumerate(self.ids[row]):
                if token is not None:
                    assert canvas[slot] == token
                    assert not masked[slot]


@pytest.mark.parametrize(("rule", "cache"), EACH)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 20])
def test_t16_given_tokens_are_untouched_and_the_span_has_its_length(rule, cache, length):
    lm = text_lm(rule)
    prefix, suffix = "the cab ", " abc é."
    watch = Given([[*ids_of(prefix), *[None] * length, *ids_of(suffix)]])
    fill = lm.infill(prefix, suffix, length, cache=cache, callback_on_step_end=watch, heal_white_space=False)
    assert fill.lengths == [[length]]
    assert len(fill.fill_ids[0][0]) == length
    assert fill.texts == [prefix + fill.fills[0] + suffix]
    assert fill.fills[0] == lm.tokenizer.decode(fill.fill_ids[0][0], skip_special_tokens=True)
    assert not {MASK, FILLER, EOS} & set(fill.fill_ids[0][0])
    assert (watch.calls > 0) is (length > 0)
    assert fill.stats.useful_tokens == length
    if length == 0:
        assert (fill.texts, fill.stats.nfe) == ([prefix + suffix], 0)


@pytest.mark.parametrize(("rule", "cache"), EACH)
def test_t16_two_gaps_are_filled_between_three_given_parts(rule, cache):
    lm = text_lm(rule)
    template = "ab {{first}} cd, {{ second }}. the"
    watch = Given([[*ids_of("ab "), *[None] * 5, *ids_of(" cd, "), *[None] * 11, *ids_of(". the")]])
    gaps = {"first": 5, "second": 11}
    fill = lm.infill(template=template, gaps=gaps, cache=cache, callback_on_step_end=watch, heal_white_space=False)
    assert fill.lengths == [[5, 11]]
    first, second = fill.fills[0]
    assert fill.texts == [f"ab {first} cd, {second}. the"]
    assert watch.calls > 0
    assert fill.stats.useful_tokens == 16


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", [(0, 4), (4, 0), (0, 0)])
def test_t16_a_gap_of_no_length_beside_another_is_as_if_it_were_not_there(rule, order):
    lm = text_lm(rule)
    fill = lm.infill(template="ab {{x}}cd {{y}}the", gaps=dict(zip("xy", order, strict=True)))
    assert fill.lengths == [list(order)]
    if order == (0, 4):
        plain = lm.infill("ab cd ", "the", 4)
        assert fill.fill_ids[0][1] == plain.fill_ids[0][0]
    elif order == (4, 0):
        plain = lm.infill("ab ", "cd the", 4)
        assert fill.fill_ids[0][0] == plain.fill_ids[0][0]
    else:
        assert fill.texts == ["ab cd the"]


PREFIXES = ["the cab ", "a", "ab cd ab cd ab cd "]
SUFFIXES = [" abc.", "", " the end, é"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("rule", "cache"), EACH)
def test_t16_a_row_of_a_batch_equals_its_single_run(rule, cache, temperature):
    lm = text_lm(rule)
    lengths = [9, 3, 0]
    options: dict[str, Any] = dict(cache=cache, temperature=temperature, threshold=0.6)
    batch = lm.infill(PREFIXES, SUFFIXES, lengths, seed=5, **options)
    for i in range(3):
        single = lm.infill(PREFIXES[i], SUFFIXES[i], lengths[i], seed=5 + i, **options)
        assert batch.fill_ids[i] == single.fill_ids[0]
        assert batch.texts[i] == single.texts[0]
        assert batch.scores[i] == pytest.approx(single.scores[0], abs=1e-4)
        assert (batch.row_stats[i].nfe, batch.row_stats[i].positions) == (single.stats.nfe, single.stats.positions)


@pytest.mark.parametrize("method", ["window", "score"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_t16_unknown_lengths_give_the_same_in_a_batch_beside_known_ones(rule, temperature, method):
    lm = text_lm(rule)
    lengths = ["auto", 3, "auto"]
    options: dict[str, Any] = dict(temperature=temperature, max_length=7, length_method=method)
    batch = lm.infill(PREFIXES, SUFFIXES, lengths, seed=[9, 4, 7], **options)
    for i, seed in enumerate((9, 4, 7)):
        single = lm.infill(PREFIXES[i], SUFFIXES[i], lengths[i], seed=seed, **options)
        assert batch.fill_ids[i] == single.fill_ids[0]
        assert batch.lengths[i] == single.lengths[0]
        assert 0 <= batch.lengths[i][0] <= 7
        assert batch.texts[i] == PREFIXES[i] + batch.fills[i] + SUFFIXES[i]
        assert FILLER not in batch.fill_ids[i][0]
        assert (batch.row_stats[i].nfe, batch.row_stats[i].positions) == (single.stats.nfe, single.stats.positions)
        assert batch.row_stats[i].useful_tokens == len(batch.fill_ids[i][0])
    assert batch.lengths[1] == [3]
    assert batch.stats.nfe >= max(s.nfe for s in batch.row_stats)
    assert batch.stats.positions == sum(s.positions for s in batch.row_stats)


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_a_window_is_closed_by_the_filler_and_the_fill_is_what_stands_before_it(count):
    # "abc" are two tokens, ab and c, so that the gap begins at slot 2; the oracle's table counts from there.
    written = list(range(20, 20 + count))
    lm = oracle_lm(
        {2 + i: (t, 0.95) for i, t in enumerate(written)} | dict.fromkeys(range(2 + count, 99), (FILLER, 0.95))
    )
    fill = speaking(lm).infill("abc", "d", "auto", max_length=9)
    assert fill.fill_ids == [[written]]
    assert fill.stats.useful_tokens == count


def test_a_gap_of_given_length_beside_a_window_holds_no_filler():
    logits = torch.full((64,), -9.0)
    logits[FILLER], logits[20] = 9.0, 5.0
    lm = speaking(oracle_lm(lambda slot, call: logits))
    fill = lm.infill(template="ab {{fixed}} cd {{open}} the", gaps={"fixed": 4}, max_length=6)
    assert fill.fill_ids == [[[20] * 4, []]]


def test_the_score_search_takes_the_length_with_the_highest_mean_log_probability():
    # Sure of two tokens and of a third, unsure of what comes after: at length 3 the mean is highest.
    table = {2: (20, 0.9), 3: (21, 0.9), 4: (22, 0.95)}
    lm = speaking(oracle_lm(lambda slot, call: table.get(slot, (30, 0.2)), filler_token_id=None))
    fill = lm.infill("abc", "d", "auto", max_length=12)
    assert fill.fill_ids == [[[20, 21, 22]]]
    assert fill.scores[0] == pytest.approx(torch.tensor([0.9, 0.9, 0.95]).log().mean().item(), abs=1e-4)
    # The cost of a searched fill is the cost of the search.
    assert fill.stats.nfe == fill.row_stats[0].nfe == lm.model.calls


def test_without_a_filler_the_score_search_is_the_default_and_a_window_raises():
    lm = text_lm(filler_token_id=None)
    assert lm.infill("ab ", " cd", max_length=3).lengths[0][0] in (1, 2, 3)
    with pytest.raises(ValueError, match="length_method='window' needs a model trained with an end-of-gap filler"):
        lm.infill("ab ", " cd", max_length=3, length_method="window")
    with pytest.raises(ValueError, match="length 'auto' for several gaps needs length_method='window'"):
        lm.infill(template="ab {{x}} cd {{y}} the")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("prefix", "suffix"), [("", "the end"), ("ab ", ""), ("", "")])
def test_t16_an_empty_prefix_starts_a_document_and_an_empty_suffix_ends_it(rule, prefix, suffix):
    lm = text_lm(rule)
    first = []
    fill = lm.infill(prefix, suffix, 5, callback_on_step_end=lambda lm, i, t, kw: first.append(int(kw["canvas"][0, 0])))
    assert fill.texts == [prefix + fill.fills[0] + suffix]
    assert len(fill.fill_ids[0][0]) == 5
    assert set(first) == {START if not prefix else ids_of(prefix)[0]}


def test_an_empty_prefix_without_a_document_start_raises():
    with pytest.raises(ValueError, match="prefix must not be empty for this model"):
        text_lm(document_start_id=None).infill("", "ab", 3)
    aligned = text_lm("bidirectional", document_start_id=None, logits_shift=0)
    assert aligned.infill("", "ab", 3).lengths == [[3]]


@pytest.mark.parametrize("rule", RULES)
def test_the_suffix_is_seen_by_the_gap(rule):
    lm = text_lm(rule)
    fills = {tuple(lm.infill("the cab ", suffix, 6).fill_ids[0][0]) for suffix in ("", " ab", " cd the", ".", "\n")}
    assert len(fills) > 1


def test_messages_wrap_prefix_and_suffix_into_the_assistants_turn():
    lm = text_lm(template=True)
    chat = [{"role": "user", "content": "hi"}]
    expected = [*ids_of("u.hi\na."), *ids_of("ab"), None, None, None, *ids_of(" cd"), EOS]
    watch = Given([expected])
    fill = lm.infill("ab", " cd", 3, messages=chat, callback_on_step_end=watch)
    assert fill.texts == ["ab" + fill.fills[0] + " cd"]
    assert watch.calls
    both = lm.infill(["ab", "c"], [" cd", ""], [3, 2], messages=[chat, chat])
    assert both.fill_ids[0] == fill.fill_ids[0]


def test_history_is_kept_a_row_and_the_last_frame_is_the_fill():
    lm = text_lm()
    fill = lm.infill(PREFIXES, SUFFIXES, [4, 9, 2], output_history=True)
    assert fill.history is not None
    for row in range(3):
        assert fill.history[row][-1].token_ids == fill.fill_ids[row][0]
    assert lm.infill("ab ", "cd", 2).history is None


@pytest.mark.parametrize("cache", ["none", "block"])
def test_given_parts_between_gaps_are_computed_once(cache):
    lm = text_lm()
    gap, middle = 8, ids_of(" ab cd the ab cd the.")
    fill = lm.infill(
        template="ab.{{x}} ab cd the ab cd the.{{y}}cd",
        gaps={"x": gap, "y": gap},
        cache=cache,
        threshold=0.0,
        block_length=9,
    )
    prefix, suffix = ids_of("ab."), ids_of("cd")
    total = len(prefix) + len(middle) + len(suffix) + 2 * gap
    if cache == "none":
        assert fill.stats.positions == 2 * total
    else:
        # Prefill of all given rows but the two that open a gap's block; then 1 + 8 rows; then the second nine beside the first nine.
        assert fill.stats.positions == (total - 2 * gap - 2) + 9 + 18
        plain = lm.infill(
            template="ab.{{x}} ab cd the ab cd the.{{y}}cd", gaps={"x": gap, "y": gap}, threshold=0.0, block_length=9
        )
        assert fill.fill_ids == plain.fill_ids


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(), ValueError, "prefix or template must be given"),
        (dict(prefix="a", length=-1), ValueError, "length must be >= 0: got -1"),
        (dict(prefix="a", length=2.5), TypeError, "length must be 'auto' or an int"),
        (dict(prefix="a", length=True), TypeError, "length must be 'auto' or an int"),
        (dict(prefix="a", length="long"), TypeError, "length must be 'auto' or an int"),
        (dict(prefix="a", length=None), TypeError, "length must be 'auto' or an int"),
        (dict(prefix="a", length=[1, 2]), ValueError, "length must be 'auto', an int or one a row \\(1\\): got 2"),
        (dict(prefix=["a", "b"], suffix=["c"]), ValueError, "suffix must be a str or one a row \\(2\\): got 1"),
        (dict(prefix=[]), ValueError, "prefix must hold at least one row"),
        (dict(prefix=5), TypeError, "prefix must be a str or a list of str: got 5"),
        (dict(prefix=["a", None]), TypeError, "prefix must be a str or a list of str: got None"),
        (dict(prefix="a", suffix=["b", 3], length=1), TypeError, "suffix must be a str or a list of str: got 3"),
        (dict(prefix="a", max_length=0), ValueError, "max_length must be an int >= 1"),
        (dict(prefix="a", max_length=2.0), ValueError, "max_length must be an int >= 1"),
        (dict(prefix="a", length=300), ValueError, "must fit in 256 positions: row 0 needs 301"),
        (dict(prefix="a", max_length=300), ValueError, "must fit in 256 positions"),
        (
            dict(prefix="a", length_method="guess"),
            ValueError,
            "length_method must be 'score', 'window', 'grow' or None",
        ),
        (dict(prefix="a", length=2, max_new_tokens=5), TypeError, "max_new_tokens has no meaning for infill"),
        (dict(prefix="a", length=2, gen_length=5), TypeError, "gen_length has no meaning for infill"),
        (dict(prefix="a", length=2, stop="x"), TypeError, "stop has no meaning for infill"),
        (dict(prefix="a", length=2, eos_token_ids=3), TypeError, "eos_token_ids has no meaning for infill"),
        (dict(prefix="a", length=2, foo=1), TypeError, "unknown argument 'foo'"),
        (dict(prefix="a", length=2, seed=[1, 2]), ValueError, "seed must be an int or one int a row \\(1\\): got 2"),
        (dict(prefix="a", gaps={"x": 1}), ValueError, "gaps goes with template"),
        (dict(template="a"), ValueError, "template must hold at least one"),
        (dict(template="a{{x}}b{{x}}"), ValueError, "marks must have different names"),
        (dict(template="a{{x}}{{y}}"), ValueError, "must have text between two marks"),
        (dict(template="a{{x}}", gaps={"y": 1}), ValueError, "gaps must name marks.*got \\['y'\\]"),
        (dict(template="a{{x}}", prefix="b"), ValueError, "template goes with gaps alone"),
        (dict(template="a{{x}}", length=3), ValueError, "template goes with gaps alone"),
        (
            dict(prefix="a", messages=[[], []], length=1),
            ValueError,
            "messages must be one conversation a row \\(1\\): got 2",
        ),
    ],
    ids=lambda v: str(v)[:50] if isinstance(v, dict) else None,
)
def test_bad_arguments_raise_naming_the_argument(kwargs, error, message):
    with pytest.raises(error, match=message):
        text_lm(template=True).infill(**kwargs)


def test_infill_needs_a_tokenizer():
    with pytest.raises(ValueError, match="infill needs a tokenizer"):
        tiny_lm().infill("a", "b", 3)


def test_a_literal_mask_in_the_given_parts_stays():
    lm = DiffusionLM(text_lm().model, text_lm().spec, byte_tokenizer())
    watch = Given([[*ids_of("ab<mask>"), None, None, MASK]])
    lm.infill("ab<mask>", "<mask>", 2, callback_on_step_end=watch)
    assert watch.calls


def test_nothing_given_and_nothing_to_fill_is_an_empty_text():
    lm = text_lm("bidirectional", logits_shift=0, document_start_id=None)
    for cache in CACHES["bidirectional"]:
        fill = lm.infill("", "", 0, cache=cache)
        assert (fill.texts, fill.fills, fill.stats.nfe) == ([""], [""], 0)
