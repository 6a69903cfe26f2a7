"""Faults that users of other tools report, on every family where they can occur. Not here, and why:

| fault | where it cannot occur |
| --- | --- |
| T04, T05, T06, T16 | diffusion_gemma has no mask token: nothing to type, to leave behind, to lack, or to open a gap with |
| T07, temperature | diffusion_gemma anneals a temperature of its own; its arg-max and its ties are tested |
| T17 | about scoring infilled text: no model in it |
| T19, T20, T21 | about drafters of autoregressive models: no diffusion family in it |
| T28, block cache | llada, dream, dreamon and mdlm are bidirectional: it is refused there, and refreshing caches are tested instead |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from dllm.pipeline import DiffusionLM
from tests.families.golden import FOLDERS, NAMES, golden_lm
from tests.tiny import padded, tokens
from tests.words import byte_tokenizer

MASKED = [name for name in NAMES if name != "diffusion_gemma"]
BLOCK_CAUSAL = ["bd3lm", "fast_dllm_v2", "llada2_moe", "sdar"]
ROWS = [[3, 40, 21, 7, 33, 9, 10, 11, 5, 6], [11, 12, 50, 4, 9]]

model = lru_cache(maxsize=None)(golden_lm)


def options_of(folder: str, **changes: Any) -> dict[str, Any]:
    """Short blocks where the family has masks; its own canvas and few steps where it has none."""
    own: dict[str, Any] = {"max_new_tokens": 10, "block_length": 4}
    if folder == "diffusion_gemma":
        own = {"max_new_tokens": 20, "max_denoising_steps": 3, "seed": 0}
    return own | {"eos_token_id": [eos_of(model(folder))]} | changes


def says(law: Callable[[int], int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A logits processor that makes any model say token law(slot), and be sure of it."""

    def process(logits, slots):
        said = torch.tensor([[law(int(s)) for s in row] for row in slots])
        return torch.zeros_like(logits).scatter_(2, said[..., None], 25.0)

    return process


def eos_of(lm: DiffusionLM) -> int:
    """The model's stop token, or an ordinary id where the tiny vocabulary is too small for the published one."""
    return lm.spec.eos_token_ids[0] if lm.spec.eos_token_ids else 20


@pytest.mark.parametrize("folder", FOLDERS)
def test_t01_t02_t03_a_row_of_a_ragged_batch_equals_its_single_run_whatever_the_padding_holds(folder):
    lm = model(folder)
    caches = ["none", "dual"] + (["block"] if lm.spec.attention == "block_causal" else [])
    caches = ["block"] if folder == "diffusion_gemma" else caches
    rows = [ROWS[0], [*ROWS[1][:2], eos_of(lm), *ROWS[1][2:]]]
    for cache in caches:
        options = options_of(folder, cache=cache, **({} if folder == "diffusion_gemma" else {"threshold": 0.4}))
        singles = [lm.generate(input_ids=[row], **(options | {"seed": b})) for b, row in enumerate(rows)]
        for side in ("left", "right"):
            batch = lm.generate(**padded(rows, side, eos_of(lm)), **options)
            for b, single in enumerate(singles):
                assert tokens(batch, b) == tokens(single), (cache, side)
                assert batch.row_stats[b].nfe == single.stats.nfe, (cache, side)
                assert batch.finish_reasons[b] == single.finish_reasons[0]


@pytest.mark.parametrize("folder", MASKED)
def test_t04_a_typed_mask_id_is_an_ordinary_token(folder):
    lm = model(folder)
    assert lm.spec.mask_token_id is not None
    for length in (4, 6):
        ids = [*ROWS[0][: length - 2], lm.spec.mask_token_id, 7]
        seen: list[Any] = []

        def see(lm, step, timestep, kw, seen=seen, length=length):
            seen.append((kw["canvas"][0, :length].tolist(), int(kw["masked"].sum())))

        options = options_of(folder, threshold=2.0, eos_token_id=[], callback_on_step_end=see)
        out = lm.generate(input_ids=[ids], **options)
        assert all(prompt == ids for prompt, _ in seen)
        assert [masks for _, masks in seen] == list(range(9, -1, -1))
        assert lm.spec.mask_token_id not in tokens(out)


@pytest.mark.parametrize("folder", MASKED)
def test_t05_no_mask_is_left_by_a_model_that_wants_one_nor_by_too_few_steps(folder):
    lm = model(folder)
    mask = lm.spec.mask_token_id

    def want_mask(logits, slots):
        out = torch.zeros_like(logits)
        out[..., mask], out[..., 9] = 30.0, 5.0
        return out

    out = lm.generate(input_ids=ROWS[1:], **options_of(folder, logits_processor=want_mask, eos_token_id=[]))
    assert tokens(out) == [9] * 10
    few = lm.generate(input_ids=ROWS[1:], **options_of(folder, max_denoising_steps=1, threshold=2.0, eos_token_id=[]))
    assert few.lengths == [10]
    assert mask not in tokens(few)


