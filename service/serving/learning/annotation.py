"""An annotated stack: an image and corrected labels of one shape, where they come from, and which others overlap."""

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

IMAGE, LABELS = "image.ome.tif", "labels.ome.tif"
# Stacks that are named as overlapping with one.
MOST_OVERLAPS = 32
_REGION = re.compile(",".join(3 * [r"([0-9]{1,7}):([0-9]{1,7})"]))
# Pairs of boxes that are compared at a time.
_COMPARED = 2**20


@dataclass(frozen=True)
class Region:
    """The part [z0, z1), [y0, y1), [x0, x1) of a stack, in voxels."""

    z: tuple[int, int]
    y: tuple[int, int]
    x: tuple[int, int]

    @classmethod
    def parse(cls, text: str, shape: Size) -> Self:
        """Parse z0:z1,y0:y1,x0:x1. Raises BadParameter for text of another form, and for what is not in the stack."""
        if match := _REGION.fullmatch(text):
            z0, z1, y0, y1, x0, x1 = map(int, match.groups())
            region = cls((z0, z1), (y0, y1), (x0, x1))
            if all(a < b <= edge for (a, b), edge in zip(region.ranges, shape, strict=True)):
                return region
        size = ",".join(f"0:{edge}" for edge in shape)
        raise BadParameter.about("region", f"z0:z1,y0:y1,x0:x1 within {size} is expected, not {text[:80]!r}.")

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return self.z, self.y, self.x

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The part as an index of an array [Z, Y, X]."""
        z, y, x = (slice(*edges) for edges in self.ranges)
        return z, y, x

    def __str__(self) -> str:
        """Return text that `parse` understands."""
        return ",".join(f"{a}:{b}" for a, b in self.ranges)


@dataclass(frozen=True)
class Origin:
    """Origin of corrected labels.

    model     with its version
    diameter  as the parameter takes it
    changes   number of corrections
    time      the time point of a series, from 0
    stack     id of the stack; like the job it may be gone
    job       id of the job whose labels were corrected
    """

    model: str | None = None
    diameter: str | None = None
    changes: int | None = None
    time: int | None = None
    stack: str | None = None
    job: str | None = None


@dataclass(frozen=True)
class NewAnnotation:
    """What is stated of a stack that is to be kept.

    owner   key that keeps it
    region  the corrected part, None: all
    """

    name: str
    owner: str | None
    region: Region | None = None
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class Annotation:
    """An annotated stack on disk.

    folder   its name is the annotation's id
    owner    key that has kept it
    shape    (Z, Y, X)
    region   the corrected part, None: all
    objects  in that part of the labels
    digest   of the image's pixels: two annotated stacks with the same one are of one image
    nbytes   of its files
    created  in seconds since 1970
    """

    folder: Path
    name: str
    owner: str | None
    shape: Size
    voxel_size: VoxelSize | None
    region: Region | None
    objects: int
    digest: str
    origin: Origin
    nbytes: int
    created: float

    @cached_property
    def id(self) -> str:
        return self.folder.name

    @property
    def image(self) -> Path:
        """The image, OME-TIFF ZYX."""
        return self.folder / IMAGE

    @property
    def labels(self) -> Path:
        """The labels, OME-TIFF ZYX of the image's shape."""
        return self.folder / LABELS

    @cached_property
    def box(self) -> tuple[tuple[int, int], ...]:
        """The corrected part, or all, as ranges of z, y, x."""
        return tuple((0, edge) for edge in self.shape) if self.region is None else self.region.ranges


def find_overlaps(annotations: Sequence[Annotation]) -> dict[str, Sequence[Annotation]]:
    """Return those of the annotated stacks that overlap with each of them, by its id.

    They have labels for the same place of one image. They are in their order, `MOST_OVERLAPS` at most.
    """
    of_image: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in annotations:
        of_image[annotation.digest].append(annotation)
    found: dict[str, Sequence[Annotation]] = dict.fromkeys((annotation.id for annotation in annotations), ())
    for group in of_image.values():
        if len(group) == 1:
            continue
        # Along z, y and x the first and the last edges of all boxes.
        edges = np.array([annotation.box for annotation in group]).transpose(1, 2, 0).copy()
        # One owner may have thousands of one image.
        rows = max(_COMPARED // len(group), 1)
        for first in range(0, len(group), rows):
            own = slice(first, first + rows)
            shared = np.ones((len(edges[0, 0, own]), len(group)), np.bool_)
            for low, high in edges:
                shared &= low < high[own, np.newaxis]
                shared &= low[own, np.newaxis] < high
            np.fill_diagonal(shared[:, first:], val=False)
            for number in np.flatnonzero(shared.any(axis=1)).tolist():
                others = np.flatnonzero(shared[number])[:MOST_OVERLAPS].tolist()
                found[group[first + number].id] = [group[other] for other in others]
    return found
