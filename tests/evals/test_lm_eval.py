"""A real task of lm-evaluation-harness, from a local file, on a tiny model."""

import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: its tasks are not run (pip install dllm-toolkit[evals])"
)

import lm_eval
from lm_eval.tasks import TaskManager

from dllm.evals.lm_eval_model import DllmLM, main
from dllm.evals.run_store import load_run
from dllm.evals.runner import run_task
from dllm.evals.systems import DiffusionSystem
from dllm.evals.task import Sample
from dllm.pipeline import DiffusionLM
from tests.evals.fakes import EchoTask
from tests.words import text_lm

QUESTIONS = ["abc the", "dab", "cab 12 the bad", "he", "the a", "zip top", "a b c", "mad", "hat", "cat 1"]
OPTIONS: dict[str, Any] = {"threshold": 0.3}


def call(*arguments):
    return SimpleNamespace(args=arguments)


class LocalTask(EchoTask):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def samples(self, data=None, limit=None, seed=0):
        return [
            Sample(
                f"q/{i}", "generate", prompt=f"{r['question']}\n", reference=r["answer"], max_new_tokens=7, stop=("e",)
            )
            for i, r in enumerate(self.rows)
        ]

    def score(self, sample, output, execute=None):
        return {"exact": float(output.strip() == sample.reference.strip())}


