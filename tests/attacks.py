"""What a codec would try that a hostile file has taken over, in a process that reads files.

`python attacks.py` prints how every attempt ends in a reader's process on this host, and fails where one succeeds that
a layer in force should stop. It needs nothing but the service, so that it runs in a container of it, too.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile

from service.core.types import Selection
from service.formats.sandbox import child_main, confinement
from service.formats.sandbox.reader import Reader

PACKBITS = 32773
SIDE = 128
PTRACE_ATTACH = 16
KEYCTL, BPF, IO_URING_SETUP = {"x86_64": (250, 321, 425), "aarch64": (219, 280, 425)}.get(platform.machine(), (-1,) * 3)

Targets = dict[str, Any]
"""What is attacked: `jobs`, a database; `kernels`, a folder; `port` and `socket`, where a server listens; `parent`."""


def libc(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path: str, mode: str = "wb") -> None:
    with Path(path).open(mode) as file:
        file.write(b"hostile")


def connect(family: int, address: Any) -> None:
    with socket.socket(family) as there:
        there.connect(address)


def listen(_: Targets) -> None:
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        here.listen()


def fork(_: Targets) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def spawn(_: Targets) -> None:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def shorten_open_files(_: Targets) -> None:
    """Shorten whatever is open for writing, such as the output: the service maps it."""
    failure = OSError(errno.EBADF, "")
    for file in range(3, 32):
        try:
            os.ftruncate(file, 0)
        except OSError as error:
            failure = error
        else:
            return
    raise failure


def read_memory(pid: int) -> None:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").partition("-")[0], 16))
        memory.read(16)


# By attempt: what it does, and the layers of which each alone stops it.
ATTACKS: dict[str, tuple[Callable[[Targets], object], set[str]]] = {
    "read the jobs": (lambda at: Path(at["jobs"]).read_bytes(), {"landlock"}),
    "read accounts": (lambda _: Path("/etc/passwd").read_bytes(), {"landlock"}),
    "read the service's environment": (lambda at: Path(f"/proc/{at['parent']}/environ").read_bytes(), {"landlock"}),
    "read the service's memory": (lambda at: read_memory(at["parent"]), {"landlock"}),
    "write the jobs": (lambda at: write(at["jobs"], "r+b"), {"landlock", "seccomp"}),
    "write a kernel": (lambda at: write(f"{at['kernels']}/kernel.so"), {"landlock", "seccomp"}),
    "delete the jobs": (lambda at: Path(at["jobs"]).unlink(), {"landlock", "seccomp"}),
    "make a folder": (lambda at: Path(at["kernels"], "new").mkdir(), {"landlock", "seccomp"}),
    "change permissions": (lambda at: Path(at["jobs"]).chmod(0o777), {"seccomp"}),
    "shorten open files": (shorten_open_files, {"seccomp"}),
    "connect by TCP": (lambda at: connect(socket.AF_INET, ("127.0.0.1", at["port"])), {"namespaces", "seccomp"}),
    "connect by path": (lambda at: connect(socket.AF_UNIX, at["socket"]), {"seccomp"}),
    "listen": (listen, {"seccomp"}),
    "start a process": (fork, {"seccomp"}),
    "run a program": (spawn, {"landlock", "seccomp"}),
    "trace the service": (lambda at: libc("ptrace", PTRACE_ATTACH, at["parent"], 0, 0), {"landlock", "seccomp"}),
    "signal the service": (lambda at: os.kill(at["parent"], signal.SIGCONT), {"seccomp"}),
    "mount": (lambda at: libc("mount", b"none", at["kernels"].encode(), b"tmpfs", 0, None), {"landlock", "seccomp"}),
    "get privileges": (lambda _: libc("unshare", 0x10000000), {"seccomp"}),
    "use the keyring": (lambda _: libc("syscall", KEYCTL, 0, -3, 0), {"seccomp"}),
    "use io_uring": (lambda _: libc("syscall", IO_URING_SETUP, 1, ctypes.create_string_buffer(120)), {"seccomp"}),
    "load a BPF program": (lambda _: libc("syscall", BPF, 0, ctypes.create_string_buffer(128), 128), {"seccomp"}),
    # Last: nothing would be reported any more.
    "become a program": (lambda _: os.execv("/bin/true", ["true"]), {"landlock", "seccomp"}),
}


def attempts_that_fail(layers: Iterable[str]) -> list[str]:
    """Return the names of the attempts that these layers should stop."""
    return [name for name, (_, stopping) in ATTACKS.items() if stopping & set(layers)]


def attempt(targets: Targets) -> dict[str, str]:
    """Make the `attempts`. Returns how each was refused, "" where it was not."""
    outcomes = {}
    for name in targets["attempts"]:
        try:
            ATTACKS[name][0](targets)
            outcomes[name] = ""
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno or 0]
    return outcomes


def taken_over(strip: bytes, **_: Any) -> bytes:
    """Stand in for a codec: attack the targets that the strip names, and return the outcomes as pixels."""
    outcomes = json.dumps(attempt(json.loads(bytes(strip).rstrip(b"\0"))))
    return outcomes.encode().ljust(SIDE * SIDE, b"\0")


@contextmanager
def targets_in(folder: Path) -> Iterator[Targets]:
    """Make what is attacked, with servers that listen during the block."""
    jobs, kernels, path = folder / "jobs.sqlite", folder / "kernels", folder / "socket"
    jobs.write_bytes(b"secret")
    kernels.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as by_port, socket.socket(socket.AF_UNIX) as by_path:
        by_path.bind(str(path))
        by_path.listen()
        yield {
            "jobs": str(jobs),
            "kernels": str(kernels),
            "port": by_port.getsockname()[1],
            "socket": str(path),
            "parent": os.getpid(),
        }


def attack_from_reader(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read a file whose codec is taken over, and make the attempts that the layers in force should stop.

    Returns `Reader.missing_layers`, and the outcomes as `attempt` does.
    """
    path = folder / "hostile.tif"
    with (
        targets_in(folder) as targets,
        Reader(memory_bytes=2**30, seconds=30, decoded_bytes=2**20, processes=1, module="attacks") as reader,
    ):
        reader.await_start()
        targets["attempts"] = attempts_that_fail(confinement.LAYERS.keys() - reader.missing_layers)
        content = json.dumps(targets).encode().ljust(SIDE * SIDE, b"\0")
        tifffile.imwrite(path, np.frombuffer(content, np.uint8).reshape(SIDE, SIDE), metadata=None)
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages.first.tags["Compression"].overwrite(PACKBITS)
        volume = reader.read(path, Selection(axes="YX"), folder / "scratch")
        return reader.missing_layers, json.loads(volume.array().tobytes().rstrip(b"\0"))


def main() -> int:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        missing, outcomes = attack_from_reader(Path(folder))
    for layer in confinement.LAYERS:
        sys.stdout.write(f"{layer}: {missing.get(layer, 'holds')}\n")
    for name in ATTACKS:
        outcome = outcomes.get(name)
        sys.stdout.write(f"{name}: {'not stopped by what holds' if outcome is None else outcome or 'POSSIBLE'}\n")
    return int(not all(outcomes.values()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            sys.exit(main())
        case ["alone", layers, targets]:
            lacking = confinement.confine(filter(None, layers.split(",")))
            # What nothing stops would trace and so halt the process that waits for the outcomes.
            sys.stdout.write(json.dumps([lacking, {} if lacking else attempt(json.loads(targets))]))
        case [memory_bytes, decoded_bytes, seconds]:
            # tifffile takes codecs of this package alone.
            taken_over.__module__ = imagecodecs.__name__
            imagecodecs.packbits_decode = taken_over
            child_main.main(int(memory_bytes), int(decoded_bytes), float(seconds))
