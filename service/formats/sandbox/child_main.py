"""Child process that parses and decodes stacks, with limits on memory and file size.

It communicates through JSON messages and file descriptors. `service.formats.sandbox.reader` starts it with `python -m`.
It does not import torch, and imports only the parts of the service that read files.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from service.core.errors import RequestError, TooLarge
from service.core.quantities import TimeRange, VoxelSize
from service.core.types import Description, Selection
from service.formats import stack_reader
from service.formats.placement import VolumeLocation
from service.formats.sandbox import label_reader
from service.formats.sandbox.confinement import confine
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
    """Handle requests from the socket at descriptor 0, one at a time, until the parent closes it.

    Messages are lines of JSON. The first message to the parent contains the layers of confinement that are not in
    force, with reasons. A request about a file comes with the descriptor of the file. Requests about folders and remote
    stores come without a descriptor. The reply to a request is a result or an error. Before it replies, the child can
    send questions to the parent:

    output_bytes  size of an output file; the parent replies with the descriptor of a file of this size
    open          key of a file in the folder; the parent replies with its descriptor if the file exists
    fetch         ranges of objects in a remote store; the parent replies with their sizes, and with the descriptor of a
                  file that contains the ranges
    """
    with socket.socket(fileno=0) as channel:
        _set_limits(memory_bytes, max_decoded_bytes)
        missing_layers = confine()
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
            reply = handle_request(request, store if file is None else file, make_output)
            _send(channel, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)


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


def _set_limits(memory_bytes: int, max_decoded_bytes: int) -> None:
    startup_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (startup_bytes + memory_bytes, startup_bytes + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_decoded_bytes, max_decoded_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
