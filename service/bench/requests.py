"""Whole requests, stage by stage, in this process: from a file to a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from service.bench.timing import synchronise
from service.errors import BadParameter
from service.formats import tiff
from service.metrics import Stages
from service.networks import Network
from service.parity import image_of
from service.repository import ModelSpec
from service.segmenter import Segmenter
from service.volume import Array, Options, Segmentation, Selection

LIMIT_BYTES = 2**40

# What is measured is the network on the stack at hand, not what else its objects' size would bring about.
AS_SAMPLED = Options(diameter="none")
PLAIN = Path(__file__).resolve().parents[2] / "benchmarks" / "plain.py"

Size = tuple[int, int, int]


class Requests:
    """Requests for one stack to one warm segmenter, whose work on windows is told apart.

    windows  of the stack
    batch    as the last forward got it, [B, C, *roi]
    """

    def __init__(self, segmenter: Segmenter, stack: Path, folder: Path, device: torch.device) -> None:
        self._segmenter, self._stack, self._folder, self._device = segmenter, stack, folder, device
        self._network: Network = lambda x: x
        self._batch_began = self._copy = self._forward = 0.0
        self.windows = 0
        self.batch = torch.empty(0)
        segmenter.instrument(self._timed)

    def once(self) -> dict[str, float]:
        """Seconds of one request, by stage and in `total`.

        normalise  statistics of the stack, resampling, copying to a GPU
        copy       windows into the batch; on a CPU their pixels become float32 on the way
        forward    the network, until the device has finished
        """
        stages = Stages()
        self._copy = self._forward = 0.0
        with stages.measure("read"):
            volume = tiff.read(self._stack, Selection(), LIMIT_BYTES, self._folder)
        result = self._segmenter.segment(volume, AS_SAMPLED, cancelled=self._begin, progress=self._count)
        stages.add("normalise", result.seconds["prepare"])
        stages.add("copy", self._copy)
        stages.add("forward", self._forward)
        stages.add("blend", result.seconds["windows"] - self._copy - self._forward)
        stages.add("postprocess", result.seconds["decode"])
        with stages.measure("write"):
            tiff.write(result.segmentation, self._folder / "labels.tif")
        return stages.seconds | {"total": stages.total}

    def bare_loop(self) -> float:
        """Seconds of as many forwards as one request needs, of its last batch, and nothing else."""
        began = time.perf_counter()
        self.forward(-(-self.windows // len(self.batch)))
        return time.perf_counter() - began

    def forward(self, times: int = 1) -> None:
        """The network on the last batch, until the device has finished."""
        with torch.inference_mode():
            for _ in range(times):
                self._network(self.batch)
        synchronise(self._device)

    def plain_script(self) -> dict[str, float]:
        """Seconds by stage of `benchmarks/plain.py`, in a process of its own with as many threads.

        Raises BadParameter where it fails.
        """
        model, result = self._segmenter.spec.folder, self._folder / "plain.tif"
        command = [sys.executable, str(PLAIN), str(self._stack), str(result), "--model", str(model)]
        command += ["--threads", str(torch.get_num_threads()), "--device", str(self._device)]
        done = subprocess.run(command, cwd=PLAIN.parents[1], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise BadParameter(f"The plain script failed: {(done.stderr.strip().splitlines() or ['silently'])[-1]}")
        stages: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["stages"]
        total = sum(stages.values())
        return {{"decode": "postprocess"}.get(name, name): taken for name, taken in stages.items()} | {"total": total}

    def profile(self, trace: Path) -> None:
        """Write a trace of one request, for chrome://tracing or Perfetto."""
        volume = tiff.read(self._stack, Selection(), LIMIT_BYTES, self._folder)
        with torch.profiler.profile() as recorded:
            self._segmenter.segment(volume, AS_SAMPLED)
        recorded.export_chrome_trace(str(trace))

    def _begin(self) -> bool:
        """Segmenters ask before every batch whether the request is cancelled: from there on windows are copied."""
        self._batch_began = time.perf_counter()
        return False

    def _count(self, _done: int, total: int) -> None:
        self.windows = total

    def _timed(self, network: Network) -> Network:
        self._network = network

        def call(batch: Tensor) -> Tensor:
            synchronise(self._device)
            began = time.perf_counter()
            scores = network(batch)
            synchronise(self._device)
            self._copy += began - self._batch_began
            self._forward += time.perf_counter() - began
            self.batch = batch
            return scores

        return call


def tiled(spec: ModelSpec, shape: Size) -> Array:
    """The middle of the model's sample over and over, uint16 [Z, Y, X]. Raises BadParameter for several channels."""
    if spec.input.channels != 1:
        raise BadParameter(f"{spec.name} takes {spec.input.channels} channels; bench makes stacks of one.")
    image = image_of(spec)[0, 0].numpy()
    counts = ((image - image.min()) / max(float(np.ptp(image)), 1e-6) * 4000 + 300).astype(np.uint16)
    reach = [(0, max(edge - length, 0)) for edge, length in zip(shape, counts.shape, strict=True)]
    z, y, x = shape
    return np.pad(counts, reach, mode="symmetric")[:z, :y, :x]


def write_stack(spec: ModelSpec, shape: Size, path: Path) -> None:
    """`tiled` as a file."""
    tiff.write(Segmentation(tiled(spec, shape), "labels"), path)
