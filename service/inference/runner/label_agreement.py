"""Comparison of the labels of a fast network with the labels of the FP32 reference, on the model's sample stack.

On devices other than the CPU, batches are large, and the scores of a full batch are also compared, because some library
bugs affect only the last windows of a large batch.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.errors import NonFiniteScores, StackSegError
from service.core.quantities import Size
from service.core.telemetry import step
from service.core.types import Array, OutputKind, Segmentation, Selection
from service.formats import stack_reader
from service.inference.decoding.decoders import make_decoder
from service.inference.preprocessing.resample import prepare
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import SlidingWindow
from service.models.spec import ModelSpec

# Maximum decoded size of a model's sample.
MAX_SAMPLE_BYTES = 2**30
# Overlap of the windows when labels or scores are compared.
COMPARISON_OVERLAP = 0.25

# A score is wrong if its difference from the reference exceeds this fraction of the root mean square of all scores of
# the same output. Rounding causes smaller differences: up to 0.034 for the bundled models in BF16 on a CPU.
ROUNDING_LIMIT = 0.25
# A batch is faulty if more than this fraction of the voxels of a window have wrong scores.
MAX_WRONG_FRACTION = 1e-3

log = logging.getLogger(__name__)


class LabelAgreement:
    """Compares the labels of a small image with the labels of the FP32 reference.

    make_reference       creates the `SlidingWindow` that runs the FP32 network as loaded; called on first use
    compares_full_batch  whether `compute_difference` also compares the scores of a full batch
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        make_reference: Callable[[], SlidingWindow],
        *,
        compares_full_batch: bool = False,
    ) -> None:
        self._spec, self._compares_full_batch = spec, compares_full_batch
        # The reference computes its labels only once, but each comparison of a full batch needs the reference again.
        self._make_reference = cache(make_reference) if compares_full_batch else make_reference
        self._image = load_sample_image(spec).to(device)
        self._expected_segmentation: Segmentation | None = None

    def repeat_image(self, num_windows: int) -> Tensor:
        """Return the image, repeated until it covers a row of windows along x, float32 [1, C, Z, Y, X]."""
        z, y, x = self._spec.input.roi_size
        row_size = (z, y, x + (num_windows - 1) * int(x * (1 - COMPARISON_OVERLAP)))
        axis_indices = (
            torch.arange(row_length, device=self._image.device) % length
            for row_length, length in zip(row_size, self._image.shape[2:], strict=True)
        )
        row = self._image
        for axis, indices in enumerate(axis_indices, start=2):
            row = row.index_select(axis, indices)
        return row

    def compute_difference(self, window: SlidingWindow) -> float:
        """Return the fraction of voxels whose label differs from the reference, or NaN if scores are not finite.

        With `compares_full_batch`, return infinity if the scores of a full batch are wrong.
        """
        if self._expected_segmentation is None:
            with step("computing the labels of the FP32 network"):
                self._expected_segmentation = self.segment(self._make_reference(), self._image)
        try:
            with step("checking labels"):
                found_segmentation = self.segment(window, self._image)
        except NonFiniteScores:
            return math.nan
        wrong_fraction = self.compute_batch_difference(window) if self._compares_full_batch else 0.0
        if math.isnan(wrong_fraction):
            return math.nan
        return (
            math.inf
            if wrong_fraction > MAX_WRONG_FRACTION
            else compute_label_difference(self._expected_segmentation, found_segmentation)
        )

    @torch.inference_mode()
    def compute_batch_difference(self, window: SlidingWindow) -> float:
        """Return the largest fraction of wrong voxels in a window of a full batch, or NaN if scores are not finite.

        The batch has the same size, dtype and memory format as for requests, and each of its windows is a part of the
        image. A voxel is wrong if one of its scores differs from the reference by more than rounding can explain.
        """
        count = window.capacity
        image = self.repeat_image(count)
        with step(f"checking a batch of {count}"):
            (scores,) = window.forward([window.scan(image, COMPARISON_OVERLAP).take(count)])
            norms = torch.linalg.vector_norm(scores, dim=(0, 2, 3, 4), dtype=torch.float32)
            limits = ROUNDING_LIMIT * norms / math.sqrt(scores[:, 0].numel())
            if not limits.isfinite().all():
                return math.nan
            reference = self._make_reference()
            scan = reference.scan(image, COMPARISON_OVERLAP)
            fractions = [
                compute_fraction_above(window_scores, reference.forward([scan.take(1)])[0][0], limits)
                for window_scores in scores.unbind()
            ]
            fraction, window_index = torch.stack(fractions).max(0)
        if fraction > 0:
            window_text = f"{int(window_index) + 1} of {count}"
            log.info(
                "%s: %.2f%% of the voxels of window %s are wrong",
                self._spec.identifier,
                100 * float(fraction),
                window_text,
            )
        return float(fraction)

    @torch.inference_mode()
    def segment(self, window: SlidingWindow, image: Tensor, stream: int = 0) -> Segmentation:
        """Segment an image [1, C, Z, Y, X] into labels, or into classes if the model does not separate objects.

        For boundaries, the class mask is compared, because the merging of supervoxels amplifies rounding.
        """
        compares_labels = self._spec.decoding.kind in ("instances", "star-convex")
        kind: OutputKind = "labels" if compares_labels else "classes"
        decoder = make_decoder(self._spec, as_size(image.shape[2:]), kind, None)
        for slab in window.run(image, COMPARISON_OVERLAP, stream=stream):
            decoder.add(slab.z0, slab.y0, slab.scores)
        return decoder.finish()


