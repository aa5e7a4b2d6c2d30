"""A child process that trains a model, and its error messages for users."""

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

from service.core.errors import remove_host_details
from service.formats.sandbox.child_process import make_child_environment

TRAINING_MODULE = "service.training.process"
# Environment variables that select devices and cache folders.
INHERITED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOME", "XDG_CACHE_HOME")
# Maximum number of bytes to log from the error output of the child.
MAX_LOGGED_OUTPUT_BYTES = 4000
INTERNAL_ERROR_MESSAGE = "An internal error occurred during training. See the log of the service."
KILLED_MESSAGE = "The training process was killed, most likely because the host ran out of memory. Use fewer stacks."
TIMEOUT_MESSAGE = (
    "The training run was stopped, because reading and scoring the stacks took too long. Use fewer or smaller stacks."
)

log = logging.getLogger(__name__)


class TrainingChild:
    """A child process that waits for a training request.

    training_id  ID of the training run, for the log
    module       module that the process runs, which implements the protocol of `service.training.process`
    process      the process, which is started immediately
    """

    def __init__(self, training_id: str, module: str = TRAINING_MODULE) -> None:
        self._training_id, self._has_timed_out = training_id, False
        self._error_output = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        environment = make_child_environment()
        # Idle OpenMP threads must not spin, so that the CPU is available to requests.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
        del environment["OMP_NUM_THREADS"]
        environment |= {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of this package
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._error_output,
            env=environment,
            # In a process group of its own, the child is not interrupted by Ctrl+C at a terminal. Do not create a
            # session, because the scheduler would give that session as much CPU time as the whole service.
            process_group=0,
        )

    def run(
        self, request: dict[str, Any], timeout_seconds: float, update: Callable[[dict[str, Any]], object]
    ) -> str | None:
        """Train a model in the child. Kill the child after `timeout_seconds`.

        Return the error message that the child reports, if any.

        Each progress message is passed to `update`, which raises ValueError, TypeError or LookupError if the message is
        invalid.
        """
        timer = threading.Timer(timeout_seconds, self.process.kill)
        timer.daemon = True
        start_time = time.monotonic()
        timer.start()
        try:
            return self._follow_progress(request, update)
        finally:
            timer.cancel()
            self._has_timed_out = time.monotonic() - start_time >= timeout_seconds

    def explain_failure(self, failure: str | None) -> str:
        """Log the error output of the child, and return the message for users.

        failure  error message from the child, if any
        """
        exit_status = self.process.returncode
        self._error_output.seek(0)
        output = self._error_output.read()[-MAX_LOGGED_OUTPUT_BYTES:].decode(errors="replace")
        log.error("training run %s ended with status %d: %s %s", self._training_id, exit_status, failure, output)
        if failure is not None:
            return remove_host_details(failure)
        if self._has_timed_out:
            return TIMEOUT_MESSAGE
        return KILLED_MESSAGE if exit_status < 0 else INTERNAL_ERROR_MESSAGE

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
                # Keep stdin open, because the child exits when stdin is closed.
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            for line in stdout:
                try:
                    progress = json.loads(line)
                    update(progress)
                    failure = str(progress["failed"]) if "failed" in progress else failure
                except (ValueError, TypeError, LookupError):
                    log.warning("training run %s: invalid progress message: %r", self._training_id, line[:200])
            process.wait()
        return failure
