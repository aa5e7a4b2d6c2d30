"""Cost of hostile files for the service: how each is answered, in what time, and with how much memory.

python benchmarks/hostile.py FOLDER [--limit-seconds 10] [--limit-mb 512] [--json FILE]

Posts every file below FOLDER to /segment of a real server with the bundled model, and after each of them a small stack
to /inspect, which must be understood; at the end that stack must come back segmented. Memory is that of the server with
its child processes: the highest sum of resident bytes seen while the request lasted, read every two milliseconds, above
the sum before it. Exits with status 1 if a file was answered with 5xx or not at all, or a refusal took longer or more
than the limits.
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
from processes import Sampler, resident

CONFIG = "engine: {kind: eager}\nserver: {scratch_folder: SCRATCH}\n"


class Outcome(NamedTuple):
    """Answer to one file; `kind` is the problem type, `segmented`, or the error of a broken connection."""

    file: str
    status: int
    kind: str
    seconds: float
    megabytes: float


def post(process: int, port: int, path: Path, name: str) -> Outcome:
    body = path.read_bytes()
    before = resident(process)
    with Sampler(lambda: resident(process), 0.002) as memory:
        began = time.perf_counter()
        status, answer = request(port, "POST", "/segment", body)
        seconds = time.perf_counter() - began
    highest = max([before, *(size for _, size in memory.samples)])
    if status == 200:
        kind = "segmented"
    elif status == 0:
        kind = answer.decode()
    else:
        kind = json.loads(answer)["type"].rpartition(":")[2]
    return Outcome(name, status, kind, seconds, (highest - before) / 2**20)


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
    good, outcomes, after = make_tiff((4, 8, 8), 0)[0], [], []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.replace("SCRATCH", folder))
        with run_server(Path(folder), "--config", str(config)) as (process, port):
            for _ in range(3):
                request(port, "POST", "/segment", good)
            for path in files:
                outcomes.append(post(process, port, path, str(path.relative_to(options.folder))))
                after.append(request(port, "POST", "/inspect", good)[0])
            after.append(request(port, "POST", "/segment", good)[0])
    if options.json:
        options.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    return 0 if show(outcomes, after, options.limit_seconds, options.limit_mb) else 1


if __name__ == "__main__":
    sys.exit(main())
