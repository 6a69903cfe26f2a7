"""Hostile programs: none passes, none leaves its folder, none outlives its time."""

import contextlib
import functools
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from dllm.evals.execution import CHILD, Execution, ExecutionError, execute

run = functools.partial(execute, timeout_s=20.0)
IMPOSSIBLE = "assert False"


def processes_with(mark: str) -> list[int]:
    """Ids of processes whose command line holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_for(condition, seconds=60.0) -> bool:
    """True as soon as the condition holds, False if it does not within the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(params=["all that the system offers", "no namespaces", "no namespaces, no Landlock"])
def offered(request, monkeypatch, tmp_path):
    """Systems that offer less: the child with those steps refused."""
    child = tmp_path / "child.py"
    child.write_text(
        f"import importlib.util as u\ns = u.spec_from_file_location('child', {str(CHILD)!r})\nm = u.module_from_spec(s)\n"
        + "s.loader.exec_module(m)\n"
        + ("m.linux.unshare = lambda: False\n" if "namespaces" in request.param else "")
        + ("m.linux.landlock_abi = lambda: 0\n" if "Landlock" in request.param else "")
        + "m.main()\n"
    )
    monkeypatch.setattr("dllm.evals.execution.CHILD", child)
    return request.param


def test_a_right_program_passes_and_a_wrong_one_says_why_not():
    assert run("def f(x):\n    return x + 1", "assert f(1) == 2").passed
    wrong = run("def f(x):\n    return x", "assert f(1) == 2, 'one more'")
    assert (wrong.passed, wrong.reason, wrong.detail) == (False, "failed", "AssertionError: one more")
    broken = run("def f(x):", "assert f(1) == 2")
    assert (broken.passed, broken.reason) == (False, "error") and broken.detail.startswith("IndentationError")


TEE = """import sys
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
"""


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("import sys\nprint('a')\nsys.stdout = None", "a\n"),
        ("import sys\nprint('a')\ndel sys.stdout", "a\n"),
        (f"{TEE}sys.stdout = Tee(sys.stdout)\nprint('a')", "a\n"),
        (f"{TEE}Tee.flush = lambda self: 1 / 0\nsys.stdout = Tee(sys.stdout)\nprint('a')", "a\n"),
        (f"{TEE}Tee.flush = lambda self: sys.exit(1)\nsys.stdout = Tee(sys.stdout)\nprint('a')", "a\n"),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('a')", "a\n"),
        ("import io, sys\nsys.stdout = io.StringIO()\nprint('a')", ""),
    ],
)
def test_a_right_program_may_put_anything_in_place_of_its_standard_output(program, output):
    result = run(f"{program}\ndef f(x):\n    return x + 1", "assert f(1) == 2")
    assert (result.passed, result.output) == (True, output), result
    assert run(f"{program}\ndef f(x):\n    return x", "assert f(1) == 2").reason == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "quit()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM); os.abort()",
        "def f():\n    import os\n    os._exit(0)",
        "import threading, os; threading.Thread(target=lambda: os._exit(0)).start(); import time; time.sleep(5)",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
    ],
)
def test_leaving_before_the_tests_are_done_is_no_pass(program):
    result = run(program, f"f()\n{IMPOSSIBLE}")
    assert not result.passed and result.reason in ("ended", "error")


@pytest.mark.parametrize(
    "program",
    [
        'print("passed"); print(\'{"secret": "passed"}\'); import os; os._exit(0)',
        # Every descriptor gets what the report looks like, with a guessed secret.
        'import os\nfor fd in range(1, 40):\n  try: os.write(fd, b\'{"secret": "00"}\\n{"secret": "00"}\\n\')\n'
        "  except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(1, 40):\n  try: os.write(fd, b'[1]\\nnull\\n' * 9)\n  except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(1, 40):\n  try: os.write(fd, b'[' * 9000 + b'\\n')\n  except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(1, 40):\n  try: os.write(fd, b'{\"setup_error\": 1}\\n')\n  except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 100)",
    ],
)
def test_printing_success_is_no_pass(program):
    assert not run(program, IMPOSSIBLE).passed


