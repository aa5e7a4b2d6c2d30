"""Comparison of the labels of a fast network with those of the FP32 reference, on the model's own sample.

On devices other than the CPU, where batches are large, the scores of a full batch are also compared: some library bugs
affect only the last windows of a large batch.
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

# Scores deviate by more than rounding if the difference from the reference exceeds this fraction of the root mean
# square of their output. In BF16 on a CPU, scores of the bundled models differ by at most 0.034 of it.
ROUNDING_LIMIT = 0.25
# A batch is faulty if more than this fraction of a window's voxels have such scores.
MAX_WRONG_FRACTION = 1e-3

log = logging.getLogger(__name__)


class LabelAgreement:
    """Compares labels of a small image with those of the FP32 reference.

    reference   creates windows that run the FP32 network as loaded; called on first use
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
        # The labels need the reference only once, but each comparison of a full batch needs it again.
        self._reference = cache(reference) if full_batch else reference
        self._image = sample_image(spec).to(device)
        self._expected: Segmentation | None = None

    def repeat_image(self, windows: int) -> Tensor:
        """Return the image repeated to the size of a row of windows along x, float32 [1, C, Z, Y, X]."""
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
        """Return the fraction of the image's voxels whose label differs from the reference; NaN for non-finite scores.

        With `full_batch`, return infinity if the scores of a full batch are wrong.
        """
        if self._expected is None:
            with step("computing the labels of the FP32 network"):
                self._expected = self.segment(self._reference(), self._image)
        try:
            with step("checking labels"):
                found = self.segment(window, self._image)
        except NonFiniteScores:
            return math.nan
        worst_window = self.batch_difference(window) if self._full_batch else 0.0
        if math.isnan(worst_window):
            return math.nan
        return math.inf if worst_window > MAX_WRONG_FRACTION else fraction_differing(self._expected, found)

    @torch.inference_mode()
    def batch_difference(self, window: SlidingWindow) -> float:
        """Return the largest fraction of wrong voxels in any window of a full batch; NaN for non-finite scores.

        The batch has the size, dtype and memory format of requests, and each of its windows is a part of the image. A
        voxel is wrong if one of its scores differs from the reference by more than rounding explains.
        """
        count = window.capacity
        image = self.repeat_image(count)
        with step(f"checking a batch of {count}"):
            (scores,) = window.forward([window.scan(image, OVERLAP).take(count)])
            norms = torch.linalg.vector_norm(scores, dim=(0, 2, 3, 4), dtype=torch.float32)
            limits = ROUNDING_LIMIT * norms / math.sqrt(scores[:, 0].numel())
            if not limits.isfinite().all():
                return math.nan
            reference = self._reference()
            scan = reference.scan(image, OVERLAP)
            shares = [fraction_above(one, reference.forward([scan.take(1)])[0][0], limits) for one in scores.unbind()]
            share, place = torch.stack(shares).max(0)
        if share > 0:
            number = f"{int(place) + 1} of {count}"
            log.info(
                "%s: %.2f %% of the scores in window %s are wrong", self._spec.identifier, 100 * float(share), number
            )
        return float(share)

    @torch.inference_mode()
    def segment(self, window: SlidingWindow, image: Tensor, stream: int = 0) -> Segmentation:
        """Segment an image [1, C, Z, Y, X] into labels, or into classes if the model does not detect objects."""
        kind: OutputKind = "labels" if self._spec.decoding.kind == "instances" else "classes"
        decoder = make_decoder(self._spec, as_size(image.shape[2:]), kind, None)
        for slab in window.run(image, OVERLAP, stream=stream):
            decoder.add(slab.z0, slab.y0, slab.scores)
        return decoder.finish()


def score(window: SlidingWindow, image: Tensor, stream: int = 0) -> None:
    """Compute and blend the scores of an image [1, C, Z, Y, X] like `LabelAgreement.segment`, and discard them."""
    for _slab in window.run(image, OVERLAP, stream=stream):
        pass


def fraction_above(found: Tensor, expected: Tensor, limits: Tensor) -> Tensor:
    """Return the fraction of voxels [z, y, x] with a score that differs by more than the limit of its output.

    found, expected  scores [K, z, y, x]
    limits           limit of each output, [K]
    """
    return ((found - expected).abs() > limits[:, None, None, None]).any(0).float().mean()


def sample_image(spec: ModelSpec) -> Tensor:
    """Return the center of the model's sample, at most two windows per axis: normalized float32 [1, C, Z, Y, X].

    Return smooth noise if the model has no sample, or if its sample cannot be read.
    """
    z, y, x = (edge + int(edge * (1 - OVERLAP)) for edge in spec.input.roi_size)
    try:
        image = _sample(spec)
    except (StackSegError, OSError) as error:
        log.warning("%s: cannot read the sample; comparing engines on noise instead: %s", spec.identifier, error)
        image = None
    if image is None:
        image = noise((1, spec.input.channels, z, y, x))
    for axis, most in zip((2, 3, 4), (z, y, x), strict=True):
        length = min(image.shape[axis], most)
        image = image.narrow(axis, (image.shape[axis] - length) // 2, length)
    return image.contiguous()


def noise(shape: tuple[int, ...]) -> Tensor:
    """Return noise: random values up to 1 on every eighth voxel, interpolated, plus up to 0.1 on every voxel."""
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


def fraction_differing(one: Segmentation, other: Segmentation) -> float:
    """Return the fraction of voxels that differ. Labels are matched first: each object to its largest partner."""
    if one.kind != "labels":
        return float(np.mean(one.pixels != other.pixels))
    return 1 - _count_agreeing(one.pixels, other.pixels) / max(one.pixels.size, 1)


def _count_agreeing(one: Array, other: Array) -> int:
    # Encode the pair of labels at each voxel as one number, because counting pairs dominates the run time.
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
