"""A real server that can be restarted on the same folders, and stacks with known labels to test it with."""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tifffile
import torch
import yaml
from common import ROOT, START_SECONDS, make_model, make_tiff, wait_for, write_results
from numpy.typing import NDArray

from service.core.config import Settings
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_repository

LARGE_SHAPE = (64, 192, 192)
SMALL_SHAPE = (16, 48, 48)
EAGER_ENGINE = {"kind": "eager"}


class Stack:
    """A TIFF to send, and the class labels that the service should return for it."""

    def __init__(self, shape: tuple[int, int, int], seed: int, runner: ModelRunner) -> None:
        self.content, pixels = make_tiff(shape, seed)
        self.expected: NDArray[Any] = segment(runner, Volume.from_array(pixels[None]), Options()).segmentation.pixels

    def compress(self) -> Stack:
        """Return the same stack as a compressed file, which takes longer to read."""
        other, file = copy(self), io.BytesIO()
        tifffile.imwrite(file, tifffile.imread(io.BytesIO(self.content)), compression="zlib", metadata={"axes": "ZYX"})
        other.content = file.getvalue()
        return other

    def has_labels(self, content: bytes) -> bool:
        """Return whether a label TIFF equals the expected labels in every voxel."""
        return np.array_equal(tifffile.imread(io.BytesIO(content)), self.expected)

    def iterate_slowly(self, seconds: float) -> Iterator[bytes]:
        """Yield the content in 20 pieces over `seconds`, so that a restart is likely to interrupt the upload."""
        step = -(-len(self.content) // 20)
        for start in range(0, len(self.content), step):
            yield self.content[start : start + step]
            time.sleep(seconds / 20)


def make_stacks(models: Path, engine: dict[str, str]) -> list[Stack]:
    """Return three small stacks and a large one, with the labels that the only model in `models` computes for them."""
    settings = Settings.model_validate({"engine": engine, "device": {"name": "cpu", "threads": 1}})
    (spec,) = read_repository(models).values()
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    return [
        Stack(shape, seed, runner) for seed, shape in enumerate((SMALL_SHAPE, SMALL_SHAPE, SMALL_SHAPE, LARGE_SHAPE))
    ]


class Server:
    """`python -m service serve`, which can be restarted on the same folders.

    Args:
        models: folder with the models
        folder: folder for the configuration and the log
        storage: folder for jobs, uploads and temporary files; default: `folder`
        waiting: maximum number of requests in the queue
        environment: additional environment variables
        sections: additional sections and keys of the configuration
    """

    def __init__(
        self,
        models: Path,
        folder: Path,
        storage: Path | None = None,
        waiting: int = 64,
        environment: dict[str, str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        storage = storage or folder
        self.jobs, self.scratch = storage / "jobs", storage / "scratch"
        self.scratch.mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        self._config, self._log, self.address = folder / "config.yaml", folder / "log", ""
        content = {
            "models": {"folder": str(models)},
            "engine": EAGER_ENGINE,
            "device": {"name": "cpu", "threads": 1},
            "limits": {"waiting": waiting, "cache_bytes": 0},
            "jobs": {"folder": str(self.jobs), "attempts": 1000},
            "server": {"scratch_folder": str(self.scratch), "port": 0},
        }
        for name, keys in sections.items():
            content[name] = content.get(name, {}) | keys
        self._config.write_text(yaml.safe_dump(content), encoding="utf-8")
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "service", "serve", "--config", str(self._config), *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait_for_port(self) -> bool:
        """Wait until the port is open, and set `address`; return False if the process exits before that."""
        assert self.process.stdout is not None
        self.address = (self.process.stdout.readline().split() or [""])[-1]
        return bool(self.address)

    def wait_for_exit(self, seconds: float = 60) -> int:
        """Wait until the process has exited, and return its status; its child processes may exit a little later."""
        status = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def read_log(self) -> list[str]:
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    @contextmanager
    def run(self) -> Iterator[httpx2.Client]:
        """Start the server; yield an HTTP client once it is ready, and kill it at the end of the block."""
        self.start()
        try:
            assert self.wait_for_port(), "The server exited before its port was open."
            with httpx2.Client(base_url=self.address, timeout=30) as client:
                is_ready = wait_for(lambda: client.get("/health/ready").status_code == 200, START_SECONDS)
                assert is_ready, self.read_log()[-20:]
                yield client
        finally:
            self.process.kill()
            self.wait_for_exit()


def measure(options: argparse.Namespace, run: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Call `run(models, folder)` in a temporary folder, and write the results that it returns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    models = options.models or folder / "models"
    if options.models is None:
        make_model(models)
    results = run(models, folder / "service")
    shutil.rmtree(folder)
    write_results(results | {"python": platform.python_version(), "torch": torch.__version__}, options.json)