@pytest.mark.parametrize(
    "program", ["x = '''", 'x = """', "if False:", "x = (", "def check(f):\\", "#\\", "'''", "x = \\"]
)
def test_a_program_that_is_cut_off_cannot_swallow_the_tests(program):
    assert not run(program, "'''\n)\n\"\"\"\n'''\nassert False").passed
    assert not run(program, IMPOSSIBLE).passed


def test_an_exception_that_cannot_be_printed_is_an_error():
    result = run("class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E", "")
    assert (result.reason, result.detail) == ("error", "E (its text raised ValueError)")


def test_the_environment_and_standard_input_are_empty(monkeypatch):
    monkeypatch.setenv("DLLM_TEST_SECRET", "swordfish")
    program = (
        "import os, sys\nprint(sorted(os.environ), sys.stdin.read())\nhome = os.path.realpath(os.path.expanduser('~'))"
    )
    result = run(program, "import os\nassert home == os.path.realpath(os.getcwd()) and os.listdir('.') == []")
    assert result.passed, result
    assert "DLLM_TEST_SECRET" not in result.output and "swordfish" not in result.output


def test_the_same_hashes_in_every_run():
    program = "print(hash('a'), list({'a', 'b', 'c', 'd'}))"
    assert run(program, "").output == run(program, "").output


def test_files_are_written_in_its_folder_only_and_the_folder_goes(tmp_path_factory, monkeypatch, offered):
    temporary, tmp_path = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("outside")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    program = f"""
import os, shutil
open("inside.txt", "w").write("x")
os.makedirs("a/b"); os.chmod("a/b", 0); os.symlink({str(tmp_path)!r}, "link")
denied = 0
def refused(what):
    try:
        what()
    except OSError:
        return 1
    return 0
for target in ({str(tmp_path / "new.txt")!r}, "link/new.txt", {str(kept)!r}):
    denied += refused(lambda: open(target, "w").write("gone"))
denied += refused(lambda: os.unlink({str(kept)!r}))
denied += refused(lambda: os.rename({str(kept)!r}, {str(tmp_path / "other")!r}))
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
"""
    result = run(program, "assert denied == 5, denied")
    if result.isolation["files"] == "open" and result.isolation["user"] != "own":
        pytest.skip("this system has neither mount namespaces nor Landlock, and the caller is not root")
    assert result.passed, result
    assert kept.read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    assert list(temporary.iterdir()) == []


def test_a_file_outside_cannot_be_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish")
    result = run(f"print(open({str(secret)!r}).read())", "")
    if "Landlock" not in result.isolation["files"]:
        pytest.skip("this system has no Landlock")
    assert result.reason == "error" and result.detail.startswith("PermissionError") and "swordfish" not in result.output


def test_disk_and_memory_have_their_limits():
    assert run("open('big', 'wb').write(b'0' * (80 << 20))", "").reason in ("error", "ended")
    many = "for i in range(40):\n    open(str(i), 'wb').write(b'0' * (4 << 20))"
    result = run(many, "")
    if "mounts" in result.isolation["files"]:
        assert result.reason == "error" and "No space left" in result.detail
    result = run("x = bytearray(8 << 30)", "")
    assert (result.reason, result.detail.partition(":")[0]) == ("error", "MemoryError")


def test_there_is_no_network(offered):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)", "")
    assert result.reason == "error" and result.isolation["network"]


def test_a_program_that_ignores_signals_ends_with_its_time(offered):
    ignoring = (
        "import signal, time\nfor s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(s, lambda *a: None)\nwhile True:\n    try: time.sleep(100)\n    except BaseException: pass"
    )
    result = execute(ignoring, "", timeout_s=1.0)
    assert result.reason == "timeout" and result.seconds < 10


def test_processor_time_has_its_own_limit():
    result = execute("while True: pass", "", timeout_s=60.0, cpu_s=1.0)
    assert result.reason == "timeout" and result.seconds < 40


def test_endless_output_is_cut_off():
    result = run("while True: print('x' * 10000)", "")
    assert result.reason == "output" and len(result.output) <= 16_384 < result.num_output_bytes
    quiet = run("print('y' * 100_000)", "")
    assert quiet.passed and len(quiet.output) <= 16_384


