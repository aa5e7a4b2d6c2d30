"""What hostile files cost the service: how each is answered, in what time, and with how much memory.

python benchmarks/hostile.py FOLDER [--limit-seconds 10] [--limit-mb 512] [--json FILE]

Posts every file below FOLDER to /segment of a real server with the bundled model, and after each of them a small stack
to /inspect, which must be understood; at the end that stack must come back segmented. Memory is that of the server with
its child processes: the highest sum of resident bytes seen while the request lasted, read every two milliseconds, above
the sum before it. Exits with status 1 if a file was answered with 5xx or not at all, or a refusal took longer or more
than the limits.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tifffile
from processes import resident

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "engine: {kind: eager}\nserver: {scratch_folder: SCRATCH}\n"


class Outcome(NamedTuple):
    """How one file was answered; `kind` is the problem type, `segmented`, or what broke."""

    file: str
    status: int
    kind: str
    seconds: float
    megabytes: float


class Memory:
    """The highest resident memory of a process and its children while the block lasts, in bytes above its beginning."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._over = threading.Event()
        self.before = self.highest = resident(process)

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.highest = max(self.highest, resident(self._process))

    @property
    def megabytes(self) -> float:
        return (self.highest - self.before) / 2**20


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """A ready server; yields its process number and its port."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("SCRATCH", str(folder)))
    command = [sys.executable, "-m", "service", "serve", "--config", str(config), "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    if process.stdout is None:
        raise RuntimeError("the server has no output")
    try:
        port = int(process.stdout.readline().rpartition(":")[2])
        deadline = time.monotonic() + 300
        while ask(port, "GET", "/health/ready")[0] != 200:
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "log").read_text())
            time.sleep(0.5)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of one request; status 0 where the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "image/tiff"} if body is not None else {})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def post(process: int, port: int, path: Path, name: str) -> Outcome:
    body = path.read_bytes()
    with Memory(process) as memory:
        began = time.perf_counter()
        status, answer = ask(port, "POST", "/segment", body)
        seconds = time.perf_counter() - began
    if status == 200:
        kind = "segmented"
    elif status == 0:
        kind = answer.decode()
    else:
        kind = json.loads(answer)["type"].rpartition(":")[2]
    return Outcome(name, status, kind, seconds, memory.megabytes)


def small_stack() -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, np.full((4, 8, 8), 7, np.uint8), metadata={"axes": "ZYX"})
    return file.getvalue()


def show(outcomes: list[Outcome], after: list[int], limit_seconds: float, limit_mb: float) -> bool:
    """Print the table; whether everything is as it should be."""
    refused = [outcome for outcome in outcomes if outcome.status != 200]
    print(f"| answer | files | seconds: median, most | MB over baseline: median, most |\n|{'---|' * 4}")
    for (status, kind), count in sorted(Counter((one.status, one.kind) for one in outcomes).items()):
        of_kind = [one for one in outcomes if (one.status, one.kind) == (status, kind)]
        seconds, megabytes = [one.seconds for one in of_kind], [one.megabytes for one in of_kind]
        print(
            f"| {status} {kind} | {count} | {statistics.median(seconds):.3f}, {max(seconds):.2f} "
            f"| {statistics.median(megabytes):.0f}, {max(megabytes):.0f} |"
        )
    for field in ("seconds", "megabytes"):
        worst = max(refused, key=lambda one: getattr(one, field))
        print(f"\nmost {field} of a refusal: {getattr(worst, field):.2f}, {worst.file} ({worst.status} {worst.kind})")
    wrong = [one for one in refused if not 400 <= one.status < 500]
    wrong += [one for one in refused if one.seconds > limit_seconds or one.megabytes > limit_mb]
    for one in wrong:
        print("NOT AS IT SHOULD BE:", one)
    print(
        f"\n{len(outcomes)} files; {after.count(200)} of {len(after)} good requests in between and after were answered"
    )
    return not wrong and after.count(200) == len(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit-seconds", type=float, default=10)
    parser.add_argument("--limit-mb", type=float, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = [path for path in sorted(options.folder.rglob("*")) if path.is_file() and path.suffix != ".json"]
    good, outcomes, after = small_stack(), [], []
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as (process, port):
        for _ in range(3):
            ask(port, "POST", "/segment", good)
        for path in files:
            outcomes.append(post(process, port, path, str(path.relative_to(options.folder))))
            after.append(ask(port, "POST", "/inspect", good)[0])
        after.append(ask(port, "POST", "/segment", good)[0])
    if options.json:
        options.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    return 0 if show(outcomes, after, options.limit_seconds, options.limit_mb) else 1


if __name__ == "__main__":
    sys.exit(main())
