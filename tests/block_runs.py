"""Block-wise runs for tests, in this process or in worker processes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from service.core.config import Settings
from service.core.quantities import Size
from service.core.types import Options, Selection
from service.formats import stack_reader
from service.inference.blockwise.driver import Driver, make_plan
from service.inference.blockwise.run_folder import BlockTask, RunFolder
from service.inference.blockwise.workers import Workers, run_block
from service.inference.segment import segment
from service.inference.types import Result
from service.models.spec import ModelSpec
from tests.segmenters import start_runner

FULL_SELECTION = Selection()


class InlineWorkers:
    """A replacement for worker processes that computes each task in the submitting thread.

    submitted  step and block number of every submitted task
    """

    count = 1

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        self.submitted.append((task.step, task.number))
        future: Future[dict[str, Any]] = Future()
        try:
            future.set_result(run_block(task))
        except Exception as error:  # noqa: BLE001 - a pool returns any exception through the future
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


def create_run(
    scratch: Path,
    source: Path,
    spec: ModelSpec,
    options: Options,
    settings: Settings,
    windows: Size | None = None,
    selection: Selection = FULL_SELECTION,
    *,
    measured: bool = False,
) -> RunFolder:
    """Create a run folder for `source` with a plan for two workers.

    windows  maximum number of windows per group along (z, y, x); None: as planned
    """
    plan = make_plan(source, selection, spec, options, settings, workers=2, measure_objects=measured)
    if windows is not None:
        plan = replace(plan, layout=replace(plan.layout, group_shape=windows))
    folder = RunFolder(scratch)
    folder.create_or_resume(plan, settings)
    return folder


def segment_blocks(folder: RunFolder, out: Path, workers: Workers | None = None) -> np.ndarray:
    """Run all blocks. Return the result at full resolution."""
    Driver(folder, workers or InlineWorkers()).run(out, dict)
    return zarr.open_group(out, mode="r")["0"][...]


def segment_whole(
    source: Path, spec: ModelSpec, options: Options, settings: Settings, selection: Selection = FULL_SELECTION
) -> Result:
    """Segment the whole volume at once, without blocks."""
    return segment(start_runner(spec, settings), stack_reader.read(source, selection, 2**40), options)
