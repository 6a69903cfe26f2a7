"""What Linux offers to shut a process in, through ctypes: namespaces, a private file system, Landlock, capabilities.

Runs inside the child process of `execution.py` only (standard library, nothing of ours). Each step says whether it worked;
where the kernel or a container forbids one, the others still hold. Numbers are from the kernel's public headers; the three
Landlock calls and mount_setattr have the same number on every architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
CAP_DAC_READ_SEARCH = 1 << 2
# CAP_CHOWN, CAP_SETGID, CAP_SETUID
NEEDED_TO_BECOME = 1 << 0 | 1 << 6 | 1 << 7
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
AT_RECURSIVE, MOUNT_ATTR_RDONLY, MS_PRIVATE, MS_NOSUID_NODEV = 0x8000, 1, 1 << 18, 2 | 4

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_OF_ABI_1, REFER, TRUNCATE, IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def _call(name: str, *args: object) -> int:
    """A libc function; raises OSError on -1."""
    result = getattr(_libc, name)(*args)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def unshare() -> bool:
    """New process, network, mount and IPC namespaces; for anybody but root in a new user namespace. True if all were granted.

    The process namespace takes effect for the next fork: that child is its init, and with it everything in it dies.
    """
    if not LINUX:
        return False
    if os.getuid() != 0:
        # Some systems grant a user namespace but no user in it, and there is no way back: a child tries first.
        child = os.fork()
        if child == 0:
            os._exit(0 if _unshare() else 1)
        if os.waitpid(child, 0)[1] != 0:
            return False
    return _unshare()


def _unshare() -> bool:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | (CLONE_NEWUSER if uid != 0 else 0)
    try:
        _call("unshare", flags)
        if uid != 0:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                Path("/proc/self", name).write_text(text)
    except OSError:
        return False
    return True


def mount_private(folder: str, num_bytes: int, owner: tuple[int, int]) -> bool:
    """Everything read-only, and an empty file system of ``num_bytes`` at ``folder``; needs the namespaces of `unshare`."""
    try:
        _mount_setattr("/", propagation=MS_PRIVATE)
        options = f"size={num_bytes},nr_inodes=4096,mode=700,uid={owner[0]},gid={owner[1]}"
        _call("mount", b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(MS_NOSUID_NODEV), options.encode())
        _mount_setattr("/", set_=MOUNT_ATTR_RDONLY)
        _mount_setattr(folder, clear=MOUNT_ATTR_RDONLY)
    except OSError:
        return False
    return True


def _mount_setattr(path: str, set_: int = 0, clear: int = 0, propagation: int = 0) -> None:
    attr = struct.pack("=QQQQ", set_, clear, propagation, 0)
    at_fdcwd, size = ctypes.c_int(-100), ctypes.c_size_t(len(attr))
    _call("syscall", SYS_MOUNT_SETATTR, at_fdcwd, path.encode(), AT_RECURSIVE, attr, size)


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 without."""
    if not LINUX:
        return 0
    try:
        return _call("syscall", SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock(readable: list[str], writable: list[str]) -> int:
    """Shut this process and its children off from all files but these folders; the ABI in force, 0 where there is none.

    From ABI 4 also no TCP, from ABI 6 no signal to anybody outside. Needs PR_SET_NO_NEW_PRIVS.
    """
    abi = landlock_abi()
    if abi == 0:
        return 0
    files = ALL_OF_ABI_1 | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    attr = struct.pack("=Q", files)
    if abi >= 4:
        attr += struct.pack("=Q", 3)
    if abi >= 6:
        attr += struct.pack("=Q", 3)
    ruleset = _call("syscall", SYS_LANDLOCK_CREATE, attr, ctypes.c_size_t(len(attr)), ctypes.c_uint(0))
    of_a_file = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
    for paths, rights in ((readable, EXECUTE | READ_FILE | READ_DIR), (writable, files)):
        for path in paths:
            try:
                parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = rights if Path(path).is_dir() else rights & files & of_a_file
            _call("syscall", SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, parent), ctypes.c_uint(0))
            os.close(parent)
    _call("syscall", SYS_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0))
    os.close(ruleset)
    return abi


def _held() -> int:
    """Bit mask of the capabilities in force."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


def can_become(uid: int) -> bool:
    """Root can be less than all-powerful in a container: may it give files and itself to this user, and does the user exist here?"""
    maps = [[int(n) for n in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    exists = any(first <= uid < first + count for first, _, count in maps)
    return exists and _held() & NEEDED_TO_BECOME == NEEDED_TO_BECOME


def drop_privileges(user: tuple[int, int] | None) -> None:
    """Become this (user, group), or stay who one is, and drop all capabilities. Raises OSError.

    Another user than root keeps the right to read what root can, if root had it: the interpreter may lie in root's own folder.
    """
    kept = 0
    if user is not None:
        kept = _held() & CAP_DAC_READ_SEARCH
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        prctl(PR_SET_KEEPCAPS, 1)
        os.setresuid(user[0], user[0], user[0])
    header = struct.pack("=Ii", 0x20080522, 0)
    _call("capset", header, struct.pack("=IIIIII", kept, kept, 0, 0, 0, 0))


def num_tasks(uid: int) -> int:
    """Threads of a user's processes, as far as /proc shows them."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                total += len(list(Path(entry.path, "task").iterdir())) if entry.stat().st_uid == uid else 0
    return total
