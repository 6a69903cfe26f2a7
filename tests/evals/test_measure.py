import io
import re
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.evals.judge import Judge
from dllm.evals.measure import Comparison, Measurement, compare, filled, measure, render_table
from dllm.evals.statistics import Interval
from dllm.output import InfillOutput, Stats

PHRASE = list(range(10, 18))


@dataclass(frozen=True)
class Cost:
    nfe: int = 0
    guide_nfe: int = 0
    draft_nfe: int = 0
    useful_tokens: int = 0
    positions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    accept_lengths: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Output:
    texts: list[str]
    sequences: torch.Tensor
    finish_reasons: list[str]
    stats: Cost
    row_stats: list[Cost]


def oracle(answers, nfe, reason="stop"):
    """A run that answers each prompt with known ids in a known number of forwards, right-padded as `GenerationOutput`
    is.
    """

    def run(batch):
        rows = [answers[prompt] for prompt in batch]
        width = max(len(row) for row in rows) + 3
        return Output(
            texts=[" ".join(map(str, row)) for row in rows],
            sequences=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            finish_reasons=[reason] * len(rows),
            stats=Cost(prefill_s=0.5, decode_s=2.0 * len(rows)),
            row_stats=[
                Cost(
                    nfe=nfe[p], useful_tokens=len(answers[p]), positions=5 * nfe[p], draft_nfe=1, accept_lengths=[2, 4]
                )
                for p in batch
            ],
        )

    return run


def known(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


def estimate(interval: Interval | None) -> float:
    return known(interval).estimate


ANSWERS = {"a": [1, 2, 3, 4, 5, 6], "b": [7, 8], "c": PHRASE * 3, "d": []}
NFE = {"a": 3, "b": 2, "c": 4, "d": 1}
PROMPTS = list(ANSWERS)


@pytest.fixture(scope="module")
def judge():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    return Judge(LlamaForCausalLM(config).eval())


IDS = [[1], [2, 3], [4], [5, 6, 7]]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 9])
def test_an_oracle_gives_exactly_the_stated_counts_at_any_batch_size(judge, batch_size):
    m = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="oracle", prompt_ids=IDS, batch_size=batch_size)
    assert [s.useful_tokens for s in m.samples] == [6, 2, 24, 0]
    assert [list(s.tokens) for s in m.samples] == list(ANSWERS.values())
    assert (m.total("useful_tokens"), m.total("nfe"), m.total("positions"), m.total("draft_nfe")) == (32, 10, 50, 4)
    assert estimate(m.tokens_per_forward) == pytest.approx(3.2)
    assert estimate(m.tokens_per_forward_no_loops) == pytest.approx(8 / 6)
    assert known(m.tokens_per_forward_no_loops).n == 3
    assert m.length.estimate == 8.0
    assert m.loop_rate.estimate == 0.25
    assert estimate(m.tokens_per_second) == pytest.approx(32 / 8.0)
    assert estimate(m.accept_length) == 3.0
    assert m.finish_reasons == {"stop": 4}
    assert len(m.batch_seconds) == -(-4 // batch_size)
    assert m.prefill_s == pytest.approx(0.5 * len(m.batch_seconds))
    assert m.total("seconds") == pytest.approx(sum(m.batch_seconds))


def test_likelihoods_are_the_judges_over_answers_and_over_tokens(judge):
    m = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="oracle", prompt_ids=IDS, batch_size=2)
    scores = judge.score(IDS, list(ANSWERS.values()))
    means = [score.mean for score in scores if score.num_tokens]
    assert estimate(m.log_likelihood) == pytest.approx(sum(means) / 3)
    assert known(m.log_likelihood).n == 3
    assert estimate(m.log_likelihood_no_loops) == pytest.approx(sum(means[:2]) / 2)
    assert estimate(m.log_likelihood_by_token) == pytest.approx(sum(s.total for s in scores) / 32)
    assert m.samples[3].log_likelihood is None
    assert known(m.log_likelihood).low < estimate(m.log_likelihood) < known(m.log_likelihood).high


def test_a_judge_with_its_own_vocabulary_reads_the_text(judge):
    def encode(text):
        return [int(word) + 30 for word in text.split()]

    m = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="oracle", prompt_ids=IDS, encode=encode)
    (score,) = judge.score([IDS[1]], [[37, 38]])
    assert m.samples[1].log_likelihood == pytest.approx(score.total)


