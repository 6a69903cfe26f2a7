"""The demo's second table on a tiny target."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dllm.evals.demo_drafters import CPU_DRAFTS, DraftedRun, drafted_runs, drafter_table
from tests.speculative import hf_target, random_drafter

PROMPTS = [[1, 2, 3], [4, 5]]


def test_every_way_gives_the_same_text_and_counts_its_forwards():
    target = hf_target()
    drafter = random_drafter("dfly", target)
    seen: list[str] = []
    runs = drafted_runs(target, target, {"tiny-dfly": drafter}, PROMPTS, 9, seen.append)
    assert [run.name for run in runs] == ["AR, transformers", "AR", "AR + dfly"] == seen
    assert len({run.tokens for run in runs}) == 1
    plain, ours, drafted = runs
    assert plain.useful_tokens == 18 and plain.nfe == ours.nfe == 18
    # One prefill a prompt, then a forward a round; the prefill gives the first token.
    assert drafted.nfe == len(PROMPTS) + len(drafted.accept_lengths)
    assert sum(drafted.accept_lengths) == 18 - len(PROMPTS)
    assert drafted.draft_nfe > 0


def test_ratios_are_against_the_faster_run_without_drafts():
    def run(name: str, seconds: float, draft_nfe: int = 0, tokens: tuple[tuple[int, ...], ...] = ((1, 2), (3, 4))):
        return DraftedRun(name, tokens, 4, draft_nfe, seconds, (2, 2) if draft_nfe else ())

    table = drafter_table(
        [run("transformers", 1.0), run("AR", 2.0), run("AR + x", 0.5, 2, ((1, 2), (3, 5)))], "a title"
    )
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    last = next(line for line in text.getvalue().splitlines() if line.startswith("AR + x"))
    assert last.split() == ["AR", "+", "x", "4", "4", "2", "2.00", "0.5", "2.00", "1/2"]
    above = " ".join(text.getvalue()[: text.getvalue().index("─")].split())
    assert above.endswith("useful draft same setting tokens forwards forwards accepted seconds ratio text")
    with pytest.raises(ValueError, match="one without drafts"):
        drafter_table([run("AR + x", 0.5, 2)], "a title")


def test_the_caption_says_how_drafts_are_counted_and_when_texts_may_part():
    runs = [DraftedRun("AR", ((1, 2),), 2, 0, 1.0, ()), DraftedRun("AR + x", ((1, 2),), 1, 1, 1.0, (1,))]
    limited, free = (str(drafter_table(runs, "a title", num_drafts).caption) for num_drafts in (CPU_DRAFTS, None))
    for caption in (limited, free):
        assert "the target's own included (the prompt's forward gives the first token and is no round)" in caption
        assert "in float32 all are, in bfloat16 near-ties may round differently" in caption
    assert "at most 4 drafts a round on a CPU, seven on a GPU" in limited
    assert "drafts a round" not in free
