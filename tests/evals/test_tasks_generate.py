"""Prompts, and how an answer is found in what a model wrote."""

import builtins
import json
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dllm.evals.execution import Execution
from dllm.evals.tasks._common import code_of, draw, read_rows
from dllm.evals.tasks.math500 import last_boxed
from dllm.evals.tasks.registry import get_task
from tests.words import byte_tokenizer

HERE = Path(__file__).parents[1] / "data" / "evals"


class Spy:
    """Stands for `execute`: keeps what it was given, passes everything."""

    def __init__(self):
        self.programs = []

    def __call__(self, program, tests):
        self.programs.append((program, tests))
        return Execution(passed=True, reason="passed")


def first(name, **options):
    task = get_task(name, **options)
    return task, task.samples(HERE / f"{name}.jsonl")[0]


@pytest.mark.parametrize(
    ("output", "accuracy", "strict"),
    [
        ("So 9 * 2 = 18.\n#### 18", 1, 1),
        ("#### $18.00", 1, 1),
        ("#### 18\n\nI hope that this helps 100 %!", 1, 1),
        ("The answer is \\boxed{18}. Have 2 nice days.", 1, 0),
        ("She makes $18.", 1, 0),
        ("She makes 18 dollars, every 1 day", 0, 0),
        ("#### 19, not 18", 0, 0),
        ("#### 180", 0, 0),
        ("#### -18", 0, 0),
        ("#### $-18", 0, 0),
        ("#### -$18", 0, 0),
        ("18 eggs and 20", 0, 0),
        ("no number", 0, 0),
        ("#### eighteen", 0, 0),
    ],
)
def test_gsm8k_finds_the_number(output, accuracy, strict):
    task, sample = first("gsm8k")
    assert task.score(sample, output) == {"accuracy": accuracy, "strict": strict}


def test_gsm8k_reads_thousands_and_fractions():
    task, sample = first("gsm8k")
    from dataclasses import replace

    large = replace(sample, reference="#### 1,234,567")
    assert task.score(large, "#### 1234567")["accuracy"] == task.score(large, "it is $1,234,567.00.")["accuracy"] == 1
    assert task.score(replace(sample, reference="#### 0.5"), "about .5")["accuracy"] == 1


def test_gsm8k_shows_worked_examples_as_turns_or_as_text():
    fewshot = HERE / "gsm8k_train.jsonl"
    _, chat = first("gsm8k", shots=2, fewshot=fewshot)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2 + ["user"]
    assert "72" in chat.messages[1]["content"] and not chat.prompt
    _, raw = first("gsm8k", shots=2, fewshot=fewshot, chat=False)
    assert raw.prompt.count("Question:") == 3 and raw.prompt.endswith("\nAnswer:") and raw.stop == ("Question:",)
    with pytest.raises(ValueError, match="shots must be at most the 3 rows"):
        first("gsm8k", shots=4, fewshot=fewshot)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\ndef f():\n    return 1\n```", "def f():\n    return 1\n"),
        (
            "First:\n```\nimport x\n```\nthen\n```py\ndef f(): pass\n```\nand\n```\ndef g(): pass\n```",
            "def f(): pass\n",
        ),
        ("```python\ndef f():\n    return 1\n", "def f():\n    return 1\n"),
        ("```bash\npip install x\n```\n```python\n    return 1\n```", "    return 1\n"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("````python\ns = '''\n```\n'''\ndef f(): pass\n````", "s = '''\n```\n'''\ndef f(): pass\n"),
        ("I would define f, but I do not.", None),
        ("```bash\nls\n```", None),
        ("def ff(): pass", None),
        ("", None),
    ],
)
def test_the_code_of_an_answer_is_the_block_that_defines_the_function(answer, code):
    assert code_of(answer, "f") == code


def test_humaneval_keeps_the_head_and_calls_check_itself():
    task, sample = first("humaneval")
    spy = Spy()
    name = sample.meta["entry_point"]
    whole = f"```python\ndef {name}(numbers, threshold):\n    return True\n```"
    assert task.score(sample, whole, spy) == {"pass@1": 1.0}
    program, tests = spy.programs[0]
    assert program.startswith(sample.meta["head"]) and program.count(f"def {name}") == 2
    assert tests.endswith(f"check({name})\n")
    task.score(sample, "```python\n    return True\n```", spy)
    assert spy.programs[1][0] == sample.meta["head"] + "    return True\n"
    assert task.score(sample, "no code at all", spy) == {"pass@1": 0.0} and len(spy.programs) == 2
    task, sample = first("humaneval", chat=False)
    task.score(sample, "    return True\n\ndef other(): ...", spy)
    assert spy.programs[2][0] == sample.prompt + "    return True\n"


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_code_is_not_run_unless_it_is_allowed(name):
    task, sample = first(name)
    assert task.needs_execution
    with pytest.raises(ValueError, match="--allow-code-execution"):
        task.score(sample, task.check(sample)[0][0])


def test_mbpp_shows_its_tests_and_the_papers_examples():
    _, chat = first("mbpp")
    assert (
        "assert remove_Occ" in chat.messages[0]["content"] and "remove_Occ(s,ch): \n" not in chat.messages[0]["content"]
    )
    _, raw = first("mbpp", chat=False, shots=3, fewshot=HERE / "mbpp_prompt.jsonl")
    assert raw.prompt.count("[BEGIN]") == 4 and raw.prompt.count("[DONE]") == 3 and raw.prompt.endswith("[BEGIN]\n")
    assert raw.stop == ("[DONE]",)
    with pytest.raises(ValueError, match="chat must be False"):
        get_task("mbpp", shots=3)


