import gc
import json
import multiprocessing
import os
import random
import signal
import time
import tracemalloc

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dllm.evals.judge import Judge
from dllm.evals.report_data import load_views
from dllm.evals.run_store import RESULT, RUN, SAMPLES, load_run
from dllm.evals.runner import Extras, headline, run_task, sample_seed
from dllm.evals.systems import ARSystem, DiffusionSystem, fill_length
from dllm.evals.task import Sample
from tests.evals.fakes import EchoTask, FakeTokenizer, OracleSystem
from tests.tiny import VOCAB
from tests.words import byte_tokenizer, text_lm


def result_bytes(folder):
    return (folder / SAMPLES).read_bytes(), (folder / RESULT).read_bytes()


def run(folder, task=None, system=None, **options):
    task = task or EchoTask()
    return run_task(task, task.samples(), system or OracleSystem(), folder, {"model": "oracle"}, **options)


def test_an_oracle_of_known_forwards_and_tokens_gives_exactly_the_stated_counts(tmp_path):
    assert run(tmp_path, system=OracleSystem(wrong=lambda i: i % 4 == 0), batch_size=5)
    result = json.loads((tmp_path / RESULT).read_text())
    tokens = [5 if i % 4 == 0 else len(f"word {i}") for i in range(12)]
    totals = {"nfe": 36, "guide_nfe": 0, "draft_nfe": 0, "useful_tokens": sum(tokens), "positions": 180}
    assert result["summary"]["totals"] == totals
    assert result["summary"]["tokens_per_forward"]["estimate"] == pytest.approx(sum(tokens) / 36)
    score = headline(result)
    assert score is not None and score.estimate == 0.75 and score.low < 0.75 < score.high and score.n == 12


def test_every_sample_is_asked_once_with_a_seed_of_its_own(tmp_path):
    system = OracleSystem()
    run(tmp_path, system=system, batch_size=5)
    assert [len(call) for call in system.calls] == [5, 5, 2]
    assert sorted(i for call in system.calls for i in call) == sorted(f"e/{i}" for i in range(12))
    assert len({record["seed"] for record in load_run(tmp_path).records}) == 12
    assert sample_seed(0, "e/1") != sample_seed(1, "e/1")
    # Nothing is left to do.
    again = OracleSystem()
    assert run(tmp_path, system=again, batch_size=5)
    assert again.calls == []


