"""Functions that several benchmarks share: make models and stacks, run a server, send requests, and write results."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from service.models.architectures.build import build_network
from service.models.spec import Architecture

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300
TIFF = {"Content-Type": "image/tiff"}


def describe_model(
    name: str, architecture: str, arguments: dict[str, Any], roi_size: Sequence[int], outputs: list[str], **keys: Any
) -> dict[str, Any]:
    """Return the content of `model.yaml`, without weights, for a model of classes; `keys` add or replace keys."""
    return {
        "format": 1,
        "name": name,
        "version": "1",
        "summary": "A model for benchmarks.",
        "licence": "Apache-2.0",
        "training_data": "None.",
        "architecture": {"name": architecture, "arguments": arguments},
        "input": {"channels": 1, "normalisation": {"kind": "percentile"}, "roi_size": list(roi_size)},
        "outputs": outputs,
        "decoding": {"kind": "classes"},
    } | keys


UNET = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "channels": [8, 16], "strides": [2], "norm": "BATCH"}
TINY_MODEL = describe_model("tiny", "UNet", UNET, (16, 32, 32), ["background", "dim", "bright"])


def make_model(
    root: Path, content: dict[str, Any] = TINY_MODEL, prepare: Callable[[nn.Module], None] = lambda _network: None
) -> Path:
    """Create a model folder in `root` with this `model.yaml`; the weights are random unless `prepare` sets them."""
    folder = root / content["name"]
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    network = build_network(Architecture(**content["architecture"]))
    prepare(network)
    weights = folder / "weights.safetensors"
    # Copy the tensors: some networks contain a layer under two names, and safetensors rejects shared memory.
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, weights)
    weights_entry = {"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    (folder / "model.yaml").write_text(yaml.safe_dump(content | {"weights": weights_entry}), encoding="utf-8")
    return folder


def make_tiff(shape: tuple[int, int, int], seed: int) -> tuple[bytes, NDArray[np.uint16]]:
    """Return an ImageJ TIFF of random blocks, and its pixels, uint16 [Z, Y, X]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(200, 3000, [-(-edge // 8) for edge in shape], dtype=np.uint16)
    pixels = coarse.repeat(8, 0).repeat(8, 1).repeat(8, 2)[: shape[0], : shape[1], : shape[2]]
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, imagej=True, metadata={"axes": "ZYX"})
    return file.getvalue(), pixels


def make_bomb(pages: int, plane: tuple[int, int], compression: str = "zlib") -> bytes:
    """Return a TIFF decompression bomb: all of its uint8 planes (Y, X) of zeros share one compressed strip."""
    file = io.BytesIO()
    tifffile.imwrite(
        file,
        np.zeros(plane, np.uint8),
        photometric="minisblack",
        compression=compression,
        rowsperstrip=plane[0],
        metadata=None,
    )
    content = file.getvalue() + b"\0" * (file.tell() % 2)
    (first,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, first)
    directory = content[first : first + 2 + 12 * entries]
    starts = [len(content) + number * (len(directory) + 4) for number in range(pages)]
    chain = [directory + struct.pack("<I", following) for following in (*starts[1:], 0)]
    return content[:4] + struct.pack("<I", starts[0]) + content[8:] + b"".join(chain)


@contextmanager
def run_server(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[int, int]]:
    """Run `python -m service serve` on a free port; yield its process ID and port once it is ready."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *arguments]
    log = folder / "server.log"
    environment = {"XDG_STATE_HOME": str(folder)} | environment
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip().rpartition(":")[2]

        def has_started_or_exited() -> bool:
            return process.poll() is not None or request(int(port), "GET", "/health/ready")[0] == 200

        if not port or not wait_for(has_started_or_exited, START_SECONDS) or process.poll() is not None:
            raise SystemExit(f"The server did not become ready:\n{log.read_text()}")
        yield process.pid, int(port)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def request(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Send a request; return the status and the body of the response, or status 0 if the connection failed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {**(TIFF if body is not None else {}), **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def post_file(port: int, path: str, stack: Path, result: Path) -> http.client.HTTPMessage:
    """Post a file like `curl --data-binary`, and save the response body; return the response headers."""
    # curl uploads in chunks of 64 KiB.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600, blocksize=2**16)
    with stack.open("rb") as body, result.open("wb") as answer:
        connection.request("POST", path, body, TIFF | {"Content-Length": str(stack.stat().st_size)})
        response = connection.getresponse()
        while chunk := response.read(1 << 20):
            answer.write(chunk)
    connection.close()
    if response.status != 200:
        raise SystemExit(f"The server responded with status {response.status}: {result.read_text()}")
    return response.headers


def parse_server_timing(server_timing: str) -> dict[str, float]:
    """Return the seconds of each stage from a Server-Timing header."""
    entries = (entry.partition(";dur=") for entry in server_timing.split(", "))
    return {name: float(milliseconds) / 1000 for name, _, milliseconds in entries}


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until the condition is true, for at most `seconds`; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_true


def write_results(results: Any, path: Path | None) -> None:
    """Print the results as JSON, and also write them to `path` if it is given."""
    text = json.dumps(results, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