def test_a_fork_bomb_is_gone_with_its_time(offered):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = execute(bomb, IMPOSSIBLE, timeout_s=1.0)
    assert result.reason == "timeout"
    assert run("", "").passed


def test_what_held_is_reported(offered):
    result = run("import socket", "assert True")
    assert result.passed and set(result.isolation) == {"network", "files", "processes", "user"}
    if "namespaces" in offered:
        assert result.isolation["processes"] == "own session, swept" and "patched" in result.isolation["network"]
        assert "mounts" not in result.isolation["files"]
    if "Landlock" in offered:
        assert result.isolation["files"] == "open"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_daemon_does_not_outlive_its_program(offered):
    mark = f"97531.{os.getpid()}"
    daemon = f"""
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.run(["sleep", "{mark}"])
    os._exit(0)
os.wait(); time.sleep(0.3)
"""
    assert run(daemon, "").passed
    assert processes_with(mark) == []
    assert execute(daemon + "time.sleep(100)", "", timeout_s=1.0).reason == "timeout"
    assert processes_with(mark) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_caller_takes_its_program_along(tmp_path):
    mark = f"86420.{os.getpid()}"
    program = f"import subprocess\nprint(1, flush=True)\nsubprocess.run(['sleep', '{mark}'])"
    script = tmp_path / "caller.py"
    # By its path: what is to be killed need not load the package.
    script.write_text(
        "import importlib.util as u, sys\n"
        f"s = u.spec_from_file_location('execution', {str(CHILD.with_name('execution.py'))!r})\n"
        "m = u.module_from_spec(s)\nsys.modules['execution'] = m\ns.loader.exec_module(m)\n"
        f"m.execute({program!r}, '', timeout_s=100)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "TMPDIR": str(tmp_path)}) as caller:
        assert wait_for(lambda: processes_with(mark))
        caller.kill()
    assert wait_for(lambda: not processes_with(mark))


def test_threads_left_running_and_deep_recursion_do_no_harm():
    threads = "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(100,)).start()"
    result = run(threads, "")
    assert result.passed and result.seconds < 20
    assert run("def f(n): return f(n + 1)\nf(0)", "").detail.startswith("RecursionError")
    deep = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())"
    assert not run(deep, "").passed


def test_it_cannot_signal_anybody_outside():
    # Where only Python's own functions are patched this would be no test, but a danger to whoever runs it.
    if "patched" in run("", "").isolation["processes"]:
        pytest.skip("this system has neither process namespaces nor Landlock 6, and the caller is not root")
    with subprocess.Popen(["sleep", "60"]) as bystander:
        program = f"import os, signal\nfor pid in ({bystander.pid}, {os.getpid()}, -1):\n  try: os.kill(pid, signal.SIGKILL)\n"
        result = run(program + "  except OSError: pass", "assert True")
        time.sleep(0.1)
        alive = bystander.poll() is None
        bystander.kill()
    assert alive and result.reason in ("passed", "ended")


def test_limits_are_checked_and_failing_machinery_is_no_failing_sample(monkeypatch, tmp_path):
    wrong: list[dict[str, Any]] = [{"timeout_s": 0}, {"timeout_s": math.inf}, {"cpu_s": math.inf}, {"cpu_s": math.nan}]
    for limit in wrong:
        [(name, value)] = limit.items()
        with pytest.raises(ValueError, match=f"{name} must be > 0 and <= 1000000: got {value}"):
            execute("", "", **limit)
    with pytest.raises(ValueError, match="memory_bytes must be > 0 and <= "):
        execute("", "", memory_bytes=1 << 63)
    assert execute("", "", timeout_s=1_000_000, cpu_s=1_000_000, disk_bytes=1 << 62, max_output_bytes=1 << 62).passed
    monkeypatch.setattr("dllm.evals.execution.CHILD", tmp_path / "nothing.py")
    with pytest.raises(ExecutionError, match="ended with code"):
        run("", "")


def test_surrogates_and_null_bytes_are_a_failing_program():
    for program in ("x = '\ud800'", "x = 1\0"):
        result = run(program, "")
        assert isinstance(result, Execution)
        assert result.reason == "error"
