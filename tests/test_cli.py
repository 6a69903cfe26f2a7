"""What `dllm generate | chat | bench` say beside their results, and the names that their help lists."""

import io
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

import dllm
from dllm.cli import app, show_live
from dllm.pipeline import DiffusionLM
from dllm.registry import CACHES, SAMPLERS
from dllm.streaming import StreamEvent
from tests.words import text_lm


@pytest.fixture
def call(monkeypatch):
    """`dllm ...` with a tiny model in place of every checkpoint: (exit code, output with its words one blank apart)."""
    monkeypatch.setattr(DiffusionLM, "from_pretrained", classmethod(lambda cls, name, **_: text_lm(template=True)))
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments, stdin=""):
        done = CliRunner().invoke(app, list(arguments), input=stdin)
        assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
        return done.exit_code, " ".join(done.output.split())

    return run


def test_the_version_is_the_packages(call):
    assert call("--version") == (0, f"dllm {dllm.__version__}")
    assert "Diffusion language models made fast" in call("--help")[1]


def test_a_missing_prompt_is_said(call, monkeypatch):
    wanted = "prompt must be given, as an argument or on standard input: got none"
    code, text = call("generate")
    assert code == 2 and wanted in text
    # As Python starts where the shell closed it.
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=wanted):
        dllm.cli._prompt_of_stdin()


def test_a_prompt_is_read_from_standard_input(call):
    assert call("generate", "-n", "2", "--no-stats", stdin="the cat")[0] == 0


@pytest.mark.parametrize("command", ["generate", "infill", "chat", "eval"])
def test_help_lists_every_sampler_and_cache(call, command):
    text = call(command, "--help")[1]
    assert all(name in text for name in [*SAMPLERS, *CACHES])


@pytest.mark.parametrize(("kind", "known"), [("cache", CACHES), ("sampler", SAMPLERS)])
def test_an_unknown_name_is_answered_with_the_names_alone(call, kind, known):
    code, text = call("generate", "the cat", "-n", "4", f"--{kind}", "nothing")
    assert code == 2 and text.endswith(f"{kind} must be one of {sorted(known)}: got 'nothing'")


def test_a_piped_answer_ends_its_line_and_a_terminals_is_left_alone():
    events = [StreamEvent(0, "committed", "the cat", 1), StreamEvent(0, "done", "", 1, "stop")]
    piped, terminal = io.StringIO(), io.StringIO()
    assert show_live(Console(file=piped), events) == ("the cat", 1)
    assert piped.getvalue() == "the cat\n"
    show_live(Console(file=terminal, force_terminal=True, width=40), events)
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "noted"),
    [((), True), (("--device", "cpu"), True), (("--device=cpu",), True), (("--device", "cuda"), False), (("--help",), False)],
)  # fmt: skip
def test_bench_notes_that_times_on_a_cpu_mean_nothing(call, monkeypatch, arguments, noted):
    from dllm.evals.bench import run

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(run, "main", lambda _: 0)
    assert ("on a CPU these times mean nothing" in call("bench", *arguments)[1]) == noted


@pytest.mark.parametrize("command", ["adapt", "train-drafter"])
def test_training_says_what_an_option_is_where_it_is_not_given(call, command):
    text = call(command, "--help")[1]
    wanted = {
        "adapt": ["twice the rank", "1; bidirectional: 0.1", "known for the shipped base"],
        "train-drafter": ["the target's", "the target's hidden size", "known for the shipped target"],
    }
    assert all(f"(default: {words})" in text for words in wanted[command])


def test_a_searched_gap_that_took_all_it_could_is_named(call):
    said = "a gap took all 3 tokens"
    assert said not in call("infill", "the cat", "the dog", "--length", "3", "--max-length", "3")[1]
    assert said not in call("infill", "the {{x}} dog", "--template", "--gap", "x=3", "--max-length", "3")[1]
    texts = [call("infill", "the cat", "the dog", "--max-length", str(n))[1] for n in range(1, 7)]
    full = [f"gap lengths [{n}]" in text for n, text in enumerate(texts, 1)]
    assert full == [f"a gap took all {n} tokens" in text for n, text in enumerate(texts, 1)]
    assert any(full)


def test_a_gaps_length_is_a_plain_number_and_given_once(call):
    assert call("infill", "a {{x}} b", "--template", "--gap", "x=2")[0] == 0
    for arguments, said in (
        (["ab", "cd", "--length", "²"], "must be a number of tokens or 'auto': got '²'"),
        (["a {{x}} b", "--template", "--gap", "x=2", "--gap", "x=3"], "--gap must be given once a mark: got x=2 x=3"),
    ):
        code, text = call("infill", *arguments)
        assert code == 2 and said in text
