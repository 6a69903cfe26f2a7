"""Recording counts what the loop counts; labels follow the cost table; training learns what there is to learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dllm.cli import app
from dllm.draft_cost import CostTable
from dllm.drafters.loading import load_drafter
from dllm.samplers.block_pilot import BlockPilot, BlockPilotConfig
from dllm.speculate import speculative_generate
from dllm.training.base import load_base
from dllm.training.block_pilot import PilotTrainConfig, merits, plot_pilot_curves, split_prompts, train_pilot
from dllm.training.block_pilot_command import mixed, read_group
from dllm.training.block_pilot_costs import ForwardCosts, RoundCosts, measured_forward, measured_tables
from dllm.training.block_pilot_traces import (
    LengthCounts,
    PromptTrace,
    denoise_decoder,
    draft_decoder,
    read_traces,
    record,
)
from tests.drafters.toy import toy_drafter, toy_target
from tests.speculative import padded
from tests.tiny import prompt, tiny_lm
from tests.training.toy import toy_base, toy_tokenizer

PROMPTS = [[1, 2, 3, 4], [5, 1, 1], [2, 6, 3, 3, 1, 0, 2]]


def toy(kind="dfly", seed=1):
    return toy_drafter(kind, toy_target(seed=seed), seed=seed + 5)


def trace(number, passes, group="a", hidden=(0.0, 0.0), tokens=60):
    """A prompt that takes passes[length] passes for ``tokens`` tokens."""
    counts = {n: LengthCounts(tokens, p, 99, (1,) * p) for n, p in passes.items()}
    return PromptTrace(f"key{number}", group, 5, torch.tensor(hidden), torch.tensor([3.0, 1.0]), counts)


def easy(count=60):
    """Requests whose first feature says whether long blocks are accepted."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        sign = 1.0 if i % 2 else -1.0
        passes = {1: 60, 4: 20} if sign > 0 else {1: 60, 4: 50}
        rows.append(trace(i, passes, "ab"[i % 3 > 0], (sign + 0.2 * rng.normal(), rng.normal())))
    return rows


COSTS = RoundCosts({1: 1.0, 4: 2.0})
SHAPE = BlockPilotConfig((1, 4), "draft", ("hidden", "top_logits"), (2, 2), 4)


@pytest.mark.parametrize(("kind", "seed"), [("dfly", 5), ("dflash", 4)])
def test_counts_are_those_of_the_draft_and_verify_loop(kind, seed):
    drafter = toy(kind, seed)
    traces = draft_decoder(drafter, (1, 2, 6), [3], 20)(PROMPTS)
    assert any(t is not None and sum(t.counts[6].accept_lengths) > len(t.counts[6].accept_lengths) for t in traces)
    ids, mask = padded(PROMPTS)
    for length in (1, 2, 6):
        out = speculative_generate(
            drafter.target, drafter, ids, mask, max_new_tokens=20, block_length=length, eos_token_id=[3]
        )
        for found, stats in zip(traces, out.row_stats, strict=True):
            if found is None:
                assert stats.useful_tokens == 0 or stats.nfe == 1
                continue
            assert found.counts[length] == LengthCounts(
                stats.useful_tokens, stats.nfe - 1, stats.positions, tuple(stats.accept_lengths)
            )


def test_an_answer_that_ends_with_its_first_token_has_no_trace():
    drafter = toy()
    first = speculative_generate(drafter.target, None, [PROMPTS[0]], max_new_tokens=1).sequences[0, 0]
    assert draft_decoder(drafter, (1, 2), [int(first)], 8)(PROMPTS[:1]) == [None]


def test_lengths_beyond_the_drafters_block_are_refused():
    with pytest.raises(ValueError, match=r"lengths must be in \[1, 6\]"):
        draft_decoder(toy(), (2, 7), [3], 8)


def test_a_diffusion_model_is_counted_as_generate_counts_it():
    lm, ids = tiny_lm("bidirectional"), prompt(7)
    (found,) = denoise_decoder(lm, (4, 8), 16, {})([ids])
    assert found is not None
    for length in (4, 8):
        stats = lm.generate(input_ids=[ids], max_new_tokens=16, block_length=length).row_stats[0]
        assert (found.counts[length].passes, found.counts[length].positions) == (stats.nfe, stats.positions)
    assert found.hidden.shape == (32,)


