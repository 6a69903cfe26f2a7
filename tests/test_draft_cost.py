"""Drafting stays off at batch sizes where it does not pay, and nothing but the speed changes."""

import pytest

from dllm.draft_cost import CostTable, measure_costs, table_path
from dllm.speculate import speculative_generate
from tests.speculative import TARGETS, Scripted, greedy_text, hf_target, padded, prompts, random_drafter


def table(pays_up_to, accept_length=4.0, **changes):
    """Drafting costs three times a plain pass up to a batch size, five times beyond it."""
    sizes = range(1, 9)
    values = dict(
        num_drafts=7,
        accept_length=accept_length,
        plain_ms=dict.fromkeys(sizes, 10.0),
        verify_ms={size: 20.0 if size <= pays_up_to else 40.0 for size in sizes},
        draft_ms=dict.fromkeys(sizes, 10.0),
    )
    return CostTable(**{**values, **changes})


def test_speedup_is_tokens_per_time_and_sizes_between_are_interpolated():
    costs = CostTable(7, 3.0, {1: 10.0, 5: 30.0}, {1: 12.0, 5: 100.0}, {1: 3.0, 5: 20.0})
    assert costs.speedup(1) == pytest.approx(3 * 10 / 15)
    assert costs.speedup(3) == pytest.approx(3 * 20 / (56 + 11.5))
    assert costs.speedup(5) == costs.speedup(64) == pytest.approx(3 * 30 / 120)
    assert costs.speedup(5, accept_length=8.0) == pytest.approx(2.0)
    assert costs.pays(1) and not costs.pays(3)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_drafting_is_off_while_the_batch_is_too_large_and_comes_on_when_rows_leave(kind):
    target = TARGETS[kind](4)
    rows = prompts(4)
    texts = [greedy_text(target, row, 40) for row in rows]
    # Rows leave one after another, by their own stop tokens.
    eos = [texts[0][len(rows[0]) + 6], texts[1][len(rows[1]) + 12]]
    ids, mask = padded(rows)
    options = dict(max_new_tokens=40, eos_token_id=eos)
    plain = speculative_generate(target, None, ids, mask, **options)
    drafter = Scripted(target, texts)
    seen = []

    def note(model, step, timestep, kwargs):
        if step:
            seen.append((len(kwargs["rows"]), kwargs["draft_tokens"].shape[1] > 0))

    out = speculative_generate(
        target, drafter, ids, mask, cost_table=table(pays_up_to=2), callback_on_step_end=note, **options
    )
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert {size for size, _ in seen} & {1, 2} and {size for size, _ in seen} & {3, 4}
    assert all(drafted == (size <= 2) for size, drafted in seen)
    assert out.stats.nfe < plain.stats.nfe


def test_where_drafting_never_pays_the_drafter_is_not_even_fed(monkeypatch):
    target = hf_target(4)
    drafter = Scripted(target, [greedy_text(target, row, 9) for row in prompts(4)])
    drafter.feed = lambda context: pytest.fail("fed in vain")  # type: ignore[method-assign]
    out = speculative_generate(target, drafter, *padded(prompts(4)), max_new_tokens=9, cost_table=table(0))
    assert (out.stats.draft_nfe, out.stats.nfe) == (0, 9)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_a_measured_table_is_kept_and_found_again(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("DLLM_CACHE", str(tmp_path))
    target = TARGETS[kind](1)
    drafter = random_drafter("dfly", target)
    assert CostTable.find(drafter) is None
    measured = measure_costs(drafter, batches=(1, 3), columns=12, repeats=3)
    assert sorted(measured.plain_ms) == [1, 3] and measured.num_drafts == 7
    assert all(t > 0 for times in (measured.plain_ms, measured.verify_ms, measured.draft_ms) for t in times.values())
    assert measured.accept_length == pytest.approx(drafter.check().accept_length)
    assert CostTable.find(drafter) == measured
    assert table_path(random_drafter("dflash", target)) != table_path(drafter)
    row = prompts(1)[:1]
    options = dict(max_new_tokens=9)
    expected = speculative_generate(target, None, row, **options).sequences.tolist()
    for value in ("auto", str(table_path(drafter)), measured):
        assert speculative_generate(target, drafter, row, cost_table=value, **options).sequences.tolist() == expected


def test_bad_tables_are_named(tmp_path):
    with pytest.raises(ValueError, match="num_drafts must be >= 1"):
        table(1, num_drafts=0)
    with pytest.raises(ValueError, match=r"accept_length must be in \[1, 8\]: got 9"):
        table(1, accept_length=9)
    with pytest.raises(ValueError, match="must have the same batch sizes"):
        table(1, plain_ms={1: 2.0})
    with pytest.raises(ValueError, match="draft_ms must be > 0"):
        table(1, draft_ms=dict.fromkeys(range(1, 9), 0.0))
    (tmp_path / "bad.json").write_text('{"num_drafts": 3}')
    with pytest.raises(ValueError, match="must be a cost table"):
        CostTable.load(tmp_path / "bad.json")
    drafter = random_drafter("dflash", hf_target())
    for options, message in (
        (dict(num_drafts=8), "num_drafts must be in"),
        (dict(batches=()), "batches must be batch sizes"),
        (dict(columns=1), "columns must be >= 2"),
        (dict(repeats=0), "repeats must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_costs(drafter, **options)
