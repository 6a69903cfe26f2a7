"""AR-guided unmasking through ``generate``: invariants G1 to G6 of its notes, batches, counts, and the guide's own greedy text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm import ARGuide, DiffusionLM
from dllm.hooks import GuideHook
from dllm.noise import STREAM_ACCEPT, CounterNoise
from dllm.samplers.guided import Guided
from dllm.samplers.verify import sample_law
from dllm.types import Attend
from tests.tiny import EOS, FILLER, MASK, padded, prompt, tiny_decoder, tiny_lm, tokens

RULES = ["bidirectional", "block_causal"]
BANNED = [MASK, FILLER]


def guide(seed: int = 1, **rule: Any) -> ARGuide:
    return ARGuide(tiny_decoder(seed), rule=Guided(**rule))


def ar_law(model, ids):
    at = torch.arange(len(ids))[None]
    logits = model.head(model(torch.tensor([ids]), at, None, Attend.causal(at))[0, -1]).clone()
    logits[BANNED] = -torch.inf
    return logits


def ar_greedy(model, ids, length, stops=()) -> list[int]:
    """The AR model alone, without a cache: arg-max of the last row, one token at a time."""
    ids, start = list(ids), len(ids)
    while len(ids) < start + length:
        token = int(ar_law(model, ids).argmax())
        if token in stops:
            break
        ids.append(token)
    return ids[start:]


def run(lm, ids, **options):
    return lm.generate(input_ids=[ids], **{"max_new_tokens": 20, **options})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shift", [0, 1])
def test_g6_the_exact_rule_with_the_guides_own_token_is_the_guides_greedy_text(rule, shift):
    lm = tiny_lm(rule, logits_shift=shift)
    exact = guide(accept="exact", on_reject="ar")
    for length in (1, 2, 5, 9, 12):
        ids = prompt(length)
        out = run(lm, ids, guide=exact)
        assert tokens(out) == ar_greedy(exact.model, ids, 20, (EOS,))
        assert sum(out.stats.accept_lengths) == out.stats.useful_tokens + (out.finish_reasons == ["stop"])


@pytest.mark.parametrize("cache", ["none", "block", "dual", "free"])
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_g6_holds_with_every_cache_and_chunk_when_many_drafts_are_accepted(cache, chunk):
    # The same weights draft and guide: kept keys matter.
    lm = tiny_lm(seed=1, eos_token_ids=())
    exact = ARGuide(lm.model, rule=Guided("exact", "ar", verify_batch_size=chunk))
    accepted = []
    for length in (1, 4):
        out = run(lm, prompt(length), guide=exact, cache=cache, max_new_tokens=21)
        assert tokens(out) == ar_greedy(lm.model, prompt(length), 21)
        accepted += out.stats.accept_lengths
    assert max(accepted) > 1


@pytest.mark.parametrize("passes", [2, None])
def test_more_guide_passes_over_one_draft_give_the_same_text_for_fewer_forwards_of_the_diffusion_model(passes):
    lm = tiny_lm(seed=1, eos_token_ids=())
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {"guide": guide(3), "accept": "exact", "on_reject": "ar", "temperature": temperature}
        rows = padded([prompt(4), prompt(9)])
        once = lm.generate(**rows, **options, seed=2, max_new_tokens=21)
        more = lm.generate(**rows, **options, seed=2, max_new_tokens=21, guide_passes=passes)
        assert more.sequences.tolist() == once.sequences.tolist()
        assert more.stats.nfe < once.stats.nfe
        assert [sum(row.accept_lengths) for row in more.row_stats] == [21, 21]
        single = lm.generate(input_ids=[prompt(9)], **options, seed=3, max_new_tokens=21, guide_passes=passes)
        assert tokens(single) == tokens(more, 1)
        assert single.stats.guide_nfe == more.row_stats[1].guide_nfe
    stop = tokens(once)[5]
    cut = lm.generate(
        **padded([prompt(4)]), **options, seed=2, max_new_tokens=21, guide_passes=passes, eos_token_id=stop
    )
    assert tokens(cut) == tokens(once)[: tokens(once).index(stop)]


def test_g6_at_a_temperature_the_exact_rule_gives_the_guides_own_draw_for_its_positions_noise():
    lm = tiny_lm(eos_token_ids=())
    exact = guide(accept="exact", on_reject="ar")
    noise = CounterNoise.for_rows(7, 1)
    ids = prompt(5)
    found = run(lm, ids, guide=exact, temperature=0.8, seed=7, max_new_tokens=12)
    for _ in range(12):
        law = (ar_law(exact.model, ids) / 0.8).softmax(-1)
        uniform = noise.uniform(torch.tensor([[len(ids)]]), torch.zeros(1, dtype=torch.int64), STREAM_ACCEPT)
        ids = [*ids, int(sample_law(law[None, None], uniform))]
    assert tokens(found) == ids[5:]


def test_the_speculative_rule_has_the_guides_law():
    """Chi-squared over the first token, whose exact law is known; the draft's law is another one."""
    lm = tiny_lm(eos_token_ids=())
    speculative = guide(accept="speculative", on_reject="ar")
    ids, count = prompt(5), 1500
    law = ar_law(speculative.model, ids).softmax(-1)
    out = lm.generate(input_ids=[ids] * count, max_new_tokens=2, guide=speculative, temperature=1.0, seed=11)
    first = torch.bincount(out.sequences[:, 0], minlength=law.numel()).double()
    likely = law > 8 / count
    expected = torch.cat([law[likely], law[~likely].sum()[None]]).double() * count
    seen = torch.cat([first[likely], first[~likely].sum()[None]])
    statistic, freedom = float(((seen - expected) ** 2 / expected).sum()), int(likely.sum())
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5
    plain = lm.generate(input_ids=[ids] * count, max_new_tokens=2, temperature=1.0, seed=11)
    other = torch.bincount(plain.sequences[:, 0], minlength=law.numel()).double()
    drafted = torch.cat([other[likely], other[~likely].sum()[None]])
    assert float(((drafted - expected) ** 2 / expected).sum()) > 10 * freedom, (
        "the two laws must differ to show anything"
    )


