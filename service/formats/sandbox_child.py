"""The process in which a TIFF is parsed and decoded: JSON in, JSON out, under limits of memory and file size.

Started by `service.formats.sandbox` as `python -m`; it imports neither torch nor the rest of the service.
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
from service.formats.parse_cache import ReadLog


def voxel_size(sizes: dict[str, float] | None) -> VoxelSize | None:
    """From its fields, as they come out of JSON."""
    return None if sizes is None else VoxelSize(**sizes)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a child does with one request; only errors that a file or a folder may cause are caught.

    Beside a result that is no decoded file stands its `read_log`, the parts of `ReadLog`, or null.
    """
    stated = request["selection"]
    selection = Selection(**{**stated, "voxel_size": voxel_size(stated["voxel_size"])})
    path, limit_bytes, read_log = Path(request["path"]), request["limit_bytes"], ReadLog()
    try:
        if request["call"] == "inspect":
            described = tiff_reader.inspect(path, selection, limit_bytes, read_log)
            return {"result": asdict(described), "evidence": read_log.parts}
        extract = tiff_reader.extract(path, selection, limit_bytes, Path(request["scratch"]), read_log)
    except RequestError as error:
        return {"error": error.slug, "message": str(error)}
    except MemoryError:
        return {"error": TooLarge.slug, "message": "Reading the file needs more memory than one file may use."}
    except OSError as error:
        return {"errno": error.errno, "message": error.strerror}
    plain = extract.path == path
    return {
        "result": {
            "file": None if plain else extract.path.name,
            **asdict(extract.placement),
            "voxel_size": asdict(extract.voxel_size) if extract.voxel_size else None,
            "channels": extract.channels,
        },
        "evidence": read_log.parts if plain else None,
    }


def main(memory_bytes: int, decoded_bytes: int, seconds: float, held: Path) -> None:
    """The child: read requests, one JSON object per line, until the parent closes the pipe.

    First it says whether it can open `held`, which leads to a file that the parent has open.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit(memory_bytes, decoded_bytes)
    replies.write(json.dumps({"opens": opens(held)}).encode() + b"\n")
    replies.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds + 5)
        replies.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        replies.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def opens(path: Path) -> bool:
    """Whether this process can: not those of a parent that has changed its user, nor without its view of /proc."""
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
