"""Attacks that a compromised codec might attempt in a reader process of the sandbox.

`python attacks.py` runs all attacks in a reader process on this host, prints their outcomes, and exits with status 1 if
an attack succeeds that an active layer of the sandbox should block. It depends only on the service, so that it also
runs in the container image.
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

# TIFF compression scheme.
PACKBITS = 32773
# Edge of the hostile image in pixels. It must be large enough for the JSON data that is passed as pixels.
SIDE = 128
PTRACE_ATTACH = 16
KEYCTL, BPF, IO_URING_SETUP = {"x86_64": (250, 321, 425), "aarch64": (219, 280, 425)}.get(platform.machine(), (-1,) * 3)

Targets = dict[str, Any]
"""What to attack: `jobs` (path of a database), `kernels` (path of a folder), `port` and `socket` (port and path where
servers listen), `parent` (process ID of the service), and `attempts` (names of the attacks to run)."""


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError if it returns a negative value."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path: str, mode: str = "wb") -> None:
    """Write to a file."""
    with Path(path).open(mode) as file:
        file.write(b"hostile")


def connect(family: int, address: Any) -> None:
    """Connect to a server."""
    with socket.socket(family) as connection:
        connection.connect(address)


def listen(_: Targets) -> None:
    """Listen for connections on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()


def fork(_: Targets) -> None:
    """Create a child process."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def spawn(_: Targets) -> None:
    """Run a program in a child process."""
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def truncate_open_files(_: Targets) -> None:
    """Truncate a file that is open for writing, such as the output file, which the service maps."""
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
    """Read the first mapped bytes of another process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").partition("-")[0], 16))
        memory.read(16)


# For each attack: the function, and the layers that each block it on their own.
ATTACKS: dict[str, tuple[Callable[[Targets], object], set[str]]] = {
    "read the jobs": (lambda targets: Path(targets["jobs"]).read_bytes(), {"landlock"}),
    "read accounts": (lambda _: Path("/etc/passwd").read_bytes(), {"landlock"}),
    "read the service's environment": (
        lambda targets: Path(f"/proc/{targets['parent']}/environ").read_bytes(),
        {"landlock"},
    ),
    "read the service's memory": (lambda targets: read_memory(targets["parent"]), {"landlock"}),
    "write the jobs": (lambda targets: write(targets["jobs"], "r+b"), {"landlock", "seccomp"}),
    "write a kernel": (lambda targets: write(f"{targets['kernels']}/kernel.so"), {"landlock", "seccomp"}),
    "delete the jobs": (lambda targets: Path(targets["jobs"]).unlink(), {"landlock", "seccomp"}),
    "make a folder": (lambda targets: Path(targets["kernels"], "new").mkdir(), {"landlock", "seccomp"}),
    "change permissions": (lambda targets: Path(targets["jobs"]).chmod(0o777), {"seccomp"}),
    "truncate open files": (truncate_open_files, {"seccomp"}),
    "connect by TCP": (
        lambda targets: connect(socket.AF_INET, ("127.0.0.1", targets["port"])),
        {"namespaces", "seccomp"},
    ),
    "connect by path": (lambda targets: connect(socket.AF_UNIX, targets["socket"]), {"seccomp"}),
    "listen": (listen, {"seccomp"}),
    "start a process": (fork, {"seccomp"}),
    "run a program": (spawn, {"landlock", "seccomp"}),
    "trace the service": (
        lambda targets: call_libc("ptrace", PTRACE_ATTACH, targets["parent"], 0, 0),
        {"landlock", "seccomp"},
    ),
    "signal the service": (lambda targets: os.kill(targets["parent"], signal.SIGCONT), {"seccomp"}),
    "mount": (
        lambda targets: call_libc("mount", b"none", targets["kernels"].encode(), b"tmpfs", 0, None),
        {"landlock", "seccomp"},
    ),
    "gain privileges": (lambda _: call_libc("unshare", 0x10000000), {"seccomp"}),
    "use the keyring": (lambda _: call_libc("syscall", KEYCTL, 0, -3, 0), {"seccomp"}),
    "use io_uring": (lambda _: call_libc("syscall", IO_URING_SETUP, 1, ctypes.create_string_buffer(120)), {"seccomp"}),
    "load a BPF program": (lambda _: call_libc("syscall", BPF, 0, ctypes.create_string_buffer(128), 128), {"seccomp"}),
    # The last attack, because nothing could be reported after it succeeds.
    "replace the process": (lambda _: os.execv("/bin/true", ["true"]), {"landlock", "seccomp"}),
}