@pytest.mark.parametrize("rule", RULES)
def test_g1_a_guide_that_accepts_everything_fills_a_block_in_one_step(rule):
    lm = tiny_lm(rule, eos_token_ids=())
    always = run(lm, prompt(5), guide=guide(accept="always"), max_new_tokens=24)
    assert tokens(always) == tokens(run(lm, prompt(5), threshold=0.0, max_new_tokens=24))
    assert always.stats.accept_lengths == [8, 8, 8]
    assert always.stats.guide_nfe == 3


@pytest.mark.parametrize("rule", RULES)
def test_g2_a_guide_that_accepts_nothing_is_left_to_right_decoding_of_the_diffusion_model(rule):
    lm = tiny_lm(rule, eos_token_ids=())
    never = run(lm, prompt(5), guide=guide(accept="never"))
    alone = run(lm, prompt(5), sampler="sequential")
    assert tokens(never) == tokens(alone)
    assert never.stats.nfe == alone.stats.nfe
    assert never.stats.accept_lengths == [1] * 20


@pytest.mark.parametrize(
    "accept", ["exact", "topk", "topk_relative", "dynamic_threshold", "aggressive", "original", "log_ratio"]
)
def test_g3_every_token_is_the_diffusion_models_proposal_of_its_step(accept):
    lm = tiny_lm("bidirectional", eos_token_ids=())
    out = run(lm, prompt(5), guide=guide(accept=accept), output_history=True, cache="none")
    canvas = prompt(5) + [MASK] * 20
    for frame in out.history[0]:
        logits = lm.forward([canvas])[0, 4:-1].clone()
        logits[:, BANNED] = -torch.inf
        new = [i for i, is_new in enumerate(frame.new) if is_new]
        assert [frame.token_ids[i] for i in new] == logits.argmax(-1)[new].tolist()
        assert new == list(range(new[0], new[-1] + 1)), "left to right"
        for i in new:
            canvas[5 + i] = frame.token_ids[i]


