"""Seconds and processor time of a start with a warm plan until the service is ready.

python benchmarks/start.py [--starts 5] [--case eager] [--case auto] [--tree FOLDER] [--cache FOLDER] [--json FILE]

Cases: `eager` is the tiny model and the configuration of benchmarks/crash.py, `auto` the bundled models with
configs/default.yaml. Every start is that of a real server, which then is killed; the first of each case makes the plan
and fills the caches (in `--cache`, if it is to be kept), and is not counted. With `--tree` the checkouts named, this
one included only if it is, start in turn. Seconds from the beginning of the process to: the line that tells the
address, the first answer, the answer that the service is ready; those of all threads and child processes on a processor
until the line and until ready; and from ready to the result of a first small stack. `--log` prints what was logged,
and when.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import yaml
from common import ROOT, TIFF, make_model, make_tiff, write_figures
from crash import SMALL
from processes import cpu_seconds, resident

START_SECONDS = 600


def make_settings(case: str, tree: Path, models: Path, cache: Path) -> dict[str, Any]:
    """Return the configuration of a case for a checkout; caches and scratch files lie below `cache`."""
    folder = cache / case
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    common = {
        "jobs": {"folder": str(folder / "jobs")},
        "server": {"scratch_folder": str(folder / "scratch"), "port": 0},
        "logging": {"format": "json"},
    }
    if case == "auto":
        defaults: dict[str, Any] = yaml.safe_load((tree / "configs" / "default.yaml").read_text(encoding="utf-8"))
        own = {"models": {"folder": str(tree / "models")}, "engine": {"cache_folder": str(folder / "engine")}}
    else:
        defaults = {}
        own = {
            "models": {"folder": str(models)},
            "engine": {"kind": case},
            "device": {"name": "cpu", "threads": 1},
            "limits": {"cache_bytes": 0},
        }
    return {name: {**defaults.get(name, {}), **keys} for name, keys in {**defaults, **own, **common}.items()}


def start(tree: Path, config: Path, log: Path, stack: bytes) -> dict[str, Any]:
    """Start the service of a checkout, kill it, and return the figures of the start."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "service", "serve", "--config", str(config)]
    began, clock = time.monotonic(), time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout is not None
    figures: dict[str, Any] = {}
    try:
        address = process.stdout.readline().split()[-1]
        figures["address"], figures["address_cpu"] = time.monotonic() - began, cpu_seconds(process.pid)
        with httpx2.Client(base_url=address, timeout=START_SECONDS) as client:
            client.get("/health/live").raise_for_status()
            figures["answer"] = time.monotonic() - began
            while client.get("/health/ready").status_code != 200:
                assert time.monotonic() - began < START_SECONDS, f"not ready within {START_SECONDS} s"
                time.sleep(0.02)
            figures["ready"], figures["ready_cpu"] = time.monotonic() - began, cpu_seconds(process.pid)
            client.post("/segment", content=stack, headers=TIFF).raise_for_status()
            figures["first_result"] = time.monotonic() - began - figures["ready"]
            figures["memory_mb"] = resident(process.pid) >> 20
            metrics = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
            figures["recompilations"] = int(float(metrics["stackseg_recompilations"]))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    figures["log"] = list(lines_of(log, clock))
    return figures


def lines_of(log: Path, began: float) -> list[str]:
    """Return the logged lines, each with its seconds since `began` on the clock of time.time."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [f"{datetime.fromisoformat(one['time']).timestamp() - began:8.2f} s  {one['message']}" for one in records]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the most of each figure."""
    names = [name for name in runs[0] if name != "log"]
    return {
        name: {"median": round(statistics.median(run[name] for run in runs), 2), "most": max(run[name] for run in runs)}
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument(
        "--case", action="append", choices=["eager", "compiled", "winograd", "auto"], help="default: eager and auto"
    )
    parser.add_argument("--tree", action="append", type=Path, help="a checkout of this repository; default: this one")
    parser.add_argument("--cache", type=Path, help="keep plans and caches in this folder, for the next run")
    parser.add_argument("--log", action="store_true", help="print what the last start of each logged, and when")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [ROOT]]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-start-") as name:
        folder = Path(name)
        make_model(folder / "models")
        stack = make_tiff(SMALL, 0)[0]
        for case in options.case or ["eager", "auto"]:
            runs: dict[str, list[dict[str, Any]]] = {str(tree): [] for tree in trees}
            for turn in range(options.starts + 1):
                for number, tree in enumerate(trees):
                    cache = (options.cache or folder / "cache") / str(number)
                    config = folder / f"{case}-{number}.yaml"
                    config.write_text(
                        yaml.safe_dump(make_settings(case, tree, folder / "models", cache)), encoding="utf-8"
                    )
                    found = start(tree, config, folder / "log", stack)
                    if turn:
                        runs[str(tree)].append(found)
                    shown = {key: round(value, 2) for key, value in found.items() if key != "log"}
                    print(f"{case} {tree} {'warm' if turn else 'first'}: {shown}", file=sys.stderr)
                    if options.log and turn in {0, options.starts}:
                        print("\n".join(found["log"]), file=sys.stderr)
            figures[case] = {tree: summary(found) for tree, found in runs.items()}
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
