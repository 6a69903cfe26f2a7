import html.parser
import json
import re
from typing import Any

import pytest

from dllm.evals.report import given_text, marked, render_html, write_report
from dllm.evals.report_charts import Curve, Point, _ticks, lines, scatter, text_of
from dllm.evals.report_data import find_runs, load_views, verdict, versus_first
from dllm.evals.report_markdown import Cell, length_rows, render_markdown
from dllm.evals.results_page import render_results
from dllm.evals.runner import Extras, run_task
from dllm.evals.statistics import Interval
from tests.evals.fakes import EchoTask, OracleSystem

HOSTILE = "</script><script>alert(1)</script><!--&amp;'\"\ud83d"
VOID = {"meta", "link", "br", "img", "input"}


def every(wrong):
    return lambda i: i % wrong == 1


class HostileSystem(OracleSystem):
    def answer(self, samples, seeds, history=False):
        answers = super().answer(samples, seeds, history)
        return [type(a)(**{**vars(a), "text": HOSTILE}) for a in answers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five runs of two tasks: an AR model, two thresholds, and an infill at two lengths."""
    root = tmp_path_factory.mktemp("runs")
    task = EchoTask(count=20)
    systems: dict[str, tuple[OracleSystem, dict[str, Any]]] = {
        "ar": (OracleSystem(nfe=7, drafts=True), {"model": "base", "drafter": "d"}),
        "slow": (OracleSystem(nfe=6, wrong=lambda i: i < 5), {"model": "diffusion", "options": {"threshold": 0.9}}),
        "fast": (OracleSystem(nfe=2, wrong=lambda i: i < 12), {"model": "diffusion", "options": {"threshold": 0.5}}),
    }
    for name, (system, settings) in systems.items():
        run_task(task, task.samples(), system, root / name, settings, batch_size=4, extras=Extras(replays=1))
    infill = EchoTask("infill", count=6)
    infill.name = "echo_infill"
    for length, wrong in (("auto", 2), ("fixed:4", 3), ("oracle", 6)):
        settings = {"model": "diffusion", "length": length}
        system = OracleSystem(wrong=every(wrong))
        extras = Extras(reference_likelihood=True)
        run_task(infill, infill.samples(), system, root / f"infill@{length[:5]}", settings, extras=extras)
    return root


@pytest.fixture(scope="module")
def page(folder):
    return render_html(load_views([*(folder / name for name in ("ar", "slow", "fast")), folder]), "A page")


def elements(page):
    """(tag, attributes, text inside) of every element; raises where tags do not close in order."""
    found, stack = [], []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append([tag, dict(attrs), ""])
            if tag not in VOID:
                stack.append((tag, found[-1]))

        def handle_startendtag(self, tag, attrs):
            found.append([tag, dict(attrs), ""])

        def handle_endtag(self, tag):
            assert stack and stack[-1][0] == tag, f"{tag} closes {stack[-1][0] if stack else 'nothing'}"
            stack.pop()

        def handle_data(self, data):
            for _, element in stack:
                element[2] += data

    Parser().feed(page)
    assert not stack
    return found


def test_scores_costs_and_paired_differences_are_those_of_the_runs(folder):
    views = load_views([folder / "ar", folder])
    assert sorted((v.task["name"], v.number) for v in views) == [
        ("echo", 1), ("echo", 2), ("echo", 3), ("echo_infill", 1), ("echo_infill", 2), ("echo_infill", 3),
    ]  # fmt: skip
    by_label = {v.label: v for v in views}
    assert set(by_label) >= {"base, drafter d", "diffusion, threshold 0.9", "diffusion, threshold 0.5"}
    fast = by_label["diffusion, threshold 0.5"]
    assert fast.score is not None and fast.score.estimate == pytest.approx(0.4)
    assert fast.measurement.total("nfe") == 40 and fast.missing == 0
    assert fast.latency[50.0] == pytest.approx(0.695)
    [pair] = [p for p in versus_first(views) if p.a is fast]
    assert pair.b is by_label["base, drafter d"] and pair.n == 20
    assert pair.score is not None and pair.score.estimate == pytest.approx(-0.6) and verdict(pair.score) == "lower"
    assert pair.comparison.num_identical == 8
    acceptance = by_label["base, drafter d"].acceptance
    assert acceptance is not None and acceptance.num_passes == 40 and acceptance.rate[0] == pytest.approx(35 / 40)


def test_the_page_is_well_formed_and_asks_for_nothing_from_outside(page):
    tags = [tag for tag, _, _ in elements(page)]
    assert tags.count("svg") == 5 and tags.count("iframe") == 0 and tags.count("h1") == 1
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,|#)|url\(|@import|fetch\(|XMLHttp""", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    ids = [attributes["id"] for _, attributes, _ in elements(page) if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for t, a, _ in elements(page) if t == "a"} <= set(ids)


def cut(keep):
    return lambda text: "".join(text.splitlines(keepends=True)[:keep])


def without(*path):
    def change(text):
        first, _, rest = text.partition("\n")
        value = json.loads(first)
        inner = value
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        return json.dumps(value) + "\n" + rest

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("samples.jsonl", cut(3), "must hold samples 0 to 5, a line each: got 3 lines"),
        ("times.jsonl", cut(3), "must hold samples 0 to 5, a line each: got 3 lines"),
        ("samples.jsonl", lambda text: text[:-9], "line 6: must be JSON"),
        ("times.jsonl", lambda text: text[:-9], "line 6: must be JSON"),
        ("samples.jsonl", lambda text: text.replace("word 2", "ward 2"), "sha256 must be the one in result.json"),
        ("samples.jsonl", without("scores"), "line 1: must have 'scores'"),
        ("times.jsonl", without("seconds"), "line 1: must have 'seconds'"),
        ("samples.jsonl", None, "must be there beside result.json"),
        ("result.json", lambda text: "{}", "must have 'samples_sha256'"),
        ("run.json", lambda text: "[]", "must be a JSON object: got '\\[\\]'"),
        ("run.json", lambda text: text[:40], "must be JSON"),
        ("run.json", lambda text: text.replace('"metric"', '"matric"'), "task: must have 'metric'"),
        ("run.json", lambda text: text.replace('"num_samples": 6', '"num_samples": "6"'), "'num_samples' must be int: got '6'"),
        ("replays.json", lambda text: text[:40], "must be JSON"),
        ("replays.json", lambda text: "[{}]", "replay 0: must have 'prompt'"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_complete_run_is_named(tmp_path, name, change, message):
    task = EchoTask(count=6)
    run_task(task, task.samples(), OracleSystem(), tmp_path / "run", {"model": "m"}, extras=Extras(replays=1))
    path = tmp_path / "run" / name
    if change is None:
        path.unlink()
    else:
        before = path.read_text(encoding="utf-8")
        path.write_text(change(before), encoding="utf-8")
        assert path.read_text(encoding="utf-8") != before
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_length_setting_that_nobody_knows_is_named_with_its_folder(tmp_path):
    task = EchoTask("infill", count=3)
    run_task(task, task.samples(), OracleSystem(), tmp_path / "odd", {"model": "m", "length": ""})
    with pytest.raises(ValueError, match=r"odd: length must be 'oracle', 'fixed:N' or 'auto': got ''"):
        write_report([tmp_path], tmp_path / "page.html")


def test_the_three_length_settings_stand_side_by_side(folder):
    views = [v for v in load_views([folder]) if v.task["name"] == "echo_infill"]
    assert [v.settings["length"] for v in length_rows(views)] == ["oracle", "fixed:4", "auto"]
    text = render_markdown(views, "t")
    rows = [line for line in text.splitlines() if re.search(r"\| (oracle|fixed:4|auto) \|", line)]
    assert [re.findall(r"\| (\d+\.\d) ", row)[0] for row in rows] == ["83.3", "66.7", "50.0"]
    assert all("-2.00 (-2.00 to -2.00)" in row for row in rows)


def test_replays_are_kept_as_pages_of_their_own(page):
    [(_, _, text)] = [e for e in elements(page) if e[1].get("id") == "replays"]
    [replay] = json.loads(text)
    assert replay.startswith("<!doctype html>") and "diffusion, threshold 0.5" in replay and "say word 0" in replay


def test_changed_scores_come_first_among_the_diffs(page):
    diffs = [text for _, attributes, text in elements(page) if attributes.get("class") == "diff"]
    assert len(diffs) == 4
    assert "5 of 20 outputs differ" in diffs[0] and "sorry" in diffs[0]
    assert "12 of 20 outputs differ; 8 are shown" in diffs[1]


def test_no_text_of_a_model_or_a_task_can_add_an_element(tmp_path):
    def build(system, name, title):
        task = EchoTask(count=2)
        run_task(task, task.samples(), OracleSystem(), tmp_path / name / "a", {"model": "a"})
        run_task(task, task.samples(), system, tmp_path / name / "b", {"model": title}, extras=Extras(replays=1))
        return render_html(load_views([tmp_path / name]), title)

    class Sorry(OracleSystem):
        def answer(self, samples, seeds, history=False):
            return [type(a)(**{**vars(a), "text": "?"}) for a in super().answer(samples, seeds, history)]

    plain, page = build(Sorry(), "plain", "t"), build(HostileSystem(), "hostile", HOSTILE.replace("\ud83d", "{{BODY}}"))
    kept = ("ins", "del")
    assert [e[0] for e in elements(page) if e[0] not in kept] == [e[0] for e in elements(plain) if e[0] not in kept]
    assert page.count("</script>") == plain.count("</script>")


def test_the_files_are_written_together_and_a_wrong_name_is_refused(folder, tmp_path):
    page, text = write_report([folder], tmp_path / "r.html", "Title")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert text == tmp_path / "r.md" and text.read_text(encoding="utf-8").startswith("# Title\n")
    with pytest.raises(ValueError, match=r"out must end in \.html"):
        write_report([folder], tmp_path / "r.txt")
    with pytest.raises(ValueError, match="run must be a folder"):
        find_runs([tmp_path])


def test_the_folder_of_the_page_is_made(folder, tmp_path):
    page, text = write_report([folder], tmp_path / "new" / "deep" / "page.html")
    assert page.is_file() and text.is_file() and {p.name for p in page.parent.iterdir()} == {"page.html", "page.md"}


def test_a_run_that_is_not_complete_says_so(tmp_path):
    task = EchoTask(count=4)
    run_task(task, task.samples(), OracleSystem(), tmp_path, {"model": "m"}, rank=0, world=2)
    views = load_views([tmp_path])
    assert views[0].missing == 2
    assert "is not complete: 2 samples are missing" in render_html(views, "t")
    assert "is not complete: 2 samples are missing" in render_markdown(views, "t")


def test_the_results_page_is_the_same_for_the_same_runs_and_names_the_settings(folder):
    first, second = (render_results(load_views([folder])) for _ in range(2))
    assert first == second
    assert "## echo\n" in first and "## echo_infill\n" in first
    assert re.search(r"^\| \d\. diffusion, threshold 0\.5 \| ", first, re.MULTILINE)
    assert re.search(r"^\| echo_infill: diffusion \(A\) \|( [\d.]+ \(.*?\) \|){3}$", first, re.MULTILINE)
    heads = [line for line in first.splitlines() if line.startswith("| ") and "same outputs" in line]
    assert heads and all(line.count("|") > 5 for line in heads)


def test_words_that_differ_are_marked_on_their_side():
    old, new = marked("a <b> c", "a x c")
    assert old == "a <del>&lt;b&gt;</del> c" and new == "a <ins>x</ins> c"
    assert marked("same", "same") == ("same", "same")
    assert marked("", "new") == ("", "<ins>new</ins>")
    record = {"given": {"messages": [{"role": "user", "content": "q"}]}}
    assert given_text(record) == "user: q" and given_text({"given": {"prefix": "p", "suffix": "s"}}) == "p[...]s"


def test_charts_place_points_by_value_and_refuse_nothing():
    low, high = (Interval(v, v, v, 5) for v in (1.0, 2.0))
    picture = scatter([Point(1, "a", low, low), Point(2, "b", high, high)], "x", "y")
    (x1, y1), (x2, y2) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)
    assert float(x1) < float(x2) and float(y1) > float(y2)
    assert 'data-run="2"' in picture
    # One run of one sample has no spread, and still a place.
    assert scatter([Point(1, "a", low, low)], "x", "y").count("<circle") == 1
    assert lines([Curve(1, "a", [(1.0, 0.5)])], "x", "y", top=1.0).count("<circle") == 1
    with pytest.raises(ValueError, match="points"):
        scatter([], "x", "y")
    with pytest.raises(ValueError, match="curves"):
        lines([Curve(1, "a", [])], "x", "y")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, -2.9), (0.0001, 0.0002), (5.0, 12345.0)])
def test_ticks_are_round_and_inside(low, high):
    ticks = _ticks(low, high, False)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)


def test_numbers_and_verdicts_are_written_with_care():
    assert [text_of(v) for v in (0, 0.1234, 12.345, -1234.5, 0.00012)] == ["0", "0.123", "12.3", "-1234", "0.0001"]
    interval = Interval(-0.1, -0.2, 0.1, 9)
    assert Cell.of(interval, 1, 100.0, difference=True) == Cell("-10.0", "-20.0 to +10.0", "no difference seen")
    assert Cell.of(None, 1) is None and Cell.ratio(None) is None
    assert Cell.of(Interval(0.5, 0.5, 0.5, 1), 1) == Cell("0.5")
    assert [verdict(Interval(v, v, v, 3)) for v in (0.0, 1.0, -1.0)] == ["no difference", "higher", "lower"]
    assert verdict(Interval(1.0, 1.0, 1.0, 1)) == "one sample" and verdict(None) == ""
