"""The runs behind docs/results.md: what is there is kept, what fails is survived, what was deferred is scored to the same bytes."""

import dataclasses
import json
import re
import signal
import tarfile
import time

import pytest
from typer.testing import CliRunner

from dllm.evals import results_runs, runner
from dllm.evals.report_data import find_runs, load_views
from dllm.evals.results_page import _at_limit, is_run, method_name, render_results
from dllm.evals.results_plan import BD8, FILES, FILL_BD8, GENERATE, INFILL, LENGTHS, Entry, Method, plan
from dllm.evals.results_runs import Choice, Models, pack_runs, run_all, run_entry, settings_of
from dllm.evals.results_score import score_run
from dllm.evals.run_store import RESULT, SAMPLES, load_run
from dllm.evals.runner import Extras, run_task, source_digest, versions
from tests.evals.fakes import EchoTask, OracleSystem

STORIES = [{"id": f"fable/{i}", "prefix": f"a{i} ", "target": f"word {i}", "suffix": " z"} for i in range(4)]


class Executed(EchoTask):
    """Scores by running something."""

    needs_execution = True

    def score(self, sample, output, execute=None):
        assert execute is not None
        return {"exact": float(execute(output, sample.reference).passed)}


class Passed:
    def __init__(self, passed):
        self.passed = passed


def same(program, tests):
    return Passed(program == tests)


def result_bytes(folder):
    return (folder / SAMPLES).read_bytes(), (folder / RESULT).read_bytes()


def test_a_deferred_run_is_scored_to_the_bytes_of_one_scored_at_once(tmp_path):
    task, system = Executed(), OracleSystem(wrong=lambda i: i % 3 == 0)
    runs = {"now": Extras(execute=same), "later": Extras(deferred=True)}
    for name, extras in runs.items():
        run_task(task, task.samples(), system, tmp_path / name, {"model": "x"}, batch_size=5, extras=extras)
    later = tmp_path / "later"
    assert all(record["scores"] == {} for record in load_run(later).records)
    assert load_run(later).run["scores"] == "deferred"
    with pytest.raises(ValueError, match="made from other samples of echo"):
        score_run(later, task, task.samples(limit=3) + task.samples()[3:][::-1], same)
    with pytest.raises(ValueError, match="allow it with --allow-code-execution"):
        score_run(later, task, task.samples())
    with pytest.raises(ValueError, match="workers must be >= 1: got 0"):
        score_run(later, task, task.samples(), same, workers=0)
    assert score_run(later, task, task.samples(), same, workers=3)
    assert result_bytes(later) == result_bytes(tmp_path / "now")
    assert (later / "times.jsonl").read_text().count("\n") == 12
    # Scored once is enough, and nothing else is left beside it.
    assert score_run(later, task, task.samples(), same) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "now"]


def test_a_deferred_run_that_is_not_complete_is_refused(tmp_path):
    task = EchoTask()
    half = run_task(task, task.samples(), OracleSystem(), tmp_path, {}, extras=Extras(deferred=True), world=2)
    assert half is False
    with pytest.raises(ValueError, match="must be complete: 6 samples are missing"):
        score_run(tmp_path, task, task.samples())


def test_the_plan_has_every_method_on_the_tasks_and_each_run_once():
    entries = plan()
    assert {e.task for e in entries} == {*GENERATE, *INFILL} == set(FILES)
    assert all((e.length is None) == (e.task in GENERATE) for e in entries)
    names = {task: {e.method.name for e in entries if e.task == task} for task in FILES}
    for task in ("gsm8k", "mtbench", "humaneval", "mbpp", "math500"):
        assert len(names[task]) >= 11
    for task in INFILL:
        assert {e.length for e in entries if e.task == task} == set(LENGTHS)
        assert len(names[task]) == 4
    # What the others are compared with sorts first.
    assert min(names["gsm8k"]) == "00-ar" and min(names["aesop_infill"]) == "00-ar-prefix"
    assert [str(value) for value in BD8] == ["0.9", "0.8", "0.7"]


class Oracles(Models):
    """No model: the entry's method says what happens."""

    def system(self, entry, max_new_tokens):
        if entry.method.name == "broken":
            raise RuntimeError("no such kernel")
        return OracleSystem(nfe=1 + len(entry.method.options))