def test_warm_up_batches_are_run_and_not_counted():
    calls, done = [], []
    run = oracle(ANSWERS, NFE)

    def counted(batch):
        calls.append(list(batch))
        return run(batch)

    m = measure(
        counted, PROMPTS, name="x", batch_size=3, warmup=1, progress=lambda part, whole: done.append((part, whole))
    )
    assert calls == [["a", "b", "c"], ["a", "b", "c"], ["d"]]
    assert done == [(3, 4), (4, 4)]
    assert len(m.samples) == 4
    assert m.log_likelihood is None


def test_json_gives_an_equal_measurement_back(judge, tmp_path):
    m = measure(
        oracle(ANSWERS, NFE), PROMPTS, judge, name="oracle", settings={"threshold": 0.9, "cache": None}, prompt_ids=IDS
    )
    assert Measurement.from_json(m.to_json()) == m
    assert Measurement.load(m.save(tmp_path / "m.json")) == m
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    c = compare(m, m)
    assert Comparison.from_json(c.to_json()) == c


def test_files_of_another_kind_are_refused(judge):
    m = measure(oracle(ANSWERS, NFE), PROMPTS, name="oracle")
    with pytest.raises(ValueError, match="format"):
        Measurement.from_json("{}")
    with pytest.raises(ValueError, match="Measurement must have the fields"):
        Measurement.from_json(m.to_json().replace('"prefill_s"', '"prefill_ms"'))
    with pytest.raises(ValueError, match="Sample must have the fields"):
        Measurement.from_json(m.to_json().replace('"scored_tokens"', '"scored"'))


def test_a_comparison_is_paired_by_prompt(judge):
    slow_answers = {**ANSWERS, "a": [1, 2, 3], "c": [20, 21, 22, 23]}
    slow_nfe = {"a": 3, "b": 2, "c": 4, "d": 1}
    fast = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="fast", prompt_ids=IDS)
    slow = measure(oracle(slow_answers, slow_nfe), PROMPTS, judge, name="slow", prompt_ids=IDS)
    c = compare(fast, slow)
    assert (c.a, c.b, c.n, c.num_identical) == ("fast", "slow", 4, 2)
    assert estimate(c.length_ratio) == pytest.approx(32 / 9)
    assert estimate(c.nfe_ratio) == 1.0
    assert c.loop_rate_points.estimate == 25.0
    assert estimate(c.tokens_per_forward_ratio) == pytest.approx((32 / 10) / (9 / 10))
    assert estimate(c.tokens_per_forward_ratio_no_loops) == pytest.approx((8 / 6) / (5 / 6))
    per_token = [[s.log_likelihood_per_token or 0.0 for s in m.samples[:3]] for m in (fast, slow)]
    differences = [x - y for x, y in zip(*per_token, strict=True)]
    assert estimate(c.log_likelihood_difference) == pytest.approx(sum(differences) / 3)
    assert known(c.log_likelihood_difference).n == 3
    assert estimate(c.log_likelihood_difference_no_loops) == pytest.approx(differences[0] / 2)


def test_a_setting_against_itself_shows_no_difference(judge):
    m = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="x", prompt_ids=IDS)
    c = compare(m, m)
    for interval, value in [
        (c.log_likelihood_difference, 0.0),
        (c.length_ratio, 1.0),
        (c.loop_rate_points, 0.0),
        (c.tokens_per_forward_ratio, 1.0),
        (c.speed_ratio, 1.0),
    ]:
        bounds = known(interval)
        assert (bounds.estimate, bounds.low, bounds.high) == pytest.approx((value, value, value))
    assert c.num_identical == 4


def test_an_infill_is_measured_by_the_tokens_of_its_gaps(judge):
    output = InfillOutput(
        texts=["AxB", "AyBzC"],
        fills=["x", ["y", "z"]],
        fill_ids=[[[1, 2]], [[3], [4, 5, 6]]],
        lengths=[[2], [1, 3]],
        scores=[0.0, 0.0],
        stats=Stats(nfe=4, decode_s=1.0),
        row_stats=[Stats(nfe=2), Stats(nfe=4)],
    )
    m = measure(lambda batch: filled(output), ["p", "q"], judge, name="infill", prompt_ids=IDS[:2], batch_size=2)
    assert [s.tokens for s in m.samples] == [(1, 2), (3, 4, 5, 6)]
    assert [s.text for s in m.samples] == ["x", "yz"]
    assert estimate(m.tokens_per_forward) == 1.0
    assert m.finish_reasons == {"filled": 2}


def test_other_prompts_cannot_be_compared():
    a = measure(oracle(ANSWERS, NFE), PROMPTS, name="a")
    b = measure(oracle(ANSWERS, NFE), PROMPTS[::-1], name="b")
    with pytest.raises(ValueError, match="same prompts in the same order"):
        compare(a, b)