def test_recording_goes_on_where_it_stopped_and_runs_nothing_twice(tmp_path):
    path, calls = tmp_path / "t.jsonl", []
    rows = [("ab"[i % 2], [i, i + 1]) for i in range(6)]

    def decode(prompts):
        calls.append(prompts)
        return [None if p[0] == 5 else trace(0, {1: 9, 4: 5}, hidden=(float(p[0]), 0.5)) for p in prompts]

    part = record(path, rows, decode, {"lengths": (1, 4)}, 2, lambda: len(calls) == 1)
    assert [t.group for t in part] == ["a", "b"]
    # What a killed run leaves behind its last whole line.
    path.write_text(path.read_text() + '{"key": "half')
    whole = record(path, rows, decode, {"lengths": (1, 4)}, 2)
    assert [p[0] for c in calls for p in c] == [0, 1, 2, 3, 4, 5]
    assert [float(t.hidden[0]) for t in whole] == [0, 1, 2, 3, 4], "the answer that opens no block has no trace"
    settings, again = read_traces(path)
    assert settings == {"lengths": [1, 4]} and len({t.key for t in again}) == 5
    assert again[1].counts == whole[1].counts and torch.equal(again[1].top_logits, whole[1].top_logits)
    assert record(path, rows, decode, {"lengths": (1, 4)}, 2) and len(calls) == 3
    with pytest.raises(ValueError, match="recorded with other settings"):
        record(path, rows, decode, {"lengths": (1, 8)}, 2)
    with pytest.raises(ValueError, match="batch must be >= 1"):
        record(path, rows, decode, {"lengths": (1, 4)}, 0)


def test_another_file_is_no_traces(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="must hold traces"):
        read_traces(path)
    path.write_text("no json\n")
    with pytest.raises(ValueError, match="line 1: expected JSON"):
        read_traces(path)


def test_a_length_between_two_tables_costs_a_time_between_theirs():
    def table(drafts, verify, draft):
        return CostTable(drafts, 1.5, {1: 10.0, 3: 14.0}, {1: verify, 3: 2 * verify}, {1: draft, 3: draft})

    tables = [table(1, 12.0, 4.0), table(7, 24.0, 10.0)]
    costs = RoundCosts.of_tables(tables, (1, 2, 5, 8))
    assert costs.round_ms == pytest.approx({1: 10.0, 2: 16.0, 5: 18 + 7.0, 8: 34.0})
    assert RoundCosts.of_tables(tables, (1, 8), batch=2).round_ms == pytest.approx({1: 12.0, 8: 46.0})
    assert RoundCosts.of_tables(tables[1:], (2,)).round_ms == pytest.approx({2: 10 + 14 / 7 + 10})
    with pytest.raises(ValueError, match="tables must reach 9 rows"):
        RoundCosts.of_tables(tables, (9,))
    with pytest.raises(ValueError, match="one CostTable at least"):
        RoundCosts.of_tables([], (1,))
    with pytest.raises(ValueError, match="round_ms must have block length 4"):
        RoundCosts({1: 1.0}).ms(4, LengthCounts(1, 1, 1))


def test_tables_are_measured_once(tmp_path):
    drafter = toy()
    traces = [t for t in draft_decoder(drafter, (1, 4), [], 8)(PROMPTS) if t is not None]
    (table,) = measured_tables(drafter, traces, (1, 4), tmp_path)
    accepted = [n for t in traces for n in t.counts[4].accept_lengths]
    assert table.num_drafts == 3 and table.accept_length == pytest.approx(np.mean(accepted))
    assert measured_tables(drafter, traces, (1, 4), tmp_path) == [table]
    costs = measured_forward(tiny_lm("bidirectional"), (2, 32), 3)
    assert costs.ms(4, LengthCounts(5, 3, 20)) == pytest.approx(3 * costs.forward_ms + 20 * costs.row_ms)
    with pytest.raises(ValueError, match="not both 0"):
        ForwardCosts(0, 0)


def test_the_label_is_the_fastest_length_or_the_papers_the_most_accepted():
    rows = [trace(0, {1: 60, 4: 40}), trace(1, {1: 60, 4: 20})]
    speed = merits(rows, (1, 4), "speed", COSTS)
    assert speed.tolist() == [[1000.0, 750.0], [1000.0, 1500.0]]
    # Accepted length never falls with the block here: the paper's label takes the longest, whatever it costs.
    uneven = [LengthCounts(60, 2, 9, (30, 30)), LengthCounts(60, 1, 9, (60,))]
    both = PromptTrace("k", "a", 1, torch.zeros(2), torch.zeros(2), dict(zip((1, 4), uneven, strict=True)))
    assert merits([both], (1, 4), "accept_length", None).tolist() == [[30.0, 60.0]]
    with pytest.raises(ValueError, match="costs must be given"):
        merits(rows, (1, 4), "speed", None)
    with pytest.raises(ValueError, match=r"must hold the lengths \[1, 8\]"):
        merits(rows, (1, 8), "speed", COSTS)


def test_every_group_is_on_both_sides_of_the_split():
    groups = ["a"] * 8 + ["b"] * 2 + ["c"]
    kept, held = split_prompts(groups, 0.25, 0)
    assert sorted(kept + held) == list(range(11))
    assert [sum(groups[i] == g for i in held) for g in "abc"] == [2, 1, 0]
    with pytest.raises(ValueError, match="two prompts of a group"):
        split_prompts(["a", "b"], 0.5, 0)