def methods(*names):
    return [Entry("aesop_infill", Method(name, "smollm2-135m"), "fixed:16") for name in names]


@pytest.fixture
def choice(tmp_path):
    (tmp_path / "data").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in STORIES)
    (tmp_path / "data" / FILES["aesop_infill"]).write_text(rows)
    return Choice(tmp_path / "data", None, 2, 8, 8, 0, "a note", True, False, False, None)


def test_runs_are_kept_failures_survived_and_the_time_limit_heeded(tmp_path, choice, capsys):
    models, out = Oracles("cpu", "float32"), tmp_path / "runs"
    out.mkdir()
    assert run_all(methods("00-a", "broken", "10-b"), choice, models, out) == 1
    failed = json.loads((out / "failed.json").read_text())
    assert (
        list(failed) == ["aesop_infill/broken@1-fixed16"]
        and "no such kernel" in failed["aesop_infill/broken@1-fixed16"]
    )
    assert [p.name for p in find_runs([out])] == ["00-a@1-fixed16", "10-b@1-fixed16"]
    assert "FAILED: RuntimeError: no such kernel" in capsys.readouterr().out
    # Made runs are not made again, whatever the time; nothing new is begun when there is none left.
    assert run_entry(methods("00-a")[0], choice, models, out) is False
    assert run_all(methods("00-a", "20-c"), choice, models, out, deadline=time.monotonic() + 1.0) == 0
    assert not (out / "aesop_infill/20-c@1-fixed16").exists()
    assert not (out / "failed.json").exists()
    saved = load_run(out / "aesop_infill/00-a@1-fixed16")
    assert saved.run["settings"]["note"] == "a note" and saved.run["settings"]["length"] == "fixed:16"


def test_everything_comes_home_in_one_file_and_makes_the_page(tmp_path, choice):
    out = tmp_path / "runs"
    entries = [
        Entry("aesop_infill", Method(name, model, options), length)
        for name, model, options in (("00-a", "smollm2-135m", {}), ("10-b", "other", {"threshold": 0.9}))
        for length in LENGTHS
    ]
    models = Oracles("cpu", "float32")
    run_all(entries, choice, models, out)
    packed = pack_runs(out, tmp_path / "runs.tar.gz")
    with tarfile.open(packed) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "home", filter="data")
    assert len([name for name in names if name.endswith("samples.jsonl")]) == 6
    assert not [name for name in names if "shard" in name or "lock" in name]
    views = load_views([tmp_path / "home"])
    page = render_results(views)
    assert page == render_results(load_views([out]))
    row = next(
        line for line in page.splitlines() if line.startswith("| aesop_infill: other, threshold 0.9 (A, 8 tokens) |")
    )
    assert row.count("100.0 (51.0 to 100.0)") == 3
    head = next(line for line in page.splitlines() if line.startswith("| task: method (setting) |"))
    assert head == "| task: method (setting) | oracle | fixed:16 | auto |"
    # Each length setting is compared with its like: run 4, 5, 6 with 1, 2, 3.
    differences = page[page.index("Differences from the first run of the same length,") :].splitlines()
    against = {
        line.split(".")[0].strip("| "): line.split("|")[2].strip()
        for line in differences
        if line[:3] in ("| 4", "| 5", "| 6")
    }
    assert against == {"4": "1", "5": "2", "6": "3"}
    assert "- A: none, none, a note, batch_size 2, " in page
    assert {method_name(v.settings) for v in views} == {"smollm2-135m, by prefix", "other, threshold 0.9"}
    assert "Story infill on fables" in page and "per second" not in page and "seconds" not in page


