"""Running code that a model wrote, shut in.

Opt-in: nothing here runs unless the caller passes `execute` on (the command line's ``--allow-code-execution``). One program is one
process of its own session, with limits on time, memory, processes, files and printed text, an emptied environment, and an empty
folder as working folder and home that is gone afterwards. On Linux, as far as kernel and container allow, also: its own process
namespace (when the program ends or is ended, so does everything that it started), no network, read-only mounts, Landlock (no file
but the interpreter's, no signal to anybody outside), and another user where the caller is root. `Execution.isolation` says what held.

A program passes only if a secret comes back after its last test, so that exiting early, exit codes and printed text mean nothing.
Program and tests share an interpreter, as in every harness for these data sets: code written against this very file could look for
the secret, and an object can claim to equal everything. The limits are after Chen et al. 2021 (arXiv:2107.03374, section 2.3).

Limits are per process, and a program has up to 32. ``memory_bytes`` bounds address space, so it does not hold what the kernel keeps
for a process outside of it: files in memory that are written and never mapped (``os.memfd_create``: at most ``disk_bytes`` each and 128
descriptors a process, 8 GiB with the defaults), and buffers of pipes and sockets. All of that goes when the program ends. Where a
program may mean harm, put a limit on the memory of the whole evaluation (a container, a cgroup).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Reason = Literal["passed", "failed", "error", "ended", "timeout", "output"]

CHILD = Path(__file__).with_name("_execution_child.py")
# What the supervisor may take on top of the program's time: its start, and killing and reaping a fork bomb.
GRACE_S = 30.0
# What poll and setrlimit take: 11 days, and 4 EiB.
MOST_S, MOST_BYTES = 1_000_000, 1 << 62


class ExecutionError(RuntimeError):
    """The machinery failed, not the program; a score made of it would be wrong."""


@dataclass(frozen=True)
class Execution:
    """What became of one program.

    reason: ``passed``; ``failed`` (a test's assertion); ``error`` (any other exception, a program that does not compile included);
    ``ended`` (the process exited or crashed before the tests were done); ``timeout``; ``output`` (it printed too much).
    detail: the exception or signal. output: the first 16 KiB that it printed. num_output_bytes: all that it printed.
    seconds: wall time. survivors: processes that it left behind and that had to be killed one by one (0 with a process namespace).
    isolation: what shut it in, by ``network``, ``files``, ``processes``, ``user``.
    """

    passed: bool
    reason: Reason
    detail: str = ""
    output: str = ""
    num_output_bytes: int = 0
    seconds: float = 0.0
    survivors: int = 0
    isolation: Mapping[str, str] = field(default_factory=dict)


def execute(
    program: str,
    tests: str,
    *,
    timeout_s: float = 30.0,
    cpu_s: float = 15.0,
    memory_bytes: int = 1 << 30,
    disk_bytes: int = 64 << 20,
    max_output_bytes: int = 4 << 20,
) -> Execution:
    """Run a Python program, then its tests in the same module; passed if both reach their ends.

    timeout_s: wall time. cpu_s: processor time of each process, rounded up to seconds: on a busy machine the fairer of the two.
    memory_bytes: address space of each process; files in memory are not in it, see above.
    disk_bytes: its folder where that can be private, else each file. max_output_bytes: printed text at which it is ended.

    Raises ValueError for a limit that is not positive, or higher than any system takes, NotImplementedError off POSIX, ExecutionError
    if the machinery fails.
    """
    limits = {
        "timeout_s": timeout_s,
        "cpu_s": cpu_s,
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "max_output_bytes": max_output_bytes,
    }
    for name, value in limits.items():
        most = MOST_S if name.endswith("_s") else MOST_BYTES
        if not 0 < value <= most:
            raise ValueError(f"{name} must be > 0 and <= {most}: got {value}")
    if os.name != "posix":
        raise NotImplementedError(f"code execution needs a POSIX system (rlimits, process groups): got {os.name!r}")
    folder = tempfile.mkdtemp(prefix="dllm-execution-")
    try:
        request = {"program": program, "tests": tests, "folder": folder, "parent": os.getpid(), **limits}
        verdict = _supervise(request, folder, timeout_s + GRACE_S)
    finally:
        _remove(folder)
    if verdict.get("setup_error"):
        raise ExecutionError(f"the program could not be shut in: {verdict['setup_error']}")
    return Execution(
        passed=verdict["reason"] == "passed",
        reason=verdict["reason"],
        detail=verdict["detail"],
        output=verdict["output"],
        num_output_bytes=verdict["num_output_bytes"],
        seconds=verdict["seconds"],
        survivors=verdict["survivors"],
        isolation=verdict["isolation"] or {},
    )


def _supervise(request: dict[str, Any], folder: str, patience_s: float) -> dict[str, Any]:
    """Start the supervisor, hand it the request, take its verdict."""
    # -P -s and an environment of our own do what -I does, but leave PYTHONHASHSEED in force: the same score in every run.
    command = [sys.executable, "-P", "-s", "-B", str(CHILD)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    supervisor = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        payload = json.dumps(request).encode("utf-8", "replace")
        out, err = supervisor.communicate(payload, timeout=patience_s)
    except subprocess.TimeoutExpired:
        raise ExecutionError(f"the supervisor gave no verdict in {patience_s:g} s") from None
    finally:
        if supervisor.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.communicate()
    if supervisor.returncode != 0 or not out:
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing on its standard error"]
        raise ExecutionError(f"the supervisor ended with code {supervisor.returncode}: {last[0]}")
    verdict: dict[str, Any] = json.loads(out)
    return verdict


def _remove(folder: str) -> None:
    """Remove the folder, also where the program took its own rights to it away."""
    Path(folder).chmod(0o700)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            inner = Path(path, name)
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)
