"""Annotated stacks (an image, corrected labels and the provenance of the labels), and overlaps between stacks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from service.core.errors import BadParameter
from service.core.quantities import Size, VoxelSize

IMAGE_FILE = "image.ome.tif"
LABELS_FILE = "labels.ome.tif"
# Maximum number of overlapping stacks that are reported for one stack.
MAX_OVERLAPS = 32
_REGION_PATTERN = re.compile(",".join(3 * [r"([0-9]{1,7}):([0-9]{1,7})"]))
# Maximum number of pairs of boxes that are compared at a time. This limits the memory usage.
_MAX_COMPARED_PAIRS = 2**20


@dataclass(frozen=True)
class Region:
    """The region [z0, z1), [y0, y1), [x0, x1) of a stack, in voxels."""

    z: tuple[int, int]
    y: tuple[int, int]
    x: tuple[int, int]

    @classmethod
    def parse(cls, text: str, shape: Size) -> Self:
        """Parse z0:z1,y0:y1,x0:x1. Raises BadParameter if the string is malformed or the region exceeds the stack."""
        if match := _REGION_PATTERN.fullmatch(text):
            z0, z1, y0, y1, x0, x1 = map(int, match.groups())
            region = cls((z0, z1), (y0, y1), (x0, x1))
            if all(start < stop <= length for (start, stop), length in zip(region.ranges, shape, strict=True)):
                return region
        size = ",".join(f"0:{length}" for length in shape)
        raise BadParameter.for_parameter("region", f"expected z0:z1,y0:y1,x0:x1 within {size}, not {text[:80]!r}.")

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return self.z, self.y, self.x

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The region as an index into an array [Z, Y, X]."""
        z, y, x = (slice(*bounds) for bounds in self.ranges)
        return z, y, x

    def __str__(self) -> str:
        """Return the region in the format of `parse`."""
        return ",".join(f"{start}:{stop}" for start, stop in self.ranges)


@dataclass(frozen=True)
class LabelProvenance:
    """The provenance of corrected labels.

    model     name and version of the model
    diameter  object diameter in the format of the parameter `diameter`
    changes   number of corrections
    time      zero-based time point of a series
    stack     ID of the stored stack, which may have been deleted
    job       ID of the job whose labels were corrected, which may have been deleted
    """

    model: str | None = None
    diameter: str | None = None
    changes: int | None = None
    time: int | None = None
    stack: str | None = None
    job: str | None = None


@dataclass(frozen=True)
class NewAnnotation:
    """The properties of a new annotated stack.

    owner       name of the API key used to store the stack
    region      the annotated region; None for the whole stack
    ignored     label of voxels that are not annotated; None if there is no such label
    is_partial  whether only some objects are annotated, so that most voxels without a label are unknown
    """

    name: str
    owner: str | None
    region: Region | None = None
    provenance: LabelProvenance = field(default_factory=LabelProvenance)
    ignored: int | None = None
    is_partial: bool = False


@dataclass(frozen=True)
class Annotation:
    """An annotated stack on disk.

    folder      folder that contains the files; the name of the folder is the ID of the annotated stack
    owner       name of the API key used to store the stack
    shape       (Z, Y, X)
    region      the annotated region; None for the whole stack
    objects     number of objects in the annotated region
    digest      digest of the pixels of the image; annotated stacks of the same image have equal digests
    nbytes      size of the files in bytes
    created     seconds since the Unix epoch
    ignored     label of voxels that are not annotated; None if there is no such label
    is_partial  whether only some objects are annotated, so that most voxels without a label are unknown
    """

    folder: Path
    name: str
    owner: str | None
    shape: Size
    voxel_size: VoxelSize | None
    region: Region | None
    objects: int
    digest: str
    provenance: LabelProvenance
    nbytes: int
    created: float
    ignored: int | None = None
    is_partial: bool = False

    @cached_property
    def id(self) -> str:
        return self.folder.name

    @property
    def image(self) -> Path:
        """Path of the image, an OME-TIFF with axes ZYX."""
        return self.folder / IMAGE_FILE

    @property
    def labels(self) -> Path:
        """Path of the labels, an OME-TIFF with axes ZYX and the shape of the image."""
        return self.folder / LABELS_FILE

    @cached_property
    def box(self) -> tuple[tuple[int, int], ...]:
        """The annotated region as ranges along z, y and x."""
        return tuple((0, length) for length in self.shape) if self.region is None else self.region.ranges


def find_overlaps(annotations: Sequence[Annotation]) -> dict[str, Sequence[Annotation]]:
    """Return, for the ID of each annotated stack, the annotated stacks that overlap with it.

    Two annotated stacks overlap if they have labels for the same voxels of the same image. At most `MAX_OVERLAPS`
    overlaps are returned for each stack, in the order of `annotations`.
    """
    annotations_by_digest: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in annotations:
        annotations_by_digest[annotation.digest].append(annotation)
    overlaps: dict[str, Sequence[Annotation]] = dict.fromkeys((annotation.id for annotation in annotations), ())
    for same_image_annotations in annotations_by_digest.values():
        if len(same_image_annotations) == 1:
            continue
        # The lower and upper bounds of all boxes along z, y and x.
        bounds = np.array([annotation.box for annotation in same_image_annotations]).transpose(1, 2, 0).copy()
        # Compare in blocks of rows, because there may be thousands of annotated stacks of the same image.
        rows_per_block = max(_MAX_COMPARED_PAIRS // len(same_image_annotations), 1)
        for first_row in range(0, len(same_image_annotations), rows_per_block):
            block = slice(first_row, first_row + rows_per_block)
            is_overlapping = np.ones((len(bounds[0, 0, block]), len(same_image_annotations)), np.bool_)
            for low, high in bounds:
                is_overlapping &= low < high[block, np.newaxis]
                is_overlapping &= low[block, np.newaxis] < high
            np.fill_diagonal(is_overlapping[:, first_row:], val=False)
            for row in np.flatnonzero(is_overlapping.any(axis=1)).tolist():
                other_rows = np.flatnonzero(is_overlapping[row])[:MAX_OVERLAPS].tolist()
                overlaps[same_image_annotations[first_row + row].id] = [
                    same_image_annotations[other] for other in other_rows
                ]
    return overlaps


def check_no_overlaps(stacks: Sequence[Annotation]) -> None:
    """Raise BadParameter if two stacks overlap, because training data would leak into the held-out data."""
    overlaps = find_overlaps(stacks)
    for stack in stacks:
        for overlapping_stack in overlaps[stack.id]:
            older_stack, newer_stack = sorted((stack, overlapping_stack), key=lambda annotation: annotation.created)
            raise BadParameter.for_parameter(
                "annotations",
                f"{older_stack.id} ({older_stack.name}) and the newer {newer_stack.id} ({newer_stack.name}) have"
                " labels for the same region of the same image. Omit one of them.",
            )
