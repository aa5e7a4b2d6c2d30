"""Child process that trains for the service: a request as a line of JSON on stdin, progress as lines on stdout.

`service.serving.learning.trainings` starts it as `python -m`. It ends with the service, whose end of stdin is open
until then.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.core.config import Settings
from service.core.errors import OutOfMemory, OutOfStorage, StackSegError
from service.core.hardware import devices
from service.core.hardware.devices import translate_error
from service.models.repository import read_spec
from service.training.fine_tune import FineTuning, Report, Stack, fine_tune

DISK_FULL = (
    "The disk of the trained models (models.trained_folder) is full, and nothing is left of the training; have room"
    " made there, then start it again."
)
# Errors of a file that cannot grow.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Of the base model: the new one, and a checkpoint with averages and the optimizer's state.
COPIES = 6
OUT_OF_MEMORY = (
    "The training needs more memory than it may take (trainings.memory_bytes); use fewer or smaller annotated stacks."
)


def main() -> None:
    """Answer the one request."""
    # Whoever stops the service stops all of its processes at once, and it then says what becomes of this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What a library prints must not come between the lines of progress.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_service, daemon=True).start()

    def report(news: dict[str, Any]) -> None:
        output.write(json.dumps(news) + "\n")

    try:
        train(request, report)
    except Exception as error:
        known = explain(error, request)
        if known is None:
            raise
        report({"failed": known})


def train(request: dict[str, Any], report: Report) -> None:
    """Train as a request says, with little priority and a limit of memory. Raises what `fine_tune` raises."""
    settings = Settings.model_validate(request["settings"])
    _step_back(int(request["niceness"]))
    _limit_memory(int(request["memory_bytes"]), settings)
    if _is_full(request):
        raise OutOfStorage(DISK_FULL)
    stacks = [_parse_stack(stack) for stack in request["stacks"]]
    task = FineTuning(read_spec(Path(request["base"])), Path(request["out"]), settings, report)
    outcome = fine_tune(stacks, task, minutes=request["minutes"])
    lineage = outcome.lineage
    report({"done": {"after": lineage.after, "better": lineage.better, "message": outcome.message}})


def explain(error: Exception, request: dict[str, Any]) -> str | None:
    """Return in words why the training of a request has failed; None where that is not known."""
    known = translate_error(error)
    if isinstance(known, StackSegError):
        return OUT_OF_MEMORY if isinstance(known, OutOfMemory) else str(known)
    # Each library that writes a file has an error of its own where that fails.
    return DISK_FULL if _is_full(request) else None


def _is_full(request: dict[str, Any]) -> bool:
    """Return whether there is no room for a model as large as the base model, and for its checkpoint."""
    base = sum(path.stat().st_size for path in Path(request["base"]).iterdir())
    try:
        with tempfile.TemporaryFile(dir=Path(request["out"]).parent) as file:
            os.posix_fallocate(file.fileno(), 0, COPIES * base)
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def _parse_stack(stack: dict[str, Any]) -> Stack:
    region = stack["region"]
    part = None if region is None else (slice(*region[0]), slice(*region[1]), slice(*region[2]))
    return Stack(stack["name"], Path(stack["image"]), Path(stack["labels"]), part, stack["diameter"])


def _end_with_service() -> None:
    """End this process once stdin is closed, as it is when the service has ended, however that was."""
    sys.stdin.read()
    os._exit(1)


def _step_back(niceness: int) -> None:
    """Let requests go first, and have the kernel end this process before the service where memory is short."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _limit_memory(nbytes: int, settings: Settings) -> None:
    """Limit what this process may take beyond the libraries that it has loaded, also of a GPU."""
    device = devices.choose_device(settings.device.name)
    devices.limit_memory(device, nbytes)
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    used = next((1024 * int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, used + nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
