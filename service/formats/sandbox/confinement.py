"""Confine this process, in several independent layers, to the operations that are needed to parse an open file.

Each layer is a feature of Linux that needs no privileges: namespaces(7), `no_new_privs` of prctl(2), landlock(7) and
seccomp(2). Some kernels, containers and other operating systems lack some of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CLONE_THREAD = 0x10000
_CLONE_NEWIPC = 0x8000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522

# Landlock: system call numbers (the same on all architectures), arguments, and number of file access types per version.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_FILE_ACCESS_TYPE_COUNTS = {1: 13, 2: 14, 3: 15, 4: 15}
_READ_ACCESS = 1 << 2 | 1 << 3  # files and folders

# The system calls that Python, NumPy and the codecs use after startup. Calls that truncate files are not included, even
# for open files. The service maps output files, and accessing a mapped file that was truncated kills the process.
_ALLOWED_CALLS = """
    read readv pread64 preadv write writev pwrite64 pwritev lseek recvmsg sendto close dup
    fstat newfstatat stat lstat statx access faccessat faccessat2 readlink readlinkat getcwd getdents64
    brk mmap munmap mremap mprotect madvise
    futex set_robust_list rseq sched_yield sched_getaffinity exit exit_group
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall setitimer
    clock_gettime clock_nanosleep gettimeofday nanosleep getrandom getrusage getpid gettid uname sysinfo
"""
# System calls that training never needs: access to other processes, mounts, modules and tracing. Training may start
# programs, because torch.compile runs a compiler.
_CALLS_DENIED_TO_TRAINING = """
    ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp perf_event_open bpf userfaultfd io_uring_setup
    mount umount2 pivot_root chroot move_mount open_tree fsopen fsmount fspick mount_setattr unshare setns
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff
    add_key request_key keyctl open_by_handle_at name_to_handle_at
"""
_WRITE_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC


class Confinement:
    """Layers of confinement that are prepared once, before a process is forked, and applied in each forked process.

    `layers` are the available layers, by default `LAYERS`. `names` selects some of them; by default, all layers are
    applied. Create this object after all imports.
    """

    def __init__(
        self, names: Iterable[str] | None = None, layers: Mapping[str, Callable[[], Iterator[None]]] | None = None
    ) -> None:
        layers = LAYERS if layers is None else layers
        self._missing_layers: dict[str, str] = {}
        self._steps_by_layer = {name: layers[name]() for name in (layers if names is None else names)}
        self._run_next_steps()

    def apply(self) -> dict[str, str]:
        """Permanently drop all rights that parsing does not need. Call this before starting threads.

        Returns the layers that could not be applied, with reasons.
        """
        self._run_next_steps()
        return self._missing_layers

    def _run_next_steps(self) -> None:
        for layer, steps in self._steps_by_layer.items():
            with _record_failure(layer, self._missing_layers):
                next(steps, None)


def confine(
    names: Iterable[str] | None = None, layers: Mapping[str, Callable[[], Iterator[None]]] | None = None
) -> dict[str, str]:
    """Prepare and apply layers of confinement in this process. The arguments are those of `Confinement`.

    Call this after all imports and before starting threads. Returns the layers that could not be applied, with reasons.
    """
    return Confinement(names, layers).apply()


def limit_resources(memory_bytes: int, max_file_bytes: int) -> None:
    """Limit the memory that this process allocates from now on, and the size of files that it writes."""
    startup_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (startup_bytes + memory_bytes, startup_bytes + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process as soon as its parent exits. Call this before `Confinement.apply`."""
    _raise_if_negative(_load_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    # The parent may have exited before the call.
    if os.getppid() != parent_pid:
        os._exit(1)


@contextmanager
def _record_failure(layer: str, missing_layers: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        missing_layers[layer] = getattr(error, "strerror", None) or str(error)


# Each function below prepares its layer before the `yield`, while no layer is in force yet, and applies it afterwards.


def _enter_new_namespaces() -> Iterator[None]:
    """Enter a network namespace without devices, and a user namespace whose privileges have no effect outside."""
    yield
    _raise_if_negative(_load_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))


def _disable_new_privileges() -> Iterator[None]:
    """Prevent setuid programs from gaining privileges."""
    yield
    _raise_if_negative(_load_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _restrict_file_access() -> Iterator[None]:
    """Allow only libraries to be opened, and only for reading. Newer kernels also block connections and signals."""
    version = _syscall(_CREATE_RULESET, 0, 0, _CREATE_RULESET_VERSION)
    rights = (1 << _FILE_ACCESS_TYPE_COUNTS.get(version, 16)) - 1
    network_rights, scopes = 3 * (version >= 4), 3 * (version >= 6)
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", rights, network_rights, scopes), 24)
    ruleset = _syscall(_CREATE_RULESET, ctypes.addressof(attributes), len(attributes), 0)
    try:
        for folder in _find_library_folders():
            folder_fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", _READ_ACCESS, folder_fd), 12)
            _syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule), 0)
            os.close(folder_fd)
        yield
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise OSError(errno.EBUSY, "landlock would apply to only one of several threads")
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _find_library_folders() -> set[Path]:
    """Return the folders of Python, of installed packages, and of the packages and libraries in use."""
    installed_folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {
        folder
        for folder in _find_package_folders() | _find_shared_library_folders() | installed_folders
        if folder.is_dir()
    }


