"""Child process that parses and decodes TIFFs: JSON in, JSON out, under limits of memory and file size.

`service.formats.sandbox` starts it as `python -m`; it imports neither torch nor the rest of the service.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.core.errors import RequestError, TooLarge
from service.core.volume import Selection, VoxelSize
from service.formats import tiff_reader


def parse_voxel_size(sizes: dict[str, float] | None) -> VoxelSize | None:
    """Parse a voxel size from its JSON fields."""
    return None if sizes is None else VoxelSize(**sizes)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; only errors that a file or a folder may cause are caught.

    A reply has a `result`, or an error by its slug or errno.
    """
    fields = request["selection"]
    selection = Selection(**{**fields, "voxel_size": parse_voxel_size(fields["voxel_size"])})
    path, limit_bytes = Path(request["path"]), request["limit_bytes"]
    try:
        if request["call"] == "inspect":
            return {"result": asdict(tiff_reader.inspect(path, selection, limit_bytes))}
        extract = tiff_reader.extract(path, selection, limit_bytes, Path(request["scratch"]))
    except RequestError as error:
        return {"error": error.slug, "message": str(error)}
    except MemoryError:
        return {"error": TooLarge.slug, "message": "Reading the file needs more memory than one file may use."}
    except OSError as error:
        return {"errno": error.errno, "message": error.strerror}
    return {
        "result": {
            "file": None if extract.path == path else extract.path.name,
            **asdict(extract.placement),
            "voxel_size": asdict(extract.voxel_size) if extract.voxel_size else None,
            "channels": extract.channels,
        }
    }


def main(memory_bytes: int, decoded_bytes: int, seconds: float, parent_file: Path) -> None:
    """Answer requests, one JSON object per line, until the parent closes the pipe.

    The first line tells the parent whether this process can open `parent_file`, a file that the parent has open.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit(memory_bytes, decoded_bytes)
    replies.write(json.dumps({"opens": can_open(parent_file)}).encode() + b"\n")
    replies.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds + 5)
        replies.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        replies.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def can_open(path: Path) -> bool:
    """Whether this process can open a file; not that of a parent with another user, or another view of /proc."""
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True


def _limit(memory_bytes: int, decoded_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (decoded_bytes, decoded_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