def test_answers_that_are_all_empty_have_no_likelihood_and_no_ratio(judge):
    m = measure(oracle({"d": []}, {"d": 1}), ["d"], judge, name="empty", prompt_ids=[[1]])
    assert m.log_likelihood is None
    assert estimate(m.tokens_per_forward) == 0.0
    c = compare(m, m)
    assert c.log_likelihood_difference is None
    assert c.length_ratio is None
    assert c.tokens_per_forward_ratio is None


def test_an_output_that_contradicts_itself_is_refused():
    run = oracle(ANSWERS, NFE)

    def changed(change, batch):
        return change(run(batch))

    for change, message in [
        (lambda o: replace(o, texts=o.texts[:1]), "one row per prompt"),
        (
            lambda o: replace(o, row_stats=[replace(o.row_stats[0], useful_tokens=99), *o.row_stats[1:]]),
            "useful_tokens",
        ),
        (lambda o: replace(o, row_stats=[replace(o.row_stats[0], nfe=0), *o.row_stats[1:]]), "nfe must be >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            measure(partial(changed, change), PROMPTS, name="x", batch_size=4)


def test_bad_arguments_are_named_before_anything_runs(judge):
    def never(batch):
        raise AssertionError("run was called")

    with pytest.raises(ValueError, match="prompts"):
        measure(never, [], name="x")
    with pytest.raises(ValueError, match="prompt_ids"):
        measure(never, PROMPTS, judge, name="x")
    with pytest.raises(ValueError, match="prompt_ids"):
        measure(never, PROMPTS, judge, name="x", prompt_ids=IDS[:2])
    with pytest.raises(ValueError, match="batch_size"):
        measure(never, PROMPTS, name="x", batch_size=0)
    with pytest.raises(ValueError, match="warmup"):
        measure(never, PROMPTS, name="x", warmup=-1)
    with pytest.raises(TypeError, match="prompt 0 is a Tensor"):
        measure(never, [torch.tensor([1])], name="x")
    with pytest.raises(TypeError, match="JSON"):
        measure(never, PROMPTS, name="x", settings={"dtype": torch.float32})


def printed(table, width):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(table)
    return stream.getvalue()


def table_rows(text, names):
    """{name: cells} of the first line of each row whose name starts with one of `names`."""
    lines = [line.strip() for line in text.splitlines()]
    cells = [re.split(r" {2,}", line) for line in lines if line.startswith(tuple(names))]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize(("width", "intervals"), [(80, False), (95, True)])
def test_the_table_shows_totals_rates_and_the_ratio_to_the_baseline(judge, width, intervals):
    slow = measure(oracle(ANSWERS, {k: 10 * v for k, v in NFE.items()}), PROMPTS, judge, name="x", prompt_ids=IDS)
    fast = measure(oracle(ANSWERS, NFE), PROMPTS, judge, name="x", prompt_ids=IDS)
    # The same answers in a quarter of the time, whatever the clock said.
    slow = Measurement.of("vanilla", [replace(s, seconds=4.0) for s in slow.samples])
    fast = Measurement.of("threshold [0.9]", [replace(s, seconds=1.0) for s in fast.samples])
    text = printed(render_table([slow, fast], intervals=intervals), width)
    rows = table_rows(text, ["vanilla", "threshold"])
    likelihood = f"{estimate(fast.log_likelihood):.2f}"
    assert rows["vanilla"] == ["32", "100", "0.32", "500", "16.0", "1.00", likelihood, "25"]
    assert rows["threshold [0.9]"] == ["32", "10", "3.20", "50", "4.0", "4.00", likelihood, "25"]
    assert ("4.00..4.00" in text) == intervals
    assert "…" not in text
    # The rule under the headings; a word of them is never broken.
    above = " ".join(text[: text.index("─")].split())
    assert above == "useful tokens/ loops setting tokens forwards forward positions seconds ratio log-lik. %"
    for word in ("forwards:", "positions:", "ratio:", "log-lik.:", "judge", "loops:"):
        assert word in text
    slower = table_rows(printed(render_table([slow, fast], "threshold [0.9]", intervals=False), width), ["vanilla"])
    assert slower["vanilla"][5] == "0.25"


def test_rows_of_other_prompts_get_no_ratio():
    a = measure(oracle(ANSWERS, NFE), PROMPTS, name="a")
    b = measure(oracle(ANSWERS, NFE), PROMPTS[:2], name="b")
    assert table_rows(printed(render_table([a, b], intervals=False), 80), ["b "])["b"][5] == "-"
    with pytest.raises(ValueError, match=r"baseline must be one of \['a', 'b'\]"):
        render_table([a, b], baseline="c")
    with pytest.raises(ValueError, match="measurements"):
        render_table([])