def test_g4_topk_of_the_whole_vocabulary_accepts_all_and_of_one_is_exact():
    lm = tiny_lm()
    ids = prompt(6)

    def by(**rule):
        return tokens(run(lm, ids, guide=guide(**rule)))

    assert by(accept="topk", accept_top_k=64) == by(accept="always")
    assert by(accept="topk", accept_top_k=1) == by(accept="exact")


def test_a_rows_run_in_a_ragged_batch_equals_its_single_run_with_its_counts():
    lm = tiny_lm()
    rows = [prompt(3), prompt(9), prompt(6)]
    rules: list[dict[str, Any]] = [{"accept": "exact", "on_reject": "ar"}, {"accept": "topk"}, {"accept": "original"}]
    for rule in rules:
        options: dict[str, Any] = {"guide": guide(**rule), "max_new_tokens": 19}
        both = lm.generate(**padded(rows), **options, seed=3)
        for b, ids in enumerate(rows):
            single = lm.generate(input_ids=[ids], **options, seed=3 + b)
            assert tokens(both, b) == tokens(single)
            assert both.row_stats[b].guide_nfe == single.stats.guide_nfe
            assert both.row_stats[b].accept_lengths == single.stats.accept_lengths
        assert both.stats.guide_nfe == max(row.guide_nfe for row in both.row_stats)
        assert both.stats.nfe == max(row.nfe for row in both.row_stats)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("on_reject", ["dlm", "ar"])
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_the_law_of_the_first_open_slot_is_that_of_the_text_before_it(rule, on_reject, chunk, monkeypatch):
    seen, original = [], GuideHook._score

    def score(hook, proposal, first, count, banned):
        law, own = original(hook, proposal, first, count, banned)
        text = hook.loop.walk.wide["canvas"][0]
        at = int(first[0])
        truth = ar_law(hook.run.model, text[:at].tolist()).softmax(-1)
        seen.append((truth - law[0, int(at - proposal.slots[0, 0])]).abs().max().item())
        return law, own

    monkeypatch.setattr(GuideHook, "_score", score)
    for accept in ("topk", "log_ratio"):
        run(tiny_lm(rule), prompt(7), guide=guide(accept=accept, on_reject=on_reject, verify_batch_size=chunk))
    assert len(seen) > 8 and max(seen) < 1e-5


@pytest.mark.parametrize("accept", ["topk", "aggressive", "log_ratio"])
def test_the_size_of_the_guides_chunks_and_the_other_rows_change_no_text(accept):
    for seed in range(3):
        lm, ids = tiny_lm("block_causal", seed), [prompt(n, seed) for n in (14, 4, 2)]
        texts = []
        for chunk in (1, 3, 32):
            one = guide(3, accept=accept, verify_batch_size=chunk)
            out = lm.generate(**padded(ids), max_new_tokens=20, guide=one)
            texts.append([tokens(out, b) for b in range(3)])
            assert texts[-1] == [tokens(lm.generate(input_ids=[row], max_new_tokens=20, guide=one)) for row in ids]
        assert texts[0] == texts[1] == texts[2]


def test_the_guide_stops_where_its_greedy_text_stops_and_min_new_tokens_bars_the_stop():
    lm = tiny_lm(eos_token_ids=())
    exact = guide(accept="exact", on_reject="ar")
    text = ar_greedy(exact.model, prompt(5), 20)
    stop = text[11]
    cut = run(lm, prompt(5), guide=exact, eos_token_id=stop)
    assert tokens(cut) == text[: text.index(stop)]
    assert cut.finish_reasons == ["stop"]
    late = run(lm, prompt(5), guide=exact, eos_token_id=stop, min_new_tokens=15)
    assert stop not in tokens(late)[:15]


