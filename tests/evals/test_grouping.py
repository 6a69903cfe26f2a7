"""Several samples of one question: pass@k with known values, intervals over questions, and the command's option."""

import json
from itertools import combinations

import pytest
from typer.testing import CliRunner

from dllm.cli import app
from dllm.evals.grouping import pass_rates, question_means, repeated, score_interval
from dllm.evals.report_data import load_views
from dllm.evals.report_markdown import render_markdown
from dllm.evals.run_store import RESULT, load_run
from dllm.evals.runner import run_task, summary
from dllm.pipeline import DiffusionLM
from tests.evals.fakes import EchoTask, OracleSystem
from tests.words import text_lm


class Sometimes(OracleSystem):
    """Of the four answers to question e/i, the first min(i, 4) are right."""

    def _one(self, sample, rows, history):
        question, _, number = sample.id.partition("#")
        self.wrong = lambda i: int(number) > int(question[2:])
        # The oracle reads the question's number from the id's end.
        named = sample.__class__(question, "generate", prompt=sample.prompt, reference=sample.reference)
        return super()._one(named, rows, history)


def test_pass_at_k_of_a_run_is_the_share_of_draws_that_hold_a_pass(tmp_path):
    task = EchoTask(count=5)
    samples = repeated(task.samples(), 4)
    assert [s.id for s in samples[:5]] == ["e/0#1", "e/0#2", "e/0#3", "e/0#4", "e/1#1"]
    assert {s.question for s in samples} == {f"e/{i}" for i in range(5)}
    run_task(task, samples, Sometimes(), tmp_path, {"model": "oracle"}, batch_size=3)
    result = json.loads((tmp_path / RESULT).read_text())
    passed = [min(i, 4) for i in range(5)]
    for k in (1, 2, 4):
        drawn = [[any(j < c for j in draw) for draw in combinations(range(4), k)] for c in passed]
        expected = sum(sum(d) / len(d) for d in drawn) / 5
        found = result["summary"]["pass_at_k"][str(k)]
        assert found["estimate"] == pytest.approx(expected) and found["n"] == 5
        assert found["low"] < found["estimate"] < found["high"] or k == 4
    assert sorted(result["summary"]["pass_at_k"]) == ["1", "2", "4"]
    # The mean score has the interval of five questions, not of twenty samples.
    score = result["summary"]["means"]["score.exact"]
    assert score["n"] == 5 and score["estimate"] == result["summary"]["pass_at_k"]["1"]["estimate"]
    assert len({r["seed"] for r in load_run(tmp_path).records}) == 20
    [view] = load_views([tmp_path])
    assert view.score is not None and view.score.n == 5 and view.pass_rates[4].estimate == 0.8
    assert "@4 80.0" in render_markdown([view], "x")


def test_one_sample_each_is_no_pass_at_k_and_stays_as_it_is():
    samples = EchoTask().samples()
    assert repeated(samples, 1) == samples
    assert question_means(["a", "b"], [0.0, 1.0]) == [0.0, 1.0]
    assert question_means(["a", "b", "a"], [0.0, 1.0, 0.5]) == [0.25, 1.0]
    assert pass_rates(["a", "b"], [0.0, 1.0]) == {}
    assert pass_rates([], []) == {}
    # A likelihood is no pass or fail.
    assert pass_rates(["a", "a"], [0.5, 1.0]) == {}
    with pytest.raises(ValueError, match="samples per task must be >= 1: got 0"):
        repeated(samples, 0)


def test_a_score_of_nothing_but_fails_still_has_a_width():
    # Wilson's upper bound at 0 of n is z^2 / (n + z^2).
    found = score_interval(["a", "b", "c", "d"], [0.0] * 4)
    assert (found.estimate, found.low) == (0.0, 0.0) and found.high == pytest.approx(
        1.95996**2 / (4 + 1.95996**2), abs=1e-4
    )
    assert score_interval(["a", "a", "b"], [0.0, 1.0, 1.0]).estimate == 0.75
    assert score_interval(["a", "b"], [0.25, 0.75]).n == 2


def test_k_goes_up_to_the_fewest_samples_of_a_question():
    rates = pass_rates(["a"] * 3 + ["b"] * 5, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    assert sorted(rates) == [1, 2, 3]
    assert rates[1].estimate == pytest.approx((1 / 3 + 1 / 5) / 2)
    assert rates[3].estimate == pytest.approx((1.0 + 6 / 10) / 2)


def test_a_summary_without_scores_says_what_things_cost():
    record = {"id": "a", "scores": {}, "loops": False, "log_likelihood": None, "nfe": 2, "guide_nfe": 0, "draft_nfe": 0}
    found = summary(iter([record | {"useful_tokens": 4, "positions": 9}]), "exact")
    assert found["tokens_per_forward"]["estimate"] == 2.0 and "pass_at_k" not in found


def test_the_command_answers_each_question_several_times(tmp_path, monkeypatch):
    monkeypatch.setattr(DiffusionLM, "from_pretrained", classmethod(lambda cls, name, **_: text_lm()))
    (tmp_path / "a.txt").write_text("the cab had a bad day\nhe had a hat\nabc the cat\n")
    command = ["eval", "infill", "--files", str(tmp_path / "a.txt"), "--output", str(tmp_path / "runs"), "--limit", "2"]
    command += ["--length", "fixed:3", "--replays", "0", "--samples-per-task", "3"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code != 0 and "needs a --temperature above 0" in " ".join(refused.output.split())
    done = CliRunner().invoke(app, [*command, "--temperature", "1.0"])
    assert done.exit_code == 0, done.output
    saved = load_run(tmp_path / "runs" / "files_infill@fixed3")
    assert len(saved.records) == 6 and len({r["question"] for r in saved.records}) == 2
    assert saved.run["settings"]["samples_per_task"] == 3
    assert len({tuple(r["token_ids"]) for r in saved.records[:3]}) > 1
