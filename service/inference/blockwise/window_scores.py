"""Scores of a group of windows, written as the network gives them; they are blended where a tile is decoded."""

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
from service.inference.blockwise.layout import Box, Layout, lengths, ranges
from service.inference.blockwise.run_folder import BlockTask, OpenRun
from service.inference.preprocessing.normalize import NormalisedImage
from service.inference.preprocessing.resample import ResampledImage, Resampling
from service.inference.windows.blending import Slab, require_finite
from service.inference.windows.sliding_window import Image, SlidingWindow, SparseImage

if TYPE_CHECKING:
    from service.inference.runner.model_runner import ModelRunner

# NumPy has no bfloat16; its bits are written.
_BITS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "uint16"}


def score_group(run: OpenRun, task: BlockTask, runner: ModelRunner, stages: Stages) -> dict[str, Any]:
    """Compute and write the scores of the windows of a group, [N, K, *roi]; return facts for its record."""
    plan, layout = run.plan, run.plan.layout
    windows = layout.group(task.number)
    skipped = skipped_in(run, windows)
    count = math.prod(lengths(windows)) - len(skipped)
    if not count:
        return {"windows": 0}
    survey, box, resampling = run.folder.survey, ranges(layout.voxels(windows)), Resampling(plan.size, layout.size)
    with stages.measure("read"), stack_reader.open_blocks(plan.source, plan.selection) as stack:
        volume = Volume.from_array(stack.read_region(resampling.source(box)))
    image: Image = NormalisedImage(volume, survey.scalings)
    if layout.size != plan.size:
        image = ResampledImage(image, resampling, box)
    if skipped:
        origin = window_places(layout, windows)[0]
        image = SparseImage(image, frozenset(_shifted(place, origin) for place in skipped), torch.tensor(survey.scores))
    with run.folder.writing(f"scores/{task.number}.raw") as file:
        spent = Stages()
        with torch.inference_mode():
            image = runner.placement.bring(image, layout.roi[0])
            planned = runner.estimator.plan(plan.options)
            scored = runner.scores.compute(image, planned, lambda: _Writer(file), spent, _raw_windows)
        with stages.measure("write"):
            file.flush()
    stages.update({"windows": spent.seconds["windows"], "write": spent.seconds["decode"]})
    return {
        "windows": count,
        "dtype": scored.consumer.dtype,
        "engine": runner.describe_engine(),
        "notes": list(scored.notes),
        "bytes": scored.consumer.nbytes,
    }


class _Writer:
    """Consumer that writes windows as they come; a new one begins from the start of the file."""

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


def _raw_windows(window: SlidingWindow, image: Image, overlap: float) -> Iterator[Slab]:
    """Yield the scores of batches of windows [B, K, *roi] in their order. Raises NonFiniteScores."""
    scan = window.scan(image, overlap)
    while scan.left:
        (scores,) = window.forward([scan.take(window.capacity)])
        require_finite(scores)
        yield Slab(0, 0, scores)


def window_places(layout: Layout, windows: Box) -> list[Size]:
    """Return the first voxels of windows, z slowest, as `Grid.positions` does of all."""
    z, y, x = (axis[first:end] for (first, end), axis in zip(windows, layout.grid.starts, strict=True))
    return list(itertools.product(z, y, x))


def skipped_in(run: OpenRun, windows: Box) -> set[Size]:
    """Return the first voxels of those of some windows that are not computed."""
    places = run.folder.read_array("skipped.npy")
    axes = [axis[first:end] for (first, end), axis in zip(windows, run.plan.layout.grid.starts, strict=True)]
    low, high = (np.array([axis[at] for axis in axes]) for at in (0, -1))
    # They are sorted by z.
    span = np.searchsorted(places[:, 0], (low[0], high[0] + 1))
    part = np.asarray(places[span[0] : span[1]])
    inside = ((part >= low) & (part <= high)).all(1)
    return {(int(z), int(y), int(x)) for z, y, x in part[inside]}


def _shifted(place: Size, origin: Size) -> Size:
    z, y, x = (at - first for at, first in zip(place, origin, strict=True))
    return z, y, x


class GroupScores:
    """Scores of the groups of windows that a tile is decoded from, mapped from their files."""

    def __init__(self, run: OpenRun, groups: list[int]) -> None:
        self._run = run
        self._windows: dict[Size, tuple[Array, int, str]] = {}
        layout, roi = run.plan.layout, run.plan.layout.roi
        for group in groups:
            facts = run.folder.read_record("scores", group)
            if not facts["windows"]:
                continue
            windows = layout.group(group)
            skipped = skipped_in(run, windows)
            bits = np.memmap(run.folder.path / f"scores/{group}.raw", _BITS[getattr(torch, facts["dtype"])], "c")
            each = bits.reshape(facts["windows"], -1, *roi)
            places = [place for place in window_places(layout, windows) if place not in skipped]
            self._windows |= {place: (each, index, facts["dtype"]) for index, place in enumerate(places)}
        self._default = torch.tensor(run.folder.survey.scores)[:, None, None, None].expand(-1, *roi)

    def __bool__(self) -> bool:
        """Whether any window was computed."""
        return bool(self._windows)

    def read(self, place: Size) -> Tensor:
        """Return the scores [K, *roi] of the window at a place, those of a skipped one too."""
        if place not in self._windows:
            return self._default
        each, index, dtype = self._windows[place]
        scores = torch.from_numpy(each[index])
        return scores.view(torch.bfloat16) if dtype == "bfloat16" else scores
