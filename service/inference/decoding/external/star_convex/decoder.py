"""Decoder of star-convex polyhedra, which collects candidates and then passes them to the functions of StarDist.

Algorithm: Weigert et al., "Star-convex Polyhedra for 3D Object Detection and Segmentation in Microscopy", WACV 2020.
"""

from __future__ import annotations

import tempfile
import weakref
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.errors import OutOfStorage, TooLarge
from service.core.quantities import Size, VoxelSize
from service.core.types import CancellationCheck, Objects, Segmentation, choose_label_dtype, never_cancelled
from service.inference.decoding.external.star_convex.child import RenderedObjects, render_polyhedra
from service.inference.decoding.external.star_convex.child_main import Task
from service.inference.decoding.labels import keep_objects
from service.models.spec import ModelSpec
from service.models.spec_parts import StarConvex

# Number of scores next to each face of the padded volume that are never origins of polyhedra, as in StarDist.
BORDER_SCORES = 2
# Maximum size of all candidates. Scores of 1 everywhere would otherwise fill the disk.
MAX_CANDIDATE_BYTES = 2**33


class StarConvexDecoder:
    """Decoder of star-convex polyhedra, which are numbered from 1 in descending order of their probability.

    It keeps only the scores above the threshold, in a temporary file. Slabs may be on any device.

    size       (Z, Y, X) of the volume
    cancelled  returns whether the request was canceled; called while polyhedra are selected and rendered
    """

    def __init__(
        self,
        spec: ModelSpec,
        decoding: StarConvex,
        size: Size,
        voxel_size: VoxelSize | None,
        cancelled: CancellationCheck = never_cancelled,
    ) -> None:
        self._decoding, self._size, self._voxel_size, self._cancelled = decoding, size, voxel_size, cancelled
        self._has_logits = spec.get_activation(spec.outputs[0]) == "sigmoid"
        # The network works on a volume whose lengths are rounded up to multiples of the alignment.
        multiples = spec.tiling.alignment
        padded_size = [-(-length // multiple) * multiple for length, multiple in zip(size, multiples, strict=True)]
        # Scores that may be origins of polyhedra, along each axis.
        self._ranges = [
            (BORDER_SCORES, padded_length // step - BORDER_SCORES)
            for padded_length, step in zip(padded_size, decoding.grid, strict=True)
        ]
        self._candidates, self._num_candidates = open_temporary_file(), 0
        # A canceled request drops the decoder without finishing it.
        weakref.finalize(self, self._candidates.close)

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        """Add raw scores [1, 1 + R, z, y, X], as in `Decoder.add`, where a slab has one score per step of the grid.

        Raises TooLarge if there are too many candidates, and OutOfStorage if the disk is full.
        """
        probabilities = scores[0, 0].float()
        probabilities = probabilities.sigmoid() if self._has_logits else probabilities
        mask = probabilities > self._decoding.threshold
        for axis, (start, (first, end)) in enumerate(zip((z0, y0, 0), self._ranges, strict=True)):
            mask.narrow(axis, 0, min(max(first - start, 0), mask.shape[axis])).fill_(0)
            num_kept = min(max(end - start, 0), mask.shape[axis])
            mask.narrow(axis, num_kept, mask.shape[axis] - num_kept).fill_(0)
        z, y, x = mask.nonzero(as_tuple=True)
        distances = scores[0, 1:, z, y, x].float().T
        step = torch.tensor(self._decoding.grid, device=scores.device)
        origins = torch.stack((z + z0, y + y0, x), 1) * step
        rows = torch.cat((probabilities[z, y, x][:, None], origins.float(), distances), 1).cpu().numpy()
        self._store(rows)

    def _store(self, rows: NDArray[np.float32]) -> None:
        self._num_candidates += len(rows)
        if self._num_candidates * rows.shape[1] * rows.itemsize > MAX_CANDIDATE_BYTES:
            raise TooLarge(
                f"The model finds more than {self._num_candidates - len(rows)} candidates for objects. Set a higher"
                " threshold=, or segment a smaller part of the stack.",
                parameter="threshold",
            )
        try:
            self._candidates.write(np.ascontiguousarray(rows).data)
        except OSError as error:
            raise OutOfStorage(
                "The disk for temporary files has no space for the candidates for objects. Set a higher threshold=, or"
                " try again later."
            ) from error

    def finish(self) -> Segmentation:
        """Return the labels [Z, Y, X]. Raises the same errors as `render_polyhedra`."""
        if not self._num_candidates:
            no_objects = Objects.from_sums(*np.zeros((3, 0)))
            labels = np.zeros(self._size, choose_label_dtype(0))
            return Segmentation(labels, "labels", self._voxel_size, 0, objects=no_objects)
        rays = self._decoding.rays
        task = Task(self._size, self._num_candidates, rays.count, rays.anisotropy, self._decoding.nms_threshold)
        rendered = render_polyhedra(task, self._candidates, self._cancelled)
        return self._select_objects(rendered)

    def _select_objects(self, rendered: RenderedObjects) -> Segmentation:
        """Return the visible objects that the parameters of the decoding do not exclude."""
        num_objects = len(rendered.probability)
        labels = rendered.labels.astype(choose_label_dtype(num_objects))
        voxel_counts = np.bincount(labels.ravel(), minlength=num_objects + 1)[1:]
        objects = Objects(voxel_counts.astype(np.int64), rendered.probability, rendered.distance)
        is_kept = (voxel_counts >= max(self._decoding.minimum_size, 1)) & (
            rendered.probability >= self._decoding.min_confidence
        )
        if self._decoding.border == "drop":
            is_kept[find_labels_at_faces(labels) - 1] = False
        segmentation = Segmentation(labels, "labels", self._voxel_size, num_objects, objects=objects)
        return segmentation if is_kept.all() else keep_objects(segmentation, is_kept)


def open_temporary_file() -> IO[bytes]:
    """Open an unnamed file that is deleted when it is closed."""
    return tempfile.TemporaryFile()


def find_labels_at_faces(labels: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Return the labels that touch a face of the volume. Axes that are only one voxel long have no faces."""
    faces = [labels.take(end, axis).ravel() for axis in range(3) if labels.shape[axis] > 1 for end in (0, -1)]
    touching = np.unique(np.concatenate(faces)) if faces else labels[:0].ravel()
    return touching[touching > 0].astype(np.int64)
