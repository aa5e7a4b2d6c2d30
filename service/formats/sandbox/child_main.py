"""Child process that forks processes that parse and decode stacks, with limits on memory and file size.

It communicates through JSON messages and file descriptors. `service.formats.sandbox.reader` starts it with `python -m`.
It does not import torch, and imports only the parts of the service that read files.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from service.core.errors import RequestError, TooLarge
from service.core.quantities import TimeRange, VoxelSize
from service.core.types import Description, Selection
from service.formats import stack_reader
from service.formats.placement import VolumeLocation
from service.formats.sandbox import label_reader
from service.formats.sandbox.confinement import Confinement, end_with_parent, limit_resources
from service.formats.stack_reader import Source
from service.formats.zarr.store import FetchedStore, FileRange, FolderStore


def parse_voxel_size(sizes: dict[str, float] | None) -> VoxelSize | None:
    """Parse a voxel size from its JSON fields."""
    return None if sizes is None else VoxelSize(**sizes)


def encode_message(message: dict[str, Any]) -> bytes:
    """Encode a message as a line of JSON. Dataclasses are encoded by their fields."""
    return json.dumps(message, default=vars).encode() + b"\n"


def handle_request(request: dict[str, Any], file: Source, make_output: Callable[[int], int]) -> dict[str, Any]:
    """Handle one request about a store or an open file. The descriptors of the file and of the output file are closed.

    Only errors that a file or folder can cause are caught. The reply contains a `result`, or the slug or errno of an
    error.
    """
    fields = request["selection"]
    time = TimeRange(**fields["time"]) if isinstance(fields["time"], dict) else fields["time"]
    selection = Selection(**{**fields, "time": time, "voxel_size": parse_voxel_size(fields["voxel_size"])})
    limit_bytes = request["limit_bytes"]
    try:
        if request["call"] == "inspect":
            return {"result": stack_reader.inspect(file, selection, limit_bytes)}
        location: VolumeLocation | Description
        if request["call"] == "labels":
            z, y, x = request["shape"]
            if not isinstance(file, int):
                raise TypeError("labels must be stored in a single file")
            location = label_reader.extract(file, (z, y, x), make_output)
        else:
            location = stack_reader.extract(file, selection, limit_bytes, make_output, request["max_decoded_bytes"])
    except RequestError as error:
        advice = {"parameter": error.parameter, "suggested": error.suggested}
        return {"error": error.slug, "message": str(error), **advice}
    except MemoryError:
        return {
            "error": TooLarge.slug,
            "message": "Reading the file exceeds the memory limit for one file. Crop or downsample the stack.",
        }
    except OSError as error:
        return {"errno": error.errno, "message": error.strerror}
    if isinstance(location, Description):
        return {"result": {"description": location}}
    fields_to_send = ("voxel_size", "channels", "notes", "is_decoded")
    return {"result": vars(location.placement) | {name: getattr(location, name) for name in fields_to_send}}


def main(memory_bytes: int, max_decoded_bytes: int, time_limit_seconds: float) -> None:
    """Fork a process for each client, so that no process reads files of several clients.

    The socket at descriptor 0 receives a byte and a descriptor for each process to fork. The descriptor is the socket
    through which the forked process receives requests. The previous forked process is killed first. This process itself
    never receives data from a file. When the socket is closed, this process exits like the last forked process.
    """
    limit_resources(memory_bytes, max_decoded_bytes)
    sample = _make_sample()
    _read_sample(os.dup(sample))
    confinement = Confinement()
    # Objects that exist now are not collected, so the forked processes share their memory.
    gc.freeze()
    control, parent_pid, child_pid = socket.socket(fileno=0), os.getpid(), 0
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if child_pid:
            os.kill(child_pid, signal.SIGKILL)
            os.waitpid(child_pid, 0)
        child_pid = os.fork()
        if not child_pid:
            # Only the service and this process hold the other sockets. The new socket replaces the one at descriptor 0.
            os.dup2(descriptors[0], control.detach())
            os.close(descriptors[0])
            end_with_parent(parent_pid)
            _handle_requests(confinement, sample, time_limit_seconds)
            # Skip the shutdown of the interpreter.
            os._exit(0)
        os.close(descriptors[0])
    if child_pid:
        _exit_like(child_pid)


def _handle_requests(confinement: Confinement, sample: int, time_limit_seconds: float) -> None:
    """Read the sample, then handle requests from the socket at descriptor 0, one at a time, until it is closed.

    Messages are lines of JSON. The first message to the service contains the layers of confinement that are not in
    force, with reasons. A request about a file comes with the descriptor of the file. Requests about folders and remote
    stores come without a descriptor. The reply to a request is a result or an error. Before it replies, the process can
    send questions to the service:

    output_bytes  size of an output file; the service replies with the descriptor of a file of this size
    open          key of a file in the folder; the service replies with its descriptor if the file exists
    fetch         ranges of objects in a remote store; the service replies with their sizes, and with the descriptor of
                  a file that contains the ranges
    """
    with socket.socket(fileno=0) as channel:
        missing_layers = confinement.apply()
        _read_sample(sample)
        messages = _receive(channel)
        channel_lock = threading.Lock()

        def send_question(question: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
            with channel_lock:
                _send(channel, question)
                return next(messages)

        def request_file(question: dict[str, Any]) -> tuple[dict[str, Any], int]:
            reply, file = send_question(question)
            if file is None:
                raise EOFError("the parent replied without a descriptor")
            return reply, file

        def make_output(nbytes: int) -> int:
            return request_file({"output_bytes": nbytes})[1]

        def fetch(ranges: Sequence[FileRange]) -> tuple[list[int], int]:
            reply, content = request_file({"fetch": ranges})
            signal.setitimer(signal.ITIMER_REAL, time_limit_seconds + 5)
            return reply["sizes"], content

        _send(channel, {"missing": missing_layers})
        for request, file in messages:
            signal.setitimer(signal.ITIMER_REAL, time_limit_seconds + 5)
            store = (
                FetchedStore(fetch)
                if request.get("remote")
                else FolderStore(lambda key: send_question({"open": key})[1])
            )
            _send(channel, handle_request(request, store if file is None else file, make_output))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _make_sample() -> int:
    """Return the descriptor of an unchangeable file in memory: a TIFF of one pixel."""
    tags = ((256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 1))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    file = os.memfd_create("sample", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, struct.pack("<2sHIQH", b"II", 42, 16, 0, len(tags)) + entries + bytes(4))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _read_sample(sample: int) -> None:
    """Read and close the sample, so that reading the first file takes as little time as reading later files."""
    stack_reader.extract(sample, Selection(axes="YX"), 1, _refuse_output, 1)


def _refuse_output(nbytes: int) -> int:
    raise ValueError(f"the sample has no {nbytes} bytes to decode")


def _exit_like(child_pid: int) -> None:
    """Wait for a forked process, and exit with its status or signal, which the service evaluates."""
    status = os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])
    if status < 0:
        # The handlers of some signals, such as SIGKILL, cannot be changed.
        with suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(encode_message(message))


def _receive(channel: socket.socket) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield each message with its descriptor, or with None, until the other side closes the socket."""
    line, files = b"", list[int]()
    while True:
        chunk, received_files, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not chunk:
            return
        line, files = line + chunk, files + received_files
        if line.endswith(b"\n"):
            yield json.loads(line), next(iter(files), None)
            line, files = b"", []


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
