"""White space before the gap of an infill sample: every system gives it to the model, and what is measured fits what the model saw."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm.evals.gaps import gap_of
from dllm.evals.judge import Judge
from dllm.evals.run_store import load_run
from dllm.evals.runner import Extras, run_task
from dllm.evals.systems import FILL_REQUEST, ARSystem, DiffusionSystem
from dllm.evals.task import Sample
from dllm.infill_rows import border_white_space
from dllm.likelihood import chain_log_likelihood
from tests.evals.fakes import EchoTask, FakeTokenizer
from tests.evals.test_runner import ar_model
from tests.test_white_space import code_tokenizer
from tests.words import byte_tokenizer, text_lm

PREFIXES = ["the cab ", "ab", "cd\n\n ", "he a\n", "b ", " "]


def encode(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def decode(ids: Any) -> str:
    return byte_tokenizer().decode(ids, skip_special_tokens=True)


class GapTask(EchoTask):
    """Gaps behind white space, and beside them one behind a word and one behind nothing else."""

    def __init__(self) -> None:
        super().__init__("infill")

    def samples(self, data=None, limit=None, seed=0):
        return [
            Sample(f"g/{i}", "infill", prefix=p, suffix=". the", reference="a the"[i % 3 :], max_new_tokens=5)
            for i, p in enumerate(PREFIXES)
        ]


def test_the_true_length_is_the_tokens_that_hold_some_of_the_middle():
    found = border_white_space(text_lm())
    sample = Sample("x", "infill", prefix="the ", suffix="", reference="ab")
    gap = gap_of(byte_tokenizer(), found, sample)
    assert (gap.prefix, gap.white, decode(gap.reference_ids), gap.length) == ("the", b" ", " ab", 1)
    assert len(gap.reference_ids) == 2
    # " a" is one token: it ends the white space and begins the middle.
    gap = gap_of(byte_tokenizer(), found, replace(sample, reference="ac"))
    assert (gap.reference_ids, gap.length) == (encode(" ac"), 2)
    gap = gap_of(byte_tokenizer(), found, replace(sample, prefix="the\n", reference="cd"))
    assert (gap.reference_ids, gap.length) == (encode("\ncd"), 1)
    assert gap_of(byte_tokenizer(), found, replace(sample, reference="")).length == 0
    for white_space, prefix in ((None, "the "), (found, "the"), (found, " "), (found, "")):
        gap = gap_of(byte_tokenizer(), white_space, replace(sample, prefix=prefix))
        assert (gap.prefix, gap.white, gap.reference_ids, gap.length) == (prefix, b"", encode("ab"), len(encode("ab")))
    assert gap_of(FakeTokenizer(), None, sample).length == 2


def test_a_diffusion_system_asks_and_scores_behind_the_text_without_its_white_space():
    lm = text_lm()
    system = DiffusionSystem(lm, {}, "oracle")
    samples = GapTask().samples()
    answers = system.answer(samples, list(range(len(samples))))
    for sample, answer in zip(samples, answers, strict=True):
        bare = sample.prefix.rstrip() or sample.prefix
        healed = bare != sample.prefix
        assert system.context_ids(sample) == encode(bare)
        assert (answer.white_space_ids is not None) is healed
        assert len(answer.token_ids) == answer.true_length
        white = sample.prefix[len(bare) :]
        assert decode([*(answer.white_space_ids or ()), *answer.token_ids]) == white + answer.text
        span = encode(white + sample.reference)
        values = chain_log_likelihood(lm.model, lm.spec, encode(bare), span, encode(sample.suffix))
        assert system.reference_log_likelihood(sample) == (pytest.approx(sum(values), abs=1e-4), len(span))
    plain = DiffusionSystem(lm, {"heal_white_space": False}, "oracle")
    assert plain.context_ids(samples[0]) == encode(samples[0].prefix)
    assert plain.reference_log_likelihood(samples[0])[1] == len(encode(samples[0].reference))
    [answer] = plain.answer(samples[:1], [0])
    assert (answer.white_space_ids, answer.true_length) == (None, len(encode(samples[0].reference)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("infill", ["prefix", "prompt"])
def test_an_ar_model_begins_with_the_white_space_and_fills_the_asked_length(infill, temperature):
    model = ar_model()
    model.config.max_position_embeddings = 2048
    system = ARSystem(model, None, {"temperature": temperature}, "oracle", infill=infill)
    samples = GapTask().samples()
    seeds = [3 + i for i in range(len(samples))]
    answers = system.answer(samples, seeds)
    for sample, seed, answer in zip(samples, seeds, answers, strict=True):
        bare = sample.prefix.rstrip() or sample.prefix
        white = sample.prefix[len(bare) :]
        quoted = encode(FILL_REQUEST.format(prefix=bare, suffix=sample.suffix) + "\n\nMissing piece:\n")
        assert system.context_ids(sample) == (encode(bare) if infill == "prefix" else quoted)
        assert (answer.white_space_ids is not None) is bool(white)
        assert decode([*(answer.white_space_ids or ()), *answer.token_ids]) == white + answer.text
        if infill == "prefix":
            assert len(answer.token_ids) == answer.true_length
        assert answer.cost.useful_tokens == len(answer.token_ids)
        [score] = Judge(model).score([system.context_ids(sample)], [encode(white + sample.reference)])
        assert system.reference_log_likelihood(sample) == (score.total, score.num_tokens)
        [single] = system.answer([sample], [seed])
        assert (single.token_ids, single.white_space_ids) == (answer.token_ids, answer.white_space_ids)
        assert (single.cost.nfe, single.cost.positions) == (answer.cost.nfe, answer.cost.positions)


def wanting(*wanted: int):
    """An AR model that wants these ids, the likelier the earlier they are named."""
    model = ar_model()
    head = model.lm_head

    class Wish(torch.nn.Module):
        weight = head.weight

        def forward(self, hidden):
            out = torch.full((*hidden.shape[:-1], len(head.weight)), -20.0)
            for place, token in enumerate(wanted):
                out[..., token] = 20.0 - place
            return out

    model.lm_head = Wish()
    return model


def test_the_first_token_of_an_ar_fill_counts_among_its_tokens_and_forwards():
    [a] = encode(" a")
    [line] = encode("\n")
    sample = Sample("x", "infill", prefix="cd\n ", suffix=".", reference="a", max_new_tokens=4)
    for length, count in (("oracle", 1), ("fixed:3", 3), ("auto", 4)):
        [answer] = ARSystem(wanting(a, line), length=length).answer([sample], [0])
        assert answer.token_ids == (a,) * count
        assert answer.text == "a" + " a" * (count - 1)
        assert answer.white_space_ids == (line,)
        # A forward for the line break, one for the token that begins the fill, and one for each token more.
        assert answer.cost.nfe == 2 + (count - 1)
        assert answer.cost.positions >= len(encode("cd")) + len(encode("cd")) + 1
        assert answer.finish_reason == "length"
        assert 0 < answer.prefill_s <= answer.seconds


def test_a_stop_string_that_begins_in_the_first_token_ends_an_ar_fill():
    [a] = encode(" a")
    [ab] = encode("ab")
    sample = Sample("x", "infill", prefix="cd ", suffix=".", reference="a", max_new_tokens=4, stop=("a a",))
    [answer] = ARSystem(wanting(a, ab), length="auto").answer([sample], [0])
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "stop")
    [answer] = ARSystem(wanting(a, ab), length="auto").answer([replace(sample, stop=(" a a",))], [0])
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a", (a,), "stop")
    for stop, text in ((("x",), "a"), (("a",), "")):
        [answer] = ARSystem(wanting(a, ab), length="oracle").answer([replace(sample, stop=stop)], [0])
        assert (answer.text, answer.token_ids) == (text, (a,) if text else ())
    [answer] = ARSystem(wanting(a, ab), length="auto").answer([replace(sample, stop=("x",))], [0])
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a a a a", (a,) * 4, "length")


def test_rows_that_begin_with_one_token_behind_different_white_space_keep_their_own_texts():
    code = code_tokenizer()
    [indent, x] = (code.encode(text, add_special_tokens=False)[0] for text in ("\n  ", "x"))
    model = wanting(indent, x)
    model.tokenizer = code
    samples = [
        Sample(f"s/{i}", "infill", prefix="ab" + white, suffix=".", reference="x", max_new_tokens=2, stop=("y",))
        for i, white in enumerate(("\n", "\n "))
    ]
    answers = ARSystem(model, length="auto").answer(samples, [0, 1])
    assert [answer.text for answer in answers] == ["  \n  ", " \n  "]


def test_an_ar_model_takes_the_likeliest_token_that_fits_in_a_padded_batch():
    model = ar_model()
    with torch.no_grad():
        # Laws that hang on what was read and where.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    model.tokenizer = code_tokenizer()
    system = ARSystem(model, None, {}, "fixed:1")
    assert system._white_space is not None
    words = ["ab", "x(1):", "abcdex", "zy.", "d2", "(a(b(c", "e", "xxyy1"]
    prefixes = [word + white for word in words for white in " \n"]
    samples = [Sample(prefix, "infill", prefix=prefix, suffix="", reference="x") for prefix in prefixes]
    for sample, answer in zip(samples, system.answer(samples, list(range(len(samples)))), strict=True):
        fits = system._white_space.fits(sample.prefix[-1].encode()).nonzero()[:, 0].tolist()
        scores = Judge(model).score([system.context_ids(sample)] * len(fits), [[token] for token in fits])
        best = max(zip(fits, scores, strict=True), key=lambda pair: pair[1].total)[0]
        assert len(fits) == 4
        assert [*(answer.white_space_ids or ()), *answer.token_ids][0] == best


@pytest.mark.parametrize("same", [True, False])
def test_the_judge_reads_the_white_space_with_the_fill(tmp_path, same):
    model, lm, task = ar_model(), text_lm(), GapTask()
    tokenizer = byte_tokenizer() if same else byte_tokenizer(True)
    judge = Judge(model)
    extras = Extras(judge, tokenizer, reference_likelihood=True, replays=2)
    if not same:
        tokenizer.add_tokens(["zz0"])
    run_task(task, task.samples(), DiffusionSystem(lm, {}, "oracle"), tmp_path, {}, batch_size=3, extras=extras)
    records = load_run(tmp_path).records
    for sample, record in zip(task.samples(), records, strict=True):
        bare = sample.prefix.rstrip() or sample.prefix
        [answer] = DiffusionSystem(lm, {}, "oracle").answer([sample], [record["seed"]])
        written = [*(answer.white_space_ids or ()), *answer.token_ids]
        if not same:
            written = encode(sample.prefix[len(bare) :] + answer.text)
        [score] = judge.score([encode(bare)], [[*written, *encode(sample.suffix)]])
        assert record["log_likelihood"] == pytest.approx(score.total, abs=1e-4)
    replays = json.loads((tmp_path / "replays.json").read_text())
    assert [r["steps"][-1]["token_ids"] for r in replays] == [r["token_ids"] for r in records[:2]]