@pytest.fixture
def local_task(tmp_path):
    """Ten questions; the reference of every other one is what the model says."""
    lm = text_lm()
    said = lm.generate(
        [f"{q}\n" for q in QUESTIONS], use_chat_template=False, max_new_tokens=7, stop_strings=["e"], **OPTIONS
    ).texts
    rows = [
        {"question": q, "answer": s if i % 2 else "x" + s} for i, (q, s) in enumerate(zip(QUESTIONS, said, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local_words.yaml").write_text(
        f"""
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{tmp_path / "rows.jsonl"}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}\\n"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["e"], max_gen_toks: 7, do_sample: false}}
filter_list:
  - name: strip
    filter: [{{function: take_first}}]
metric_list:
  - metric: !function local_metric.exact
    aggregation: mean
    higher_is_better: true
metadata: {{version: 1}}
"""
    )
    (tmp_path / "local_metric.py").write_text(
        "def exact(predictions, references):\n    return float(predictions[0].strip() == references[0].strip())\n"
    )
    return rows


def only_value(results):
    [value] = [v for k, v in results.items() if k.startswith("exact") and "stderr" not in k]
    return value


def test_a_local_task_scores_as_our_own_runner_does(tmp_path, local_task):
    lm = text_lm()
    model = DllmLM(pretrained=lm, batch_size=4, **OPTIONS)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["local_words"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    task = LocalTask(local_task)
    run_task(task, task.samples(), DiffusionSystem(lm, OPTIONS), tmp_path / "run", {}, batch_size=3)
    ours = load_run(tmp_path / "run").records
    score = sum(record["scores"]["exact"] for record in ours) / len(ours)
    assert only_value(found["results"]["local_words"]) == score
    assert 0.5 <= score < 1
    theirs = [sample["resps"][0][0] for sample in found["samples"]["local_words"]]
    assert theirs == [record["output"] for record in ours]


@pytest.mark.slow
def test_the_command_line_of_lm_eval_knows_the_model(tmp_path, local_task, monkeypatch):
    monkeypatch.setattr(DiffusionLM, "from_pretrained", classmethod(lambda cls, name, **_: text_lm()))
    monkeypatch.setattr(sys, "argv", ["dllm"])
    out = tmp_path / "out"
    names = {"--model": "dllm", "--model_args": "pretrained=tiny,threshold=0.3", "--tasks": "local_words"}
    names |= {"--batch_size": "2", "--include_path": str(tmp_path), "--output_path": str(out), "--device": "cpu"}
    main([word for pair in names.items() for word in pair])
    [found] = out.rglob("results_*.json")
    assert 0.5 <= only_value(json.loads(found.read_text())["results"]["local_words"]) < 1


def test_likelihoods_are_those_of_the_model_and_greedy_is_what_it_decodes():
    lm = text_lm()
    model = DllmLM(pretrained=lm, **OPTIONS)
    said = lm.generate("abc", use_chat_template=False, max_new_tokens=5, **OPTIONS).texts[0]
    ids = lm.tokenizer.encode(said, add_special_tokens=False)
    lm_ids = lm.generate("abc", use_chat_template=False, max_new_tokens=5, **OPTIONS).sequences[0].tolist()
    (nats, greedy), (other, not_greedy) = model.loglikelihood([call("abc", said), call("abc", "x" + said)])
    n = len(lm.tokenizer.encode("abc", add_special_tokens=False))
    whole = lm.tokenizer.encode("abc" + said, add_special_tokens=False)
    assert nats == pytest.approx(lm.loglikelihood(whole[:n], whole[n:], method="chain"), abs=1e-5)
    assert greedy == (ids == lm_ids[: len(ids)] and whole[n:] == ids)
    assert other < 0 and not_greedy is False
    # Nothing stands before the text: the model's document start does.
    [empty] = model.loglikelihood([call("", "abc")])
    start = lm.spec.document_start_id
    assert empty[0] == pytest.approx(lm.loglikelihood([start], [*model.tok_encode("abc")], method="chain"), abs=1e-5)


def test_a_rolling_likelihood_scores_every_token_once_over_windows():
    lm = text_lm()
    model = DllmLM(pretrained=lm)
    text = "the cab had a bad day 12"
    ids = model.tok_encode(text)
    [whole] = model.loglikelihood_rolling([call(text)])
    assert whole == pytest.approx(lm.loglikelihood([lm.spec.document_start_id], ids, method="chain"), abs=1e-4)
    short = text_lm(max_positions=11)
    [cut] = DllmLM(pretrained=short).loglikelihood_rolling([call(text)])
    expected = short.loglikelihood([short.spec.document_start_id], ids[:10], method="chain")
    assert len(ids) > 12
    for start in range(10, len(ids), 10):
        span = ids[start : start + 10]
        low = start + len(span) - 10 - 1
        context = ids[low:start]
        expected += short.loglikelihood(context, span, method="chain")
    assert cut == pytest.approx(expected, abs=1e-4)


def test_generation_arguments_are_honoured_or_refused_by_name():
    model = DllmLM(pretrained=text_lm(), max_gen_toks=6)
    assert model._settings({"until": "x"}) == (("x",), 6, ())
    assert model._settings({"until": ["x", ""], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}) == (
        ("x",), 3, (("temperature", 0.0),)
    )  # fmt: skip
    assert model._settings({"do_sample": True, "top_k": 5}) == ((), 6, (("temperature", 1.0), ("top_k", 5)))
    assert model._settings({"temperature": 0.5}) == ((), 6, (("temperature", 0.5),))
    with pytest.raises(ValueError, match=r"\['repetition_penalty'\]"):
        model.generate_until([call("abc", {"repetition_penalty": 2.0})])
    drawn = [model.generate_until([call("abc", {"do_sample": True})])[0] for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_unknown_model_arguments_raise_at_once():
    with pytest.raises(TypeError, match="unknown argument 'treshold'"):
        DllmLM(pretrained=text_lm(), treshold=0.9)
    with pytest.raises(ValueError, match="batch_size must be a number"):
        DllmLM(pretrained=text_lm(), batch_size="auto")
    with pytest.raises(ValueError, match="likelihood must be one of"):
        DllmLM(pretrained=text_lm(), likelihood="exact")
    with pytest.raises(ValueError, match="fit in 16 positions"):
        DllmLM(pretrained=text_lm(max_positions=16)).loglikelihood([call("abc", "d" * 20)])


def test_the_entry_point_names_the_class():
    path = Path(__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["entry-points"]["lm_eval.models"]
    assert EntryPoint("dllm", points["dllm"], "lm_eval.models").load() is DllmLM
