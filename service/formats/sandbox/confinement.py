"""Confine this process to what parsing an open file takes, in layers that hold without each other.

Each is a part of Linux that needs no privilege: namespaces(7), `no_new_privs` of prctl(2), landlock(7) and seccomp(2).
Kernels, containers and other systems may lack any of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_THREAD, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x10000, 0x8000000, 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38

# Landlock: system calls, equal on all processors, and the number of kinds of access to files by version.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_READ = 1 << 2 | 1 << 3  # files and folders

# All that Python, NumPy and the codecs call once they run. What changes or ends a file is missing also for open ones:
# a mapped file that becomes shorter kills the process that maps it.
_ALLOWED_CALLS = """
    read readv pread64 preadv write writev pwrite64 pwritev lseek recvmsg sendto close dup
    fstat newfstatat stat lstat statx access faccessat faccessat2 readlink readlinkat getcwd getdents64
    brk mmap munmap mremap mprotect madvise
    futex set_robust_list rseq sched_yield sched_getaffinity exit exit_group
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall setitimer
    clock_gettime clock_nanosleep gettimeofday nanosleep getrandom getrusage getpid gettid uname sysinfo
"""
_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC


def confine(layers: Iterable[str] | None = None) -> dict[str, str]:
    """Give up what parsing does not need, for good; call it after all imports and before other threads start.

    Takes the names of `LAYERS`, all by default. Returns the reasons why layers do not hold, by their names.
    """
    missing: dict[str, str] = {}
    prepared = {layer: LAYERS[layer]() for layer in (LAYERS if layers is None else layers)}
    for _ in ("prepare", "apply"):
        for layer, steps in prepared.items():
            with _report_failure(layer, missing):
                next(steps, None)
    return missing


@contextmanager
def _report_failure(layer: str, missing: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        missing[layer] = getattr(error, "strerror", None) or str(error)


# Each layer is prepared up to its `yield`, where the others do not hold yet, and then put in force.


def _leave_namespaces() -> Iterator[None]:
    """Move to a network without devices, and to a user namespace, in which privileges hold for nothing outside."""
    yield
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))


def _gain_no_privileges() -> Iterator[None]:
    """Have programs that run with the rights of another user run without them."""
    yield
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _restrict_files() -> Iterator[None]:
    """Open nothing but libraries, and these for reading; newer versions also neither connect nor send signals."""
    version = _syscall(_CREATE_RULESET, 0, 0, _ASK_VERSION)
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network, scopes = 3 * (version >= 4), 3 * (version >= 6)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, network, scopes), 24)
    ruleset = _syscall(_CREATE_RULESET, ctypes.addressof(attributes), len(attributes), 0)
    try:
        for folder in _library_folders():
            handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", _READ, handle), 12)
            _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
            os.close(handle)
        yield
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise OSError(errno.EBUSY, "it would hold for one of several threads only")
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _library_folders() -> set[Path]:
    """Return the folders of Python, of the packages and libraries in use, and of all packages that were installed."""
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {folder for folder in _package_folders() | _linked_folders() | installed if folder.is_dir()}


def _package_folders() -> set[Path]:
    """Return the folders of the packages that are imported."""
    packages = [module for name, module in sys.modules.items() if name != "__main__" and "." not in name]
    return {Path(file).parent for package in packages if (file := getattr(package, "__file__", None))}


def _linked_folders() -> set[Path]:
    """Return the folders of the shared libraries that are in memory."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    mapped = (Path(line[line.index("/") :]) for line in maps if "/" in line)
    return {path.parent for path in mapped if ".so" in path.suffixes}


def _filter_system_calls() -> Iterator[None]:
    """Allow the system calls of `_ALLOWED_CALLS`, opening for reading, threads, and limits of this process.

    All others fail as if the kernel did not know them, for which libraries are prepared.
    """
    # It needs the system's libseccomp, and runs programs to find it.
    import pyseccomp as seccomp  # noqa: PLC0415

    system_calls = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    system_calls.set_attr(seccomp.Attr.CTL_TSYNC, 1)
    rules: list[tuple[str, list[seccomp.Arg]]] = [(name, []) for name in _ALLOWED_CALLS.split()]
    rules.append(("open", [seccomp.Arg(1, seccomp.MASKED_EQ, _WRITING, 0)]))
    rules.append(("openat", [seccomp.Arg(2, seccomp.MASKED_EQ, _WRITING, 0)]))
    rules.append(("clone", [seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD)]))
    rules.append(("prlimit64", [seccomp.Arg(0, seccomp.EQ, 0)]))
    for name, conditions in rules:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        # An older library may not know a newer call, and not every processor has every call.
        if number >= 0:
            system_calls.add_rule(seccomp.ALLOW, number, *conditions)
    yield
    system_calls.load()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int) -> int:
    return _check(_libc().syscall(*map(ctypes.c_long, (number, *arguments))))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


LAYERS: dict[str, Callable[[], Iterator[None]]] = {
    "namespaces": _leave_namespaces,
    "no_new_privs": _gain_no_privileges,
    "landlock": _restrict_files,
    "seccomp": _filter_system_calls,
}
