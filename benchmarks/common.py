"""Parts that several benchmarks share: a tiny model, a stack, a running server, and the figures that are printed."""

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

from service.models.architectures import build_network
from service.models.spec import Architecture

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300
TIFF = {"Content-Type": "image/tiff"}


def describe_model(
    name: str, architecture: str, arguments: dict[str, Any], roi_size: Sequence[int], outputs: list[str], **keys: Any
) -> dict[str, Any]:
    """Return a model file without weights, for a model of classes; `keys` replace or add some."""
    return {
        "format": 1,
        "name": name,
        "version": "1",
        "summary": "Made to be measured.",
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
    """Make a model folder in `root` as `content` describes; its weights are random unless `prepare` sets them."""
    folder = root / content["name"]
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    network = build_network(Architecture(**content["architecture"]))
    prepare(network)
    weights = folder / "weights.safetensors"
    # Copies: some networks hold a layer under two names, which the format does not allow to be one.
    save_file({name: tensor.clone() for name, tensor in network.state_dict().items()}, weights)
    stated = {"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    (folder / "model.yaml").write_text(yaml.safe_dump(content | {"weights": stated}), encoding="utf-8")
    return folder


def make_tiff(shape: tuple[int, int, int], seed: int) -> tuple[bytes, NDArray[np.uint16]]:
    """Make an ImageJ stack of random blocks; return the file and its pixels [Z, Y, X]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(200, 3000, [-(-edge // 8) for edge in shape], dtype=np.uint16)
    pixels = coarse.repeat(8, 0).repeat(8, 1).repeat(8, 2)[: shape[0], : shape[1], : shape[2]]
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, imagej=True, metadata={"axes": "ZYX"})
    return file.getvalue(), pixels


def make_bomb(pages: int, plane: tuple[int, int], compression: str = "zlib") -> bytes:
    """Make a TIFF whose uint8 planes (Y, X) of zeros share one compressed strip."""
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
    """Run `python -m service serve` on a free port; yield its process number and port once it is ready."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *arguments]
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip().rpartition(":")[2]

        def ready_or_ended() -> bool:
            return process.poll() is not None or request(int(port), "GET", "/health/ready")[0] == 200

        if not port or not wait_for(ready_or_ended, START_SECONDS) or process.poll() is not None:
            raise SystemExit(f"The server did not become ready:\n{log.read_text()}")
        yield process.pid, int(port)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def request(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body of the answer to one request; status 0 where the connection broke."""
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
    """Post a file as `curl --data-binary` does, and save the answer; return its headers."""
    # In pieces as large as curl's.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600, blocksize=2**16)
    with stack.open("rb") as body, result.open("wb") as answer:
        connection.request("POST", path, body, TIFF | {"Content-Length": str(stack.stat().st_size)})
        response = connection.getresponse()
        while chunk := response.read(1 << 20):
            answer.write(chunk)
    connection.close()
    if response.status != 200:
        raise SystemExit(f"The server answered {response.status}: {result.read_text()}")
    return response.headers


def stage_seconds(server_timing: str) -> dict[str, float]:
    """Return the seconds of each stage in a Server-Timing header."""
    entries = (entry.partition(";dur=") for entry in server_timing.split(", "))
    return {name: float(milliseconds) / 1000 for name, _, milliseconds in entries}


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until the condition holds or the time is up; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds


def write_figures(figures: Any, path: Path | None) -> None:
    """Print figures as JSON, and write them to `path`."""
    text = json.dumps(figures, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
