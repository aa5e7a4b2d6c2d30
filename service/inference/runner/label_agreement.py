"""Compare the labels of a fast network with those of the FP32 reference, on the model's own sample.

On devices other than the CPU, where batches are large, the scores of a full batch are compared as well: libraries have
had faults that show in the last windows of a large batch only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.errors import NonFiniteScores, StackSegError
from service.core.telemetry import step
from service.core.types import Array, OutputKind, Segmentation, Selection
from service.formats import stack_reader
from service.inference.decoding.decoders import make_decoder
from service.inference.preprocessing.resample import prepare_tensor
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec import ModelSpec

SAMPLE_BYTES = 2**30
OVERLAP = 0.25

# Scores differ from the reference by more than rounding if the difference exceeds this share of the root mean square of
# their output. In BF16 on a CPU, scores of the bundled models differ by at most 0.034 of it.
ROUNDING_LIMIT = 0.25
# A batch is faulty if more than this share of a window's voxels have such scores.
MAX_SHARE_BEYOND_ROUNDING = 1e-3

log = logging.getLogger(__name__)


class LabelAgreement:
    """Labels of one small image as the reference makes them, and how far those of others are from them.

    reference   makes the windows that run the FP32 network as it was loaded; called when it is first needed
    full_batch  whether `difference` also compares the scores of a full batch
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        reference: Callable[[], SlidingWindow],
        *,
        full_batch: bool = False,
    ) -> None:
        self._spec, self._full_batch = spec, full_batch
        # It is needed once for the labels, but again for every batch.
        self._reference = cache(reference) if full_batch else reference
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
        """Return the share of the image's voxels with another label than the reference's; NaN for non-finite scores.

        With `full_batch`, infinity if the scores of a full batch are wrong.
        """
        if self._expected is None:
            with step("computing the labels of the FP32 network"):
                self._expected = self.segment(self._reference(), self._image)
        try:
            with step("checking labels"):
                found = self.segment(window, self._image)
        except NonFiniteScores:
            return math.nan
        in_batch = self.batch_difference(window) if self._full_batch else 0.0
        if math.isnan(in_batch):
            return math.nan
        return math.inf if in_batch > MAX_SHARE_BEYOND_ROUNDING else share_differing(self._expected, found)

    @torch.inference_mode()
    def batch_difference(self, window: SlidingWindow) -> float:
        """Return the largest share of wrong voxels in any window of a full batch; NaN for non-finite scores.

        The batch has the size, dtype and memory format that requests use, and every window of it is a part of the
        image. A voxel is wrong if any of its scores differs from the reference's by more than rounding explains.
        """
        count = window.capacity
        image = self.row(count)
        with step(f"checking a batch of {count}"):
            (scores,) = window.forward([window.scan(image, OVERLAP).take(count)])
            norms = torch.linalg.vector_norm(scores, dim=(0, 2, 3, 4), dtype=torch.float32)
            limits = ROUNDING_LIMIT * norms / math.sqrt(scores[:, 0].numel())
            if not limits.isfinite().all():
                return math.nan
            reference = self._reference()
            scan = reference.scan(image, OVERLAP)
            shares = [share_beyond(found, reference.forward([scan.take(1)])[0][0], limits) for found in scores.unbind()]
            share, place = torch.stack(shares).max(0)
        if share > 0:
            number = f"{int(place) + 1} of {count}"
            log.info("%s: scores of %.2f %% of window %s are wrong", self._spec.identifier, 100 * float(share), number)
        return float(share)

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


def share_beyond(found: Tensor, expected: Tensor, limits: Tensor) -> Tensor:
    """Return the share of voxels of scores [K, z, y, x] with any difference above the limit [K] of its output."""
    return ((found - expected).abs() > limits[:, None, None, None]).any(0).float().mean()


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
