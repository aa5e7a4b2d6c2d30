"""The child process that trains models for the service.

`service.serving.learning.training_manager` starts this process with `python -m`. The process reads a request from stdin
and writes progress messages to stdout, each as a line of JSON. It exits when stdin is closed, which happens when the
service exits.
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

from service.core.config import Settings, override_settings
from service.core.errors import OutOfMemory, OutOfStorage, StackSegError
from service.core.hardware import devices
from service.core.hardware.devices import translate_error
from service.formats.sandbox.confinement import TRAINING_LAYERS, confine
from service.models.repository import read_spec
from service.models.spec import ModelSpec
from service.training.fine_tune import MAX_STEPS, FineTuningTask, ProgressCallback, fine_tune
from service.training.stacks.annotated_stack import AnnotatedStack, LabelOptions, StackFiles, read_stack

log = logging.getLogger(__name__)

DISK_FULL_MESSAGE = (
    "The disk that contains the trained models (models.trained_folder) is full, so training could not finish. Ask the"
    " operator to free some space, then start the training run again."
)
# Error numbers which mean that a file cannot grow.
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Required disk space in multiples of the size of the base model, for the new model and a checkpoint. The checkpoint
# also contains averaged weights and the optimizer state.
REQUIRED_MODEL_COPIES = 6
OUT_OF_MEMORY_MESSAGE = (
    "Training needs more memory than is allowed (trainings.memory_bytes). Use fewer or smaller annotated stacks."
)


def main() -> None:
    """Train the model that the request on stdin specifies, and report the progress on stdout."""
    # Ignore SIGTERM, which may be sent to all processes of the service. The service itself stops this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Keep the output of libraries separate from the progress messages.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for layer, reason in confine(layers=TRAINING_LAYERS).items():
        log.warning("training runs without %s: %s", layer, reason)
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_service, daemon=True).start()

    def report(progress: dict[str, Any]) -> None:
        output.write(json.dumps(progress) + "\n")

    try:
        train(request, report)
    except Exception as error:
        message = describe_error(error, request)
        if message is None:
            raise
        report({"failed": message})


def train(request: dict[str, Any], report: ProgressCallback) -> None:
    """Fine-tune a model as requested, with low priority and a memory limit. Raises the errors of `fine_tune`."""
    settings = Settings.model_validate(request["settings"])
    _lower_priority(int(request["niceness"]))
    _limit_memory(int(request["memory_bytes"]), settings)
    if _is_disk_full(request):
        raise OutOfStorage(DISK_FULL_MESSAGE)
    settings = override_settings(settings, "training", {"minutes": request["minutes"], "steps": MAX_STEPS})
    base = read_spec(Path(request["base"]))
    stacks, keeps_worse = read_stacks(request, base), bool(request["keep_worse"])
    out, target = Path(request["out"]), request["target"]
    task = FineTuningTask(base, out, settings, report, target=target, keeps_worse=keeps_worse)
    result = fine_tune(stacks, task)
    outcome = {"after": round(result.after.f1, 4), "better": result.is_better, "message": result.message}
    report({"done": outcome})


def describe_error(error: Exception, request: dict[str, Any]) -> str | None:
    """Return a message for users about an error, or None if the error is unexpected."""
    translated_error = translate_error(error)
    if isinstance(translated_error, StackSegError):
        return OUT_OF_MEMORY_MESSAGE if isinstance(translated_error, OutOfMemory) else str(translated_error)
    # Libraries that write files raise their own errors if the disk is full, so check the disk.
    return DISK_FULL_MESSAGE if _is_disk_full(request) else None


def _is_disk_full(request: dict[str, Any]) -> bool:
    """Return whether there is not enough disk space for a checkpoint and a model of the size of the base model."""
    base_bytes = sum(path.stat().st_size for path in Path(request["base"]).iterdir())
    try:
        with tempfile.TemporaryFile(dir=Path(request["out"]).parent) as file:
            os.posix_fallocate(file.fileno(), 0, REQUIRED_MODEL_COPIES * base_bytes)
    except OSError as error:
        return error.errno in DISK_FULL_ERRNOS
    return False


def read_stacks(request: dict[str, Any], base: ModelSpec) -> list[AnnotatedStack]:
    """Read the annotated stacks of a request. Raises the errors of `read_stack`."""
    return [read_stack(_parse_stack(stack), _parse_options(stack, request, base)) for stack in request["stacks"]]


def _parse_stack(stack: dict[str, Any]) -> StackFiles:
    region = stack["region"]
    region_slices = None if region is None else (slice(*region[0]), slice(*region[1]), slice(*region[2]))
    return StackFiles(stack["name"], Path(stack["image"]), Path(stack["labels"]), region_slices, stack["diameter"])


def _parse_options(stack: dict[str, Any], request: dict[str, Any], base: ModelSpec) -> LabelOptions:
    return LabelOptions(
        has_diameter=base.input.diameter is not None and request["target"] in {None, "instances"},
        ignored=stack["ignored"],
        is_partial=bool(request["is_partial"] or stack["is_partial"]),
        has_partial_planes=bool(request["has_partial_planes"]),
    )


def _exit_with_service() -> None:
    """Exit when stdin is closed, which happens when the service exits for any reason."""
    sys.stdin.read()
    os._exit(1)


def _lower_priority(niceness: int) -> None:
    """Lower the priority of this process. If memory runs out, let the kernel kill this process before the service."""
    os.nice(niceness)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _limit_memory(nbytes: int, settings: Settings) -> None:
    """Limit the host and GPU memory that this process can use in addition to its current memory."""
    device = devices.choose_device(settings.device.name)
    devices.limit_memory(device, nbytes)
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    used_bytes = next((1024 * int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + nbytes, used_bytes + nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
