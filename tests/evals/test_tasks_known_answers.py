"""Every task gives its reference everything and an empty or wrong output nothing: a few rows of each set, more where the files lie."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dllm.evals.execution import execute
from dllm.evals.task import Task
from dllm.evals.tasks.known_answers import app, known_answers
from dllm.evals.tasks.registry import TASKS, get_task

HERE = Path(__file__).parents[1] / "data" / "evals"
SHARED = Path(__file__).parents[3] / "shared" / "data"

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")
INFILLING = {
    "humaneval_infilling_single_line": "humaneval_infilling_singleline.jsonl.gz",
    "humaneval_infilling_multi_line": "humaneval_infilling_multiline.jsonl.gz",
    "humaneval_infilling_random_span": "humaneval_infilling_randomspan.jsonl.gz",
    "humaneval_infilling_random_span_light": "humaneval_infilling_randomspanlight.jsonl.gz",
}


def check(name, data, limit=None, **options):
    """(right answers, wrong answers) that were scored; every one as it must be."""
    task = get_task(name, **options)
    found = known_answers(task, task.samples(data, limit), execute)
    assert found.misses == ()
    return found.num_checked[1.0], found.num_checked[0.0]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_the_contract(name):
    task = get_task(name)
    assert isinstance(task, Task) and task.name == name and task.kind in ("generate", "infill")
    for part in ("Dataset:", "Split:", "Prompt", "Metric", "Source:"):
        assert part in (__import__(type(task).__module__, fromlist=["x"]).__doc__ or ""), part


@pytest.mark.parametrize(
    ("name", "options", "right", "wrong"),
    [
        *((name, {}, 3, 6) for name in INFILLING),
        ("humaneval", {}, 4, 12),
        ("humaneval", {"chat": False}, 4, 8),
        ("mbpp", {}, 4, 12),
        ("mbpp", {"chat": False}, 4, 8),
        ("gsm8k", {}, 6, 12),
        ("aesop_infill", {}, 4, 8),
    ],
)
def test_references_score_one_and_wrong_outputs_zero(name, options, right, wrong):
    assert check(name, HERE / f"{name}.jsonl", **options) == (right, wrong)


@needs_math_verify
def test_math_answers_score_one_and_wrong_ones_zero():
    assert check("math500", HERE / "math500.jsonl") == (20, 20)


@pytest.mark.parametrize("unit", ["line", "span"])
def test_what_stood_in_the_files_scores_one(unit, tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    return x + 1\n\n\nprint(f(2), 'blank')\n")
    (tmp_path / "b.md").write_text("# A title\n\nSome words, and äöü words.\r\nThe end of it.\n")
    right, wrong = check("files_infill", tmp_path, unit=unit)
    assert right >= 4 and wrong == 2 * right


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
@pytest.mark.parametrize(
    ("name", "file", "limit", "right"),
    [
        ("gsm8k", "gsm8k_test.jsonl", None, 660),
        ("aesop_infill", "aesop_infill.jsonl", None, 96),
        ("humaneval", "humaneval.jsonl", 4, 4),
        ("mbpp", "mbpp_sanitized_test.jsonl", 4, 4),
        # What runs code takes a second each and more: all of it is checked by `python -m dllm.evals.tasks.known_answers`.
        *((name, file, 4, 4) for name, file in INFILLING.items()),
    ],
)
def test_the_shared_files_score_as_they_must(name, file, limit, right):
    assert check(name, SHARED / file, limit)[0] == right


@needs_math_verify
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
def test_a_part_of_the_math_file_scores_as_it_must():
    assert check("math500", SHARED / "math500.jsonl", 60) == (120, 120)


def test_the_command_reports_and_fails_on_a_miss(tmp_path, monkeypatch):
    file = HERE / "gsm8k.jsonl"
    result = CliRunner().invoke(app, ["gsm8k", "--data", str(file)])
    assert result.exit_code == 0 and "6 of 6 known answers score 1" in result.output
    monkeypatch.setattr(
        "dllm.evals.tasks.gsm8k.GSM8K.score", lambda self, sample, output, execute=None: {"accuracy": 1.0}
    )
    result = CliRunner().invoke(app, ["gsm8k", "--data", str(file)])
    assert result.exit_code == 1 and "0 of 12 known answers score 0" in result.output


def test_the_same_program_runs_once_and_counts_each_time():
    task = get_task("humaneval_infilling_multi_line")
    samples = task.samples(HERE / "humaneval_infilling_multi_line.jsonl")
    programs = [s.prefix + output + s.suffix for s in samples for output, _ in task.check(s) if output.strip()]
    ran = []

    def run(program, tests):
        ran.append(program)
        return execute(program, tests)

    found = known_answers(task, [*samples, *samples], run)
    assert found.misses == () and found.num_checked == {1.0: 2 * len(samples), 0.0: 4 * len(samples)}
    assert len(ran) == len(set(programs)) < 2 * len(programs)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
def test_all_multi_line_middles_make_few_programs_and_a_part_of_them_passes():
    task = get_task("humaneval_infilling_multi_line")
    samples = task.samples(SHARED / "humaneval_infilling_multiline.jsonl.gz")
    # Every gap of a problem is cut from the same solution, up to the line ends at its end: one sample stands for all of them.
    by_program = {s.prefix + s.reference + s.suffix: s for s in samples}
    assert len(samples) > 2000 and len(by_program) < 164
    chosen = list(by_program.values())[::8]
    assert all(task.score(s, s.reference, execute)["pass@1"] == 1.0 for s in chosen)
