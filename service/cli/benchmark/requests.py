"""Time requests in this process by stage, from the input file to the result file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from service.cli.benchmark.timing import synchronize
from service.core.errors import BadParameter
from service.core.hardware import devices
from service.core.quantities import Size
from service.core.telemetry import Stages
from service.core.types import Array, Options, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.label_agreement import load_sample_image
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.batching.batcher import WindowBatcher
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow
from service.models.spec import ModelSpec

MAX_STACK_BYTES = 2**40

# Process the stack at its original resolution, so that the measurement does not depend on the object diameter.
ORIGINAL_RESOLUTION = Options(diameter="none")
BASELINE_SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "plain.py"


class BaselineRun(NamedTuple):
    """Seconds of the baseline script by stage, and whether it was allowed to use TF32."""

    seconds: dict[str, float]
    tf32_allowed: bool = False


class RequestRunner:
    """Runs complete requests for one stack, only the windows of the stack, or only their forward passes.

    window_count    number of windows of the stack, known after the first request
    threads         total number of threads of all streams of the device
    fallback_notes  unique notes of requests that used a smaller batch or repeated the computation in float32
    """

    def __init__(self, model: ModelRunner, stack: Path, folder: Path, batcher: WindowBatcher, threads: int) -> None:
        self._model, self._stack, self._folder, self._batcher = model, stack, folder, batcher
        self._threads = threads
        self._latest_request: tuple[SlidingWindow, Image, float] | None = None
        self._stream_pool: ThreadPoolExecutor | None = None
        self.window_count = 0
        self.fallback_notes: list[str] = []

    @property
    def _latest_input(self) -> tuple[SlidingWindow, Image, float]:
        """Window, image and overlap of the latest request. Raises RuntimeError before the first request."""
        if self._latest_request is None:
            raise RuntimeError("no request has run yet")
        return self._latest_request

    def run_request(self) -> dict[str, float]:
        """Run one request. Return the seconds of each stage, and their sum as `total`.

        normalise    intensity statistics, resampling, and copying to a GPU
        windows      waiting for scores; later windows are processed while earlier ones are decoded
        postprocess  decoding
        """
        stages = Stages()
        with stages.measure("read"):
            volume = stack_reader.read(self._stack, Selection(), MAX_STACK_BYTES, self._folder)
        result = segment(
            self._model,
            volume,
            ORIGINAL_RESOLUTION,
            callbacks=Callbacks(self._record_and_run_windows, progress=self._record_window_count),
        )
        if result.num_fallbacks or result.is_recomputed:
            self.fallback_notes = list(dict.fromkeys([*self.fallback_notes, *result.notes]))
        stages.add("normalise", result.seconds["prepare"])
        stages.add("windows", result.seconds["windows"])
        stages.add("postprocess", result.seconds["decode"])
        with stages.measure("write"):
            tiff_writer.write(result.segmentation, self._folder / "labels.tif")
        return stages.seconds | {"total": stages.total_seconds}

    def run_windows(self) -> None:
        """Process the windows of the latest request again, from pixels to scores, without decoding."""
        window, image, overlap = self._latest_input
        with torch.inference_mode():
            deque(
                self._batcher.run(window, image, overlap, cancelled=lambda: False, progress=lambda *_: None), maxlen=0
            )

    def run_bare_loop(self) -> None:
        """Run only the forward passes of `run_windows`, with the same number of streams and threads.

        All threads together process the remaining batches, as the device does.
        """
        window = self._latest_input[0]
        batch_count, last_batch_windows = divmod(self.window_count, window.capacity)
        if last_batch_windows and not window.accepts_partial_batches:
            batch_count, last_batch_windows = batch_count + 1, 0
        batches_per_stream, remaining_batches = divmod(batch_count, window.streams)
        if window.streams > 1:
            # All threads start together, so that no thread processes the work of another stream.
            start = Barrier(window.streams)

            def run_stream(stream: int) -> None:
                start.wait()
                self._run_forward_passes(stream, batches_per_stream)

            list(self._stream_executor.map(run_stream, range(window.streams)))
            self.run_forward(remaining_batches)
        else:
            self.run_forward(batch_count)
        if last_batch_windows:
            self.run_forward(1, last_batch_windows)

    def run_forward(self, repeats: int = 1, window_count: int | None = None) -> None:
        """Run the network on the batch of the first stream with all threads, and wait until the device has finished.

        window_count  number of windows in the batch, for networks that accept smaller batches; None for all windows
        """

        def run_with_all_threads() -> None:
            previous_threads = torch.get_num_threads()
            devices.set_torch_threads(self._threads)
            try:
                self._run_forward_passes(0, repeats, window_count)
            finally:
                # The device expects that the number of threads does not change.
                devices.set_torch_threads(previous_threads)

        self._batcher.call(run_with_all_threads)

    @property
    def batch(self) -> Tensor:
        """Batch of the first stream, [B, C, *roi]."""
        return self._latest_input[0].batch

    def _run_forward_passes(self, stream: int, repeats: int, window_count: int | None = None) -> None:
        window = self._latest_input[0]
        with torch.inference_mode():
            for _ in range(repeats):
                if not self._batcher.is_alive:
                    # The benchmark was interrupted.
                    return
                window.network(window.batches[stream][:window_count])
        synchronize(self.batch.device)

    @property
    def _stream_executor(self) -> ThreadPoolExecutor:
        if self._stream_pool is None:
            streams = self._latest_input[0].streams
            self._stream_pool = ThreadPoolExecutor(
                streams, "bare", partial(devices.set_torch_threads, max(self._threads // streams, 1))
            )
        return self._stream_pool

    def _record_and_run_windows(
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        /,
        *,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> Iterator[Slab]:
        self._latest_request = window, image, overlap
        return self._batcher.run(window, image, overlap, cancelled=cancelled, progress=progress)

    def run_baseline_script(self) -> BaselineRun:
        """Run `benchmarks/plain.py` in a separate process. Raises BadParameter if the script fails."""
        model_folder, result_path = self._model.spec.folder, self._folder / "plain.tif"
        command = [
            sys.executable,
            str(BASELINE_SCRIPT),
            str(self._stack),
            str(result_path),
            "--model",
            str(model_folder),
        ]
        command += ["--threads", str(self._threads), "--device", str(self.batch.device)]
        completed = subprocess.run(command, cwd=BASELINE_SCRIPT.parents[1], capture_output=True, text=True, check=False)  # noqa: S603
        if completed.returncode:
            raise BadParameter(
                f"The baseline script failed: {(completed.stderr.strip().splitlines() or ['no error message'])[-1]}"
            )
        output: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
        stages: dict[str, float] = output["stages"]
        seconds = {{"decode": "postprocess"}.get(name, name): duration for name, duration in stages.items()}
        return BaselineRun(seconds | {"total": sum(stages.values())}, output.get("tf32", False))

    def write_profile(self, trace_path: Path) -> None:
        """Write a trace of one request in one stream, for chrome://tracing or Perfetto."""
        volume = stack_reader.read(self._stack, Selection(), MAX_STACK_BYTES, self._folder)
        with torch.profiler.profile() as profiler:
            segment(self._model, volume, ORIGINAL_RESOLUTION)
        profiler.export_chrome_trace(str(trace_path))

    def _record_window_count(self, _done: int, total: int) -> None:
        self.window_count = total


def tile_sample(spec: ModelSpec, shape: Size) -> Array:
    """Return a uint16 stack [Z, Y, X] that repeats the model's sample.

    Raises BadParameter if the model has several input channels.
    """
    if spec.input.channels != 1:
        raise BadParameter(
            f"{spec.name} requires {spec.input.channels} channels, but bench supports only models with one channel."
        )
    image = load_sample_image(spec)[0, 0].numpy()
    pixels = ((image - image.min()) / max(float(np.ptp(image)), 1e-6) * 4000 + 300).astype(np.uint16)
    padding = [(0, max(edge - length, 0)) for edge, length in zip(shape, pixels.shape, strict=True)]
    z, y, x = shape
    return np.pad(pixels, padding, mode="symmetric")[:z, :y, :x]


def write_stack(spec: ModelSpec, shape: Size, path: Path) -> None:
    """Write a stack that repeats the model's sample."""
    tiff_writer.write_uncompressed(tile_sample(spec, shape), path)