@pytest.mark.parametrize("objective", ["label", "expected"])
def test_what_the_features_tell_is_learnt_and_training_ends_early(objective, tmp_path):
    rows = easy()
    config = PilotTrainConfig(objective=objective, patience=15, learning_rate=0.02, max_epochs=100)
    mine = train_pilot(SHAPE, config, rows, COSTS, log=tmp_path / "log.jsonl")
    hidden, top = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[3.0, 1.0]] * 2)
    assert mine.choose(hidden, top).tolist() == [4, 1]
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == min(mine.training["best_epoch"] + 15, 100)
    assert mine.training["held_out_result"]["accuracy"] == 1.0
    assert mine.training["labels"] == {"1": 30, "4": 30}
    again = train_pilot(SHAPE, config, rows, COSTS)
    assert all(torch.equal(a, b) for a, b in zip(mine.network.parameters(), again.network.parameters(), strict=True))
    assert plot_pilot_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(label="loss"), "label must be"),
        (dict(objective="mean"), "objective must be"),
        (dict(held_out=1.0), "held_out must be"),
        (dict(patience=0), "patience must be"),
        (dict(learning_rate=0.0), "learning_rate must be"),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PilotTrainConfig(**changes)


def test_groups_are_read_by_span_and_mixed_in_turn(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": "a" * n}) + "\n" for n in (1, 2, 3, 40, 4)))
    tokenizer = toy_tokenizer()
    name, every = read_group(f"maths={path}", tokenizer, 20)
    assert name == "maths" and len(every) == 4
    assert read_group(f"maths={path}@-2:", tokenizer, 20)[1] == every[2:]
    assert [g for g, _ in mixed([("a", every[:3]), ("b", every[:1])])] == ["a", "b", "a", "a"]
    for item, message in [("questions", "GROUP=FILE"), (f"m={path}@1", "GROUP=FILE"), (f"m={path}@9:", "got none")]:
        with pytest.raises(ValueError, match=message):
            read_group(item, tokenizer, 20)


def test_a_trained_pilot_runs_in_the_loop_that_recorded_it():
    drafter = toy("dfly", 2)
    rows = [prompt(4 + i % 5, i) for i in range(12)]
    rows = [[t % 7 for t in row] for row in rows]
    traces = draft_decoder(drafter, (1, 2, 6), [], 16)(rows)
    known = [PromptTrace(**{**t.__dict__, "key": str(i), "group": "a"}) for i, t in enumerate(traces) if t is not None]
    shape = BlockPilotConfig((1, 2, 6), "draft", ("hidden", "top_logits"), (16, 8), 4)
    mine = train_pilot(shape, PilotTrainConfig(max_epochs=5), known, RoundCosts({1: 1.0, 2: 1.3, 6: 2.0}))
    assert isinstance(mine, BlockPilot)
    for row, t in zip(rows[:4], known, strict=False):
        wanted = int(mine.choose(t.hidden[None], t.top_logits[None])[0])
        out = speculative_generate(
            drafter.target, drafter, [row], max_new_tokens=16, block_length=mine, eos_token_id=[]
        )
        assert tuple(out.stats.accept_lengths) == t.counts[wanted].accept_lengths


def test_the_command_records_trains_and_writes_a_pilot_that_decodes(tmp_path):
    base = load_base(str(toy_base(tmp_path / "base", "llama")), "cpu")
    toy_drafter("dfly", base.decoder, taps=(0, 1)).save_pretrained(tmp_path / "drafter")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"say {c}"}) + "\n" for c in "abcdefgh"))
    arguments = ["train-block-pilot", "--out", tmp_path / "pilot", "--target", tmp_path / "base"]
    arguments += ["--drafter", tmp_path / "drafter", "--prompts", f"chat={tmp_path / 'q.jsonl'}", "--lengths", "1,2,4"]
    arguments += ["--max-new-tokens", 8, "--max-epochs", 3, "--device", "cpu"]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    names = {"traces.jsonl", "log.jsonl", "curves.png", "costs", "block_pilot.json", "block_pilot.safetensors"}
    assert {p.name for p in (tmp_path / "pilot").iterdir()} == names
    mine = BlockPilot.from_pretrained(tmp_path / "pilot")
    drafter = load_drafter(tmp_path / "drafter", base.decoder)
    plain = speculative_generate(base.decoder, None, [[5, 6, 7]], max_new_tokens=8)
    out = speculative_generate(base.decoder, drafter, [[5, 6, 7]], max_new_tokens=8, block_length=mine)
    assert out.sequences.tolist() == plain.sequences.tolist()
    wrong = CliRunner().invoke(app, [str(a) for a in arguments] + ["--label", "loss"])
    assert wrong.exit_code == 2 and "label must be one of" in wrong.output
