"""Gaps: prefix and suffix apart, the text around them unchanged."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dllm.evals.execution import Execution, execute
from dllm.evals.task import Sample
from dllm.evals.tasks.files_infill import FilesInfill
from dllm.evals.tasks.humaneval_infilling import SPLITS, HumanEvalInfilling
from dllm.evals.tasks.registry import get_task

HERE = Path(__file__).parents[1] / "data" / "evals"


@pytest.mark.parametrize("gap", SPLITS)
def test_prefix_reference_and_suffix_make_the_program_that_is_tested(gap):
    task = HumanEvalInfilling(gap)
    sample = task.samples(HERE / f"humaneval_infilling_{gap}.jsonl")[0]
    row = json.loads((HERE / f"humaneval_infilling_{gap}.jsonl").read_text().splitlines()[0])
    assert sample.prefix + sample.reference + sample.suffix == row["prompt"] + row["canonical_solution"] + row["suffix"]
    assert sample.prefix == row["prompt"] and (sample.prompt, sample.messages) == ("", ())
    lines = gap in ("single_line", "multi_line")
    assert sample.suffix == ("\n" if lines else "") + row["suffix"]
    assert sample.reference == (row["canonical_solution"].rstrip() if lines else row["canonical_solution"])
    seen = []

    def spy(program, tests):
        seen.append((program, tests))
        return Execution(passed=True, reason="passed")

    assert task.score(sample, sample.reference, spy) == {"pass@1": 1.0, "exact_match": 1.0}
    assert seen[0][0] == row["prompt"] + row["canonical_solution"] + row["suffix"]
    assert seen[0][1].startswith(row["test"]) and seen[0][1].endswith(f"\ncheck({row['entry_point']})\n")


def test_an_empty_fill_is_no_fill_even_where_it_would_pass():
    task = HumanEvalInfilling("single_line")
    sample = Sample(
        id="x", kind="infill", prefix="def f():\n", suffix="    return 1\n", reference="    y = 2\n",
        meta={"test": "def check(c):\n    assert c() == 1\n", "entry_point": "f"},
    )  # fmt: skip
    assert task.score(sample, "    y = 3\n", execute) == {"pass@1": 1.0, "exact_match": 0.0}
    for output in ("", " ", "\n"):
        assert task.score(sample, output, execute)["pass@1"] == 0.0
    blank = replace(sample, reference="\n")
    assert task.score(blank, "\n", execute)["pass@1"] == 1.0 and task.score(blank, "", execute)["pass@1"] == 0.0
    with pytest.raises(ValueError, match="--allow-code-execution"):
        task.score(sample, "x")


def test_a_gap_in_which_nothing_is_missing_is_left_out(tmp_path):
    rows = [json.loads(line) for line in (HERE / "humaneval_infilling_random_span.jsonl").read_text().splitlines()]
    rows[0]["canonical_solution"] = ""
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [s.id for s in HumanEvalInfilling("random_span").samples(file)] == [row["task_id"] for row in rows[1:]]


def test_another_kind_of_gap_is_refused():
    with pytest.raises(ValueError, match="gap must be one of single_line, .*: got 'line'"):
        HumanEvalInfilling("line")


def test_a_story_s_gap_begins_with_its_blank_and_scores_by_words(tmp_path):
    task = get_task("aesop_infill")
    sample = task.samples(HERE / "aesop_infill.jsonl")[0]
    row = json.loads((HERE / "aesop_infill.jsonl").read_text().splitlines()[0])
    assert sample.prefix + sample.reference + sample.suffix == f"{row['prefix']} {row['target']} {row['suffix']}"
    assert sample.id == row["id"]
    assert task.score(sample, row["target"]) == {"rouge_l": 1.0, "exact_match": 1.0}
    part = task.score(sample, " ".join(row["target"].split()[:3]))
    assert part["exact_match"] == 0.0 and 0.2 < part["rouge_l"] < 0.9
    with pytest.raises(FileNotFoundError, match="aesop_infill is on no hub: --data must name"):
        task.samples()
    stories = tmp_path / "roc.jsonl"
    stories.write_text(json.dumps({"storyid": "s1", **{f"sentence{i}": f"Sentence {i}." for i in range(1, 6)}}))
    [story] = get_task("story_infill").samples(stories)
    assert (story.id, story.prefix, story.reference) == ("s1", "Sentence 1. Sentence 2.", " Sentence 3.")
    assert story.suffix == " Sentence 4. Sentence 5."
    for bad, message in (
        ({"text": "x"}, "expected prefix, target, suffix"),
        ({"prefix": "a", "target": " ", "suffix": "b"}, "target"),
    ):
        stories.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=message):
            task.samples(stories)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("".join(f"value_{i} = {i} * {i}\n" for i in range(40)))
    (tmp_path / "b.md").write_bytes("Ein Satz über Zeilen.\r\n\r\nNoch ein Satz.\r\n".encode())
    (tmp_path / "binary.bin").write_bytes(b"\x00\xff\xfe" * 100)
    (tmp_path / "nul.txt").write_bytes(b"text with \x00 in it\n" * 9)
    (tmp_path / ".hidden.py").write_text("hidden = True\n" * 9)
    (tmp_path / "blank.txt").write_text(" \n\t\n" * 50)
    return tmp_path


@pytest.mark.parametrize("unit", ["line", "span"])
def test_gaps_are_cut_out_of_the_files_and_nothing_else_changes(unit, folder):
    samples = FilesInfill(unit=unit).samples(folder)
    assert {s.id.partition(":")[0] for s in samples} == {"deep/a.py", "b.md"}
    for sample in samples:
        name, _, place = sample.id.partition(":")
        start, end = map(int, place.split("-"))
        text = (folder / name).read_bytes().decode()
        assert sample.prefix + sample.reference + sample.suffix == text
        assert (sample.prefix, sample.reference) == (text[:start], text[start:end])
        assert sample.meta["line"] == text[:start].count("\n") + 1
        if unit == "line":
            assert "\n" not in sample.reference and "\r" not in sample.reference and sample.suffix[0] in "\r\n"
        else:
            assert 8 <= len(sample.reference) <= 120
    assert max(sum(s.id.startswith("deep/a.py") for s in samples), 1) == 8


def test_gaps_are_the_same_for_a_seed_and_independent_of_other_files(folder):
    task = FilesInfill(folder, unit="span")
    ids = [s.id for s in task.samples(seed=1)]
    assert ids == [s.id for s in task.samples(seed=1)] != [s.id for s in task.samples(seed=2)]
    (folder / "c.txt").write_text("another file with some words\n" * 3)
    assert set(ids) < {s.id for s in task.samples(seed=1)}
    limited = [s.id for s in task.samples(limit=3, seed=1)]
    assert len(limited) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems want Unicode file names")
@pytest.mark.parametrize("unit", ["line", "span"])
def test_a_file_whose_name_is_no_utf8_is_asked_under_an_escaped_name(unit, folder):
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("another file with some words\n" * 3)
    found = [s.id for s in FilesInfill(unit=unit).samples(folder) if s.id.startswith("caf")]
    assert found and all(i.startswith("caf\\udce9.txt:") for i in found)


def test_context_and_extensions_bound_what_is_shown(folder):
    samples = FilesInfill(folder, extensions=(".py",), context=50, per_file=3).samples()
    assert len(samples) == 3 and all(len(s.prefix) <= 50 and len(s.suffix) <= 50 for s in samples)
    [single] = FilesInfill(per_file=1).samples(folder / "b.md")
    assert single.id.startswith("b.md:")


def test_scores_of_a_file_gap(folder):
    task = FilesInfill()
    sample = task.samples(folder / "b.md")[0]
    assert task.score(sample, f"  {sample.reference}\n") == {"exact_match": 1.0, "edit_similarity": 1.0, "rouge_l": 1.0}
    near = task.score(sample, sample.reference[:-1])
    assert near["exact_match"] == 0.0 and 0.8 < near["edit_similarity"] < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "word"}, "unit must be 'line' or 'span': got 'word'"),
        ({"context": 0}, "context must be >= 1: got 0"),
        ({"max_span": 7}, "max_span must be >= 8"),
        ({"per_file": 0}, "per_file must be >= 1"),
        ({"extensions": ".py"}, "extensions must be a list"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FilesInfill(**options)


def test_a_missing_or_empty_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="--files DIR"):
        FilesInfill().samples()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        FilesInfill(tmp_path / "no").samples()
    with pytest.raises(ValueError, match="has none"):
        FilesInfill(tmp_path).samples()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "", "kind": "generate", "prompt": "x"}, "id must not be empty"),
        ({"id": "a", "kind": "chat", "prompt": "x"}, "kind must be 'generate' or 'infill': got 'chat'"),
        ({"id": "a", "kind": "generate"}, "a has neither"),
        ({"id": "a", "kind": "generate", "prompt": "x", "messages": ({"role": "user"},)}, "a has prompt and messages"),
        ({"id": "a", "kind": "generate", "prompt": "x", "suffix": "y"}, "no prefix and no suffix"),
        ({"id": "a", "kind": "infill", "prompt": "x"}, "an infill sample has prefix and suffix"),
        ({"id": "a", "kind": "infill", "prefix": "x", "max_new_tokens": 0}, "max_new_tokens must be >= 1: got 0"),
    ],
)
def test_a_sample_that_is_half_one_thing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sample(**arguments)