def list_blocked_attacks(layers: Iterable[str]) -> list[str]:
    """Return the names of the attacks that at least one of these layers should block."""
    return [name for name, (_, blocking) in ATTACKS.items() if blocking & set(layers)]


def attempt(targets: Targets) -> dict[str, str]:
    """Run the attacks `targets["attempts"]`. Returns the name of the error that blocked each, or "" if it succeeded."""
    outcomes = {}
    for name in targets["attempts"]:
        try:
            ATTACKS[name][0](targets)
            outcomes[name] = ""
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno or 0]
    return outcomes


def attack_instead_of_decoding(strip: bytes, **_: Any) -> bytes:
    """Replace the PackBits decoder: attack the targets in the strip (JSON), and return the outcomes as pixels."""
    outcomes = json.dumps(attempt(json.loads(bytes(strip).rstrip(b"\0"))))
    return outcomes.encode().ljust(SIDE * SIDE, b"\0")


@contextmanager
def open_targets(folder: Path) -> Iterator[Targets]:
    """Create the targets in a folder; yield them while servers listen on the port and the socket."""
    jobs, kernels, path = folder / "jobs.sqlite", folder / "kernels", folder / "socket"
    jobs.write_bytes(b"secret")
    kernels.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as tcp_server, socket.socket(socket.AF_UNIX) as unix_server:
        unix_server.bind(str(path))
        unix_server.listen()
        yield {
            "jobs": str(jobs),
            "kernels": str(kernels),
            "port": tcp_server.getsockname()[1],
            "socket": str(path),
            "parent": os.getpid(),
        }


def attack_from_reader(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read a file with a compromised codec that runs all attacks that the active layers should block.

    Returns the missing layers with the reasons (`Reader.missing_layers`), and the outcomes as `attempt` returns them.
    """
    path = folder / "hostile.tif"
    with (
        open_targets(folder) as targets,
        Reader(
            memory_bytes=2**30, time_limit_seconds=30, max_decoded_bytes=2**20, process_count=1, module="attacks"
        ) as reader,
    ):
        reader.wait_until_ready()
        targets["attempts"] = list_blocked_attacks(confinement.LAYERS.keys() - reader.missing_layers)
        content = json.dumps(targets).encode().ljust(SIDE * SIDE, b"\0")
        tifffile.imwrite(path, np.frombuffer(content, np.uint8).reshape(SIDE, SIDE), metadata=None)
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages.first.tags["Compression"].overwrite(PACKBITS)
        volume = reader.read(path, Selection(axes="YX"), folder / "scratch")
        return reader.missing_layers, json.loads(volume.read_all().tobytes().rstrip(b"\0"))


def main() -> int:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        missing, outcomes = attack_from_reader(Path(folder))
    for layer in confinement.LAYERS:
        sys.stdout.write(f"{layer}: {missing.get(layer, 'active')}\n")
    for name in ATTACKS:
        outcome = outcomes.get(name)
        sys.stdout.write(f"{name}: {'no active layer blocks it' if outcome is None else outcome or 'SUCCEEDED'}\n")
    return int(not all(outcomes.values()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            sys.exit(main())
        case ["alone", layers, targets]:
            missing = confinement.confine(filter(None, layers.split(",")))
            # If a layer is missing, run no attack: an unblocked ptrace would stop the parent, which waits for output.
            sys.stdout.write(json.dumps([missing, {} if missing else attempt(json.loads(targets))]))
        case [memory_bytes, decoded_bytes, seconds]:
            # tifffile accepts only codecs of this package.
            attack_instead_of_decoding.__module__ = imagecodecs.__name__
            imagecodecs.packbits_decode = attack_instead_of_decoding
            child_main.main(int(memory_bytes), int(decoded_bytes), float(seconds))