def test_the_last_box_is_read_with_its_braces():
    assert last_boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{{}}") == "{}" and last_boxed("\\boxed{1") is None and last_boxed("1") is None


def test_math_without_its_library_says_what_to_install(monkeypatch):
    task, sample = first("math500")
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "math_verify":
            raise ModuleNotFoundError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match="pip install 'dllm-toolkit"):
        task.score(sample, "\\boxed{1}")


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_compares_values_and_refuses_a_thread():
    from dataclasses import replace

    task, sample = first("math500")
    half = replace(sample, reference="\\frac{1}{2}")
    for output, score in (("\\boxed{0.5}", 1), ("so $\\boxed{\\dfrac12}$", 1), ("\\boxed{2}", 0), ("0.5 is it", 1)):
        assert task.score(half, output) == {"accuracy": score}, output
    raised: list[str] = []

    def in_a_thread() -> None:
        with pytest.raises(RuntimeError) as error:
            task.score(half, "\\boxed{1}")
        raised.append(str(error.value))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert len(raised) == 1 and "main thread" in raised[0]


def test_mtbench_reads_both_copies_and_has_no_score(tmp_path):
    task, sample = first("mtbench")
    assert (sample.id, sample.meta["category"], task.metric, task.score(sample, "x")) == (
        "mtbench/81",
        "writing",
        "",
        {},
    )
    hub = tmp_path / "hub.jsonl"
    hub.write_text(json.dumps({"prompt_id": 7, "category": "math", "prompt": ["One?", "Two?"], "reference": []}))
    assert task.samples(hub)[0].messages == ({"role": "user", "content": "One?"},)
    hub.write_text(json.dumps({"category": "math", "prompt": "One?"}))
    with pytest.raises(ValueError, match="row 1: expected question_id and turns"):
        task.samples(hub)


def test_held_out_chats_are_read_from_their_several_forms(tmp_path):
    task = get_task("chat_heldout")
    file = tmp_path / "chats.jsonl"
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    lines = [
        {"messages": [user, assistant]},
        {"messages": [user]},
        {"question": "Hi", "answer": "Hello"},
        {"prompt": "Hi"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    samples = task.samples(file)
    assert [s.messages for s in samples] == [(user,)] * 4
    assert [s.reference for s in samples] == ["Hello", "", "Hello", ""]
    assert task.score(samples[0], "x") == {} and task.check(samples[0]) == []
    file.write_text('{"text": "x"}')
    with pytest.raises(ValueError, match="row 1: expected messages, prompt or question"):
        task.samples(file)
    with pytest.raises(FileNotFoundError, match="on no hub"):
        task.samples()


def test_the_held_out_end_of_an_archive_is_decoded(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer(template=True)
    monkeypatch.setattr("dllm.target.load_tokenizer", lambda folder: tokenizer)
    rows = [
        (tokenizer.encode(f"u.a the {i}\na."), [*tokenizer.encode("bcd."), tokenizer.eos_token_id]) for i in range(4)
    ]
    tokens = np.concatenate([np.array(prompt + answer, np.uint16) for prompt, answer in rows])
    offsets = np.cumsum([0, *(len(prompt) + len(answer) for prompt, answer in rows)])
    lengths = np.array([len(prompt) for prompt, _ in rows])
    np.savez(tmp_path / "a.npz", tokens=tokens, offsets=offsets, prompt_lengths=lengths)
    task = get_task("chat_heldout", held_out=2, tokenizer=str(tmp_path))
    samples = task.samples(tmp_path / "a.npz")
    assert [s.messages[0]["content"] for s in samples] == ["a the 2", "a the 3"]
    assert [s.reference for s in samples] == ["bcd.", "bcd."]
    np.savez(tmp_path / "a.npz", tokens=tokens, offsets=offsets, prompt_lengths=lengths - 1)
    with pytest.raises(ValueError, match="conversation 0 of the held-out ones is not one user's turn"):
        task.samples(tmp_path / "a.npz")


def test_a_larger_limit_holds_the_smaller_ones_samples_in_file_order():
    rows = list(range(50))
    few, more = draw(rows, 5, 3), draw(rows, 20, 3)
    assert set(few) < set(more) and few == sorted(few) and more == sorted(more)
    assert draw(rows, 5, 3) == few != draw(rows, 5, 4) and draw(rows, None, 0) == draw(rows, 99, 0) == rows
    with pytest.raises(ValueError, match="limit must be >= 1"):
        draw(rows, 0, 0)


def test_data_that_cannot_be_had_or_read_say_so(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"load_dataset\('openai/gsm8k', 'main', split='test'\).*--data rows.jsonl"
    ):
        get_task("gsm8k").samples()
    file = tmp_path / "x.jsonl"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_rows(file, (), "", "")
    for text, message in (
        ("{", "line 1: must be JSON"),
        ("[1]", "must be a JSON object: got list"),
        ("\n", "at least one row"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(file, (), "", "")
    file.write_text('{"question": "?"}')
    with pytest.raises(ValueError, match="row 1: expected the fields question, answer: answer missing"):
        get_task("gsm8k").samples(file)
    file.write_text('{"question": "?", "answer": "five"}')
    with pytest.raises(ValueError, match="must end in '#### number': got 'five'"):
        get_task("gsm8k").samples(file)


def test_unknown_tasks_and_options_are_named():
    with pytest.raises(ValueError, match="task must be one of .*gsm8k.*: got 'gsm'"):
        get_task("gsm")
    with pytest.raises(TypeError, match="task gsm8k has the options shots, fewshot, chat, max_new_tokens: got shot"):
        get_task("gsm8k", shot=1)
    with pytest.raises(TypeError, match="got length"):
        get_task("humaneval_infilling_single_line", length=1)
