import json
import re

import pytest
from typer.testing import CliRunner

from dllm.cli import app
from dllm.evals import systems
from dllm.evals.run_store import RESULT, SAMPLES
from dllm.evals.tasks import registry
from dllm.pipeline import DiffusionLM
from tests.evals.fakes import EchoTask
from tests.words import text_lm


@pytest.fixture
def call(monkeypatch):
    """`dllm ...` with a tiny model in place of every checkpoint, and a task of its own."""
    monkeypatch.setattr(DiffusionLM, "from_pretrained", classmethod(lambda cls, name, **_: text_lm()))
    monkeypatch.setitem(registry.TASKS, "echo", EchoTask)
    monkeypatch.setitem(registry.TASKS, "echo_infill", lambda: EchoTask("infill"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    runner = CliRunner()

    def run(*arguments, code=0):
        done = runner.invoke(app, [str(a) for a in arguments])
        assert done.exit_code == code, done.output + repr(done.exception)
        return done.output

    return run


@pytest.fixture
def texts(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_text("the cat had a hat\nthe dog dug a ditch\nand the bat bit a bug\nthe end came at ten\n")
    return root


def test_infill_over_a_folder_runs_once_for_each_length(call, texts, tmp_path):
    out = tmp_path / "runs"
    text = call(
        "eval", "infill", "--files", texts, "--limit", 2, "--length", "oracle,fixed:2,auto", "-n", 3, "-o", out, "--batch-size", 2,
        "--task-option", "context=24"
    )  # fmt: skip
    names = sorted(p.name for p in out.iterdir())
    assert names == ["files_infill@auto", "files_infill@fixed2", "files_infill@oracle"]
    assert text.count("2 samples, exact_match") == 3
    results = {name: json.loads((out / name / RESULT).read_text()) for name in names}
    assert results["files_infill@fixed2"]["settings"]["length"] == "fixed:2"
    assert results["files_infill@fixed2"]["summary"]["totals"]["useful_tokens"] == 4
    page = tmp_path / "r.html"
    assert str(page) in call("report", out, "-o", page)
    assert "Gap lengths side by side" in page.read_text(encoding="utf-8")
    assert (tmp_path / "r.md").is_file()


def test_white_space_before_a_gap_is_an_option_of_infill_alone(call, texts, tmp_path):
    common = ("--limit", 2, "-n", 3, "--option", "heal_white_space=false", "-o", tmp_path / "runs")
    call("eval", "infill", "--files", texts, "--length", "fixed:2", *common)
    settings = json.loads((tmp_path / "runs" / "files_infill@fixed2" / RESULT).read_text())["settings"]
    assert settings["options"] == {"heal_white_space": False}
    assert "heal_white_space goes with infill tasks only" in call("eval", "echo", *common, code=2)
    assert not (tmp_path / "runs" / "echo").exists()


def test_a_second_call_finds_the_run_done_and_other_settings_are_refused(call, tmp_path, monkeypatch):
    arguments = (
        "eval",
        "echo",
        "--limit",
        3,
        "-n",
        4,
        "--threshold",
        0.4,
        "--option",
        "block_length=4",
        "-o",
        tmp_path,
    )
    call(*arguments)
    before = (tmp_path / "echo" / SAMPLES).read_bytes(), (tmp_path / "echo" / RESULT).read_bytes()
    settings = json.loads(before[1])["settings"]
    assert settings["options"] == {"threshold": 0.4, "block_length": 4} and settings["limit"] == 3

    def never(*_, **__):
        raise AssertionError("a finished run asks the model for nothing")

    monkeypatch.setattr(systems.DiffusionSystem, "answer", never)
    call(*arguments)
    assert ((tmp_path / "echo" / SAMPLES).read_bytes(), (tmp_path / "echo" / RESULT).read_bytes()) == before
    refused = call("eval", "echo", "--limit", 3, "-n", 4, "--threshold", 0.5, "-o", tmp_path, code=2)
    assert "settings.options.threshold: there 0.4, asked for 0.5" in " ".join(refused.split())


def test_the_ranks_of_a_launcher_share_the_samples(call, tmp_path, monkeypatch):
    call("eval", "echo", "--limit", 4, "-n", 4, "-o", tmp_path / "one")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        text = call("eval", "echo", "--limit", 4, "-n", 4, "-o", tmp_path / "two")
        assert ("others are still at work" in text) == (rank == 0)
    shards = sorted((tmp_path / "two" / "echo").glob("shard-*.jsonl"))
    assert [len(s.read_bytes().splitlines()) for s in shards] == [2, 2]
    for name in (SAMPLES, RESULT):
        assert (tmp_path / "two" / "echo" / name).read_bytes() == (tmp_path / "one" / "echo" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "task must be one of"),
        (("humaneval",), "humaneval runs code that the model wrote: allow it with --allow-code-execution"),
        (("echo", "--files", "x"), "--files goes with the one task `infill`"),
        (("echo", "mtbench", "--data", "x"), "--data goes with one task: got 2"),
        (("echo", "--option", "threshold"), "--option must be NAME=VALUE: got 'threshold'"),
        (("echo", "--option", "a=2", "--option", "a=3"), "--option must give each name once: got 'a' twice"),
        (("echo", "--option", "treshold=0.9"), "unknown argument 'treshold'"),
        (("echo_infill", "--length", ""), "--length '': length must be 'oracle', 'auto' or 'fixed:N' with N >= 1: got ''"),
        (("echo_infill", "--length", "oracle,,"), "--length 'oracle,,': length must be"),
        (("echo_infill", "--length", "auto,fixed:²"), "got 'fixed:²'"),
        (("echo_infill", "--length", "auto,fixed:0"), "got 'fixed:0'"),
        (("echo", "--kind", "moe"), "--kind must be auto, diffusion or ar: got 'moe'"),
        (("echo", "--drafter", "d", "--kind", "diffusion"), "--drafter drafts for an AR model"),
        (("echo", "--guide", "base", "--kind", "ar"), "--guide guides a diffusion LM"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_in_one_line_and_leaves_no_run(call, tmp_path, arguments, words):
    out = tmp_path / "runs"
    text = " ".join(call("eval", *arguments, "-o", out, code=2).split())
    assert re.search(re.escape(words), text), text
    assert not out.exists()


def test_a_report_of_nothing_is_refused(call, tmp_path):
    assert "run must be a folder" in call("report", tmp_path, "-o", tmp_path / "r.html", code=2)
