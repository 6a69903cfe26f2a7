"""The process that runs one program for `execution.py`: a supervisor, and the shut-in process that it forks.

Run as a script by a fresh interpreter. Standard input: a JSON request; standard output: one JSON verdict. The supervisor never
runs a line of the program. It counts as passed only if the forked process sends back a secret that lies in a pipe until the last
test has run: exit codes and printed text mean nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any


def _beside(name: str) -> types.ModuleType:
    """A module of this folder, by its path: the folder must not be on sys.path, since it holds a statistics.py."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, f"{name}.py must lie beside this file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


linux = _beside("_execution_linux")
confinement = _beside("_execution_confinement")

KEPT_BYTES = 16_384
SWEEP_S = 10.0


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if linux.LINUX:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        # A killed runner takes its supervisor along, and the supervisor its program.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        sys.exit("the process that asked for this program is gone")
    namespaces = linux.unshare()
    output, to_output = os.pipe()
    report, to_report = os.pipe()
    secret_out, secret_in = os.pipe()
    secret = os.urandom(32).hex()
    os.write(secret_in, secret.encode())
    os.close(secret_in)
    request["supervisor"] = os.getpid()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(output)
        os.close(report)
        _shut_in(request, namespaces, to_output, to_report, secret_out)
    for fd in (to_output, to_report, secret_out):
        os.close(fd)
    verdict = _watch(pid, output, report, secret, started + request["timeout_s"], request)
    verdict["seconds"] = time.monotonic() - started
    verdict["survivors"] = _sweep()
    sys.stdout.write(json.dumps(verdict))


def _watch(pid: int, output: int, report: int, secret: str, deadline: float, request: dict[str, Any]) -> dict[str, Any]:
    """Drain both pipes until the program has reported, ended, run out of time or printed too much; then kill it."""
    printed, told = Pipe(output), Pipe(report)
    reason, ended = "", (0, 0, resource.getrusage(resource.RUSAGE_SELF))
    while not reason:
        # A program can close its ends: then there is nothing to wait for but its end.
        time.sleep(0.0 if select.select([pipe for pipe in (printed, told) if pipe.open], [], [], 0.01)[0] else 0.002)
        printed.drain()
        told.drain()
        if told.finished():
            reason = "report"
        elif time.monotonic() >= deadline:
            reason = "timeout"
        elif printed.num_bytes > request["max_output_bytes"]:
            reason = "output"
        elif (ended := os.wait4(pid, os.WNOHANG))[0]:
            # What it wrote last may still lie in the pipe.
            told.drain()
            reason = "report" if told.finished() else "ended"
    _, status, usage = ended if ended[0] else _kill(pid)
    cpu_s = usage.ru_utime + usage.ru_stime
    printed.drain()
    first, last = (_parse(line) for line in [*told.text().split("\n"), "", ""][:2])
    # Only the first line can tell of a failed set-up: it is written before the program begins.
    verdict = {
        "reason": reason,
        "detail": "",
        "isolation": first.get("isolation"),
        "setup_error": first.get("setup_error"),
    }
    if reason == "report" and last.get("secret") == secret:
        verdict["reason"] = "passed"
    elif reason == "report":
        verdict["reason"] = "failed" if last.get("failed") is True else "error"
        verdict["detail"] = str(last.get("detail", ""))
    elif reason == "ended":
        signalled = os.WIFSIGNALED(status)
        how = f"signal {os.WTERMSIG(status)}" if signalled else f"exit code {os.waitstatus_to_exitcode(status)}"
        # The limit goes by sampled ticks, the usage by the scheduler's clock: on a busy machine they differ by tens of percent.
        spent = cpu_s >= 0.5 * request["cpu_s"]
        late = signalled and spent and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        verdict["reason"] = "timeout" if late else "ended"
        verdict["detail"] = f"ended by {how} before the tests were done"
    return verdict | {"output": printed.text(), "num_output_bytes": printed.num_bytes}


class Pipe:
    """The reading end of a pipe, whose first 16 KiB are kept and whose rest is counted."""

    def __init__(self, fd: int) -> None:
        self.fd, self.kept, self.num_bytes, self.open = fd, bytearray(), 0, True
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self.fd

    def drain(self, most: int = 1 << 20) -> None:
        """Read what is there, but not for ever."""
        for _ in range(most // 65_536):
            try:
                data = os.read(self.fd, 65_536)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            self.num_bytes += len(data)
            self.kept += data[: max(0, KEPT_BYTES - len(self.kept))]

    def text(self) -> str:
        return self.kept.decode("utf-8", "replace")

    def finished(self) -> bool:
        """For a report: both lines are there, or there will be no second one."""
        return self.kept.count(b"\n") >= 2 or len(self.kept) >= KEPT_BYTES or self.kept.startswith(b'{"setup_error"')


def _parse(line: str) -> dict[str, Any]:
    """A line of the report; whatever the program may have written there instead says nothing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _kill(pid: int) -> tuple[int, int, resource.struct_rusage]:
    """Kill the program and what shares its process group, reap it: as `os.wait4`."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
    return os.wait4(pid, 0)


def _sweep() -> int:
    """Kill whatever the program left behind, daemons included: orphans become children of this process. How many there were.

    With a process namespace there is nobody left. Raises RuntimeError if some still live after 10 s.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + SWEEP_S
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = _descendants()
        if not alive:
            return len(killed)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(alive)} processes of the program outlived their kill")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= alive
        time.sleep(0.005)


def _descendants() -> set[int]:
    """Processes below this one, zombies left out; empty where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc") if linux.LINUX else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in brackets may hold anything.
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    grown = {os.getpid()}
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def _shut_in(request: dict[str, Any], namespaces: bool, output: int, report: int, secret: int) -> None:
    """In the forked process: give up what can be given up, run program and tests, report, end. Never returns."""
    try:
        isolation = confinement.confine(request, namespaces, linux)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(max(output, report, secret) + 1, 256)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        printed = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        sys.stdout = sys.stderr = printed
    # Whatever goes wrong here is our failure, not the program's; the parent raises it.
    except Exception as error:  # noqa: BLE001
        os.write(report, json.dumps({"setup_error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(1)
    os.write(report, json.dumps({"isolation": isolation}).encode() + b"\n")
    outcome = _run(request["program"], request["tests"])
    # What the program put in place of its standard output may hold text, and may be anything.
    for stream in (getattr(sys, "stdout", None), printed):
        with contextlib.suppress(BaseException):
            stream.flush()  # type: ignore[union-attr]
    if outcome is None:
        outcome = {"secret": os.read(secret, 64).decode()}
    os.write(report, json.dumps(outcome).encode() + b"\n")
    os._exit(0)


def _run(program: str, tests: str) -> dict[str, Any] | None:
    """None if program and tests ran to their ends, else what went wrong.

    Two texts compiled apart, so that an unclosed string or a trailing ``if False:`` of the program cannot swallow the tests.
    """
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt before the tests' end are failures too
        try:
            detail = f"{type(error).__name__}: {error}"[:500]
        except BaseException as second:  # noqa: BLE001 - an exception of the program's own making may not even print
            detail = f"{type(error).__name__} (its text raised {type(second).__name__})"
        return {"failed": isinstance(error, AssertionError), "detail": detail}
    return None


if __name__ == "__main__":
    main()
