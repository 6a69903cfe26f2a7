"""Faults that users of other tools report (T01 to T28 of the fault list), on both attention rules and on a hand-written oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dllm.config import GenerationConfig
from dllm.pipeline import DiffusionLM
from tests.oracle import oracle_lm, sentence
from tests.tiny import EOS, FILLER, MASK, padded, prompt, tiny_decoder, tiny_lm, tiny_spec, tokens
from tests.words import text_lm

CACHES = {"block_causal": ["none", "block", "dual", "free"], "bidirectional": ["none", "dual", "free"]}
RULES = sorted(CACHES)
EACH = [(rule, cache) for rule in RULES for cache in CACHES[rule]]


def assert_row_equals_single(batch, row, single):
    assert tokens(batch, row) == tokens(single)
    assert batch.finish_reasons[row] == single.finish_reasons[0]
    assert batch.row_stats[row].nfe == single.stats.nfe
    assert batch.row_stats[row].positions == single.stats.positions
    assert batch.row_stats[row].useful_tokens == single.stats.useful_tokens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("rule", "cache"), EACH)
@pytest.mark.parametrize("eos", [(), (EOS, 20, 30)], ids=["to-the-limit", "stopping"])
def test_t01_t02_a_row_of_a_ragged_batch_equals_its_single_run(rule, cache, temperature, side, eos):
    lm = tiny_lm(rule, eos_token_ids=eos)
    rows = [prompt(5), prompt(10), prompt(1), prompt(16)]
    options: dict[str, Any] = dict(max_new_tokens=21, cache=cache, temperature=temperature, threshold=0.6)
    batch = lm.generate(**padded(rows, side), seed=7, **options)
    for i, row in enumerate(rows):
        assert_row_equals_single(batch, i, lm.generate(input_ids=[row], seed=7 + i, **options))
    assert batch.stats.positions == sum(s.positions for s in batch.row_stats)
    assert batch.stats.useful_tokens == sum(batch.lengths)
    assert batch.stats.nfe == max(s.nfe for s in batch.row_stats)


@pytest.mark.parametrize(("rule", "cache"), [("block_causal", "block"), ("bidirectional", "none")])
def test_t03_the_mask_decides_what_is_padding_and_values_never_do(rule, cache):
    lm = tiny_lm(rule)
    rows = [[5, EOS, 9, EOS], prompt(9)]
    out = [lm.generate(**padded(rows, "left", value), max_new_tokens=12, cache=cache) for value in (EOS, MASK)]
    alone = lm.generate(input_ids=[rows[0]], max_new_tokens=12, cache=cache)
    assert tokens(out[0]) == tokens(out[1]) == tokens(alone)
    assert out[0].row_stats[0].positions == alone.stats.positions


@pytest.mark.parametrize("own_row", [False, True], ids=["mask-is-a-vocabulary-row", "mask-has-its-own-embedding"])
@pytest.mark.parametrize(
    ("rule", "origin", "length"),
    [("block_causal", "zero", 8), ("block_causal", "zero", 11), ("bidirectional", "prompt", 11)],
)
def test_t04_a_mask_id_typed_in_the_prompt_is_an_ordinary_token(rule, origin, length, own_row):
    decoder = tiny_decoder()
    if own_row:
        decoder.mask_embedding = torch.nn.Parameter(torch.randn(32), requires_grad=False)
    lm = DiffusionLM(decoder, tiny_spec(rule, block_origin=origin, eos_token_ids=()))
    ids = prompt(length)
    ids[-2] = MASK
    seen = []
    out = lm.generate(
        input_ids=[ids],
        max_new_tokens=13,
        threshold=2.0,
        callback_on_step_end=lambda lm, i, t, kw: seen.append(
            (kw["canvas"][0, :length].tolist(), int(kw["masked"].sum()))
        ),
    )
    assert all(row == ids for row, _ in seen)
    # One slot a step: the typed mask takes no part in the quota.
    assert [masks for _, masks in seen] == list(range(12, -1, -1))
    assert MASK not in tokens(out)
    # As an ordinary token it has its own embedding: another token there would be another prompt.
    embedded = decoder.embed(torch.tensor([[MASK, MASK]]), torch.tensor([[False, True]]), MASK)[0]
    assert torch.equal(embedded[0], decoder.embed_tokens.weight[MASK])
    assert torch.equal(embedded[0], embedded[1]) is not own_row


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_t05_a_model_that_wants_to_say_mask_says_its_second_choice(rule, temperature):
    logits = torch.full((64,), -math.inf)
    logits[MASK], logits[FILLER], logits[17] = 20.0, 15.0, 1.0
    out = oracle_lm(lambda slot, call: logits, rule).generate(
        input_ids=[[5, 6]], max_new_tokens=11, temperature=temperature, seed=0
    )
    assert tokens(out) == [17] * 11


@pytest.mark.parametrize("sampler", ["threshold", "low_confidence"])
@pytest.mark.parametrize("rule", RULES)
def test_t05_too_few_steps_leave_no_mask(rule, sampler):
    options: dict[str, Any] = {"threshold": 2.0} if sampler == "threshold" else {}
    for steps in (1, 2, 3):
        out = tiny_lm(rule, eos_token_ids=()).generate(
            input_ids=[prompt(5)], max_new_tokens=20, max_denoising_steps=steps, sampler=sampler, **options
        )
        assert out.stats.nfe <= 3 * steps
        assert out.lengths == [20]
        assert MASK not in tokens(out)


@pytest.mark.parametrize("rule", RULES)
def test_t06_a_model_without_any_mask_raises_a_clear_error(rule):
    lm = DiffusionLM(tiny_decoder(), tiny_spec(rule, mask_token_id=None))
    with pytest.raises(ValueError, match="mask_token_id must be given"):
        lm.generate(input_ids=[[5, 6]], max_new_tokens=4)


def test_t06_the_mask_token_cannot_be_the_stop_token():
    with pytest.raises(ValueError, match="eos_token_id must not be the mask token"):
        tiny_lm().generate(input_ids=[[5]], max_new_tokens=4, eos_token_id=MASK)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_t07_temperature_zero_and_nearly_zero_are_greedy_whatever_the_seed(rule, temperature):
    lm = tiny_lm(rule)
    greedy = lm.generate(input_ids=[prompt(6)], max_new_tokens=16)
    for seed in (1, 2):
        assert tokens(
            lm.generate(input_ids=[prompt(6)], max_new_tokens=16, temperature=temperature, seed=seed)
        ) == tokens(greedy)


def test_t07_confidence_is_untempered_so_that_temperature_does_not_change_what_is_sure():
    # Probability 0.95 of token 20 at every slot; at temperature 0.1 the tempered law would be surer, at 5 less sure.
    lm = oracle_lm(lambda slot, call: (20, 0.95), eos_token_ids=())
    for temperature, seed in ((0.1, 0), (1.0, 3)):
        out = lm.generate(input_ids=[[5]], max_new_tokens=8, temperature=temperature, seed=seed, threshold=0.94)
        assert out.stats.nfe == 1 + sum(token != 20 for token in tokens(out))
        assert lm.generate(input_ids=[[5]], max_new_tokens=8, temperature=temperature, threshold=0.96).stats.nfe == 8


@pytest.mark.parametrize("rule", RULES)
def test_t07_ties_in_confidence_go_to_the_lowest_slot_and_ties_in_tokens_to_the_lowest_id(rule):
    logits = torch.zeros(64)
    logits[[30, 12]] = 5.0
    order = []
    out = oracle_lm(lambda slot, call: logits, rule).generate(
        input_ids=[[5, 6, 7]],
        max_new_tokens=10,
        sampler="low_confidence",
        callback_on_step_end=lambda lm, i, t, kw: order.append(kw["slots"][kw["transfer_index"]].tolist()),
    )
    assert tokens(out) == [12] * 10
    assert order == [[slot] for slot in range(3, 13)]


@pytest.mark.parametrize("origin", ["prompt", "zero"])
@pytest.mark.parametrize("length", range(1, 17))
def test_t09_an_eos_at_the_end_of_a_prompt_of_any_length_ends_nothing(length, origin):
    ids = [*prompt(length)[:-1], EOS]
    lm = oracle_lm(sentence(length, [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]), block_origin=origin)
    out = lm.generate(input_ids=[ids], max_new_tokens=32)
    assert tokens(out) == list(range(11, 21))
    assert out.finish_reasons == ["stop"]


@pytest.mark.parametrize("length", range(1, 17))
def test_t09_blocks_of_an_aligned_model_end_at_multiples_of_the_block_length(length):
    frontiers = []
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    lm.generate(
        input_ids=[prompt(length)],
        max_new_tokens=16,
        threshold=0.0,
        callback_on_step_end=lambda lm, i, t, kw: frontiers.append(int((~kw["masked"][0]).sum())),
    )
    first = (length // 8 + 1) * 8
    assert frontiers == sorted({*range(first, length + 16, 8), length + 16})


@pytest.mark.parametrize(("rule", "cache"), EACH)
def test_t10_eos_stops_the_row_and_later_blocks_are_not_computed(rule, cache):
    lm = oracle_lm(sentence(3, [11]), rule)
    out = lm.generate(input_ids=[[5, 6, 7]], max_new_tokens=64, cache=cache)
    assert tokens(out) == [11]
    assert out.finish_reasons == ["stop"]
    assert out.stats.nfe == (2 if cache == "block" else 1)
    assert out.stats.useful_tokens == 1


def test_t10_eos_committed_before_its_left_neighbours_stops_only_when_they_are_there():
    table = sentence(2, [11, 12, 13]) | {2: (11, 0.5), 4: (13, 0.6)}
    commits = []
    out = oracle_lm(table).generate(
        input_ids=[[5, 6]],
        max_new_tokens=24,
        callback_on_step_end=lambda lm, i, t, kw: commits.append(kw["slots"][kw["transfer_index"]].tolist()),
    )
    # First step: all sure slots, the stop at 5 among them; then nothing behind the stop, though 4 is surer than 2.
    assert commits == [[3, 5, 6, 7, 8, 9], [4], [2]]
    assert tokens(out) == [11, 12, 13]
    assert out.finish_reasons == ["stop"]


def test_t10_nothing_behind_a_committed_stop_is_filled_even_by_the_last_forced_step():
    table = {2: (11, 0.1), 3: (EOS, 0.95), 4: (14, 0.6)}
    commits = []
    out = oracle_lm(table).generate(
        input_ids=[[5, 6]],
        max_new_tokens=8,
        max_denoising_steps=2,
        callback_on_step_end=lambda lm, i, t, kw: commits.append(kw["slots"][kw["transfer_index"]].tolist()),
    )
    # Eight masks in two steps are four in the first, the stop among them; the second is forced, but only before the stop.
    assert commits == [[3, 4, 5, 6], [2]]
    assert tokens(out) == [11]


@pytest.mark.parametrize("cache", ["none", "block"])
def test_t10_rows_that_stop_at_different_times_leave_the_others_alone(cache):
    # Text positions are those of the canvas: the short prompt reaches the stop at slot 20 later than the long one.
    table = {slot: (10 + slot, 0.95) for slot in range(20)} | dict.fromkeys(range(20, 99), (EOS, 0.95))
    lm = oracle_lm(table)
    rows = [prompt(2), prompt(18), prompt(9)]
    out = lm.generate(**padded(rows, "right"), max_new_tokens=40, cache=cache)
    for i, row in enumerate(rows):
        assert tokens(out, i) == list(range(10 + len(row), 30))
        assert out.finish_reasons[i] == "stop"
    prefill = int(cache == "block")
    # Blocks of 8 behind prompts of 2, 18 and 9 tokens: the stop at slot 20 is in the third, first and second.
    assert [s.nfe for s in out.row_stats] == [3 + prefill, 1 + prefill, 2 + prefill]
    assert out.stats.nfe == 3 + prefill


STOP_CASES = [
    # text that the oracle writes, stop strings, what is left, whole tokens of it
    ("xyzxyzxaby", ["ab"], "xyzxyzx", 7),
    ("xyzxyzxaby", ["zx"], "xy", 2),
    ("xyzxyzxaby", ["q", "xab", "ab"], "xyzxyz", 6),
    ("xyzxyzxaby", ["b"], "xyzxyzxa", 7),
    ("xy é zz", ["é"], "xy ", 3),
    ("xy € zz", [" z"], "xy €", 6),
    ("xyzxyzxyz", ["nowhere"], "xyzxyzxyz", 9),
]


@pytest.mark.parametrize("sure", [0.95, 0.5], ids=["a-block-a-step", "a-token-a-step"])
@pytest.mark.parametrize(("text", "stops", "left", "count"), STOP_CASES)
def test_t11_a_stop_string_cuts_at_its_first_match_even_across_blocks_and_inside_a_token(
    text, stops, left, count, sure
):
    lm = text_lm(block_length=4)
    written = lm.tokenizer.encode(text, add_special_tokens=False)
    start = len(lm.tokenizer.encode("cab", add_special_tokens=False))
    talker = oracle_lm(sentence(start, written, sure), block_length=4)
    talker.tokenizer = lm.tokenizer
    out = talker.generate("cab", max_new_tokens=40, stop_strings=stops)
    assert out.texts == [left]
    assert out.finish_reasons == ["stop"]
    assert out.lengths == [count]
    assert tokens(out) == written[:count]
    assert out.stats.useful_tokens == count
    # Nothing is computed behind the block in which the match, or else the end, became final.
    places = [text.find(s) + len(s) for s in stops if s in text]
    last = len(lm.tokenizer.encode(text[: min(places)], add_special_tokens=False)) if places else len(written) + 1
    if sure > 0.9:
        assert out.stats.nfe == math.ceil(last / 4)


def test_t11_the_first_match_in_the_text_wins_not_the_first_in_the_list():
    talker = oracle_lm(sentence(1, text_lm().tokenizer.encode("x.y,z", add_special_tokens=False)))
    talker.tokenizer = text_lm().tokenizer
    assert talker.generate("x", max_new_tokens=20, stop_strings=[",", "."]).texts == ["x"]


@pytest.mark.parametrize("stop", ["c", "bc", "cd"])
def test_t11_text_behind_the_stop_token_is_no_text(stop):
    tokenizer = text_lm().tokenizer
    # The token behind the stop token is final in the same step.
    talker = oracle_lm(
        dict(enumerate([(t, 0.95) for t in tokenizer.encode("xyb<eos>cd", add_special_tokens=False)], 1))
    )
    talker.tokenizer = tokenizer
    out = talker.generate("q", max_new_tokens=6, stop_strings=stop)
    assert (out.texts, out.lengths, out.finish_reasons) == (["xyb"], [3], ["stop"])


def test_t11_a_stop_string_in_the_prompt_ends_nothing():
    talker = oracle_lm(sentence(1, text_lm().tokenizer.encode("xy", add_special_tokens=False)))
    talker.tokenizer = text_lm().tokenizer
    assert talker.generate("q", max_new_tokens=20, stop_strings="q").texts == ["xy"]


@pytest.mark.parametrize(("rule", "cache"), EACH)
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 10, 16])
def test_t12_exactly_the_limit_is_written_without_masks(rule, cache, limit):
    out = tiny_lm(rule, eos_token_ids=()).generate(
        input_ids=[prompt(5), prompt(5, 1)], max_new_tokens=limit, cache=cache
    )
    assert out.sequences.shape == (2, limit)
    assert out.lengths == [limit, limit]
    assert out.finish_reasons == ["length", "length"]
    assert not (out.sequences == MASK).any()
    assert (out.stats.nfe == 0) is (limit == 0)


@pytest.mark.parametrize("block_length", [1, 3, 10, 16, 64])
def test_t12_any_block_length_gives_the_same_number_of_tokens(block_length):
    for rule in RULES:
        out = tiny_lm(rule, eos_token_ids=()).generate(
            input_ids=[prompt(5)], max_new_tokens=10, block_length=block_length
        )
        assert out.lengths == [10]


def test_t12_min_new_tokens_keeps_the_stop_away_and_not_longer():
    lm = oracle_lm(lambda slot, call: EOS_ELSE_20)
    for least in (0, 1, 5, 8, 9):
        out = lm.generate(input_ids=[[5, 6]], max_new_tokens=20, min_new_tokens=least)
        assert tokens(out) == [20] * least
        assert out.finish_reasons == ["stop"]
    full = lm.generate(input_ids=[[5, 6]], max_new_tokens=6, min_new_tokens=6)
    assert (tokens(full), full.finish_reasons) == ([20] * 6, ["length"])


EOS_ELSE_20 = torch.full((64,), -20.0)
EOS_ELSE_20[EOS], EOS_ELSE_20[20] = 10.0, 0.0


def test_t12_min_new_tokens_holds_at_a_temperature_too_and_counts_per_row():
    lm = oracle_lm(lambda slot, call: EOS_ELSE_20)
    out = lm.generate(
        **padded([prompt(2), prompt(6)]), max_new_tokens=9, min_new_tokens=4, temperature=0.5, top_k=2, seed=0
    )
    assert out.lengths == [4, 4]


@pytest.mark.parametrize("rule", RULES)
def test_t22_tokens_and_forwards_are_counted_as_documented(rule):
    # Slots 3..10: three sure ones, then two, then the rest, the stop at index 5.
    sure_from = {3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3, 9: 3, 10: 3}
    said = {3: 11, 4: 12, 5: 13, 6: 14, 7: 15, 8: EOS, 9: 16, 10: 17}
    lm = oracle_lm(lambda slot, call: (said[slot], 0.95 if call >= sure_from[slot] else 0.3), rule)
    out = lm.generate(input_ids=[[5, 6, 7]], max_new_tokens=8)
    assert tokens(out) == [11, 12, 13, 14, 15]
    assert (out.stats.useful_tokens, out.stats.nfe) == (5, 3)
    assert out.stats.tokens_per_forward == pytest.approx(5 / 3)
    assert out.stats.positions == 3 * 11
    assert out.row_stats[0].tokens_per_forward == out.stats.tokens_per_forward
    assert (out.stats.guide_nfe, out.stats.draft_nfe) == (0, 0)


def test_t24_a_policy_is_clamped_to_what_remains_and_block_length_one_is_left_to_right():
    class Policy:
        def __init__(self, *lengths):
            self.lengths, self.asked = list(lengths), []

        def next(self, state):
            self.asked.append((int(state.position), int(state.remaining), state.default))
            return self.lengths[min(len(self.asked), len(self.lengths)) - 1]

    lm = tiny_lm("bidirectional", eos_token_ids=())
    policy = Policy(1, 4, 1000)
    out = lm.generate(input_ids=[prompt(5)], max_new_tokens=12, block_length=policy)
    assert out.lengths == [12]
    assert policy.asked == [(5, 12, 8), (6, 11, 8), (10, 7, 8)]
    one = lm.generate(input_ids=[prompt(5)], max_new_tokens=12, block_length=Policy(1))
    assert tokens(one) == tokens(lm.generate(input_ids=[prompt(5)], max_new_tokens=12, block_length=1))
    for bad in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="block policy must return an int >= 1"):
            lm.generate(input_ids=[prompt(5)], max_new_tokens=12, block_length=Policy(bad))


@pytest.mark.parametrize("rule", RULES)
def test_t25_a_cache_that_means_nothing_for_the_model_raises(rule):
    lm = tiny_lm(rule)
    if rule == "bidirectional":
        with pytest.raises(ValueError, match="cache 'block' is exact for block-causal"):
            lm.generate(input_ids=[[5]], max_new_tokens=4, cache="block")
    else:
        assert lm.generate(input_ids=[[5]], max_new_tokens=4, cache="block").stats.nfe > 0


def test_t25_steps_that_do_not_divide_over_the_blocks_raise():
    lm = tiny_lm(eos_token_ids=())
    with pytest.raises(ValueError, match="steps must be a multiple of the number of blocks \\(3 in row 0\\): got 8"):
        lm.generate(input_ids=[prompt(5)], max_new_tokens=20, steps=8)
    with pytest.raises(ValueError, match="steps .*needs a fixed block_length"):
        lm.generate(input_ids=[prompt(5)], max_new_tokens=20, steps=6, block_length=AlwaysFour())
    out = lm.generate(input_ids=[prompt(5)], max_new_tokens=20, steps=6, threshold=2.0)
    assert (out.stats.nfe, out.lengths) == (6, [20])


class AlwaysFour:
    def next(self, state):
        return 4


def test_t25_steps_count_the_blocks_that_there_are_when_blocks_count_from_zero():
    # Sixteen tokens behind five: blocks of 3, 8 and 5.
    lm = tiny_lm(block_origin="zero", eos_token_ids=())
    out = lm.generate(input_ids=[prompt(5)], max_new_tokens=16, steps=6, threshold=2.0)
    assert out.stats.nfe == 6
    # Each row has its own number: two blocks behind eight tokens, three behind five.
    batch = lm.generate(**padded([prompt(8), prompt(5)]), max_new_tokens=16, steps=6, threshold=2.0)
    assert [s.nfe for s in batch.row_stats] == [6, 6]
    for i, row in enumerate([prompt(8), prompt(5)]):
        assert_row_equals_single(batch, i, lm.generate(input_ids=[row], max_new_tokens=16, steps=6, threshold=2.0))


def test_t25_contradictions_between_config_and_call_raise_too():
    lm = tiny_lm()
    with pytest.raises(ValueError, match="max_denoising_steps.*steps"):
        lm.generate(
            input_ids=[[5]], max_new_tokens=8, steps=2, generation_config=GenerationConfig(max_denoising_steps=2)
        )


@pytest.mark.parametrize("threshold", [0.3, 0.9])
@pytest.mark.parametrize("length", [1, 4, 8, 13])
def test_t28_exact_caches_equal_no_cache_in_fp32(length, threshold):
    lm = tiny_lm(eos_token_ids=())
    ids = [prompt(length)]
    options: dict[str, Any] = dict(max_new_tokens=27, threshold=threshold)
    plain = lm.generate(input_ids=ids, cache="none", **options)
    for cache in (
        dict(cache="block"),
        dict(cache="dual"),
        dict(cache="free", freeze_delay=1),
        dict(cache="free", refresh_interval=1),
    ):
        assert tokens(lm.generate(input_ids=ids, **cache, **options)) == tokens(plain), cache
    full = tiny_lm("bidirectional", eos_token_ids=())
    plain = full.generate(input_ids=ids, cache="none", **options)
    for name in ("free", "dual"):
        assert tokens(full.generate(input_ids=ids, cache=name, refresh_interval=1, **options)) == tokens(plain)
