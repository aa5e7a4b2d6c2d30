"""Corrected labels that a client sends: read them and their stack, check that they belong together, and keep both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Cancelling, Selection
from service.serving.learning.annotation import Annotation, NewAnnotation, Origin, Region

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader, Source
    from service.serving.learning.annotations import AnnotationStore
    from service.serving.storage.scratch import Hold


class Correction(NamedTuple):
    """Corrected labels that were received.

    stack      file of the image
    labels     file of the labels
    selection  part of the image that was segmented; its voxel size decides where that of both files differs
    region     part that was corrected, as text; None: all of it
    name       of the stack
    folder     for decoded pixels
    """

    stack: Path
    labels: Source
    selection: Selection
    region: str | None
    name: str
    owner: str | None
    origin: Origin
    folder: Path


def keep_correction(
    reader: Reader, annotations: AnnotationStore, correction: Correction, space: Hold, cancelled: Cancelling
) -> Annotation:
    """Read image and labels, and keep them. Blocks.

    Raises BadParameter where they do not belong together, and what reading, `Hold.reserve` and `AnnotationStore.keep`
    raise.
    """
    stack, labels, selection, region, name, owner, origin, folder = correction
    description = reader.inspect(stack, selection, cancelled=cancelled)
    channels, z, y, x = description.shape
    if channels != 1:
        raise BadParameter.about("channel", f"the stack has {channels} channels, and labels belong to one; say which.")
    shape = (z, y, x)
    corrected = None if region is None else Region.parse(region, shape)
    # Of the image and of the labels, as they are read and as they are written.
    space.reserve(2 * (description.nbytes + 4 * description.nbytes // np.dtype(description.dtype).itemsize))
    image = reader.read(stack, selection, folder, cancelled=cancelled)
    numbers = reader.read_labels(labels, shape, folder, cancelled=cancelled)
    if selection.voxel_size is None:
        _check_voxel_size(numbers.voxel_size, image.voxel_size)
    return annotations.keep(image, numbers, NewAnnotation(name, owner, corrected, origin))


def _check_voxel_size(labels: VoxelSize | None, stack: VoxelSize | None) -> None:
    """Raise BadParameter where both files state one and these differ: then the labels may be of another stack."""
    if labels is None or stack is None or np.allclose(tuple(labels), tuple(stack), rtol=0.01, atol=0):
        return
    stated = [",".join(f"{edge:g}" for edge in size) for size in (labels, stack)]
    raise BadParameter.about(
        "voxel_size",
        f"the labels say {stated[0]} micrometres (Z,Y,X) and the stack says {stated[1]}; save the labels"
        f" without one, or state which is right, as in voxel_size={stated[1]}.",
        suggested={"voxel_size": stated[1]},
    )
