"""Resampling of scores to the grid of the stack before they are decoded, for models with `input.resampling: nnunet`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import Allocator
from service.core.quantities import Size
from service.core.types import CancellationCheck, Extent, OutputKind, Segmentation, never_cancelled
from service.inference.decoding.decoders import Decoder, make_decoder
from service.inference.preprocessing.interpolation import Resampling
from service.inference.preprocessing.resample import (
    MAX_SCORES_PER_STEP,
    choose_score_interpolation,
    resamples_scores,
)
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec


@dataclass(frozen=True)
class DecoderFactory:
    """Creates the decoders of a request. They resample the scores if the model requires it.

    volume    stack to whose grid scores are resampled
    size      size (Z, Y, X) of the grid of the scores
    allocate  creates the result array
    cancelled, threads as in `make_decoder`
    """

    volume: Extent
    spec: ModelSpec
    size: Size
    output: OutputKind
    allocate: Allocator = np.zeros
    cancelled: CancellationCheck = never_cancelled
    threads: int = 1

    def __call__(self) -> Decoder:
        """Return a decoder."""
        stack_size = as_size(self.volume.shape[1:])
        is_resampled = self.size != stack_size and resamples_scores(self.spec, self.output)
        decoder = make_decoder(
            self.spec,
            stack_size if is_resampled else self.size,
            self.output,
            self.volume.voxel_size,
            self.allocate,
            cancelled=self.cancelled,
            threads=self.threads,
        )
        if not is_resampled:
            return decoder
        resampling = Resampling(self.size, stack_size, choose_score_interpolation(self.volume, self.spec))
        return ScoreResampler(decoder, resampling)


class ScoreResampler:
    """Decoder that interpolates the planes of scores and passes them to another decoder on the host.

    It holds the planes of a slab, and the planes before them from which later planes are interpolated.
    """

    def __init__(self, decoder: Decoder, resampling: Resampling) -> None:
        self._decoder, self._resampling = decoder, resampling
        self._planes: NDArray[np.float32] = np.empty((0, 0, 0, 0), np.float32)
        self._first_plane = self._num_resampled = 0

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        """Add raw scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0`."""
        _, num_outputs, depth, num_rows, width = scores.shape
        height = self._resampling.source_size[1]
        if y0 == 0:
            planes = np.empty((num_outputs, z0 - self._first_plane + depth, height, width), np.float32)
            if self._planes.size:
                planes[:, : z0 - self._first_plane] = self._planes
            self._planes = planes
        self._planes[:, z0 - self._first_plane :, y0 : y0 + num_rows] = scores[0].float().cpu().numpy()
        if y0 + num_rows == height:
            self._resample(z0 + depth)

    def _resample(self, end: int) -> None:
        """Interpolate the planes that depend only on planes before `end`, and drop the planes that are not needed."""
        _, rows, columns = map(range, self._resampling.target_size)
        step = max(MAX_SCORES_PER_STEP // (len(self._planes) * len(rows) * len(columns)), 1)
        num_planes = self._resampling.count_planes(end)
        for first in range(self._num_resampled, num_planes, step):
            box = (range(first, min(first + step, num_planes)), rows, columns)
            z, y, x = self._resampling.find_source_box(box)
            planes = self._planes[:, z.start - self._first_plane : z.stop - self._first_plane]
            source = planes[:, :, y.start : y.stop, x.start : x.stop]
            scores = torch.from_numpy(self._resampling.interpolate(source, box))
            self._decoder.add(first, 0, scores[None])
        self._num_resampled = num_planes
        if num_planes < self._resampling.target_size[0]:
            next_box = (range(num_planes, num_planes + 1), rows, columns)
            first_plane = min(self._resampling.find_source_box(next_box)[0].start, end)
            self._planes = self._planes[:, first_plane - self._first_plane :].copy()
            self._first_plane = first_plane

    def finish(self) -> Segmentation:
        """Return the segmentation on the grid of the stack."""
        return self._decoder.finish()
