"""A server that is started on the same folders again and again, and stacks whose labels are known, to test it with."""

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
from common import ROOT, START_SECONDS, make_model, make_tiff, wait_for, write_figures
from numpy.typing import NDArray

from service.core.config import Settings
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_repository

LARGE, SMALL = (64, 192, 192), (16, 48, 48)
EAGER = {"kind": "eager"}


class Stack:
    """A TIFF to post, and the classes that come back if nothing goes wrong."""

    def __init__(self, shape: tuple[int, int, int], seed: int, runner: ModelRunner) -> None:
        self.content, pixels = make_tiff(shape, seed)
        self.expected: NDArray[Any] = segment(runner, Volume.from_array(pixels[None]), Options()).segmentation.pixels

    def deflated(self) -> Stack:
        """The stack in a file that takes its reader longer."""
        other, file = copy(self), io.BytesIO()
        tifffile.imwrite(file, tifffile.imread(io.BytesIO(self.content)), compression="zlib", metadata={"axes": "ZYX"})
        other.content = file.getvalue()
        return other

    def is_segmented(self, answer: bytes) -> bool:
        """Whether a label TIFF holds these classes, voxel by voxel."""
        return np.array_equal(tifffile.imread(io.BytesIO(answer)), self.expected)

    def slowly(self, seconds: float) -> Iterator[bytes]:
        """The content in 20 pieces, so that a kill may well come in between."""
        step = -(-len(self.content) // 20)
        for start in range(0, len(self.content), step):
            yield self.content[start : start + step]
            time.sleep(seconds / 20)


def make_stacks(models: Path, engine: dict[str, str]) -> list[Stack]:
    """Make small stacks, and a large one as the last, with what the only model in a folder makes of each alone."""
    settings = Settings.model_validate({"engine": engine, "device": {"name": "cpu", "threads": 1}})
    (spec,) = read_repository(models).values()
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    return [Stack(shape, seed, runner) for seed, shape in enumerate((SMALL, SMALL, SMALL, LARGE))]


class Server:
    """`python -m service serve` on the same folders, again and again.

    Args:
        models: a repository
        folder: for its configuration and log
        storage: for jobs, uploads and temporary files; None: `folder`
        waiting: number of requests that may wait in its queue
        environment: variables in which it runs
        sections: added to its configuration
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
            "engine": EAGER,
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

    def listening(self) -> bool:
        """Wait until the port is open, and note the address; return False if the process ends before that."""
        assert self.process.stdout is not None
        self.address = (self.process.stdout.readline().split() or [""])[-1]
        return bool(self.address)

    def ended(self, seconds: float = 60) -> int:
        """Wait until the process is gone, and return its status; its children end as soon as they notice."""
        status = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def log(self) -> list[str]:
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    @contextmanager
    def running(self) -> Iterator[httpx2.Client]:
        """A client of the service, which is ready, and killed in the end whatever happens."""
        self.start()
        try:
            assert self.listening(), "the server ended before it was ready"
            with httpx2.Client(base_url=self.address, timeout=30) as client:
                assert wait_for(lambda: client.get("/health/ready").status_code == 200, START_SECONDS), self.log()[-20:]
                yield client
        finally:
            self.process.kill()
            self.ended()


def measure(options: argparse.Namespace, run: Callable[[Path, Path], dict[str, Any]]) -> None:
    """Call `run(models, folder)` in a temporary folder, and print the figures that it returns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
    models = options.models or folder / "models"
    if options.models is None:
        make_model(models)
    figures = run(models, folder / "service")
    shutil.rmtree(folder)
    write_figures(figures | {"python": platform.python_version(), "torch": torch.__version__}, options.json)
