"""Seconds of starts: the first one with empty caches, and one with what that left there.

python benchmarks/start.py [--repeats 5] [--case auto] [--tree FOLDER] [--no-compiler] [--log] [--json FILE]

Cases: `auto` is the bundled models with configs/default.yaml, `tune` the same with `engine.tune: first-start`, the
others are fixed engines for the tiny model of benchmarks/common.py. Every start is that of a real server, which then
is killed. Seconds from the beginning of the process to: the line that tells the address, the answer that the service is
ready; those of all threads and child processes on a processor until ready; from ready to the result of a first small
stack; and of a whole first `stackseg segment` of that stack, with empty caches too. With `--tree` the checkouts named,
this one included only if it is, start in turn. `--no-compiler` hides C++ compilers from them. `--log` prints what was
logged, and when. Files that the system still has in memory are read faster than after a start of the machine.
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
from server import SMALL

START_SECONDS = 600


def make_settings(case: str, tree: Path, models: Path, folder: Path) -> dict[str, Any]:
    """Return the configuration of a case for a checkout; caches and scratch files lie in `folder`."""
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
    """Return the environment of a start, with caches of libraries in `folder`, and a path without other programs."""
    own = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return os.environ | own | ({} if compiler else {"PATH": "", "CXX": "/nonexistent"})


def start(tree: Path, config: Path, environment: dict[str, str], log: Path, stack: bytes) -> dict[str, Any]:
    """Start the service of a checkout, kill it, and return the figures of the start."""
    command = [sys.executable, "-m", "service", "serve", "--config", str(config)]
    began, clock = time.monotonic(), time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout is not None
    figures: dict[str, Any] = {}
    try:
        address = process.stdout.readline().split()[-1]
        figures["address"] = time.monotonic() - began
        with httpx2.Client(base_url=address, timeout=START_SECONDS) as client:
            while client.get("/health/ready").status_code != 200:
                assert time.monotonic() - began < START_SECONDS, f"not ready within {START_SECONDS} s"
                time.sleep(0.02)
            figures["ready"], figures["ready_cpu"] = time.monotonic() - began, cpu_seconds(process.pid)
            client.post("/segment", content=stack, headers=TIFF).raise_for_status()
            figures["first_result"] = time.monotonic() - began - figures["ready"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    figures["log"] = lines_of(log, clock)
    return figures


def segment(tree: Path, config: Path, environment: dict[str, str], stack: Path) -> dict[str, Any]:
    """Run `stackseg segment` of a checkout, and return its figures."""
    command = [sys.executable, "-m", "service", "segment", "--force", str(stack), str(stack.with_name("labels.tif"))]
    began = time.monotonic()
    subprocess.run([*command, "--config", str(config)], cwd=tree, env=environment, capture_output=True, check=True)
    return {"segment": time.monotonic() - began}


def lines_of(log: Path, began: float) -> list[str]:
    """Return the logged lines, each with its seconds since `began` on the clock of time.time."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [f"{datetime.fromisoformat(one['time']).timestamp() - began:8.2f} s  {one['message']}" for one in records]


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the most of each figure."""
    names = [name for name in runs[0] if name != "log"]
    return {
        name: {"median": round(statistics.median(run[name] for run in runs), 2), "most": max(run[name] for run in runs)}
        for name in names
    }


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    """Print a Markdown table with a line for each kind of start."""
    columns = list(dict.fromkeys(name for found in figures.values() for name in found))
    print("| median (most) s | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for kind, found in figures.items():
        cells = [
            f"{found[name]['median']:.1f} ({found[name]['most']:.1f})" if name in found else "" for name in columns
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
    parser.add_argument("--tree", action="append", type=Path, help="a checkout of this repository; default: this one")
    parser.add_argument("--no-compiler", action="store_true", help="hide C++ compilers")
    parser.add_argument("--log", action="store_true", help="print what the last starts logged, and when")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [ROOT]]
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-start-") as name:
        root = Path(name)
        make_model(root / "models")
        stack = root / "stack.tif"
        stack.write_bytes(make_tiff(SMALL, 0)[0])
        for repeat, case, tree in itertools.product(range(options.repeats), options.case or ["auto"], trees):
            for kind in ("first", "warm", "segment"):
                # A warm start finds what the first one left.
                folder = root / f"{repeat}-{case}-{trees.index(tree)}-{'segment' if kind == 'segment' else 'serve'}"
                settings = make_settings(case, tree, root / "models", folder)
                config = root / "config.yaml"
                config.write_text(yaml.safe_dump(settings), encoding="utf-8")
                environment = make_environment(tree, folder, compiler=not options.no_compiler)
                if kind == "segment":
                    found = segment(tree, config, environment, stack)
                else:
                    found = start(tree, config, environment, root / "log", stack.read_bytes())
                runs.setdefault(f"{case} {kind} {tree.name}", []).append(found)
                print(
                    f"{case} {kind} {tree}: { {key: round(found[key], 2) for key in found if key != 'log'} }",
                    file=sys.stderr,
                )
                if options.log and repeat == options.repeats - 1:
                    print("\n".join(found.get("log", ())), file=sys.stderr)
    figures = {kind: summarise(found) for kind, found in runs.items()}
    print_table(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