def compute_and_discard_scores(window: SlidingWindow, image: Tensor, stream: int = 0) -> None:
    """Compute and blend the scores of an image [1, C, Z, Y, X] like `LabelAgreement.segment`, and discard them."""
    for _slab in window.run(image, COMPARISON_OVERLAP, stream=stream):
        pass


def compute_fraction_above(scores: Tensor, expected_scores: Tensor, max_differences: Tensor) -> Tensor:
    """Return the fraction of voxels [z, y, x] with a score that differs by more than the limit for its output.

    scores, expected_scores  scores [K, z, y, x]
    max_differences          maximum difference for each output, [K]
    """
    return ((scores - expected_scores).abs() > max_differences[:, None, None, None]).any(0).float().mean()


def load_sample_image(spec: ModelSpec) -> Tensor:
    """Return the normalized center of the model's sample, float32 [1, C, Z, Y, X], with up to two windows per axis.

    Returns smooth noise if the model has no sample, or if the sample cannot be read.
    """
    z, y, x = (length + int(length * (1 - COMPARISON_OVERLAP)) for length in spec.input.roi_size)
    try:
        image = _read_sample(spec)
    except (StackSegError, OSError) as error:
        log.warning("%s: cannot read the sample, so engines are compared on noise: %s", spec.identifier, error)
        image = None
    if image is None:
        image = make_noise((1, spec.input.channels, z, y, x))
    return _cut_highest_contrast(image, (z, y, x)).contiguous()


def _cut_highest_contrast(image: Tensor, max_size: Size) -> Tensor:
    """Return the part of at most `max_size` voxels with the highest contrast, because labels of background agree."""
    lengths = [min(length, limit) for length, limit in zip(image.shape[2:], max_size, strict=True)]
    ends = [total - length for total, length in zip(image.shape[2:], lengths, strict=True)]
    starts = itertools.product(*(sorted({end // 2, 0, end}, key=lambda start: start != end // 2) for end in ends))

    def cut(corner: Sequence[int]) -> Tensor:
        spans = (slice(start, start + length) for start, length in zip(corner, lengths, strict=True))
        return image[(slice(None), slice(None), *spans)]

    return max(map(cut, starts), key=lambda part: float(part.std(correction=0)))


def make_noise(shape: tuple[int, ...]) -> Tensor:
    """Return smooth noise: interpolated random values between 0 and 1, plus a random value up to 0.1 for each voxel."""
    generator = torch.Generator().manual_seed(0)
    coarse_noise = torch.rand((*shape[:2], *[length // 8 + 2 for length in shape[2:]]), generator=generator)
    smooth_noise = functional.interpolate(coarse_noise, size=shape[2:], mode="trilinear", align_corners=False)
    return smooth_noise + 0.1 * torch.rand(shape, generator=generator)


def _read_sample(spec: ModelSpec) -> Tensor | None:
    if spec.sample is None:
        return None
    volume = stack_reader.read(spec.folder / spec.sample.input, Selection(), MAX_SAMPLE_BYTES)
    if volume.shape[0] != spec.input.channels:
        return None
    return prepare(volume, spec, spec.input.usual_diameter).image.to_tensor()


def compute_label_difference(segmentation_a: Segmentation, segmentation_b: Segmentation) -> float:
    """Return the fraction of voxels that differ, after matching objects in descending order of overlap."""
    if segmentation_a.kind != "labels":
        return float(np.mean(segmentation_a.pixels != segmentation_b.pixels))
    return 1 - _count_agreeing_voxels(segmentation_a.pixels, segmentation_b.pixels) / max(segmentation_a.pixels.size, 1)


def _count_agreeing_voxels(labels_a: Array, labels_b: Array) -> int:
    # Encode the two labels of each voxel as one number, because counting the pairs dominates the run time.
    base = int(labels_b.max(initial=0)) + 1
    pairs, counts = np.unique(labels_a.ravel().astype(np.int64) * base + labels_b.ravel(), return_counts=True)
    num_agreeing = 0
    partners: tuple[set[int], set[int]] = (set(), set())
    for index in np.argsort(-counts, kind="stable").tolist():
        label_a, label_b = divmod(int(pairs[index]), base)
        if label_a == 0 and label_b == 0:
            num_agreeing += int(counts[index])
        elif label_a and label_b and label_a not in partners[0] and label_b not in partners[1]:
            num_agreeing += int(counts[index])
            partners[0].add(label_a)
            partners[1].add(label_b)
    return num_agreeing
