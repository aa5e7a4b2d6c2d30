"""The child process that trains a model, from its start to its end."""

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

from service.core.errors import without_folders as shorten
from service.formats.sandbox.child_process import child_environment

MODULE = "service.training.process"
# Variables of the environment that choose devices and caches.
INHERITED = ("CUDA_VISIBLE_DEVICES", "HOME", "XDG_CACHE_HOME")
# Bytes of what the child has complained of that are logged.
COMPLAINTS = 4000
UNEXPECTED = "Something went wrong while the model was trained; the service's log tells more."
KILLED = "The process that trained was killed, most likely because the host ran out of memory; use fewer stacks."
TOO_LONG = (
    "The training was ended, since reading and scoring took too long beside it; use fewer or smaller annotated stacks."
)

log = logging.getLogger(__name__)


class TrainingChild:
    """A child process, which waits for what it is to train.

    name     of the training, for the log
    module   what it runs, with the request and the progress of `service.training.process`
    process  which is started at once
    """

    def __init__(self, name: str, module: str = MODULE) -> None:
        self._name, self._overdue = name, False
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        environment = child_environment()
        # Threads that wait for work must not take the processor from requests.
        environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
        del environment["OMP_NUM_THREADS"]
        environment |= {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of this package
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
            # A terminal interrupts its own group alone. A session would be scheduled as if it were all of the service.
            process_group=0,
        )

    def run(self, request: dict[str, Any], seconds: float, update: Callable[[dict[str, Any]], object]) -> str | None:
        """Have the child train; return the reason where it says that it has failed. It is killed after `seconds`.

        Every line of progress is handed to `update`, which raises ValueError, TypeError or LookupError for any other.
        """
        overdue = threading.Timer(seconds, self.process.kill)
        overdue.daemon = True
        began = time.monotonic()
        overdue.start()
        try:
            return self._follow(request, update)
        finally:
            overdue.cancel()
            self._overdue = time.monotonic() - began >= seconds

    def explain(self, failure: str | None) -> str:
        """Log what the child has complained of; return what its user is told of `failure`, or of a silent end."""
        status = self.process.returncode
        self._complaints.seek(0)
        text = self._complaints.read()[-COMPLAINTS:].decode(errors="replace")
        log.error("training %s ended with status %d: %s %s", self._name, status, failure, text)
        if failure is not None:
            return shorten(failure)
        if self._overdue:
            return TOO_LONG
        return KILLED if status < 0 else UNEXPECTED

    def kill(self) -> None:
        """End the child, whatever it does."""
        self.process.kill()

    def close(self) -> None:
        """Forget what the child has complained of."""
        self._complaints.close()

    def _follow(self, request: dict[str, Any], update: Callable[[dict[str, Any]], object]) -> str | None:
        process = self.process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        failure: str | None = None
        with process.stdin as stdin, process.stdout as stdout:
            with suppress(BrokenPipeError):
                # It stays open: the child ends once it is closed.
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            for line in stdout:
                try:
                    news = json.loads(line)
                    update(news)
                    failure = str(news["failed"]) if "failed" in news else failure
                except (ValueError, TypeError, LookupError):
                    log.warning("training %s: a line that is no progress: %r", self._name, line[:200])
            process.wait()
        return failure