def _find_package_folders() -> set[Path]:
    """Return the folders of the imported packages."""
    packages = [module for name, module in sys.modules.items() if name != "__main__" and "." not in name]
    return {Path(file).parent for package in packages if (file := getattr(package, "__file__", None))}


def _find_shared_library_folders() -> set[Path]:
    """Return the folders of the loaded shared libraries."""
    mapping_lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    mapped_paths = (Path(line[line.index("/") :]) for line in mapping_lines if "/" in line)
    return {path.parent for path in mapped_paths if ".so" in path.suffixes}


def _import_seccomp() -> Any:
    # pyseccomp needs the system's libseccomp, and runs programs to find it.
    import pyseccomp  # noqa: PLC0415

    return pyseccomp


def _filter_system_calls() -> Iterator[None]:
    """Allow the calls in `_ALLOWED_CALLS`, and a few other calls only with certain arguments.

    With these arguments, a call can open a file for reading, create a thread, or change the resource limits of this
    process. All other calls fail as if the kernel did not support them, which libraries can handle.
    """
    seccomp = _import_seccomp()

    call_filter = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    rules: list[tuple[str, list[Any]]] = [(name, []) for name in _ALLOWED_CALLS.split()]
    rules.append(("open", [seccomp.Arg(1, seccomp.MASKED_EQ, _WRITE_FLAGS, 0)]))
    rules.append(("openat", [seccomp.Arg(2, seccomp.MASKED_EQ, _WRITE_FLAGS, 0)]))
    rules.append(("clone", [seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD)]))
    rules.append(("prlimit64", [seccomp.Arg(0, seccomp.EQ, 0)]))
    _add_rules(call_filter, seccomp.ALLOW, rules)
    yield
    call_filter.load()


def _deny_system_calls() -> Iterator[None]:
    """Deny the calls in `_CALLS_DENIED_TO_TRAINING`, and all sockets except Unix domain sockets."""
    seccomp = _import_seccomp()

    call_filter = seccomp.SyscallFilter(seccomp.ALLOW)
    rules: list[tuple[str, list[Any]]] = [(name, []) for name in _CALLS_DENIED_TO_TRAINING.split()]
    rules.append(("socket", [seccomp.Arg(0, seccomp.NE, socket.AF_UNIX)]))
    _add_rules(call_filter, seccomp.ERRNO(errno.EPERM), rules)
    yield
    call_filter.load()


def _add_rules(call_filter: Any, action: int, rules: Iterable[tuple[str, Sequence[Any]]]) -> None:
    """Add an action for system calls, given by name and conditions on the arguments, in all threads."""
    seccomp = _import_seccomp()

    call_filter.set_attr(seccomp.Attr.CTL_TSYNC, 1)
    for name, conditions in rules:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        # Older versions of libseccomp do not know newer calls, and some calls exist only on some architectures.
        if number >= 0:
            call_filter.add_rule(action, number, *conditions)


def _drop_capabilities() -> Iterator[None]:
    """Give up all capabilities of the user, such as those of root in a container."""
    yield
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    # Two sets of 32 effective, permitted and inheritable capabilities.
    _raise_if_negative(_load_libc().capset(header, ctypes.create_string_buffer(24)))


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int) -> int:
    return _raise_if_negative(_load_libc().syscall(*map(ctypes.c_long, (number, *arguments))))


def _raise_if_negative(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


TRAINING_LAYERS: Mapping[str, Callable[[], Iterator[None]]] = {
    "no_new_privs": _disable_new_privileges,
    "capabilities": _drop_capabilities,
    "seccomp": _deny_system_calls,
}
"""Layers for the process that trains models, which writes files, runs a compiler and uses the GPU."""
LAYERS: Mapping[str, Callable[[], Iterator[None]]] = {
    "namespaces": _enter_new_namespaces,
    "no_new_privs": _disable_new_privileges,
    "landlock": _restrict_file_access,
    "seccomp": _filter_system_calls,
}
