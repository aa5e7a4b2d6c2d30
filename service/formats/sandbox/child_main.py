"""Child process that parses and decodes stacks: JSON and descriptors in, JSON out, with limits of memory and file size.

`service.formats.sandbox.reader` starts it as `python -m`; it imports neither torch nor the rest of the service.
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
from service.formats.placement import Extract
from service.formats.sandbox import label_reader
from service.formats.sandbox.confinement import confine
from service.formats.stack_reader import Source
from service.formats.zarr.store import FetchedStore, FolderStore, Part


def parse_voxel_size(sizes: dict[str, float] | None) -> VoxelSize | None:
    """Parse a voxel size from its JSON fields."""
    return None if sizes is None else VoxelSize(**sizes)


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message, with dataclasses by their fields, as a line of JSON."""
    return json.dumps(message, default=vars).encode() + b"\n"


def answer(request: dict[str, Any], file: Source, make_output: Callable[[int], int]) -> dict[str, Any]:
    """Answer one request about a store, or an open file, which is closed, as is the descriptor of `make_output`.

    Only errors that a file or a folder may cause are caught. A reply has a `result`, or an error by its slug or errno.
    """
    fields = request["selection"]
    time = TimeRange(**fields["time"]) if isinstance(fields["time"], dict) else fields["time"]
    selection = Selection(**{**fields, "time": time, "voxel_size": parse_voxel_size(fields["voxel_size"])})
    limit_bytes = request["limit_bytes"]
    try:
        if request["call"] == "inspect":
            return {"result": stack_reader.inspect(file, selection, limit_bytes)}
        extract: Extract | Description
        if request["call"] == "labels":
            z, y, x = request["shape"]
            if not isinstance(file, int):
                raise TypeError("labels are one file")
            extract = label_reader.extract(file, (z, y, x), make_output)
        else:
            extract = stack_reader.extract(file, selection, limit_bytes, make_output, request["small_bytes"])
    except RequestError as error:
        advice = {"parameter": error.parameter, "suggested": error.suggested}
        return {"error": error.slug, "message": str(error), **advice}
    except MemoryError:
        return {"error": TooLarge.slug, "message": "Reading the file needs more memory than one file may use."}
    except OSError as error:
        return {"errno": error.errno, "message": error.strerror}
    if isinstance(extract, Description):
        return {"result": {"description": extract}}
    facts = ("voxel_size", "channels", "notes", "decoded")
    return {"result": vars(extract.placement) | {name: getattr(extract, name) for name in facts}}


def main(memory_bytes: int, decoded_bytes: int, seconds: float) -> None:
    """Answer requests that arrive on the socket at descriptor 0, one at a time, until the parent closes it.

    A message is a line of JSON: first the layers of confinement that do not hold, with the reasons, then requests with
    the descriptor of a file or none for a folder, and replies. A reply with `output_bytes` asks for the descriptor of a
    file to decode to, one with `open` for that of the file with this key in the folder, or none, and one with `fetch`
    for parts of the objects of a store elsewhere: their sizes, and the descriptor of a file that holds them.
    """
    with socket.socket(fileno=0) as channel:
        _limit(memory_bytes, decoded_bytes)
        missing = confine()
        messages = _receive(channel)

        turn = threading.Lock()

        def ask(question: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
            with turn:
                _send(channel, question)
                return next(messages)

        def ask_for_file(question: dict[str, Any]) -> tuple[dict[str, Any], int]:
            reply, file = ask(question)
            if file is None:
                raise EOFError("the parent sends a file, or ends this process")
            return reply, file

        def make_output(nbytes: int) -> int:
            return ask_for_file({"output_bytes": nbytes})[1]

        def fetch(parts: Sequence[Part]) -> tuple[list[int], int]:
            reply, content = ask_for_file({"fetch": parts})
            signal.setitimer(signal.ITIMER_REAL, seconds + 5)
            return reply["sizes"], content

        _send(channel, {"missing": missing})
        for request, file in messages:
            signal.setitimer(signal.ITIMER_REAL, seconds + 5)
            store = FetchedStore(fetch) if request.get("remote") else FolderStore(lambda key: ask({"open": key})[1])
            reply = answer(request, store if file is None else file, make_output)
            _send(channel, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(encode(message))


def _receive(channel: socket.socket) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield each message with the descriptor that came with it, or None, until the other side closes the socket."""
    line, files = b"", list[int]()
    while True:
        data, received, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not data:
            return
        line, files = line + data, files + received
        if line.endswith(b"\n"):
            yield json.loads(line), next(iter(files), None)
            line, files = b"", []


def _limit(memory_bytes: int, decoded_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (decoded_bytes, decoded_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