def test_rule_numbers_may_be_given_to_generate_and_unknown_ones_raise():
    lm = tiny_lm()
    plain = tokens(run(lm, prompt(5), guide=guide(), accept="exact", on_reject="ar"))
    assert plain == tokens(run(lm, prompt(5), guide=guide(accept="exact", on_reject="ar")))
    with pytest.raises(TypeError, match="accept_topk.*Guided"):
        run(lm, prompt(5), guide=guide(), accept_topk=3)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sampler": "threshold"}, ValueError, "guide and sampler"),
        ({"verifier": "s2d2"}, ValueError, "guide and verifier"),
        ({"max_denoising_steps": 4}, ValueError, "max_denoising_steps"),
        ({"accept": "best"}, ValueError, "accept must be one of"),
        ({"accept": "speculative"}, ValueError, "on_reject 'ar'"),
        ({"guide": "smollm2-135m"}, TypeError, "ARGuide.from_pretrained"),
        ({"guide": 3}, TypeError, "guide must have start"),
    ],
)
def test_combinations_without_meaning_raise_and_say_why(options, error, match):
    with pytest.raises(error, match=match):
        run(tiny_lm(), prompt(5), **{"guide": guide(), **options})


def test_a_guide_cannot_fill_gaps_whose_end_it_does_not_see():
    with pytest.raises(ValueError, match="behind a gap"):
        tiny_lm("bidirectional").generate(
            input_ids=[[5, 6, 7, 8]], masked=[[0, 1, 0, 0]], max_new_tokens=4, guide=guide()
        )


def test_a_guide_of_another_size_does_not_pass_as_the_same_vocabulary():
    lm = tiny_lm(vocab_size=64)
    small = ARGuide(tiny_decoder(1), vocabulary="same")
    small.model.embed_tokens.weight.data = small.model.embed_tokens.weight.data[:60]
    small.model.lm_head.weight.data = small.model.lm_head.weight.data[:60]
    with pytest.raises(ValueError, match="needs a guide with 64 ids: got 60"):
        run(lm, prompt(5), guide=small)


def test_two_tokenizers_are_compared_once_and_not_where_the_ids_are_said_to_be_the_same():
    class Tokenizer:
        def __init__(self, ids: dict[str, int]) -> None:
            self.ids, self.reads = ids, 0

        def get_vocab(self) -> dict[str, int]:
            self.reads += 1
            return dict(self.ids)

    own, other, foreign = (Tokenizer({"a": n}) for n in (0, 0, 1))
    auto = ARGuide(tiny_decoder(1), tokenizer=own)
    for _ in range(3):
        assert auto.with_rule(accept="exact").same_vocabulary(other, 64)
        assert auto.same_vocabulary(other, 64)
    assert other.reads == 2, "once by the copy made before the first comparison, once by the guide"
    assert not auto.same_vocabulary(foreign, 64)
    assert auto.same_vocabulary(other, 64)

    class Said(ARGuide):
        def same_vocabulary(self, tokenizer: Any, vocab_size: int) -> bool:
            raise AssertionError("nothing is to be compared")

    run(tiny_lm(), prompt(5), guide=Said(tiny_decoder(1), vocabulary="same"))


@pytest.fixture(scope="module")
def bd8():
    return DiffusionLM.from_pretrained("smollm2-135m-bd8", dtype="float32", device="cpu")


def test_of_base_gives_the_base_models_greedy_answers_in_fp32(bd8):
    exact = ARGuide.of_base(bd8, accept="exact", on_reject="ar")
    assert exact.model.embed_tokens is bd8.model.embed_tokens
    prompts, length = ["Name three colours.", "What is 2 + 2?"], 24
    batch = bd8.generate(prompts, guide=exact, max_new_tokens=length)
    banned = [i for i in (bd8.spec.mask_token_id, bd8.spec.filler_token_id) if i is not None]
    for b, ids in enumerate(bd8._prompts(prompts, None, None, None, "auto", bd8._config(None, {}))):
        found = tokens(batch, b)
        # Greedy, if each token (and the stop) is the arg-max of the row before it in one plain pass.
        text = ids + found + ([bd8.spec.eos_token_ids[0]] if batch.finish_reasons[b] == "stop" else [])
        at = torch.arange(len(text))[None]
        logits = exact.model.head(exact.model(torch.tensor([text]), at, None, Attend.causal(at))[0, len(ids) - 1 : -1])
        logits[:, banned] = -torch.inf
        assert logits.argmax(-1).tolist() == text[len(ids) :]
    assert batch.stats.guide_nfe > 0
    with pytest.raises(ValueError, match="adapter over an AR base"):
        ARGuide.of_base(tiny_lm())
