"""Start the service, segment the sample stack of a bundled model, and save the labels and a picture of them.

Usage: python scripts/demo.py [stack.tif] [--output demo-output] [--config configs/default.yaml]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figure import draw_figure

from service.core.types import Selection
from service.formats import stack_reader

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_SECONDS = 600
MAX_PIXEL_BYTES = 2**34


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_service(config: Path, log: Path) -> Iterator[str]:
    """Run `stackseg serve` on a free port, yield its address when all models are ready, and stop it afterwards."""
    address = f"http://127.0.0.1:{(port := find_free_port())}"
    command = [sys.executable, "-m", "service", "serve", "--config", str(config), "--port", str(port)]
    # Cache the engine plans in the clone: nothing is written outside of it, and later starts are faster.
    environment = {
        "STACKSEG_ENGINE__CACHE_FOLDER": str(ROOT / ".cache" / "engine"),
        "STACKSEG_JOBS__FOLDER": "temporary",
    } | os.environ
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603
    try:
        wait_until_ready(address, process, log)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"The service stopped during startup. The end of its log:\n{log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(f"{address}/health/ready", timeout=5).close()  # noqa: S310
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    sys.exit(f"The service was not ready after {START_TIMEOUT_SECONDS} s. See its log: {log}")


def get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
        return dict(json.load(response))


def post_stack(url: str, stack: Path, labels: Path) -> dict[str, str]:
    """Post a stack, write the response body to `labels`, and return the response headers with lower-case names."""
    request = urllib.request.Request(url, data=stack.read_bytes(), headers={"Content-Type": "image/tiff"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:  # noqa: S310
            labels.write_bytes(response.read())
            return {key.lower(): value for key, value in response.headers.items()}
    except urllib.error.HTTPError as error:
        sys.exit(f"The request failed with status {error.code}: {error.read().decode()}")


def parse_stages(server_timing: str) -> Iterator[tuple[str, float]]:
    """Yield the name and the duration in seconds of each stage in a Server-Timing header."""
    for entry in server_timing.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            if parameter.startswith("dur="):
                yield name, float(parameter.removeprefix("dur=")) / 1000


def report(title: str, text: str) -> None:
    sys.stdout.write(f"{title:>10}  {text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", type=Path, nargs="?", default=ROOT / "models" / "nuclei" / "sample.tif")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "default.yaml")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    labels_path, figure_path = output / "labels.ome.tif", output / "labels.png"

    report("starting", "the service loads and prepares the model; the first start takes longer")
    started = time.perf_counter()
    with run_service(arguments.config, output / "service.log") as address:
        report("ready", f"{address}, started in {time.perf_counter() - started:.1f} s")
        headers = post_stack(f"{address}/segment", arguments.stack, labels_path)
        name = headers["x-stackseg-model"].partition("/")[0]
        engine = get_json(f"{address}/models/{name}")["engine"]

    volume = stack_reader.read(arguments.stack, Selection(), MAX_PIXEL_BYTES, None)
    labels = stack_reader.read(labels_path, Selection(), MAX_PIXEL_BYTES, None)
    draw_figure(
        volume.read_all()[0], labels.read_all()[0], volume.voxel_size, figure_path, f"{arguments.stack.name}, {name}"
    )

    size = "size unknown" if volume.voxel_size is None else " x ".join(f"{s:g}" for s in volume.voxel_size) + " um"
    report("stack", f"{arguments.stack}, {' x '.join(map(str, volume.shape[1:]))} voxels, {volume.dtype}, voxel {size}")
    report("model", f"{headers['x-stackseg-model']} on {engine['device']}")
    report("engine", f"{engine['engine']}, {engine['precision']}, {engine['memory_format']}")
    for warning in engine["warnings"]:
        report("warning", warning)
    report("objects", headers["x-stackseg-objects"])
    for stage, seconds in parse_stages(headers["server-timing"]):
        report(stage, f"{seconds:.3f} s")
    report("labels", str(labels_path))
    report("picture", str(figure_path))


if __name__ == "__main__":
    main()