def test_only_runs_of_one_setting_are_compared_and_what_was_not_run_is_named(tmp_path, choice):
    models = Oracles("cpu", "float32")
    base, fill = Method("00-ar-prefix", "smollm2-135m"), Method("10-bd8", "smollm2-135m-bd8", dict(FILL_BD8.options))
    for name, tokens, methods_of in (("long", 8, (base, fill)), ("short", 4, (fill, base)), ("alone", 6, (fill,))):
        for i, method in enumerate(methods_of):
            run_all(
                [Entry("aesop_infill", method, "auto")],
                dataclasses.replace(choice, fill_tokens=tokens),
                models,
                tmp_path / name / str(i),
            )
    views = load_views([tmp_path / name for name in ("long", "short", "alone")])
    page = render_results(views)
    lines = page.splitlines()
    # Three limits of tokens are three tables; the first run of each is what the other one is compared with.
    assert [line for line in lines if line.startswith("Setting A")] == [
        "Setting A, 8 tokens:",
        "Setting A, 6 tokens:",
        "Setting A, 4 tokens:",
    ]
    differing = [i for i, line in enumerate(lines) if line.startswith("Differences from")]
    assert [lines[i + 4].split(",")[0] for i in differing] == ["| 2. smollm2-135m-bd8", "| 2. smollm2-135m"]
    assert all(lines[i + 4].split("|")[2].strip() == "1" for i in differing)
    assert len([line for line in lines if line.startswith("| aesop_infill: smollm2-135m")]) == 5
    # What fills the limit is told from what stopped before it: " word 0" is 7 tokens.
    cut = {view.settings["max_new_tokens"]: _at_limit(view) for view in views}
    assert {tokens: cell.text for tokens, cell in cut.items() if cell is not None} == {8: "0", 6: "100", 4: "100"}
    # The two methods' "auto" is there, their other lengths are not.
    missing = page[page.index("## Not run") :]
    assert "- smollm2-135m-bd8, threshold 0.9, cache block: " in missing
    stories = re.findall(r"aesop_infill \(([^)]*)\)", missing)
    assert sorted(stories) == [
        "oracle, fixed:16",
        "oracle, fixed:16",
        "oracle, fixed:16, auto",
        "oracle, fixed:16, auto",
    ]
    planned = [entry for entry in plan() if any(is_run(view, entry) for view in views)]
    assert {(e.method.name, e.length) for e in planned} == {("00-ar-prefix", "auto"), ("10-bd8", "auto")}


def test_a_saved_run_says_of_its_method_what_the_plan_says(choice):
    models = Oracles("cpu", "float32")
    for entry in plan():
        saved = settings_of(entry, choice, models)
        assert saved.items() >= entry.method.settings(entry.length is not None).items()
        assert saved.get("length") == entry.length
    guides = {settings_of(e, choice, models)["guide"] for e in plan()}
    assert guides == {None, "base, accept exact, on_reject ar", "base, accept topk, on_reject dlm"}


def test_a_stated_commit_is_recorded_as_stated_and_a_wrong_one_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "_commit", lambda package: "abc123")
    assert versions("abc123")["commit"] == "abc123" and "source" not in versions("abc123")
    with pytest.raises(ValueError, match="commit must be that of the checkout, abc123, or not given: got 'def456'"):
        versions("def456")
    monkeypatch.setattr(runner, "_commit", lambda package: None)
    assert versions()["commit"] is None
    stated = versions("def456")
    assert stated["commit"] == "def456 (stated)" and len(stated["source"]) == 16
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("x = 1\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.py").write_text("y = 1\n")
    (tmp_path / "package" / "linked").symlink_to(tmp_path / "elsewhere")
    first = source_digest(tmp_path / "package")
    (tmp_path / "package" / "note.txt").write_text("not code")
    assert source_digest(tmp_path / "package") == first
    (tmp_path / "elsewhere" / "b.py").write_text("y = 2\n")
    assert source_digest(tmp_path / "package") != first


@pytest.mark.parametrize(
    ("option", "said"), [("--only=nothing*", "names none of the runs"), ("--share=3/2", "1 <= I <= N")]
)
def test_the_command_refuses_what_it_cannot_do(tmp_path, option, said):
    import typer

    app = typer.Typer()
    app.command()(results_runs.command)
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "o"), "--data", str(tmp_path), option])
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split())


def test_the_command_leaves_the_handlers_of_signals_as_they_were(tmp_path, monkeypatch):
    seen = []

    def run_all(*_):
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    monkeypatch.setattr(results_runs, "run_all", run_all)
    before = signal.getsignal(signal.SIGTERM)
    results_runs.command(tmp_path / "out", tmp_path, device="cpu", only="gsm8k/00-ar")
    assert seen != [before] and signal.getsignal(signal.SIGTERM) is before
