"""The child process that trains a model."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from service.core.errors import remove_folders as shorten
from service.formats.sandbox.child_process import child_environment

TRAINING_MODULE = "service.training.process"
# Environment variables that select devices and cache folders.
INHERITED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOME", "XDG_CACHE_HOME")
# Maximum number of bytes of the child's error output that are logged.
MAX_LOGGED_OUTPUT_BYTES = 4000
UNEXPECTED_MESSAGE = "An internal error occurred during the training. See the log of the service."
KILLED_MESSAGE = "The training process was killed, most likely because the host ran out of memory. Use fewer stacks."
TIMEOUT_MESSAGE = (
    "The training was stopped, because reading and scoring the stacks took too long. Use fewer or smaller stacks."
)

log = logging.getLogger(__name__)


class TrainingChild:
    """A child process that waits for a training request.

    name     ID of the training, for the log
    module   module that the process runs, with the protocol of `service.training.process`
    process  the process, which is started immediately
    """

    def __init__(self, name: str, module: str = TRAINING_MODULE) -> None:
        self._name, self._has_timed_out = name, False
        self._error_output = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        environment = child_environment()
        # Idle OpenMP threads must not spin, to leave the CPU to requests.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
        del environment["OMP_NUM_THREADS"]
        environment |= {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of this package
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._error_output,
            env=environment,
            # With a process group of its own, Ctrl+C at a terminal does not interrupt the child. The scheduler would
            # give a session of its own as much CPU time as the whole service.
            process_group=0,
        )

    def run(self, request: dict[str, Any], seconds: float, update: Callable[[dict[str, Any]], object]) -> str | None:
        """Run a training in the child, and return its error message if it reports one. Kill it after `seconds`.

        Each progress message is passed to `update`, which raises ValueError, TypeError or LookupError for invalid ones.
        """
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        start_time = time.monotonic()
        timer.start()
        try:
            return self._follow_progress(request, update)
        finally:
            timer.cancel()
            self._has_timed_out = time.monotonic() - start_time >= seconds

    def explain(self, failure: str | None) -> str:
        """Log the error output of the child, and return the message for users. `failure` is the child's own message."""
        status = self.process.returncode
        self._error_output.seek(0)
        text = self._error_output.read()[-MAX_LOGGED_OUTPUT_BYTES:].decode(errors="replace")
        log.error("training %s ended with status %d: %s %s", self._name, status, failure, text)
        if failure is not None:
            return shorten(failure)
        if self._has_timed_out:
            return TIMEOUT_MESSAGE
        return KILLED_MESSAGE if status < 0 else UNEXPECTED_MESSAGE

    def kill(self) -> None:
        """Kill the child process."""
        self.process.kill()

    def close(self) -> None:
        """Delete the error output of the child."""
        self._error_output.close()

    def _follow_progress(self, request: dict[str, Any], update: Callable[[dict[str, Any]], object]) -> str | None:
        process = self.process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        failure: str | None = None
        with process.stdin as stdin, process.stdout as stdout:
            with suppress(BrokenPipeError):
                # Keep the pipe open, because the child exits when it is closed.
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            for line in stdout:
                try:
                    progress = json.loads(line)
                    update(progress)
                    failure = str(progress["failed"]) if "failed" in progress else failure
                except (ValueError, TypeError, LookupError):
                    log.warning("training %s: invalid progress message: %r", self._name, line[:200])
            process.wait()
        return failure
