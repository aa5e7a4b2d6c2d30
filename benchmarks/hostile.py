"""Measure the response, the time and the memory of the service for each of many hostile files.

python benchmarks/hostile.py FOLDER [--mutations 0] [--limit-seconds 10] [--limit-mb 512] [--json FILE]

Sends every file below FOLDER to /segment of a real server with the bundled model. Then stores it with POST /stacks and
requests planes of it, and sends it as the image and as the labels of POST /annotations. With `--mutations N`, does the
same with N random mutations of each file; `--seed` selects other mutations. After each file, a valid
small stack is sent to /inspect; at the end, it is sent to /segment. Memory is the peak increase of the resident memory
of the server and its child processes during a request, sampled every two milliseconds.

The exit status is 1 if a file causes a 5xx response or a broken connection, if a refused file exceeds the limits of
time or memory, or if a valid request fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from common import make_tiff, request, run_server
from processes import Sampler, resident_bytes

CONFIG = "engine: {kind: eager}\nserver: {scratch_folder: SCRATCH}\n"


VALID_STACK = make_tiff((4, 8, 8), 0)[0]
BOUNDARY = "boundary-of-the-form"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
PLANE_QUERIES = ("from=0&to=1", "axis=x&from=1&to=3", "channel=1&time=0&step=2,3,3")


class Outcome(NamedTuple):
    """Response to a request with a file; see `describe_response` for `kind`."""

    file: str
    route: str
    status: int
    kind: str
    seconds: float
    megabytes: float


def send_file(port: int, content: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Send a file to all routes that read files; yield the route, the status and the body of each response."""
    yield "/segment", *request(port, "POST", "/segment", content)
    status, body = request(port, "POST", "/stacks", content)
    yield "/stacks", status, body
    if status == 201:
        stack = f"/stacks/{json.loads(body)['id']}"
        for query in PLANE_QUERIES:
            yield "/planes", *request(port, "GET", f"{stack}/planes?{query}")
        yield "/stacks/ID", *request(port, "DELETE", stack)
    for image, labels in ((content, VALID_STACK), (VALID_STACK, content)):
        status, body = request(port, "POST", "/annotations", make_form(image, labels), FORM)
        yield "/annotations", status, body
        if status == 201:
            yield "/annotations/ID", *request(port, "DELETE", f"/annotations/{json.loads(body)['id']}")


def make_form(image: bytes, labels: bytes) -> bytes:
    """Return the multipart form of an annotated stack."""
    parts = (("file", "stack.tif", image), ("labels", "labels.tif", labels))
    return (
        b"".join(
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{file}"\r\n\r\n'.encode()
            + content
            + b"\r\n"
            for name, file, content in parts
        )
        + f"--{BOUNDARY}--\r\n".encode()
    )


def measure(process: int, port: int, content: bytes, name: str) -> Iterator[Outcome]:
    """Send a file to all routes; yield the response, the seconds and the memory of each request."""
    responses = send_file(port, content)
    while True:
        before = resident_bytes(process)
        with Sampler(lambda: resident_bytes(process), 0.002) as memory:
            began = time.perf_counter()
            response = next(responses, None)
            seconds = time.perf_counter() - began
        if response is None:
            return
        route, status, body = response
        peak = max([before, *(size for _, size in memory.samples)])
        yield Outcome(name, route, status, describe_response(status, body), seconds, (peak - before) / 2**20)


def describe_response(status: int, body: bytes) -> str:
    """Return the problem type of a response, `accepted`, or the error that broke the connection."""
    if status == 0:
        return body.decode()
    return "accepted" if status < 300 else str(json.loads(body)["type"]).rpartition(":")[2]


def mutate(content: bytes, random: Random) -> bytes:
    """Return a file with random changes, half of them in its first 4 KiB: bytes, blocks, or its length."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        end = len(changed) if random.random() < 0.5 else min(len(changed), 4096)
        start = random.randrange(max(end, 1))
        length = random.choice((1, 1, 2, 4, 8, 64))
        kind = random.randrange(6)
        if kind < 3:
            changed[start : start + length] = random.randbytes(length)
        elif kind == 3:
            changed[start : start + length] = random.choice((b"\0", b"\xff", b"\x7f")) * length
        elif kind == 4:
            source = random.randrange(max(len(changed), 1))
            changed[start : start + length] = changed[source : source + length]
        elif random.random() < 0.2:
            del changed[start:]
    return bytes(changed)


def print_outcomes(outcomes: list[Outcome], valid_statuses: list[int], limit_seconds: float, limit_mb: float) -> bool:
    """Print the results; return whether all outcomes are within the limits and all valid requests succeeded."""
    refused = [outcome for outcome in outcomes if not 200 <= outcome.status < 300]
    print(f"| response | requests | seconds: median, maximum | MB above baseline: median, maximum |\n|{'---|' * 4}")
    groups = Counter((outcome.route, outcome.status, outcome.kind) for outcome in outcomes)
    for (route, status, kind), count in sorted(groups.items()):
        matching = [outcome for outcome in outcomes if outcome[1:4] == (route, status, kind)]
        seconds, megabytes = [outcome.seconds for outcome in matching], [outcome.megabytes for outcome in matching]
        print(
            f"| {route} {status} {kind} | {count} | {statistics.median(seconds):.3f}, {max(seconds):.2f} "
            f"| {statistics.median(megabytes):.0f}, {max(megabytes):.0f} |"
        )
    for field in ("seconds", "megabytes"):
        worst = max(refused, key=lambda outcome: getattr(outcome, field))
        print(f"\nmaximum {field} of a refused request: {getattr(worst, field):.2f}, {worst}")
    failures = [outcome for outcome in refused if not 400 <= outcome.status < 500]
    failures += [outcome for outcome in refused if outcome.seconds > limit_seconds or outcome.megabytes > limit_mb]
    for outcome in failures:
        print("FAILED:", outcome)
    print(f"\n{len(outcomes)} requests; {valid_statuses.count(200)} of {len(valid_statuses)} valid requests succeeded")
    return not failures and valid_statuses.count(200) == len(valid_statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=10)
    parser.add_argument("--limit-mb", type=float, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = [path for path in sorted(options.folder.rglob("*")) if path.is_file() and path.suffix != ".json"]
    random, outcomes, valid_statuses = Random(options.seed), [], []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.replace("SCRATCH", folder))
        with run_server(Path(folder), "--config", str(config)) as (process, port):
            for _ in range(3):
                request(port, "POST", "/segment", VALID_STACK)
            for path in files:
                name, content = str(path.relative_to(options.folder)), path.read_bytes()
                for number in range(options.mutations + 1):
                    mutation = mutate(content, random) if number else content
                    outcomes += measure(process, port, mutation, f"{name} mutation {number}" if number else name)
                    valid_statuses.append(request(port, "POST", "/inspect", VALID_STACK)[0])
            valid_statuses.append(request(port, "POST", "/segment", VALID_STACK)[0])
    if options.json:
        options.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    return 0 if print_outcomes(outcomes, valid_statuses, options.limit_seconds, options.limit_mb) else 1


if __name__ == "__main__":
    sys.exit(main())
