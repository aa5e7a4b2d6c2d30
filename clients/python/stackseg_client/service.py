"""A StackSeg server on this computer, for as long as a block of code runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stackseg_client import operations
from stackseg_client.client import Client
from stackseg_client.errors import CapacityError, ConnectionFailed, ServiceNotStarted

PROGRAM = "stackseg"
POLL_SECONDS = 0.1
# Maximum length of the log that an error message quotes.
MAX_LOG_CHARACTERS = 2000
# The server finishes running requests within `server.drain_seconds`, 30 seconds by default.
STOP_SECONDS = 45.0


@contextmanager
def local(
    *, models: Sequence[str] | Mapping[str, Any] = (), start_seconds: float = 300.0, **settings: Mapping[str, Any]
) -> Iterator[Client]:
    """Start a server on a free port of this computer, yield a client for it, and stop the server.

    Args:
        models: names of the models to serve (empty: all), or the section `models` of the settings
        start_seconds: time limit for the start, after which the server is stopped
        settings: other sections of the settings, such as `device={"name": "cpu", "threads": 4}`, which are listed in
            `configs/default.yaml` of StackSeg. By default, jobs are stored in a temporary folder.

    The server is the program `stackseg` of the Python environment that runs this code. Raises ServiceNotStarted if the
    program is not installed, or does not start.

    >>> import stackseg_client
    >>> with stackseg_client.local(models=["nuclei"], device={"name": "cpu"}) as client:
    ...     client.segment("sample.tif").objects
    16
    """
    program = _find_program()
    model_settings = models if isinstance(models, Mapping) else {"serve": list(models)}
    with tempfile.TemporaryDirectory(prefix="stackseg-") as folder:
        # JSON is a subset of YAML.
        config, log = Path(folder, "config.yaml"), Path(folder, "server.log")
        content = {"jobs": {"folder": "temporary"}, **settings, "models": model_settings}
        config.write_text(json.dumps(content, default=str), encoding="utf-8")
        # Options take precedence over environment variables, such as STACKSEG_SERVER__PORT.
        command = [program, "serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)  # noqa: S603
        try:
            with _connect(process, log, time.monotonic() + start_seconds) as client:
                yield client
        finally:
            _stop(process)


def _find_program() -> str:
    """Return the path of `stackseg` in the environment of this interpreter. Raises ServiceNotStarted."""
    folder = sysconfig.get_path("scripts")
    program = shutil.which(PROGRAM, path=folder)
    if program is None:
        raise ServiceNotStarted(
            f"The program {PROGRAM} is not in {folder}. Install StackSeg into the Python environment of this client"
            " (pip install FOLDER_OF_STACKSEG), or connect to a running server with Client('http://HOST:8000')."
        )
    return program


def _connect(process: subprocess.Popen[bytes], log: Path, deadline: float) -> Client:
    """Return a client for a server as soon as the server is ready. Raises ServiceNotStarted."""
    client: Client | None = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServiceNotStarted(f"The server has stopped with status {process.returncode}:\n{_quote(log)}")
        match = re.search(r"StackSeg listens on (https?://\S+)", log.read_text("utf-8", "replace"))
        if match is not None:
            # The environment may name a proxy, which does not reach this computer.
            client = client or Client(match[1], trust_env=False)
            try:
                client._attempt(operations.check_ready())
            except (ConnectionFailed, CapacityError):
                pass
            else:
                return client
        time.sleep(POLL_SECONDS)
    if client is not None:
        client.close()
    raise ServiceNotStarted(f"The server is not ready. Its log:\n{_quote(log)}")


def _quote(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-MAX_LOG_CHARACTERS:].strip()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
