"""Compare the labels of a fast network with those of the FP32 reference, on the model's own sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.errors import NonFiniteScores, StackSegError
from service.core.progress import step
from service.core.volume import Array, OutputKind, Segmentation, Selection
from service.formats import stack_reader
from service.inference.decoding.decoders import make_decoder
from service.inference.resample import prepare_tensor
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec import ModelSpec

SAMPLE_BYTES = 2**30
OVERLAP = 0.25

log = logging.getLogger(__name__)


class LabelAgreement:
    """Labels of one small image as the reference makes them, and how far those of others are from them.

    reference  makes the windows that run the FP32 network as it was loaded; called when it is first needed
    """

    def __init__(self, spec: ModelSpec, device: torch.device, reference: Callable[[], SlidingWindow]) -> None:
        self._spec = spec
        self._reference = reference
        self._image = image_of(spec).to(device)
        self._expected: Segmentation | None = None

    def row(self, windows: int) -> Tensor:
        """Return the image over and over, float32 [1, C, Z, Y, X], as large as this many windows in a row along x."""
        z, y, x = self._spec.input.roi_size
        edges = (z, y, x + (windows - 1) * int(x * (1 - OVERLAP)))
        ends = (
            torch.arange(edge, device=self._image.device) % length
            for edge, length in zip(edges, self._image.shape[2:], strict=True)
        )
        row = self._image
        for axis, places in enumerate(ends, start=2):
            row = row.index_select(axis, places)
        return row

    def difference(self, window: SlidingWindow) -> float:
        """Return the share of the image's voxels with another label than the reference's; NaN for non-finite scores."""
        if self._expected is None:
            with step("computing the labels of the FP32 network"):
                self._expected = self.segment(self._reference(), self._image)
        try:
            with step("checking labels"):
                found = self.segment(window, self._image)
        except NonFiniteScores:
            return math.nan
        return share_differing(self._expected, found)

    @torch.inference_mode()
    def segment(self, window: SlidingWindow, image: Tensor, stream: int = 0) -> Segmentation:
        """Segment an image [1, C, Z, Y, X] to labels, or to classes where the model has no objects."""
        kind: OutputKind = "labels" if self._spec.decoding.kind == "instances" else "classes"
        decoder = make_decoder(self._spec, as_size(image.shape[2:]), kind, None)
        for slab in window.run(image, OVERLAP, stream=stream):
            decoder.add(slab.z0, slab.y0, slab.scores)
        return decoder.finish()


def score(window: SlidingWindow, image: Tensor, stream: int = 0) -> None:
    """Compute and blend the scores of an image [1, C, Z, Y, X], as `LabelAgreement.segment` does, and drop them."""
    for _slab in window.run(image, OVERLAP, stream=stream):
        pass


def image_of(spec: ModelSpec) -> Tensor:
    """Return the middle of the model's sample, at most two windows per axis: float32 [1, C, Z, Y, X], normalised.

    Smooth noise where the model has no sample, or none that can be read.
    """
    z, y, x = (edge + int(edge * (1 - OVERLAP)) for edge in spec.input.roi_size)
    try:
        image = _sample(spec)
    except (StackSegError, OSError) as error:
        log.warning("%s: the sample cannot be read, engines are compared on noise: %s", spec.identifier, error)
        image = None
    if image is None:
        image = noise((1, spec.input.channels, z, y, x))
    for axis, most in zip((2, 3, 4), (z, y, x), strict=True):
        length = min(image.shape[axis], most)
        image = image.narrow(axis, (image.shape[axis] - length) // 2, length)
    return image.contiguous()


def noise(shape: tuple[int, ...]) -> Tensor:
    """Return random numbers from 0 to 1 on a grid of every eighth voxel, interpolated, and a tenth at every voxel."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand((*shape[:2], *[edge // 8 + 2 for edge in shape[2:]]), generator=generator)
    smooth = functional.interpolate(coarse, size=shape[2:], mode="trilinear", align_corners=False)
    return smooth + 0.1 * torch.rand(shape, generator=generator)


def _sample(spec: ModelSpec) -> Tensor | None:
    if spec.sample is None:
        return None
    volume = stack_reader.read(spec.folder / spec.sample.input, Selection(), SAMPLE_BYTES)
    if volume.shape[0] != spec.input.channels:
        return None
    return prepare_tensor(volume, spec)


def share_differing(one: Segmentation, other: Segmentation) -> float:
    """Return the share of voxels that differ; of labels, once each object and its largest partner share a number."""
    if one.kind != "labels":
        return float(np.mean(one.pixels != other.pixels))
    return 1 - _agreeing(one.pixels, other.pixels) / max(one.pixels.size, 1)


def _agreeing(one: Array, other: Array) -> int:
    # The pair of labels at a voxel as one number: counting those is what takes time.
    width = int(other.max(initial=0)) + 1
    pairs, counts = np.unique(one.ravel().astype(np.int64) * width + other.ravel(), return_counts=True)
    agreeing = 0
    partners: tuple[set[int], set[int]] = (set(), set())
    for index in np.argsort(-counts, kind="stable").tolist():
        first, second = divmod(int(pairs[index]), width)
        if first == 0 and second == 0:
            agreeing += int(counts[index])
        elif first and second and first not in partners[0] and second not in partners[1]:
            agreeing += int(counts[index])
            partners[0].add(first)
            partners[1].add(second)
    return agreeing
