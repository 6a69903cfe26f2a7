import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

from dllm.evals.replay import ReplayRun, render_replay, replay_run, write_replay

HOSTILE = "</script><script>alert(1)</script><!--&amp;'\"\u2028\\"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)


def unpack(page: str) -> dict:
    """The page's data as its script sees them: frames rebuilt from what changed."""
    elements = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            elements.append([tag, dict(attrs), ""])

        def handle_data(self, data):
            if elements:
                elements[-1][2] += data

    Parser().feed(page)
    data = json.loads(next(text for tag, attributes, text in elements if attributes.get("id") == "data"))
    for run in data["runs"]:
        slots: list = []
        frames = []
        for length, *changes in run["frames"]:
            slots = slots[:length]
            for slot, text, state in zip(*[iter(changes)] * 3, strict=True):
                slots[slot : slot + 1] = [(data["texts"][text], data["states"][state])]
            frames.append(slots)
        run["frames"] = frames
    data["tags"] = [tag for tag, _, _ in elements]
    return data


VANILLA = ReplayRun(
    "vanilla",
    "What is it?",
    [
        [("Q:", "given"), ("", "masked"), ("", "masked")],
        [("Q:", "given"), (" a", "new"), (" x", "provisional")],
        [("Q:", "given"), (" a", "committed"), ("\nb", "new"), ("", "masked")],
        [("Q:", "given"), (" a", "committed"), ("\nb", "committed")],
    ],
    settings={"threshold": 1.1},
    stats={"nfe": 7, "tokens_per_forward": 2 / 7},
    forwards=[1, 3, 5, 7],
)
HOSTILE_RUN = ReplayRun(
    "fast " + HOSTILE, "What is it?", [[("", "masked")], [(HOSTILE, "new")]], settings={HOSTILE: HOSTILE}
)


def test_every_frame_comes_back_from_the_page():
    vanilla, hostile = unpack(render_replay([VANILLA, HOSTILE_RUN]))["runs"]
    assert vanilla["frames"] == [list(frame) for frame in VANILLA.history]
    assert vanilla["forwards"] == [1, 3, 5, 7]
    assert vanilla["stats"] == VANILLA.stats
    assert hostile["frames"] == [list(frame) for frame in HOSTILE_RUN.history]
    assert hostile["forwards"] == [0, 1]
    assert hostile["settings"] == {HOSTILE: HOSTILE}


def test_no_token_title_or_prompt_can_add_an_element():
    plain = render_replay([VANILLA, ReplayRun("x", "y", [[("z", "new")]])], "t")
    page = render_replay([VANILLA, ReplayRun(HOSTILE, HOSTILE, [[(HOSTILE, "new")]])], HOSTILE + "{{DATA}}")
    assert unpack(page)["tags"] == unpack(plain)["tags"]
    assert page.count("</script>") == plain.count("</script>")


def test_the_page_asks_for_nothing_from_outside():
    page = render_replay([VANILLA])
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,)|url\(|@import|fetch\(|XMLHttp""", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page


def test_a_failed_write_leaves_the_old_page_and_no_partial_file(tmp_path):
    path = write_replay(tmp_path / "page.html", [VANILLA])
    before = path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        write_replay(path, [ReplayRun("x", "y", [[("z", "new")]], stats={"nfe": object()})])
    with pytest.raises(ValueError, match="runs"):
        write_replay(path, [])
    with pytest.raises(UnicodeEncodeError):
        write_replay(path, [VANILLA], title="\ud800")
    with pytest.raises(FileNotFoundError):
        write_replay(tmp_path / "missing" / "page.html", [VANILLA])
    assert path.read_text(encoding="utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_half_of_a_character_is_shown_and_does_not_break_the_page(tmp_path):
    path = write_replay(tmp_path / "page.html", [ReplayRun("x", "y", [[("\ud83d", "new")]])])
    assert unpack(path.read_text(encoding="utf-8"))["runs"][0]["frames"] == [[("\ud83d", "new")]]


@dataclass(frozen=True)
class Recorded:
    nfe: int
    token_ids: list[int]
    masked: list[bool]
    new: list[bool]
    provisional_ids: list[int]


def test_a_recorded_history_becomes_frames_that_end_where_the_output_does():
    mask, stop = 9, 0
    steps = [
        Recorded(2, [mask, 5, mask, mask], [True, False, True, True], [False, True, False, False], [7, 5, mask, mask]),
        Recorded(4, [6, 5, stop, mask], [False, False, False, True], [True, False, True, False], [6, 5, stop, mask]),
    ]
    run = replay_run("infill", "?", steps, lambda i: f"t{i}", length=2, before=["Once"], after=["."], stats={"nfe": 4})
    given = ("Once", "given"), (".", "given")
    assert run.history == [
        [given[0], *[("", "masked")] * 4, given[1]],
        [given[0], ("t7", "provisional"), ("t5", "new"), ("", "masked"), ("", "masked"), given[1]],
        [given[0], ("t6", "new"), ("t5", "committed"), given[1]],
    ]
    assert run.forwards == [0, 2, 4]
    with pytest.raises(ValueError, match="steps"):
        replay_run("x", "?", [], str)


def test_bad_runs_are_named():
    with pytest.raises(ValueError, match="history must hold"):
        ReplayRun("x", "y", [])
    with pytest.raises(ValueError, match="'done' in frame 0 of run 'x'"):
        ReplayRun("x", "y", [[("z", "done")]])
    with pytest.raises(TypeError, match="got int in frame 0"):
        ReplayRun("x", "y", [[(3, "new")]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one number per frame"):
        ReplayRun("x", "y", [[("z", "new")]], forwards=[1, 2])
    with pytest.raises(ValueError, match="never fall"):
        ReplayRun("x", "y", [[("z", "new")]] * 2, forwards=[2, 1])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page is not opened")
def test_a_browser_shows_the_frame_that_the_address_asks_for(tmp_path):
    path = write_replay(tmp_path / "page.html", [VANILLA, HOSTILE_RUN, ReplayRun("other", "Another", [[("z", "new")]])])
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,900", "--dump-dom",
            f"{path.as_uri()}#forward=6",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    panels = re.findall(
        r'<article[^>]*data-forwards="(\d+)" data-committed="(\d+)"[^>]*>(.*?)</article>', done.stdout, re.S
    )
    # Forward 6 is past the frame of forward 5; the other run ended after 1 and stays there.
    assert [(forwards, committed) for forwards, committed, _ in panels] == [("6", "2"), ("1", "1")]
    states = re.findall(r'class="t (\w+)"', panels[0][2])
    assert states == ["given", "committed", "new", "masked"]
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in panels[1][2]
    assert "done after 1" in panels[1][2]
