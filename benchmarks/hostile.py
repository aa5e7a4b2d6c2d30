"""Measure the response, the time and the memory of the service for each of many hostile files.

python benchmarks/hostile.py FOLDER [--limit-seconds 10] [--limit-mb 512] [--json FILE]

Sends every file below FOLDER to /segment of a real server with the bundled model. After each file, a valid small stack
is sent to /inspect; at the end, it is sent to /segment. Memory is the peak increase of the resident memory of the
server and its child processes during a request, sampled every two milliseconds.

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
from pathlib import Path
from typing import NamedTuple

from common import make_tiff, request, run_server
from processes import Sampler, resident_bytes

CONFIG = "engine: {kind: eager}\nserver: {scratch_folder: SCRATCH}\n"


class Outcome(NamedTuple):
    """Response to a file; `kind` is the problem type, `segmented`, or the error that broke the connection."""

    file: str
    status: int
    kind: str
    seconds: float
    megabytes: float


def post(process: int, port: int, path: Path, name: str) -> Outcome:
    """Send a file to /segment; return the response, the seconds and the memory."""
    body = path.read_bytes()
    before = resident_bytes(process)
    with Sampler(lambda: resident_bytes(process), 0.002) as memory:
        began = time.perf_counter()
        status, content = request(port, "POST", "/segment", body)
        seconds = time.perf_counter() - began
    peak = max([before, *(size for _, size in memory.samples)])
    if status == 200:
        kind = "segmented"
    elif status == 0:
        kind = content.decode()
    else:
        kind = json.loads(content)["type"].rpartition(":")[2]
    return Outcome(name, status, kind, seconds, (peak - before) / 2**20)


def print_outcomes(outcomes: list[Outcome], valid_statuses: list[int], limit_seconds: float, limit_mb: float) -> bool:
    """Print the results; return whether all outcomes are within the limits and all valid requests succeeded."""
    refused = [outcome for outcome in outcomes if outcome.status != 200]
    print(f"| response | files | seconds: median, maximum | MB above baseline: median, maximum |\n|{'---|' * 4}")
    for (status, kind), count in sorted(Counter((outcome.status, outcome.kind) for outcome in outcomes).items()):
        matching = [outcome for outcome in outcomes if (outcome.status, outcome.kind) == (status, kind)]
        seconds, megabytes = [outcome.seconds for outcome in matching], [outcome.megabytes for outcome in matching]
        print(
            f"| {status} {kind} | {count} | {statistics.median(seconds):.3f}, {max(seconds):.2f} "
            f"| {statistics.median(megabytes):.0f}, {max(megabytes):.0f} |"
        )
    for field in ("seconds", "megabytes"):
        worst = max(refused, key=lambda outcome: getattr(outcome, field))
        maximum = getattr(worst, field)
        print(f"\nmaximum {field} of a refused file: {maximum:.2f}, {worst.file} ({worst.status} {worst.kind})")
    failures = [outcome for outcome in refused if not 400 <= outcome.status < 500]
    failures += [outcome for outcome in refused if outcome.seconds > limit_seconds or outcome.megabytes > limit_mb]
    for outcome in failures:
        print("FAILED:", outcome)
    print(f"\n{len(outcomes)} files; {valid_statuses.count(200)} of {len(valid_statuses)} valid requests succeeded")
    return not failures and valid_statuses.count(200) == len(valid_statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit-seconds", type=float, default=10)
    parser.add_argument("--limit-mb", type=float, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = [path for path in sorted(options.folder.rglob("*")) if path.is_file() and path.suffix != ".json"]
    valid_stack, outcomes, valid_statuses = make_tiff((4, 8, 8), 0)[0], [], []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.replace("SCRATCH", folder))
        with run_server(Path(folder), "--config", str(config)) as (process, port):
            for _ in range(3):
                request(port, "POST", "/segment", valid_stack)
            for path in files:
                outcomes.append(post(process, port, path, str(path.relative_to(options.folder))))
                valid_statuses.append(request(port, "POST", "/inspect", valid_stack)[0])
            valid_statuses.append(request(port, "POST", "/segment", valid_stack)[0])
    if options.json:
        options.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    return 0 if print_outcomes(outcomes, valid_statuses, options.limit_seconds, options.limit_mb) else 1


if __name__ == "__main__":
    sys.exit(main())
