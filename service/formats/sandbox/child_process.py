"""Child process that parses and decodes stacks for `Reader`. A process that has ended is replaced.

The child process imports the modules that read files, and forks a process for each client. A forked process that has
read a file of one client never reads a file of another client. Requests and replies are lines of JSON on a socket, and
each forked process has its own socket. Files are passed on the same socket as open descriptors.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO, Any

import service
from service.core.errors import BadFile, Cancelled, NotReady, ReaderKilled, StackSegError, TooLarge
from service.core.types import CancellationCheck, never_cancelled
from service.formats.sandbox.remote_store import POLL_SECONDS
from service.formats.sandbox.request_files import INVALID_REPLY_MESSAGE, RequestFiles

# Time limit for starting a process.
STARTUP_TIMEOUT_SECONDS = 60.0
# Time that a process may take to exit after it has closed its end of the socket. A compromised process might never
# exit.
EXIT_TIMEOUT_SECONDS = 1.0
# Maximum size of a reply in bytes, far larger than the reply for any valid file.
MAX_REPLY_BYTES = 2**26

START_FAILURE_MESSAGE = "The process that reads files did not start. See the service log."

# Environment variables that Python and its libraries may need. Secrets in the environment are not passed on.
_INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")

# Signals caused by bugs in the process itself. Other signals come from the kernel or a user and do not depend on the
# file.
_CRASH_SIGNALS = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})

_log = logging.getLogger(__name__)


class ReaderProcess:
    """Child process that is started when needed and restarted after it ends. Only one thread may use it at a time.

    module              module that the process runs, such as `child_main`
    memory_bytes        memory that the process may use in addition to its memory at startup
    max_decoded_bytes   maximum size of a file that the process writes
    time_limit_seconds  time limit for a request
    """

    def __init__(self, module: str, memory_bytes: int, max_decoded_bytes: int, time_limit_seconds: float) -> None:
        self._arguments = [module, str(memory_bytes), str(max_decoded_bytes), str(time_limit_seconds)]
        self._time_limit_seconds = time_limit_seconds
        self._is_shut_down = False
        # Layers of confinement that are not in force, with reasons. None until a process has started.
        self.missing_layers: dict[str, str] | None = None
        self.kill_count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        # Socket to the forked process.
        self._channel: socket.socket
        # Whether the forked process has not received a file yet, and the client whose files it may read.
        self.is_unused = True
        self._client: str | None = None
        # Files that stay open while the process or the forked process runs.
        self._files, self._fork_files = ExitStack(), ExitStack()
        self._is_ready = False

    @property
    def is_started(self) -> bool:
        """Whether a process has been started."""
        return self._process is not None

    def restart(self) -> None:
        """Start a new process without waiting for it, so that it is ready sooner when the next caller needs it."""
        self.kill()
        self._process = self._start()
        self._fork()

    def has_client(self, client: str | None) -> bool:
        """Return whether the forked process has read files of this client, so that it may read more of them."""
        return client is not None and self._client == client

    def call(
        self, request: dict[str, Any], files: RequestFiles, client: str | None, cancelled: CancellationCheck
    ) -> dict[str, Any]:
        """Send a request with the descriptor of a client's file, and wait for the reply. Restart the process on errors.

        If the forked process has read files of a different client, it is killed and replaced first. If `client` is
        None, it is replaced before and after reading the file.
        """
        if self.is_started and not self.is_unused and not self.has_client(client):
            self._fork()
        self.wait_until_ready()
        self.is_unused, self._client = False, client
        try:
            reply = self._exchange_messages(request, files, cancelled)
        except TimeoutError:
            self.restart()
            raise TooLarge(
                f"Reading the file took more than {self._time_limit_seconds:g} seconds. Crop the stack, or save it"
                " uncompressed."
            ) from None
        except (EOFError, ConnectionError):
            if self._is_shut_down:
                raise NotReady("The service is stopping.") from None
            raise self._make_exit_error() from None
        except (ValueError, RecursionError):
            self.restart()
            raise BadFile(INVALID_REPLY_MESSAGE) from None
        except BaseException:
            self.restart()
            raise
        if client is None:
            self._fork()
        return reply

    def shut_down(self) -> None:
        """Kill the process and do not start another one. Callers that are waiting for a reply get NotReady."""
        self._is_shut_down = True
        if self._process is not None:
            self._process.kill()

    def kill(self) -> None:
        """Kill the process if it is running, and close its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._fork_files.close()
        self._files.close()

    def _exchange_messages(
        self, request: dict[str, Any], files: RequestFiles, cancelled: CancellationCheck
    ) -> dict[str, Any]:
        deadline = time.monotonic() + self._time_limit_seconds
        self._send(request, files.input_fd)
        while True:
            reply = self._receive(deadline, cancelled)
            if "output_bytes" in reply:
                self._send({}, files.make_output(reply["output_bytes"]))
            elif "open" in reply:
                # `_receive` checks for cancellation only while no message arrives, but a child can send
                # messages continuously.
                if cancelled():
                    raise Cancelled("The request was canceled while its file was being read.")
                with files.open_file_in_folder(reply["open"]) as descriptor:
                    self._send({}, descriptor)
            elif "fetch" in reply:
                start_time = time.monotonic()
                with files.fetch(reply["fetch"], cancelled) as (sizes, content):
                    # Waiting for a slow store does not count toward the time limit of the process.
                    deadline += time.monotonic() - start_time
                    self._send({"sizes": sizes}, content)
            else:
                return reply

    def wait_until_ready(self) -> None:
        """Wait until the process is ready, and restart it if it has ended. Raises NotReady."""
        if self._is_shut_down:
            raise NotReady("The service is stopping.")
        if self._process is None or self._has_ended():
            self.restart()
        if self._is_ready:
            return
        # The new process may have been killed before it could fork.
        if self._has_ended():
            raise NotReady(START_FAILURE_MESSAGE)
        try:
            self.missing_layers = self._receive(time.monotonic() + STARTUP_TIMEOUT_SECONDS)["missing"]
        except (EOFError, ConnectionError, TimeoutError):
            self._log_exit()
            raise NotReady(START_FAILURE_MESSAGE) from None
        self._is_ready = True
        for layer, reason in self.missing_layers.items():
            _warn_about_missing_layer(layer, reason)

    def _start(self) -> subprocess.Popen[bytes]:
        with ExitStack() as open_files:
            self._error_output = open_files.enter_context(tempfile.TemporaryFile())
            self._control, child_socket = socket.socketpair()
            open_files.enter_context(self._control)
            with child_socket:
                files = (child_socket.fileno(), self._error_output, self._error_output)
                process = start_module(self._arguments, make_child_environment(), files)
            self._files = open_files.pop_all()
        return process

    def _fork(self) -> None:
        """Let the process replace its forked process, without waiting for it. Kill both on errors."""
        self._fork_files.close()
        self._is_ready, self.is_unused, self._client = False, True, None
        try:
            self._channel, forked_socket = socket.socketpair()
            self._fork_files.enter_context(self._channel)
            with forked_socket:
                socket.send_fds(self._control, [b"f"], [forked_socket.fileno()])
        except OSError:
            self.kill()

    def _has_ended(self) -> bool:
        """Return whether the process or the forked process has ended."""
        if self._process is None or self._process.poll() is not None:
            return True
        poll = select.poll()
        poll.register(self._channel, 0)
        return bool(poll.poll(0))

    def _send(self, message: dict[str, Any], file: int | None) -> None:
        line = json.dumps(message, default=vars).encode() + b"\n"
        socket.send_fds(self._channel, [line], [] if file is None else [file])

    def _receive(self, deadline: float, cancelled: CancellationCheck = never_cancelled) -> dict[str, Any]:
        """Receive the next line from the child.

        Raises EOFError if the child has ended, TimeoutError if it does not reply in time, Cancelled if the request was
        canceled, and ValueError if the reply is invalid.
        """
        # select.select does not support descriptors above 1023, which are common on a busy server.
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        line = bytearray()
        while not line.endswith(b"\n"):
            if not poll.poll(1000 * min(max(0.0, deadline - time.monotonic()), POLL_SECONDS)):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                if cancelled():
                    raise Cancelled("The request was canceled while its file was being read.")
                continue
            chunk = self._channel.recv(1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
            if len(line) > MAX_REPLY_BYTES or time.monotonic() >= deadline + EXIT_TIMEOUT_SECONDS:
                raise ValueError("the reply is too long or too slow")
        match json.loads(line):
            case dict() as reply:
                return reply
        raise ValueError("the reply is not a JSON object")

    def _make_exit_error(self) -> StackSegError:
        status = self._log_exit()
        if status >= 0 or -status in _CRASH_SIGNALS:
            return BadFile("The file is damaged: the decoder crashed. Export the file again without compression.")
        self.kill_count += 1
        return ReaderKilled(
            f"The process that reads files was killed twice by signal {-status}. Most likely the host ran"
            " out of memory. Send the request again later, or select a smaller part of the stack."
        )

    def _log_exit(self) -> int:
        """Log and return the exit status. A process that does not exit is killed."""
        process = self._process
        if process is None:
            raise RuntimeError("no process was started")
        # The process then exits with the status of the forked process.
        self._control.close()
        try:
            status = process.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        self._error_output.seek(0)
        error_text = self._error_output.read()[-2000:].decode(errors="replace")
        _log.warning("A process that reads files exited with status %d. %s", status, error_text)
        return status


@cache
def _warn_about_missing_layer(layer: str, reason: str) -> None:
    """Log a warning about a missing layer of confinement, but only once per layer and reason."""
    _log.warning("Processes that read files run without the confinement layer %s: %s.", layer, reason)


def start_module(
    arguments: Sequence[str], environment: Mapping[str, str], files: tuple[int | IO[bytes], IO[bytes], IO[bytes]]
) -> subprocess.Popen[bytes]:
    """Start a module of this package in a child process.

    arguments  the module and its arguments
    files      standard input, standard output and standard error
    """
    stdin, stdout, stderr = files
    return subprocess.Popen(  # noqa: S603 - this interpreter with a module of this package
        # -P: do not import modules from the working directory, to which other users may be able to write.
        [sys.executable, "-P", "-m", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
    )


def make_child_environment() -> dict[str, str]:
    """Return the environment of a child process: the import path of this service, one thread, and no secrets."""
    root = os.fspath(Path(service.__file__).parents[1])
    environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    return environment | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
    }
