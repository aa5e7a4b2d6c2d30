"""A child process that parses and decodes stacks, as `Reader` uses it: started, asked, and replaced when it has ended.

Requests and replies are lines of JSON on a socket; files go with them as open descriptors.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import service
from service.core.errors import BadFile, Cancelled, NotReady, ReaderKilled, StackSegError, TooLarge
from service.core.types import Cancelling, never
from service.formats.sandbox.remote_store import POLL_SECONDS
from service.formats.sandbox.request_files import NONSENSE, RequestFiles

STARTUP_SECONDS = 60.0
# A process that has closed its end of the socket is about to end, unless it was taken over.
EXIT_SECONDS = 1.0
# Far beyond the reply about any file, and little enough to hold.
MAX_REPLY_BYTES = 2**26

# Variables that Python and its libraries may need; secrets in the environment are not passed on.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")

# Signals that a fault of a process's own raises. Others come from the kernel or a person, whatever the file holds.
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})

_log = logging.getLogger(__name__)


class ReaderProcess:
    """One child process, started when it is needed, and again when it has ended; used by one thread at a time."""

    def __init__(self, module: str, memory_bytes: int, decoded_bytes: int, seconds: float) -> None:
        self._arguments = [module, str(memory_bytes), str(decoded_bytes), str(seconds)]
        self._seconds = seconds
        self._retired = False
        # Layers of confinement that do not hold, with the reasons; None until a process has started.
        self.missing: dict[str, str] | None = None
        self.kills = 0
        self._process: subprocess.Popen[bytes] | None = None
        # They live as long as the process.
        self._files = ExitStack()
        self._ready = False

    def begin(self) -> None:
        """Start the process, or a new one, without waiting for it, so that the next caller need not wait for all."""
        self.end()
        self._process, self._ready = self._start(), False

    def ask(self, request: dict[str, Any], files: RequestFiles, cancelled: Cancelling) -> dict[str, Any]:
        """Send a request with the descriptor of its file, and wait for the reply. An error ends the process."""
        self.await_start()
        try:
            return self._converse(request, files, cancelled)
        except TimeoutError:
            self.begin()
            raise TooLarge(
                f"Reading the file took more than {self._seconds:g} seconds. Crop it, or save it uncompressed."
            ) from None
        except (EOFError, ConnectionError):
            if self._retired:
                raise NotReady("The service is stopping.") from None
            raise self._explain_death() from None
        except (ValueError, RecursionError):
            self.begin()
            raise BadFile(NONSENSE) from None
        except BaseException:
            self.begin()
            raise

    def retire(self) -> None:
        """Kill the process for good; a caller that waits for its answer gets NotReady."""
        self._retired = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process, if there is one, and close the way to it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._files.close()

    def _converse(self, request: dict[str, Any], files: RequestFiles, cancelled: Cancelling) -> dict[str, Any]:
        deadline = time.monotonic() + self._seconds
        self._send(request, files.input)
        while True:
            reply = self._receive(deadline, cancelled)
            if "output_bytes" in reply:
                self._send({}, files.make_output(reply["output_bytes"]))
            elif "open" in reply:
                # A child that asks for one file after the other is never silent.
                if cancelled():
                    raise Cancelled("given up while its file was read")
                with files.open_part(reply["open"]) as part:
                    self._send({}, part)
            elif "fetch" in reply:
                began = time.monotonic()
                with files.fetch(reply["fetch"], cancelled) as (sizes, content):
                    # The time is that of the process: a store may be slow.
                    deadline += time.monotonic() - began
                    self._send({"sizes": sizes}, content)
            else:
                return reply

    def await_start(self) -> None:
        """Wait until the process is ready, a new one where it has ended. Raises NotReady."""
        if self._retired:
            raise NotReady("The service is stopping.")
        if self._process is None or self._process.poll() is not None:
            self.begin()
        if self._ready:
            return
        try:
            self.missing = self._receive(time.monotonic() + STARTUP_SECONDS)["missing"]
        except (EOFError, ConnectionError, TimeoutError):
            self._log_death()
            raise NotReady("The process that reads TIFFs does not start; the operator finds more in the log.") from None
        self._ready = True
        for layer, reason in self.missing.items():
            _warn_of_missing(layer, reason)

    def _start(self) -> subprocess.Popen[bytes]:
        with ExitStack() as opened:
            self._complaints = opened.enter_context(tempfile.TemporaryFile())
            self._channel, remote = socket.socketpair()
            opened.enter_context(self._channel)
            with remote:
                process = subprocess.Popen(  # noqa: S603 - this interpreter, with the module beside this one
                    # -P: not the modules of the working folder, which others may write to.
                    [sys.executable, "-P", "-m", *self._arguments],
                    stdin=remote.fileno(),
                    stdout=self._complaints,
                    stderr=self._complaints,
                    env=child_environment(),
                )
            self._files = opened.pop_all()
        return process

    def _send(self, message: dict[str, Any], file: int | None) -> None:
        line = json.dumps(message, default=vars).encode() + b"\n"
        socket.send_fds(self._channel, [line], [] if file is None else [file])

    def _receive(self, deadline: float, cancelled: Cancelling = never) -> dict[str, Any]:
        """Receive the next line from the child.

        Raises EOFError where it has ended, TimeoutError where it is silent, Cancelled where the caller gave up, and
        ValueError where it sends what is no reply.
        """
        # select.select takes no descriptor beyond 1023, and a busy server has more.
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        line = bytearray()
        while not line.endswith(b"\n"):
            if not poll.poll(1000 * min(max(0.0, deadline - time.monotonic()), POLL_SECONDS)):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if cancelled():
                    raise Cancelled("given up while its file was read")
                continue
            chunk = self._channel.recv(1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
            if len(line) > MAX_REPLY_BYTES or time.monotonic() >= deadline + EXIT_SECONDS:
                raise ValueError("a reply without end")
        match json.loads(line):
            case dict() as reply:
                return reply
        raise ValueError("a reply without fields")

    def _explain_death(self) -> StackSegError:
        status = self._log_death()
        if status >= 0 or -status in _CRASHES:
            return BadFile("The file is damaged: the program that decodes it crashed. Export it again, uncompressed.")
        self.kills += 1
        return ReaderKilled(
            f"The process that reads files was killed twice, by signal {-status}, most likely because the host ran"
            " out of memory. Send the request again later, or a smaller part of the stack."
        )

    def _log_death(self) -> int:
        """Log and return the exit status, after killing a process that does not end."""
        process = self._process
        if process is None:
            raise RuntimeError("no process was started")
        try:
            status = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read()[-2000:].decode(errors="replace")
        _log.warning("A process that reads TIFFs ended with status %d. %s", status, complaints)
        return status


@cache
def _warn_of_missing(layer: str, reason: str) -> None:
    """Log a warning, once per process."""
    _log.warning("The processes that read files run without %s: %s.", layer, reason)


def child_environment() -> dict[str, str]:
    """Return the environment of a child: the path of this service, one thread, and no secrets."""
    root = os.fspath(Path(service.__file__).parents[1])
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return environment | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
    }
