"""Parent of the child process that selects and renders star-convex polyhedra."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from typing import IO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.core.errors import Cancelled, InternalError, OutOfMemory
from service.core.types import CancellationCheck
from service.formats.sandbox.child_process import make_child_environment, start_module
from service.inference.decoding.external.star_convex.child_main import Task

MODULE = "service.inference.decoding.external.star_convex.child_main"
# Interval at which the parent checks whether the request was canceled.
POLL_SECONDS = 0.05


class RenderedObjects(NamedTuple):
    """Objects in descending order of their probability, and the labels of their voxels.

    labels       int32 [Z, Y, X]; object N has the label N + 1, unless other objects cover it
    probability  float32 [M]
    distance     longest distance from the origin to the outline, float32 [M]
    """

    labels: NDArray[np.int32]
    probability: NDArray[np.float32]
    distance: NDArray[np.float32]


def render_polyhedra(task: Task, candidates: IO[bytes], cancelled: CancellationCheck) -> RenderedObjects:
    """Select polyhedra by non-maximum suppression, and render them in a child process.

    candidates  file with the candidates, as described in `child_main`

    Raises Cancelled, OutOfMemory if the child was killed, and InternalError if it failed.
    """
    candidates.flush()
    candidates.seek(0)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error_output:
        environment = {**make_child_environment(), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        process = start_module([MODULE, json.dumps(task)], environment, (candidates, output, error_output))
        try:
            status = _wait(process, cancelled)
        finally:
            process.kill()
            process.wait()
        if status:
            error_output.seek(0)
            raise _make_exit_error(status, error_output.read()[-2000:].decode(errors="replace"))
        return _read_result(task, output)


def _wait(process: subprocess.Popen[bytes], cancelled: CancellationCheck) -> int:
    """Return the exit status of the child. Raises Cancelled."""
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if cancelled():
                raise Cancelled("The request was canceled while its objects were being rendered.") from None


def _make_exit_error(status: int, error_text: str) -> OutOfMemory | InternalError:
    if status == -signal.SIGKILL or "MemoryError" in error_text or "bad_alloc" in error_text:
        return OutOfMemory(
            "There was not enough memory to select and render the polyhedra. Submit a smaller part of the volume, set a"
            " higher threshold=, or try again when fewer requests are running."
        )
    reason = error_text.strip().splitlines()[-1:] or [f"exit status {status}"]
    return InternalError(f"The process that renders star-convex polyhedra failed: {reason[0]}")


def _read_result(task: Task, output: IO[bytes]) -> RenderedObjects:
    label_bytes = 4 * int(np.prod(task.size, dtype=np.int64))
    num_objects, remainder = divmod(output.seek(0, 2) - label_bytes, 8)
    if num_objects < 0 or remainder:
        raise InternalError("The process that renders star-convex polyhedra returned an incomplete result.")
    output.seek(0)
    objects = np.fromfile(output, np.float32, 2 * num_objects).reshape(-1, 2)
    labels = np.fromfile(output, np.int32, label_bytes // 4).reshape(task.size)
    return RenderedObjects(labels, objects[:, 0], objects[:, 1])
