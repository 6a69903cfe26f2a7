"""White space before a gap is written by the model as the beginning of the gap's tokens; the given text stays what it is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm.infill_rows import border_white_space
from dllm.likelihood import chain_log_likelihood
from dllm.pipeline import DiffusionLM
from dllm.target import load_tokenizer, target_folder
from dllm.white_space import white_space_of
from tests.families.golden import golden_lm
from tests.oracle import oracle_lm
from tests.tiny import EOS, FILLER, MASK, START, VOCAB, tiny_decoder, tiny_lm, tiny_spec
from tests.words import byte_tokenizer, speaking, text_lm

RULES = ["bidirectional", "block_causal"]
MERGES = [
    ("Ġ", "a"),
    ("Ġ", "b"),
    ("Ċ", "Ġ"),
    ("ĊĠ", "Ġ"),
    ("Ċ", "Ċ"),
    ("č", "Ċ"),
    ("ĉ", "ĉ"),
    ("ĉ", "a"),
    ("Â", "ł"),
    ("ł", "c"),
    ("Ġ", "Ġ"),
]
WHITE = [
    "\n",
    "\n  ",
    "\n\n   ",
    " ",
    "   ",
    "\t",
    "\t\t\t",
    "\r\n\t",
    "\u00a0",
    " \u3000",
    "\u3000\n",
    "\n" * 9,
    " " * 20,
]


@lru_cache(maxsize=1)
def code_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with tokens that join kinds of white space, and white space with a letter or half a character."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(used, _)] = split.pre_tokenize_str("abcdexyz12(): \n\t\r.\u00a0\u3000")
    pieces = sorted(set(used)) + [a + b for a, b in MERGES]
    special = {START: "<start>", 1: "<unk>", EOS: "<eos>", FILLER: "<filler>", MASK: "<mask>"}
    free = [i for i in range(VOCAB) if i not in special]
    assert len(pieces) <= len(free)
    vocab = dict(zip(pieces, free, strict=False)) | {f"<{i}>": i for i in free[len(pieces) :]}
    core = Tokenizer(models.BPE(vocab=vocab | {t: i for i, t in special.items()}, merges=MERGES, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = split, decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", mask_token="<mask>")


def code_lm(rule: str = "block_causal", **changes: Any) -> DiffusionLM:
    return DiffusionLM(tiny_decoder(), tiny_spec(rule, **changes), code_tokenizer())


def ids_of(text: str) -> list[int]:
    return code_tokenizer().encode(text, add_special_tokens=False)


def token(text: str) -> int:
    """The one token with this text."""
    found = border_white_space(code_lm())
    assert found is not None
    return found.vocabulary.ids[text.encode()]


def bytes_of(ids: list[int]) -> bytes:
    found = border_white_space(code_lm())
    assert found is not None
    return found.vocabulary.bytes_of(ids)


def wish(*wanted: int):
    """A processor by which ids are the likelier the earlier they are named; all others hardly."""

    def process(logits, slots):
        out = torch.full_like(logits, -20.0)
        for place, one in enumerate(wanted):
            out[..., one] = 20.0 - place
        return out

    return process


class Seen:
    """A callback that keeps the first canvas that it sees of each row."""

    def __init__(self):
        self.first: dict[int, list[int]] = {}

    def __call__(self, lm, step, timestep, kw):
        for row, canvas in zip(kw["rows"], kw["canvas"], strict=True):
            self.first.setdefault(row, canvas.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("white", WHITE, ids=repr)
@pytest.mark.parametrize("rule", RULES)
def test_the_given_text_stays_and_the_tokens_behind_it_begin_with_its_white_space(rule, white, temperature):
    lm, seen = code_lm(rule), Seen()
    prefix, suffix = "ab(c):" + white, "\n  x"
    fill = lm.infill(prefix, suffix, 5, temperature=temperature, seed=3, callback_on_step_end=seen)
    assert fill.texts == [prefix + fill.fills[0] + suffix]
    assert fill.lengths == [[5]]
    [[ids]], [[before]] = fill.fill_ids, fill.white_space_ids
    assert before is not None
    written = bytes_of([*before, *ids])
    assert written.startswith(white.encode())
    assert written[len(white.encode()) :].decode("utf-8", "replace") == fill.fills[0]
    # Tokens of white space alone are no tokens of the fill; what they leave is in a token that holds some of the fill.
    assert white.encode().startswith(bytes_of(before))
    assert bytes_of(before) == white.encode() or len(bytes_of([*before, ids[0]])) > len(white.encode())
    assert seen.first[0][: len(ids_of("ab(c):")) + len(before)] == ids_of("ab(c):") + before
    assert not {MASK, FILLER, EOS} & {*before, *ids}
    assert fill.stats.useful_tokens == fill.row_stats[0].useful_tokens == 5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prefix", ["ab(c):", "", "\n", " \n\t ", "\u3000"], ids=repr)
@pytest.mark.parametrize("length", [0, 6])
def test_without_white_space_behind_a_text_nothing_is_healed_and_nothing_more_is_run(rule, prefix, length):
    lm = code_lm(rule)
    fills = [lm.infill(prefix, " x", length, heal_white_space=heal, seed=0, temperature=0.7) for heal in (True, False)]
    assert fills[0].fill_ids == fills[1].fill_ids
    assert fills[0].scores == fills[1].scores
    assert fills[0].white_space_ids == [[None]]
    assert [(f.stats.nfe, f.stats.positions) for f in fills[:1]] == [
        (f.stats.nfe, f.stats.positions) for f in fills[1:]
    ]


def test_without_white_space_the_vocabulary_is_not_even_read(monkeypatch):
    monkeypatch.setattr("dllm.infill_rows.white_space_of", lambda *args: pytest.fail("nobody needs it"))
    assert code_lm().infill(["ab", ""], ["\n", " "], 2).white_space_ids == [[None], [None]]
    assert code_lm().infill("ab ", "c", 2, heal_white_space=False).white_space_ids == [[None]]


def test_a_gap_of_no_length_heals_nothing():
    fill = code_lm().infill("ab \n", "x", 0)
    assert (fill.texts, fill.fills, fill.stats.nfe, fill.white_space_ids) == (["ab \nx"], [""], 0, [[None]])


@pytest.mark.parametrize("rule", RULES)
def test_switched_off_the_text_is_cut_into_tokens_by_itself(rule):
    lm, seen = code_lm(rule), Seen()
    fill = lm.infill("ab\n  ", "x", 3, heal_white_space=False, callback_on_step_end=seen)
    assert seen.first[0][: len(ids_of("ab\n  "))] == ids_of("ab\n  ")
    assert fill.white_space_ids == [[None]]
    assert fill.fills[0] == lm.tokenizer.decode(fill.fill_ids[0][0], skip_special_tokens=True)


@pytest.mark.parametrize("rule", RULES)
def test_the_token_taken_is_the_likeliest_of_those_that_fit_under_the_law_of_the_chain(rule):
    lm = code_lm(rule, block_length=8)
    found = border_white_space(lm)
    assert found is not None
    prefix, suffix, length = "ab(c):\n ", "x.", 4
    fits = found.fits(b"\n ").nonzero()[:, 0].tolist()
    assert sorted(bytes_of([t]) for t in fits) == [b"\n", b"\n ", b"\n  "]
    values = {
        t: chain_log_likelihood(lm.model, lm.spec, ids_of("ab(c):"), [t, 5, 5, 5], ids_of(suffix))[0] for t in fits
    }
    fill = lm.infill(prefix, suffix, length)
    assert [*fill.white_space_ids[0][0], *fill.fill_ids[0][0]][0] == max(values, key=lambda t: values[t])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("white", "wanted", "before", "first"),
    [
        ("\n", ["\n  ", "\n"], [], "\n  "),
        ("\n", ["\n", "\n  "], ["\n"], None),
        ("\n  ", ["\n ", " a", "\n  "], ["\n "], " a"),
        ("\n  ", ["\n  ", "\n "], ["\n  "], None),
        ("\n  ", ["x", "\n", "  ", " "], ["\n", "  "], None),
        # A blank is a piece of two, and what begins with a blank does not begin with two.
        ("  ", [" a", " b", " ", "  "], [" "], " a"),
    ],
    ids=repr,
)
def test_pieces_are_taken_one_at_a_time_until_the_white_space_is_written(white, wanted, before, first):
    lm = code_lm()
    # "x" for the rest, which comes last of the tokens that are wished for.
    process = wish(*map(token, wanted), token("x"))
    fill = lm.infill("ab" + white, "c", 3, logits_processor=process)
    assert fill.white_space_ids == [[list(map(token, before))]]
    if first is not None:
        assert fill.fill_ids[0][0][0] == token(first)
    plain = lm.infill("ab" + white, "c", 3, logits_processor=process, heal_white_space=False)
    tokens = len(before) + (first is not None)
    assert fill.stats.nfe == fill.row_stats[0].nfe
    # One forward a token, over the whole canvas as it then is; the loop then runs one slot less where the fill has begun.
    assert fill.stats.nfe - tokens in (plain.stats.nfe, plain.stats.nfe - 1)


def test_the_forwards_are_counted():
    lm = code_lm("bidirectional", logits_shift=0)
    calls = []
    lm.model.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    process = wish(token("\n"), token(" a"), token("x"))
    fill = lm.infill("ab\n\n ", "cd", 4, logits_processor=process, threshold=0.0)
    assert [bytes_of([t]) for t in fill.white_space_ids[0][0]] == [b"\n", b"\n"]  # type: ignore[union-attr]
    # Three forwards for "\n", "\n" and " a", and one for the three slots that are left.
    assert fill.stats.nfe == len(calls) == 4
    assert fill.stats.positions == sum(calls) == 8 + 9 + 10 + 10
    assert fill.row_stats[0].positions == fill.stats.positions
    assert fill.stats.prefill_s > 0


ROWS = [("ab\n  ", "x"), ("ab", ""), ("cd a \u00a0", ":\n x"), ("ab(c):\n\n", "\n"), ("a ", "b")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 6, "window", "score"])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_a_batch_equals_its_single_run(rule, length, temperature):
    lm = code_lm(rule)
    options: dict[str, Any] = dict(temperature=temperature, max_length=6)
    if isinstance(length, str):
        options |= dict(length_method=length)
        length = "auto"
    batch = lm.infill([p for p, _ in ROWS], [s for _, s in ROWS], length, seed=7, **options)
    for b, (prefix, suffix) in enumerate(ROWS):
        single = lm.infill(prefix, suffix, length, seed=7 + b, **options)
        assert batch.fill_ids[b] == single.fill_ids[0]
        assert batch.white_space_ids[b] == single.white_space_ids[0]
        assert batch.scores[b] == pytest.approx(single.scores[0], abs=1e-4)
        assert (batch.row_stats[b].nfe, batch.row_stats[b].positions) == (single.stats.nfe, single.stats.positions)
        assert batch.texts[b] == prefix + batch.fills[b] + suffix
        assert batch.lengths[b][0] <= 6
    assert batch.stats.positions == sum(s.positions for s in batch.row_stats)
    healed = [row[0] is not None for row in batch.white_space_ids]
    assert healed == [True, False, True, True, True]


def test_at_a_temperature_the_tokens_are_drawn_and_a_seed_names_the_draw():
    lm = code_lm()

    def even(logits, slots):
        return torch.zeros_like(logits)

    firsts = []
    for seed in range(40):
        fills = [lm.infill("ab ", "c", 2, temperature=1.0, seed=seed, logits_processor=even) for _ in range(2)]
        assert fills[0].fill_ids == fills[1].fill_ids
        assert fills[0].white_space_ids == fills[1].white_space_ids
        firsts.append([*fills[0].white_space_ids[0][0], *fills[0].fill_ids[0][0]][0])  # type: ignore[misc]
    assert {bytes_of([t]) for t in firsts} == {b" ", b" a", b" b", b"  "}
    # Each slot of a row has a number of its own.
    several = [
        lm.infill(template="ab {{x}}c {{y}}d", gaps={"x": 2, "y": 2}, temperature=1.0, seed=s, logits_processor=even)
        for s in range(20)
    ]
    begun = [
        [[*before, *ids][0] for before, ids in zip(f.white_space_ids[0], f.fill_ids[0], strict=True)]  # type: ignore[misc]
        for f in several
    ]
    assert any(x != y for x, y in begun)
    # The filters read the law of what fits.
    best = wish(token("x"), token(" b"), token(" a"))
    for seed in range(5):
        fill = lm.infill("ab ", "c", 2, temperature=1.0, top_k=1, seed=seed, logits_processor=best)
        assert fill.fill_ids[0][0][0] == token(" b")


@pytest.mark.parametrize("rule", RULES)
def test_every_gap_of_a_row_has_its_own_white_space(rule):
    lm, seen = code_lm(rule), Seen()
    template = "ab {{x}}cd\n\n {{y}}:{{z}} {{empty}}x\n{{last}}"
    gaps = dict(x=4, y=3, z=2, empty=2, last=2)
    fill = lm.infill(template=template, gaps=gaps, callback_on_step_end=seen)
    texts = ["ab ", "cd\n\n ", ":", " ", "x\n", ""]
    whole = texts[0] + "".join(span + part for span, part in zip(fill.fills[0], texts[1:], strict=True))
    assert fill.texts == [whole]
    assert fill.lengths == [[4, 3, 2, 2, 2]]
    white = fill.white_space_ids[0]
    # A part of white space alone has nothing to attach to.
    assert [ids is None for ids in white] == [False, False, True, True, False]
    for before, ids, text in zip(white, fill.fill_ids[0], texts[:-1], strict=True):
        if before is not None:
            assert bytes_of([*before, *ids]).startswith(text[len(text.rstrip()) :].encode())
    zero = lm.infill(template=template, gaps=gaps | {"x": 0, "empty": 0})
    assert [ids is None for ids in zero.white_space_ids[0]] == [True, False, True, True, False]
    assert zero.texts[0].startswith("ab cd\n\n ")


def test_the_first_token_may_be_all_that_a_gap_has():
    lm = code_lm()
    fill = lm.infill("ab ", "c", 1, logits_processor=wish(token(" a")), output_history=True)
    assert (fill.fills, fill.fill_ids) == (["a"], [[[token(" a")]]])
    assert (fill.stats.nfe, fill.stats.useful_tokens, fill.texts) == (1, 1, ["ab ac"])
    assert fill.scores[0] == pytest.approx(0.0, abs=1e-3)


def test_the_score_counts_the_first_token_by_its_law_among_those_that_fit():
    lm = speaking(oracle_lm({}, filler_token_id=None))

    def law(logits, slots):
        # Half of the mass is on what does not fit; of the rest " a" has three parts and " " one.
        out = torch.full_like(logits, -30.0)
        a, blank = (byte_tokenizer().encode(t, add_special_tokens=False)[0] for t in (" a", " "))
        out[..., a], out[..., blank], out[..., 20] = 3.0, 3.0 - torch.log(torch.tensor(3.0)), 4.0
        return out

    fill = lm.infill("ab ", "c", 1, logits_processor=law)
    assert fill.fills == ["a"]
    assert fill.scores[0] == pytest.approx(torch.tensor(0.75).log().item(), abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_history_begins_with_the_first_token_and_ends_with_the_fill(rule):
    lm = code_lm(rule)
    fill = lm.infill(["ab ", "ab", "ab\n"], "c", 5, output_history=True, sampler="low_confidence")
    assert fill.history is not None
    for b in range(3):
        frames = fill.history[b]
        assert frames[-1].token_ids == fill.fill_ids[b][0]
        assert not any(frames[-1].masked)
        assert frames[-1].nfe == fill.row_stats[b].nfe
        assert all(len(getattr(f, name)) == 5 for f in frames for name in ("masked", "new", "provisional_ids"))


def test_what_no_tokens_write_is_not_healed_and_costs_nothing():
    # The tokenizer of the other tests has no tab.
    lm = text_lm()
    fills = [lm.infill("ab\t", " cd", 4, heal_white_space=heal) for heal in (True, False)]
    assert fills[0].fill_ids == fills[1].fill_ids
    assert fills[0].stats.nfe == fills[1].stats.nfe
    assert fills[0].white_space_ids == [[None]]


def test_where_a_processor_bars_all_that_fits_the_text_stands_whole():
    lm, seen = code_lm(), Seen()
    found = border_white_space(lm)
    assert found is not None
    blanks = [i for i, piece in enumerate(found.vocabulary.pieces) if piece and piece[:1] == b" "]

    def no_blank(logits, slots):
        out = logits.clone()
        out[..., blanks] = -torch.inf
        return out

    fill = lm.infill("ab ", "c", 3, logits_processor=no_blank, callback_on_step_end=seen)
    plain = lm.infill("ab ", "c", 3, logits_processor=no_blank, heal_white_space=False)
    assert fill.fill_ids == plain.fill_ids
    assert fill.white_space_ids == [[None]]
    assert fill.stats.nfe == plain.stats.nfe + 1
    assert seen.first[0][: len(ids_of("ab "))] == ids_of("ab ")


def test_logits_that_are_no_numbers_raise():
    with pytest.raises(ValueError, match="logits must be finite: got NaN or infinity in row 0, before a gap"):
        code_lm().infill("ab ", "c", 3, logits_processor=lambda logits, slots: logits * float("nan"))


def test_where_single_pieces_would_exceed_the_positions_the_text_stands_whole():
    lines = wish(token("\n"), token("x"))
    for room, healed in ((3, False), (4, True)):
        # As tokens of two line breaks the text fits with three to spare, or four; one by one they are four more.
        lm = code_lm(max_positions=len(ids_of("ab" + "\n" * 8 + "x")) + 3 + room)
        fill = lm.infill("ab" + "\n" * 8, "x", 3, logits_processor=lines)
        assert (fill.white_space_ids != [[None]]) is healed
        assert fill.texts == ["ab" + "\n" * 8 + fill.fills[0] + "x"]


def test_a_conversations_header_stays_before_the_healed_prefix():
    lm, seen = text_lm(template=True), Seen()
    chat = [{"role": "user", "content": "hi"}]
    fill = lm.infill("ab ", " cd", 3, messages=chat, callback_on_step_end=seen)
    given = byte_tokenizer().encode("u.hi\na.", add_special_tokens=False) + byte_tokenizer().encode(
        "ab", add_special_tokens=False
    )
    assert seen.first[0][: len(given)] == given
    assert fill.texts == ["ab " + fill.fills[0] + " cd"]
    assert fill.white_space_ids[0][0] is not None


def test_steps_are_spread_over_the_blocks_of_the_whole_gap():
    lm = code_lm()
    # Eight slots behind one given row are three blocks of four; seven would be two.
    fill = lm.infill("ab ", "c", 8, steps=9, block_length=4, logits_processor=wish(token(" a"), token("x")))
    assert (fill.fills[0][0], fill.lengths) == ("a", [[8]])


@pytest.mark.parametrize(
    "how", [dict(cfg_scale=1.0), dict(steps=6, block_length=4), dict(cache="block"), dict(block_length=3)]
)
def test_other_settings_go_with_it(how):
    lm = code_lm("block_causal", block_origin="prompt")
    for length in (4, 9):
        options = {k: v for k, v in how.items() if k != "steps" or length == 9}
        batch = lm.infill(["ab\n ", "ab"], ["c", "x"], length, **options)
        single = lm.infill("ab\n ", "c", length, **options)
        assert batch.fill_ids[0] == single.fill_ids[0]
        assert batch.lengths == [[length], [length]]


@pytest.mark.parametrize("length", [4, 13])
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_one_that_the_loop_reads_first_of_the_same_canvas_guided_or_not(rule, scale, length):
    lm = code_lm(rule)
    seen: list[torch.Tensor] = []

    def keep(logits, slots):
        seen.append(logits[0, 0])
        return logits

    laws = []
    for prefix in ("ab(c): ", "ab(c):"):
        seen.clear()
        lm.infill(prefix, "x.", length, cfg_scale=scale, logits_processor=keep)
        laws.append(seen[0])
    torch.testing.assert_close(laws[0], laws[1], atol=1e-4, rtol=1e-4)


EXPAND, DELETE = 60, 61


@pytest.mark.parametrize("start_length", [1, 4])
@pytest.mark.parametrize("max_length", [1, 2, 7])
@pytest.mark.parametrize("grow", [True, False])
def test_a_gap_that_grows_has_its_first_token_within_its_limit(start_length, max_length, grow):
    start_length = min(start_length, max_length)
    spec = tiny_spec("bidirectional", filler_token_id=None, expand_token_id=EXPAND, delete_token_id=DELETE)
    lm = DiffusionLM(tiny_decoder(), spec, code_tokenizer())

    def process(logits, slots):
        out = (
            wish(EXPAND, token(" a"), token("x"))(logits, slots)
            if grow
            else wish(token(" a"), token("x"))(logits, slots)
        )
        return out.masked_fill(logits == -torch.inf, -torch.inf)

    options: dict[str, Any] = dict(max_length=max_length, start_length=start_length, sampler="low_confidence")
    both = lm.infill(["ab ", "ab"], "c", logits_processor=process, seed=1, **options)
    assert both.fill_ids[0][0][0] == token(" a")
    assert both.texts == ["ab " + both.fills[0] + "c", "ab" + both.fills[1] + "c"]
    full = max_length if grow else max(start_length, min(2, max_length))
    assert both.lengths == [[full], [max_length if grow else start_length]]
    for b, prefix in enumerate(("ab ", "ab")):
        single = lm.infill(prefix, "c", logits_processor=process, seed=1 + b, **options)
        assert both.fill_ids[b] == single.fill_ids[0]
        assert both.row_stats[b].nfe == single.stats.nfe


def test_a_window_is_cut_at_its_filler_behind_the_first_token():
    lm = code_lm()
    fill = lm.infill("ab ", "c", max_length=6, logits_processor=wish(FILLER, token(" a")))
    assert (fill.fills, fill.lengths) == (["a"], [[1]])
    assert fill.stats.useful_tokens == fill.row_stats[0].useful_tokens == 1


def test_a_model_of_random_open_slots_takes_the_text_as_it_is():
    lm = golden_lm("diffusion_gemma")
    lm = DiffusionLM(lm.model, lm.spec, byte_tokenizer(), lm.config)
    assert border_white_space(lm) is None


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: "▁" for a blank, bytes for what it does not know, and a decoder that drops the first blank."""
    pieces = ["▁", "a", "b", "c", "▁a", "▁b"]
    vocab = {"<unk>": 0, "<eos>": 2} | {piece: 3 + i for i, piece in enumerate(pieces)}
    vocab |= {f"<0x{value:02X}>": 9 + i for i, value in enumerate((9, 10, 32, 0xC2, 0xA0, 0x63))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("white", [" ", "\n", "\t ", "\n\u00a0", "  "], ids=repr)
def test_a_tokenizer_that_drops_blanks_loses_none(white):
    lm = tiny_lm()
    lm = DiffusionLM(lm.model, lm.spec, metaspace_tokenizer(), lm.config)
    found = border_white_space(lm)
    assert found is not None
    fill = lm.infill("ab" + white, " a", 3)
    assert fill.texts == ["ab" + white + fill.fills[0] + " a"]
    written = found.vocabulary.bytes_of([*fill.white_space_ids[0][0], *fill.fill_ids[0][0]])  # type: ignore[misc]
    assert written.decode("utf-8", "replace") == white + fill.fills[0]


def test_a_tokenizer_without_bytes_heals_nothing():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "ab": 3, "c": 4}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    lm = tiny_lm()
    lm = DiffusionLM(lm.model, lm.spec, PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"), lm.config)
    assert border_white_space(lm) is None
    assert lm.infill("ab ", "c", 2).white_space_ids == [[None]]


@pytest.mark.parametrize("value", [0, "no", None])
def test_the_switch_is_a_bool(value):
    with pytest.raises(TypeError, match="heal_white_space must be a bool"):
        code_lm().infill("ab ", "c", 2, heal_white_space=value)


def test_dead_ends_are_no_choice():
    # Of "\r\n" only the whole has a token here: "\r" alone could not be followed by its line break.
    lm = code_lm()
    found = border_white_space(lm)
    assert found is not None
    poor = type(found)(type(found.vocabulary)([b"\r", b"\r\nx", b"a", None]))
    assert poor.split("a\r\n") == ("a", b"\r\n")
    assert poor.fits(b"\r\n").tolist() == [False, True, False, False]
    assert poor.split("a\n") == ("a\n", b"")
    assert found.split(" \n") == (" \n", b"")


def test_the_shipped_tokenizer_joins_white_space_with_what_follows():
    tokenizer = load_tokenizer(target_folder("smollm2-135m"))
    found = white_space_of(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    assert found is not None
    for white, text, length in (
        ("\n", "    return x", 3),
        ("\n    ", "return x", 2),
        (" ", "sat down", 2),
        ("\n\n", "", 0),
    ):
        assert found.split("def f():" + white) == ("def f():", white.encode())
        ids, own = found.encode(white.encode(), text)
        assert (tokenizer.decode(ids), own) == (white + text, length)
        assert bool(found.fits(white.encode())[ids[0]])
    texts = {tokenizer.decode([token]) for token in found.fits(b"\n    ").nonzero()[:, 0].tolist()}
    assert {"\n", "\n   "} < texts
    assert all(text.startswith("\n    ") or "\n    ".startswith(text) for text in texts)
    for white in WHITE:
        assert found.split("x" + white)[1] == white.encode()