@pytest.mark.parametrize("folder", MASKED)
def test_t06_without_a_mask_token_there_is_an_error_and_no_stand_in(folder):
    lm = model(folder)
    bare = DiffusionLM(lm.model, replace(lm.spec, mask_token_id=None))
    with pytest.raises(ValueError, match="mask_token_id must be given"):
        bare.generate(input_ids=ROWS[1:], max_new_tokens=4)


@pytest.mark.parametrize("folder", MASKED)
def test_t07_a_temperature_near_zero_is_greedy_whatever_the_seed(folder):
    lm = model(folder)
    # Where confidence is that of the processed law every draw is certain at such a temperature, so the order is fixed here.
    options = options_of(folder, sampler="sequential")
    greedy = lm.generate(input_ids=ROWS[1:], **options)
    warm = lm.generate(input_ids=ROWS[1:], **(options | {"temperature": 1e-6, "seed": 5}))
    assert tokens(warm) == tokens(greedy)


@pytest.mark.parametrize("folder", FOLDERS)
def test_t07_ties_go_to_the_lowest_id_and_the_lowest_slot(folder):
    def tie(logits, slots):
        out = torch.zeros_like(logits)
        out[..., [30, 12]] = 5.0
        return out

    order: list[int] = []

    def see(lm, step, timestep, kw):
        order.extend(kw["slots"][kw["transfer_index"]].tolist())

    options = options_of(folder, logits_processor=tie, eos_token_id=[], callback_on_step_end=see)
    if folder != "diffusion_gemma":
        options["sampler"] = "low_confidence"
    out = model(folder).generate(input_ids=ROWS[1:], **options)
    assert tokens(out) == [12] * options["max_new_tokens"]
    assert order == list(range(5, 5 + options["max_new_tokens"]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_t09_an_eos_at_the_end_of_a_prompt_of_any_length_ends_nothing(folder):
    lm = model(folder)
    for length in (1, 3, 4, 5, 8):
        ids = [*ROWS[0][: length - 1], eos_of(lm)]
        out = lm.generate(input_ids=[ids], **options_of(folder, logits_processor=says(lambda slot: 9 + slot % 3)))
        count = options_of(folder)["max_new_tokens"]
        assert tokens(out) == [9 + slot % 3 for slot in range(length, length + count)]
        assert out.finish_reasons == ["length"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_t10_t22_an_eos_stops_the_row_is_not_counted_and_later_blocks_are_not_computed(folder):
    lm = model(folder)
    start, eos = len(ROWS[1]), eos_of(lm)
    calls = [0]
    handle = lm.model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    options = options_of(folder, max_new_tokens=40 if folder == "diffusion_gemma" else 16)
    runs = {}
    for name, law in (("stops", lambda slot: eos if slot == start + 1 else 9), ("goes on", lambda slot: 9)):
        before = calls[0]
        runs[name] = lm.generate(input_ids=ROWS[1:], **options, logits_processor=says(law))
        assert runs[name].stats.nfe == calls[0] - before
    handle.remove()
    out = runs["stops"]
    assert (tokens(out), out.finish_reasons, out.stats.useful_tokens) == ([9], ["stop"], 1)
    assert out.stats.tokens_per_forward == pytest.approx(1 / out.stats.nfe)
    assert runs["goes on"].stats.useful_tokens == options["max_new_tokens"]
    assert out.stats.nfe < runs["goes on"].stats.nfe


@pytest.mark.parametrize("folder", FOLDERS)
def test_t11_a_stop_string_across_a_block_edge_cuts_at_its_first_match(folder):
    lm = model(folder)
    tokenizer = byte_tokenizer()
    talker = DiffusionLM(lm.model, lm.spec, tokenizer, lm.config)
    written = tokenizer.encode("xyzxyzx.yzx.y", add_special_tokens=False)
    start = len(ROWS[1])
    law = says(lambda slot: written[slot - start] if start <= slot < start + len(written) else written[0])
    for stop, left in (("zx.", "xyzxy"), ("q", None)):
        options = options_of(folder, logits_processor=law, stop_strings=[stop], eos_token_id=[])
        out = talker.generate(input_ids=ROWS[1:], **options)
        assert out.finish_reasons == ["length" if left is None else "stop"]
        if left is not None:
            assert out.texts == [left]


@pytest.mark.parametrize("folder", FOLDERS)
def test_t12_exactly_the_limit_is_written_and_the_stop_keeps_away_until_the_minimum(folder):
    lm = model(folder)
    for limit in (1, 7, 10):
        out = lm.generate(input_ids=ROWS[1:], **options_of(folder, max_new_tokens=limit, eos_token_id=[]))
        assert out.sequences.shape == (1, limit)
    eos = eos_of(lm)

    def want_eos(logits, slots):
        out = torch.zeros_like(logits)
        out[..., eos], out[..., 9] = 30.0, 10.0
        return out

    out = lm.generate(input_ids=ROWS[1:], **options_of(folder, min_new_tokens=6, logits_processor=want_eos))
    assert (tokens(out), out.finish_reasons) == ([9] * 6, ["stop"])


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_t14_t15_half_precision_runs_and_differs_from_fp32_only_where_fp32_is_unsure(folder, dtype):
    lm, half = model(folder), golden_lm(folder, dtype=dtype)
    out = half.generate(input_ids=ROWS[1:], **options_of(folder, eos_token_id=[]))
    assert out.lengths == [options_of(folder)["max_new_tokens"]]
    ids = torch.tensor([(ROWS[0] * 3)[:24]])
    exact, rounded = lm.forward(ids).float(), half.forward(ids).float()
    first, second = exact.topk(2).values.unbind(-1)
    sure = first - second > 0.25 * exact.std()
    assert sure.any()
    assert torch.equal(exact.argmax(-1)[sure], rounded.argmax(-1)[sure])


@pytest.mark.parametrize("folder", MASKED)
def test_t16_given_parts_stay_gaps_have_their_length_and_a_row_equals_its_single_run(folder):
    lm = model(folder)
    talker = DiffusionLM(lm.model, lm.spec, byte_tokenizer(), lm.config)
    prefixes, suffixes = ["the cab ", "ab"], [" abc.", "cd the"]
    for cache in ("none", lm.spec.default_cache):
        both = talker.infill(prefixes, suffixes, [5, 3], cache=cache)
        assert both.lengths == [[5], [3]]
        for b in range(2):
            single = talker.infill(prefixes[b], suffixes[b], [5, 3][b], cache=cache)
            assert both.fill_ids[b] == single.fill_ids[0]
            assert both.texts[b] == prefixes[b] + both.fills[b] + suffixes[b]
            assert lm.spec.mask_token_id not in both.fill_ids[b][0]
    nothing = talker.infill("ab", "cd", 0)
    assert (nothing.texts, nothing.stats.nfe) == (["abcd"], 0)
    two = talker.infill(template="ab {{x}} cd {{y}} the", gaps={"x": 2, "y": 4})
    assert two.lengths == [[2, 4]]


class Constant:
    """A block policy of one length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def next(self, state: Any) -> int:
        return self.length


@pytest.mark.parametrize("folder", FOLDERS)
def test_t24_a_policy_is_clamped_to_what_remains_and_a_constant_one_equals_the_number(folder):
    lm = model(folder)
    options = options_of(folder, eos_token_id=[])
    for length in (1, 4, 1000):
        # Where blocks count from zero a number also lays out the prompt; a policy leaves that to the model.
        if lm.spec.block_origin == "zero" and length != lm.spec.block_length:
            out = lm.generate(input_ids=ROWS[1:], **(options | {"block_length": Constant(length)}))
            assert out.lengths == [options["max_new_tokens"]]
            continue
        out, want = (
            lm.generate(input_ids=ROWS[1:], **(options | {"block_length": value}))
            for value in (Constant(length), length)
        )
        assert tokens(out) == tokens(want)
        assert out.stats.nfe == want.stats.nfe


@pytest.mark.parametrize("folder", FOLDERS)
def test_t25_what_cannot_be_honoured_raises_with_the_accepted_names(folder):
    lm = model(folder)
    with pytest.raises(TypeError, match="unknown argument 'foo'; accepted: .*max_new_tokens"):
        lm.generate(input_ids=ROWS[1:], max_new_tokens=4, foo=1)
    with pytest.raises(TypeError, match="mean the same argument"):
        lm.generate(input_ids=ROWS[1:], max_new_tokens=4, gen_length=5)
    with pytest.raises(ValueError, match="cache must be one of"):
        lm.generate(input_ids=ROWS[1:], max_new_tokens=4, cache="magic")
    if lm.spec.attention == "bidirectional":
        with pytest.raises(ValueError, match="cache 'block' is exact for block-causal"):
            lm.generate(input_ids=ROWS[1:], max_new_tokens=4, cache="block")


@pytest.mark.parametrize("folder", MASKED)
def test_t28_exact_caches_equal_no_cache_in_fp32(folder):
    lm = model(folder)
    options = options_of(folder, eos_token_id=[], threshold=0.4)
    truth = lm.generate(**padded(ROWS), cache="none", **options).sequences.tolist()
    choices: list[dict[str, Any]] = [{"cache": name, "refresh_interval": 1} for name in ("dual", "free", "prefix")]
    choices += [{"cache": "block"}] if folder in BLOCK_CAUSAL else []
    for choice in choices:
        assert lm.generate(**padded(ROWS), **choice, **options).sequences.tolist() == truth, choice
