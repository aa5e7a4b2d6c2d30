"""Measure how long the service takes to start, with empty caches and with the caches of an earlier start.

python benchmarks/start.py [--repeats 5] [--case auto] [--tree FOLDER] [--no-compiler] [--log] [--json FILE]

The case `auto` uses the bundled models with configs/default.yaml, and `tune` adds `engine.tune: first-start`. The other
cases are fixed engines with the tiny model of benchmarks/common.py. Each start is that of a real server, which is
killed afterwards. The results, in seconds:

address       from the start of the process until it prints its address
ready         from the start of the process until the service is ready
ready_cpu     CPU time of the process and its child processes until the service is ready
first_result  from ready until the labels of a first small stack are received
segment       `stackseg segment` of the same stack, with empty caches

To compare checkouts of the repository, name each with `--tree`. `--no-compiler` hides C++ compilers. `--log` prints the
log with the time of each line. Files in the page cache of the system are read faster than after booting.
"""

from __future__ import annotations

import argparse
import itertools
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
from common import ROOT, TIFF, make_model, make_tiff
from processes import cpu_seconds
from server import SMALL_SHAPE

START_SECONDS = 600


def make_settings(case: str, tree: Path, models: Path, folder: Path) -> dict[str, Any]:
    """Return the configuration of a case for a checkout, with caches and scratch files in `folder`."""
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    common = {
        "jobs": {"folder": str(folder / "jobs")},
        "server": {"scratch_folder": str(folder / "scratch"), "port": 0},
        "logging": {"format": "json"},
    }
    cache = {"cache_folder": str(folder / "engine")}
    if case in {"auto", "tune"}:
        defaults: dict[str, Any] = yaml.safe_load((tree / "configs" / "default.yaml").read_text(encoding="utf-8"))
        engine = cache if case == "auto" else {**cache, "tune": "first-start"}
        own = {"models": {"folder": str(tree / "models")}, "engine": engine}
    else:
        defaults = {}
        own = {
            "models": {"folder": str(models)},
            "engine": {**cache, "kind": case},
            "device": {"name": "cpu", "threads": 1},
            "limits": {"cache_bytes": 0},
        }
    return {name: {**defaults.get(name, {}), **keys} for name, keys in {**defaults, **own, **common}.items()}


def make_environment(tree: Path, folder: Path, *, compiler: bool) -> dict[str, str]:
    """Return the environment variables of a start, with the caches of libraries in `folder`.

    Without `compiler`, PATH is empty, so that no compiler is found.
    """
    own = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return os.environ | own | ({} if compiler else {"PATH": "", "CXX": "/nonexistent"})


def start(tree: Path, config: Path, environment: dict[str, str], log: Path, stack: bytes) -> dict[str, Any]:
    """Start the service of a checkout, segment a stack, and kill the service; return the seconds and the log."""
    command = [sys.executable, "-m", "service", "serve", "--config", str(config)]
    began, start_time = time.monotonic(), time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout is not None
    results: dict[str, Any] = {}
    try:
        address = process.stdout.readline().split()[-1]
        results["address"] = time.monotonic() - began
        with httpx2.Client(base_url=address, timeout=START_SECONDS) as client:
            while client.get("/health/ready").status_code != 200:
                assert time.monotonic() - began < START_SECONDS, f"Not ready after {START_SECONDS} s."
                time.sleep(0.02)
            results["ready"], results["ready_cpu"] = time.monotonic() - began, cpu_seconds(process.pid)
            client.post("/segment", content=stack, headers=TIFF).raise_for_status()
            results["first_result"] = time.monotonic() - began - results["ready"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    results["log"] = read_log(log, start_time)
    return results


def segment(tree: Path, config: Path, environment: dict[str, str], stack: Path) -> dict[str, Any]:
    """Run `stackseg segment` of a checkout; return the elapsed seconds."""
    command = [sys.executable, "-m", "service", "segment", "--force", str(stack), str(stack.with_name("labels.tif"))]
    began = time.monotonic()
    subprocess.run([*command, "--config", str(config)], cwd=tree, env=environment, capture_output=True, check=True)
    return {"segment": time.monotonic() - began}


def read_log(log: Path, began: float) -> list[str]:
    """Return the messages of a log, each with the seconds since `began`, a value of `time.time()`."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [
        f"{datetime.fromisoformat(record['time']).timestamp() - began:8.2f} s  {record['message']}"
        for record in records
    ]


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the maximum of each measurement."""
    names = [name for name in runs[0] if name != "log"]
    return {
        name: {"median": round(statistics.median(run[name] for run in runs), 2), "most": max(run[name] for run in runs)}
        for name in names
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Print a Markdown table with a row for each kind of start."""
    columns = list(dict.fromkeys(name for timings in results.values() for name in timings))
    print("| seconds: median (maximum) | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for kind, timings in results.items():
        cells = [
            f"{timings[name]['median']:.1f} ({timings[name]['most']:.1f})" if name in timings else ""
            for name in columns
        ]
        print(f"| {kind} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--case",
        action="append",
        choices=["auto", "tune", "eager", "compiled", "winograd"],
        help="default: auto",
    )
    parser.add_argument("--tree", action="append", type=Path, help="checkout of the repository; default: this one")
    parser.add_argument("--no-compiler", action="store_true", help="hide C++ compilers")
    parser.add_argument("--log", action="store_true", help="print the log of the last starts")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [ROOT]]
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-start-") as name:
        root = Path(name)
        make_model(root / "models")
        stack = root / "stack.tif"
        stack.write_bytes(make_tiff(SMALL_SHAPE, 0)[0])
        for repeat, case, tree in itertools.product(range(options.repeats), options.case or ["auto"], trees):
            for kind in ("first", "warm", "segment"):
                # A warm start uses the caches of the first start.
                folder = root / f"{repeat}-{case}-{trees.index(tree)}-{'segment' if kind == 'segment' else 'serve'}"
                settings = make_settings(case, tree, root / "models", folder)
                config = root / "config.yaml"
                config.write_text(yaml.safe_dump(settings), encoding="utf-8")
                environment = make_environment(tree, folder, compiler=not options.no_compiler)
                if kind == "segment":
                    timings = segment(tree, config, environment, stack)
                else:
                    timings = start(tree, config, environment, root / "log", stack.read_bytes())
                runs.setdefault(f"{case} {kind} {tree.name}", []).append(timings)
                print(
                    f"{case} {kind} {tree}: { {key: round(timings[key], 2) for key in timings if key != 'log'} }",
                    file=sys.stderr,
                )
                if options.log and repeat == options.repeats - 1:
                    print("\n".join(timings.get("log", ())), file=sys.stderr)
    results = {kind: summarize(timings) for kind, timings in runs.items()}
    print_table(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