def _work(folder):
    run(folder, EchoTask(count=40), OracleSystem(sleep_s=0.01), batch_size=3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the run is killed in a forked process")
def test_a_run_killed_five_times_at_random_moments_ends_with_the_result_of_an_unbroken_one(tmp_path):
    fork = multiprocessing.get_context("fork")
    _work(tmp_path / "unbroken")
    rng = random.Random(11)
    broken = tmp_path / "broken"
    shard = broken / "shard-00000.jsonl"
    for kill in range(5):
        process = fork.Process(target=_work, args=(broken,))
        process.start()
        # A random moment after some further lines: the five kills spread over the run.
        wanted, limit = 2 + 6 * kill + rng.random(), time.monotonic() + 60
        while time.monotonic() < limit and (not shard.exists() or shard.read_bytes().count(b"\n") < wanted):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        assert process.pid is not None and process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if kill == 2:
            # A kill inside of a write, as the disk would show it.
            with shard.open("ab") as file:
                file.write(b'{"index": 39, "rec')
    assert not (broken / RESULT).exists()
    _work(broken)
    assert result_bytes(broken) == result_bytes(tmp_path / "unbroken")
    indices = [json.loads(line)["index"] for line in shard.read_bytes().splitlines()]
    assert sorted(indices) == list(range(40))


def test_ranks_share_the_samples_and_end_with_the_result_of_one_process(tmp_path):
    run(tmp_path / "one", batch_size=2)
    systems = [OracleSystem() for _ in range(3)]
    complete = [run(tmp_path / "three", system=systems[rank], batch_size=2, rank=rank, world=3) for rank in (1, 0, 2)]
    assert complete == [False, False, True]
    assert [sum(map(len, system.calls)) for system in systems] == [4, 4, 4]
    assert result_bytes(tmp_path / "three") == result_bytes(tmp_path / "one")


def test_memory_stays_flat_over_two_thousand_samples(tmp_path):
    marks = {}

    def progress(done, total):
        if done in (500, 2000):
            gc.collect()
            marks[done] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        # One of two ranks: its 2000 samples without the summary at the end, whose bootstrap takes longer than they do.
        task = EchoTask(count=4000)
        run(tmp_path, task, ForgetfulOracle(), batch_size=20, progress=progress, world=2)
    finally:
        tracemalloc.stop()
    # 1500 records of some 500 bytes each would be 750 kB and more.
    assert marks[2000] - marks[500] < 50_000
    assert len(load_run(tmp_path).records) == 2000


class ForgetfulOracle(OracleSystem):
    def answer(self, samples, seeds, history=False):
        try:
            return super().answer(samples, seeds, history)
        finally:
            self.calls.clear()


def test_bad_arguments_and_results_are_named(tmp_path):
    task = EchoTask()
    with pytest.raises(ValueError, match="at least one sample"):
        run_task(task, [], OracleSystem(), tmp_path, {})
    with pytest.raises(ValueError, match="unique ids"):
        run_task(task, task.samples(limit=1) * 2, OracleSystem(), tmp_path, {})
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\): got 2"):
        run(tmp_path, rank=2, world=2)
    with pytest.raises(ValueError, match="batch_size must be >= 1: got 0"):
        run(tmp_path, batch_size=0)
    task.needs_execution = True
    with pytest.raises(ValueError, match="--allow-code-execution"):
        run(tmp_path, task)
    for bad in ("fixed", "fixed:0", "fixed:x", "16"):
        with pytest.raises(ValueError, match="length must be"):
            fill_length(bad)


class WordTask(EchoTask):
    """Prompts that the tiny tokenizer can spell."""

    def samples(self, data=None, limit=None, seed=0):
        words = ["abc the", "d", "cab 12 the bad", "he", "the a", "zz top"]
        if self.kind == "infill":
            return [
                Sample(f"w/{i}", "infill", prefix=w, suffix=w[::-1], reference=w[:4], max_new_tokens=5)
                for i, w in enumerate(words)
            ]
        return [Sample(f"w/{i}", "generate", prompt=w, max_new_tokens=6 + 3 * (i % 2)) for i, w in enumerate(words)]


@pytest.mark.parametrize(
    ("kind", "options", "length"),
    [
        ("generate", {"threshold": 0.3}, "auto"),
        ("generate", {"temperature": 1.0}, "auto"),
        ("infill", {"threshold": 0.3}, "oracle"),
        ("infill", {}, "fixed:3"),
        ("infill", {}, "auto"),
    ],
)
def test_the_batch_size_does_not_change_a_sample(tmp_path, kind, options, length):
    lm = text_lm()
    task = WordTask(kind)
    found = []
    for size in (1, 4):
        folder = tmp_path / str(size)
        run_task(task, task.samples(), DiffusionSystem(lm, options, length), folder, {}, batch_size=size, seed=5)
        found.append((folder / SAMPLES).read_bytes())
    assert found[0] == found[1]
    records = load_run(tmp_path / "1").records
    assert all(r["nfe"] > 0 for r in records)
    if length == "oracle":
        assert [len(r["token_ids"]) for r in records] == [r["true_length"] for r in records]
    if length == "fixed:3":
        assert {len(r["token_ids"]) for r in records} == {3}


def ar_model():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, bos_token_id=0, eos_token_id=2,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    model.tokenizer = byte_tokenizer()
    return model


