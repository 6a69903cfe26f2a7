import json
from collections.abc import Iterator
from typing import Any

import pytest

from dllm.evals.run_store import RESULT, SAMPLES, TIMES, Line, RunStore, load_run

RUN = {"settings": {"model": "m", "options": {"threshold": 0.9}}}


def count(records: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return {"n": sum(1 for _ in records)}


def line(i: int) -> Line:
    return Line(i, {"id": f"s{i}", "output": "é\n\ud83d" * i}, {"seconds": i / 7})


def test_a_run_comes_back_in_sample_order_whatever_order_it_was_made_in(tmp_path):
    with RunStore(tmp_path, RUN, 3) as store:
        for i in (2, 0, 1):
            assert store.finish(count) is False
            store.append(line(i))
        assert store.done() == {0, 1, 2}
        assert store.finish(count) is True
    saved = load_run(tmp_path)
    assert [r["id"] for r in saved.records] == ["s0", "s1", "s2"]
    assert saved.records[2]["output"] == "é\n\ud83dé\n\ud83d"
    assert [t["seconds"] for t in saved.times] == [0, 1 / 7, 2 / 7]
    assert json.loads((tmp_path / RESULT).read_text())["summary"] == {"n": 3}
    assert b"seconds" not in (tmp_path / SAMPLES).read_bytes() and b"seconds" in (tmp_path / TIMES).read_bytes()


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_cut_and_the_lines_before_it_stay(tmp_path, cut):
    with RunStore(tmp_path, RUN, 3) as store:
        store.append(line(0))
        store.append(line(1))
    shard = tmp_path / "shard-00000.jsonl"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-cut])
    with RunStore(tmp_path, RUN, 3) as store:
        assert store.done() == {0}
        store.append(line(1))
    assert shard.read_bytes() == whole


def test_a_torn_line_longer_than_one_read_is_cut_too(tmp_path):
    with RunStore(tmp_path, RUN, 3) as store:
        store.append(line(0))
    shard = tmp_path / "shard-00000.jsonl"
    whole = shard.read_bytes()
    shard.write_bytes(whole + b'{"index": 1, "record": "' + b"x" * 200_000)
    with RunStore(tmp_path, RUN, 3) as store:
        assert store.done() == {0}
    assert shard.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with RunStore(tmp_path, RUN, 3) as store:
        store.append(line(0))
    shard = tmp_path / "shard-00000.jsonl"
    shard.write_bytes(b"not json\n" + shard.read_bytes())
    with RunStore(tmp_path, RUN, 3) as store, pytest.raises(ValueError, match=r"shard-00000\.jsonl, line 1"):
        store.done()


def test_a_folder_of_other_settings_is_refused_by_the_name_of_what_differs(tmp_path):
    with RunStore(tmp_path, RUN, 3):
        pass
    other = {"settings": {"model": "m", "options": {"threshold": 0.8}}}
    with pytest.raises(ValueError, match=r"settings\.options\.threshold: there 0\.9, asked for 0\.8"):
        RunStore(tmp_path, other, 3)
    with pytest.raises(ValueError, match="num_samples: there 3, asked for 4"):
        RunStore(tmp_path, RUN, 4)
    with RunStore(tmp_path, RUN, 3) as store:
        assert store.done() == set()


def test_a_shard_that_is_open_elsewhere_is_refused_and_other_ranks_are_not(tmp_path):
    with RunStore(tmp_path, RUN, 2) as first:
        with pytest.raises(RuntimeError, match="open in another process"):
            RunStore(tmp_path, RUN, 2)
        with RunStore(tmp_path, RUN, 2, rank=1) as second:
            second.append(line(1))
            assert second.finish(count) is False
        first.append(line(0))
        assert first.finish(count) is True


def test_a_run_that_is_not_complete_is_read_as_far_as_it_came(tmp_path):
    with RunStore(tmp_path, RUN, 5, rank=1) as store:
        store.append(line(3))
        store.append(line(1))
    saved = load_run(tmp_path)
    assert [r["index"] for r in saved.records] == [1, 3]
    assert saved.run["num_samples"] == 5
    with pytest.raises(ValueError, match="folder that `dllm eval` wrote"):
        load_run(tmp_path / "nothing")
