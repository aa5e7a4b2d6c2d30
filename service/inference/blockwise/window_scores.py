"""Raw scores of groups of windows. They are written to a file, and blended when a tile is decoded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from service.core.quantities import Size
from service.core.telemetry import Stages
from service.core.types import Array, Volume
from service.formats import stack_reader
from service.inference.blockwise.layout import Box, Layout, get_lengths, to_ranges
from service.inference.blockwise.run_folder import BlockTask, OpenRun
from service.inference.preprocessing.interpolation import Resampling
from service.inference.preprocessing.normalize import NormalizedImage
from service.inference.preprocessing.resample import ResampledImage
from service.inference.windows.blending import Slab, require_finite
from service.inference.windows.sliding_window import Image, SlidingWindow, SparseImage

if TYPE_CHECKING:
    from service.inference.runner.model_runner import ModelRunner

# NumPy dtype in which scores are written. NumPy has no bfloat16, so the bits of bfloat16 scores are written as uint16.
_FILE_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "uint16"}


def score_group(run: OpenRun, task: BlockTask, runner: ModelRunner, stages: Stages) -> dict[str, Any]:
    """Compute and write the scores of the windows of a group, [N, K, *roi]. Return the fields of the record."""
    plan, layout = run.plan, run.plan.layout
    windows = layout.get_group(task.number)
    skipped_positions = find_skipped_windows(run, windows)
    num_windows = math.prod(get_lengths(windows)) - len(skipped_positions)
    if not num_windows:
        return {"windows": 0}
    survey, box, resampling = (
        run.folder.survey,
        to_ranges(layout.get_voxels(windows)),
        Resampling(plan.size, layout.size),
    )
    with stages.measure("read"), stack_reader.open_blocks(plan.source, plan.selection) as stack:
        volume = Volume.from_array(stack.read_region(resampling.find_source_box(box)))
    image: Image = NormalizedImage(volume, survey.scalings)
    if layout.size != plan.size:
        image = ResampledImage(image, resampling, box)
    if skipped_positions:
        origin = list_window_positions(layout, windows)[0]
        image = SparseImage(
            image, frozenset(_subtract(position, origin) for position in skipped_positions), torch.tensor(survey.scores)
        )
    with run.folder.open_for_writing(f"scores/{task.number}.raw") as file:
        compute_stages = Stages()
        with torch.inference_mode():
            image = runner.placement.place_image(image, layout.roi[0])
            request_plan = runner.estimator.plan(plan.options)
            scoring_result = runner.score_computer.compute_scores(
                image, request_plan, lambda: _ScoreWriter(file), compute_stages, _compute_raw_scores
            )
        with stages.measure("write"):
            file.flush()
    stages.update({"windows": compute_stages.seconds["windows"], "write": compute_stages.seconds["decode"]})
    return {
        "windows": num_windows,
        "dtype": scoring_result.consumer.dtype,
        "engine": runner.describe_engine(),
        "notes": list(scoring_result.notes),
        "bytes": scoring_result.consumer.nbytes,
    }


class _ScoreWriter:
    """Consumer that writes the scores of windows to a file. The constructor deletes any previous content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.dtype, self.nbytes = "", 0
        file.seek(0)
        file.truncate()

    def add(self, _z0: int, _y0: int, scores: Tensor) -> None:
        self.dtype = str(scores.dtype).removeprefix("torch.")
        bits = scores.contiguous().cpu()
        bits = bits.view(torch.uint16) if scores.dtype == torch.bfloat16 else bits
        self._file.write(bits.numpy().data)
        self.nbytes += scores.numel() * scores.element_size()


def _compute_raw_scores(window: SlidingWindow, image: Image, overlap: float) -> Iterator[Slab]:
    """Yield the scores of each batch of windows, [B, K, *roi], in order.

    Raises NonFiniteScores if any score is not finite.
    """
    scan = window.scan(image, overlap)
    while scan.num_remaining:
        (scores,) = window.forward([scan.take(window.capacity)])
        require_finite(scores)
        yield Slab(0, 0, scores)


def list_window_positions(layout: Layout, windows: Box) -> list[Size]:
    """Return the first voxels of a box of windows, in the order of `Grid.positions`."""
    z, y, x = (axis[first:end] for (first, end), axis in zip(windows, layout.grid.starts, strict=True))
    return list(itertools.product(z, y, x))


def find_skipped_windows(run: OpenRun, windows: Box) -> set[Size]:
    """Return the first voxels of the skipped windows in a box of windows."""
    positions = run.folder.read_array("skipped.npy")
    axes = [axis[first:end] for (first, end), axis in zip(windows, run.plan.layout.grid.starts, strict=True)]
    first, last = (np.array([axis[index] for axis in axes]) for index in (0, -1))
    # The positions are sorted by z.
    span = np.searchsorted(positions[:, 0], (first[0], last[0] + 1))
    candidates = np.asarray(positions[span[0] : span[1]])
    is_inside = ((candidates >= first) & (candidates <= last)).all(1)
    return {(int(z), int(y), int(x)) for z, y, x in candidates[is_inside]}


def _subtract(position: Size, origin: Size) -> Size:
    z, y, x = (start - first for start, first in zip(position, origin, strict=True))
    return z, y, x


class GroupScores:
    """Scores of the groups of windows that a tile needs, memory-mapped from their files."""

    def __init__(self, run: OpenRun, groups: list[int]) -> None:
        self._run = run
        self._windows: dict[Size, tuple[Array, int, str]] = {}
        layout, roi = run.plan.layout, run.plan.layout.roi
        for group in groups:
            record = run.folder.read_record("scores", group)
            if not record["windows"]:
                continue
            windows = layout.get_group(group)
            skipped_positions = find_skipped_windows(run, windows)
            bits = np.memmap(
                run.folder.path / f"scores/{group}.raw", _FILE_DTYPES[getattr(torch, record["dtype"])], "c"
            )
            scores = bits.reshape(record["windows"], -1, *roi)
            positions = [
                position for position in list_window_positions(layout, windows) if position not in skipped_positions
            ]
            self._windows |= {position: (scores, index, record["dtype"]) for index, position in enumerate(positions)}
        self._skipped_scores = torch.tensor(run.folder.survey.scores)[:, None, None, None].expand(-1, *roi)

    def __bool__(self) -> bool:
        """Return whether there are computed scores for any of the windows."""
        return bool(self._windows)

    def read(self, position: Size) -> Tensor:
        """Return the scores [K, *roi] of the window at `position`, which may be a skipped window."""
        if position not in self._windows:
            return self._skipped_scores
        scores_of_group, index, dtype = self._windows[position]
        scores = torch.from_numpy(scores_of_group[index])
        return scores.view(torch.bfloat16) if dtype == "bfloat16" else scores
