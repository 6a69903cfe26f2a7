"""The report in a real browser: it lays out without a horizontal scroll bar on a phone, and its replay runs."""

import re
import shutil
import subprocess

import pytest

from dllm.evals.report import write_report
from dllm.evals.runner import Extras, run_task
from tests.evals.fakes import EchoTask, OracleSystem

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the report is not opened")

PROBE = """
<!doctype html><title>probe</title><body style="margin:0"><pre id="out">waiting</pre>
<iframe id="page" style="width:{width}px;height:900px;border:0"></iframe><script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const inside = frame.contentDocument, root = inside.documentElement;
  // Everything open, so that what is hidden at first is laid out too.
  inside.querySelectorAll("details").forEach((box) => {{ box.open = true; }});
  setTimeout(() => {{
    const wide = [...inside.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > {width} + 1);
    const replay = inside.querySelector("iframe");
    const panels = replay ? replay.contentDocument.querySelectorAll("article").length : 0;
    document.getElementById("out").textContent = `over ${{root.scrollWidth - root.clientWidth}}, wide ${{wide.length}} `
      + `${{wide.slice(0, 3).map((e) => e.tagName + "." + e.className)}}, `
      + `dots ${{inside.querySelectorAll(".dot").length}}, panels ${{panels}}`;
  }}, 600);
}};
frame.src = "report.html";
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    task = EchoTask(count=6)
    word = "averylongname" * 6
    for name, wrong in (("a", 7), ("b", 2)):
        system = OracleSystem(wrong=every(wrong), drafts=True)
        settings = {"model": f"{name}/{name}-{word}", "options": {"threshold": 0.9}}
        run_task(task, task.samples(), system, root / "runs" / name, settings, extras=Extras(replays=1))
    write_report([root / "runs"], root / "report.html", f"Runs of {word}")
    return root


def every(wrong):
    return lambda i: i % wrong == 1


def browse(folder, address, *flags):
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files", "--virtual-time-budget=8000",
            *flags, address,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("width", [390, 800, 1100, 1280])
def test_nothing_is_wider_than_the_screen_and_the_replay_runs(folder, width):
    (folder / "probe.html").write_text(PROBE.format(width=width), encoding="utf-8")
    page = browse(folder, (folder / "probe.html").as_uri(), "--dump-dom", "--window-size=1400,1000")
    found = re.search(r'<pre id="out">(.*?)</pre>', page, re.S)
    assert found is not None
    # Two runs in two charts; the replay shows both.
    assert found[1] == "over 0, wide 0 , dots 4, panels 2"


def test_a_picture_of_the_page_is_not_blank(folder):
    picture = folder / "shot.png"
    browse(folder, (folder / "report.html").as_uri(), f"--screenshot={picture}", "--window-size=390,1200")
    # A page of one colour compresses to a few kilobytes.
    assert picture.stat().st_size > 20_000
