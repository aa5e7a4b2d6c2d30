"""What `POST /inspect` says that a request will take, beside the memory that it does take.

python benchmarks/estimate.py [--threads 2] [--json FILE]

For a few stacks and outputs, each with a server of its own: peak memory during the first request beyond what the idle
server held, over the estimate. Pages of the mapped stack are not in the estimate, since the system can take them back;
the last column is all that is resident, over the estimate and those pages.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from crash import make_model
from end_to_end import ROOT, server, synthetic_nuclei
from memory import MODEL

from service.trimming import INTERVAL_SECONDS

MIB = 2**20

Shape = tuple[int, int, int]

NUCLEI: list[tuple[Shape, str]] = [
    ((64, 256, 256), "labels"),
    ((64, 512, 512), "labels"),
    ((64, 512, 512), "probabilities"),
]
TISSUE: list[tuple[Shape, str]] = [((128, 512, 512), "classes")]


def status(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_during(pid: int, call: Callable[[], object]) -> dict[str, int]:
    """Peak bytes during a call beyond those before: anonymous (sampled), and all that is resident."""
    before = status(pid, "RssAnon"), status(pid, "VmRSS")
    most = before[0]
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, status(pid, "RssAnon"))

    Path(f"/proc/{pid}/clear_refs").write_text("5")  # sets VmHWM back
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return {"anonymous": most - before[0], "whole": status(pid, "VmHWM") - before[1]}


def ask(port: int, path: str, content: bytes) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    try:
        connection.request("POST", path, content, {"Content-Type": "image/tiff"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"{path}: the server answered {response.status}: {body.decode(errors='replace')}")
    return body


def measure(model: Path, shape: Shape, output: str, threads: int, folder: Path) -> dict[str, Any]:
    """One request to a server that has answered none before and is idle."""
    tifffile.imwrite(folder / "stack.tif", synthetic_nuclei(shape), imagej=True, metadata={"axes": "ZYX"})
    content = (folder / "stack.tif").read_bytes()
    with server(model, threads, folder) as (process, port):
        # Until what starting has freed was given back: a request that takes it again would seem to take less.
        time.sleep(INTERVAL_SECONDS + 5)
        estimate = json.loads(ask(port, f"/inspect?output={output}", content))["estimate"]
        peak = peak_during(process.pid, lambda: ask(port, f"/segment?output={output}&diameter=none", content))
    stack = int(np.prod(shape)) * 2
    return {"model": model.name, "shape": shape, "output": output, "stack": stack, "estimate": estimate, **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(ROOT / "models" / "nuclei", *case) for case in NUCLEI]
    print("| model | stack | output | estimate, MiB | peak, MiB | peak / estimate | with the stack's pages |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        tissue = make_model(folder, MODEL)
        for model, shape, output in [*cases, *((tissue, *case) for case in TISSUE)]:
            row = measure(model, shape, output, options.threads, folder)
            rows.append(row)
            needed, peak, stack = row["estimate"]["host_bytes"], row["anonymous"], row["stack"]
            numbers = (
                f"{needed / MIB:.0f} | {peak / MIB:.0f} | {peak / needed:.2f} | {row['whole'] / (needed + stack):.2f}"
            )
            print(f"| {row['model']} | {'x'.join(map(str, shape))} | {output} | {numbers} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
