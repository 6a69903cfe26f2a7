"""What a process gives up before it runs a program for `execution.py`, and what of it the system granted.

Runs inside the child process only (standard library, nothing of ours).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

PROCESSES = 32
"""Processes and threads of one program."""
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/random",
)
"""Readable besides the interpreter's own folders."""


def confine(request: dict[str, Any], namespaces: bool, linux: Any) -> dict[str, str]:
    """Session, private file system, limits, user, Landlock, capabilities, in the order in which each still can be done.

    Raises OSError where a step fails that was thought possible, or where the interpreter's own files can no longer be read: every
    import would fail then, and count against the program.
    """
    folder = request["folder"]
    os.setsid()
    # A user of its own, by the supervisor's number: nobody else's processes count against it.
    other = 40_000 + request["supervisor"] % 20_000
    apart = os.getuid() == 0 and linux.LINUX and linux.can_become(other)
    uid, gid = (other, other) if apart else (os.getuid(), os.getgid())
    private = namespaces and linux.mount_private(folder, request["disk_bytes"], (uid, gid))
    if apart and not private:
        os.chown(folder, uid, gid)
    os.chdir(folder)
    if linux.LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    _limit(request, PROCESSES + (linux.num_tasks(uid) if linux.LINUX else 0))
    abi = 0
    if linux.LINUX:
        linux.drop_privileges((uid, gid) if apart else None)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        # Not all of sys.path: an editable install would show its whole repository.
        abi = linux.landlock([*SYSTEM, sys.prefix, sys.base_prefix], [folder, os.devnull])
    with Path(os.__file__).open("rb"):
        pass
    if not namespaces:
        _patch_network()
    # Nobody outside can be signalled from another process namespace, by another user, or from Landlock's sixth version on.
    shielded = namespaces or apart or abi >= 6
    if not shielded:
        os.kill = os.killpg = _refuse
    walls = [name for name, holds in (("read-only mounts", private), ("Landlock", abi > 0)) if holds]
    patched = "no TCP (Landlock), sockets patched" if abi >= 4 else "sockets patched"
    return {
        "network": "namespace" if namespaces else patched,
        "files": " + ".join(walls) or "open",
        "processes": "namespace" if namespaces else f"own session, swept{'' if shielded else ', os.kill patched'}",
        "user": "own" if apart else "the caller's",
    }


def _limit(request: dict[str, Any], num_processes: int) -> None:
    """Resource limits. num_processes: RLIMIT_NPROC counts all tasks of a user, those that run already too."""
    limits = {
        "RLIMIT_CPU": math.ceil(request["cpu_s"]),
        "RLIMIT_AS": request["memory_bytes"],
        "RLIMIT_FSIZE": request["disk_bytes"],
        "RLIMIT_NOFILE": 128,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": num_processes,
    }
    for name, value in limits.items():
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # Soft and hard are one, so that the end of processor time is SIGKILL, which no handler catches.
            resource.setrlimit(number, (value, value))


def _patch_network() -> None:
    """Where the system offers nothing, Python's sockets refuse; this stops an accident, not an attack."""
    import socket

    for name in ("socket", "create_connection", "create_server", "socketpair", "fromfd"):
        setattr(socket, name, _refuse)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError("executed code has no network and sends no signals")