@pytest.mark.parametrize("infill", ["prefix", "prompt"])
def test_an_ar_model_generates_and_fills_gaps_of_the_asked_length(tmp_path, infill):
    model = ar_model()
    system = ARSystem(model, length="oracle", infill=infill, max_new_tokens=4)
    judge = Judge(ar_model())
    for kind in ("generate", "infill"):
        task = WordTask(kind)
        rows = task.samples()
        if infill == "prompt":
            rows = [Sample(r.id, r.kind, r.prompt, (), r.prefix[:3], r.suffix[:3], r.reference[:3]) for r in rows]
            system.infill = "prefix" if kind == "generate" else "prompt"
        extras = Extras(judge, byte_tokenizer(), reference_likelihood=True)
        if kind == "infill" and infill == "prompt":
            # The request does not fit the tiny model's positions in any of its spellings.
            model.config.max_position_embeddings = 2048
        run_task(task, rows, system, tmp_path / kind, {}, batch_size=4, extras=extras)
        records = load_run(tmp_path / kind).records
        assert all(r["log_likelihood"] < 0 for r in records if r["scored_tokens"])
        if kind == "infill":
            assert all(r["reference_log_likelihood"] < 0 for r in records)
            lengths = [len(r["token_ids"]) for r in records]
            true = [r["true_length"] for r in records]
            assert lengths == true if infill == "prefix" else all(a <= b for a, b in zip(lengths, true, strict=True))


def test_the_judge_reads_an_infill_with_its_suffix(tmp_path):
    model = ar_model()
    lm = text_lm()
    task = WordTask("infill")
    extras = Extras(Judge(model), byte_tokenizer(), reference_likelihood=True, replays=2)
    system = DiffusionSystem(lm, {}, "oracle")
    run_task(task, task.samples(), system, tmp_path, {}, batch_size=3, extras=extras)
    sample, record = task.samples()[0], load_run(tmp_path).records[0]
    encode = byte_tokenizer().encode
    [score] = Judge(model).score([encode(sample.prefix)], [[*record["token_ids"], *encode(sample.suffix)]])
    assert record["log_likelihood"] == pytest.approx(score.total, abs=1e-4)
    assert record["scored_tokens"] == score.num_tokens
    replays = json.loads((tmp_path / "replays.json").read_text())
    assert [r["id"] for r in replays] == ["w/0", "w/1"]
    assert replays[0]["steps"][-1]["token_ids"] == record["token_ids"]


def test_a_system_without_denoise_steps_leaves_no_replays(tmp_path):
    task = WordTask()
    run_task(task, task.samples(), ARSystem(ar_model(), max_new_tokens=2), tmp_path, {}, extras=Extras(replays=1))
    assert not (tmp_path / "replays.json").exists()
    assert FakeTokenizer().decode([97]) == "a"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"index": 0}, "must have 'record'"),
        ({"index": "0", "record": {}, "time": {}}, "'index' must be int: got '0'"),
        ({"index": 0, "record": {"id": "e/0"}, "time": {}}, "record: must have 'given'"),
        ([0], "must be a JSON object"),
        ({"index": 70, "record": None, "time": {}}, "'record' must be dict: got 'None'"),
    ],
)
def test_a_run_with_a_damaged_line_does_not_go_on_and_names_it(tmp_path, line, message):
    task = EchoTask(count=3)
    run_task(task, task.samples(), OracleSystem(), tmp_path, {})
    (tmp_path / RESULT).unlink()
    shard = tmp_path / "shard-00000.jsonl"
    shard.write_text(json.dumps(line) + "\n" + shard.read_text(encoding="utf-8"), encoding="utf-8")
    for use in (lambda: run_task(task, task.samples(), OracleSystem(), tmp_path, {}), lambda: load_views([tmp_path])):
        with pytest.raises(ValueError, match=f"shard-00000.jsonl, line 1.*{message}"):
            use()


def test_a_damaged_run_file_is_named_when_a_run_goes_on(tmp_path):
    task = EchoTask(count=3)
    run_task(task, task.samples(), OracleSystem(), tmp_path, {})
    for text, message in (("[]", "must be a JSON object"), ('{"format"', "must be JSON")):
        (tmp_path / RUN).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"run.json: {message}"):
            run_task(task, task.samples(), OracleSystem(), tmp_path, {})
