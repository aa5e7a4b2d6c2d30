"""Corrected labels from a client: read the labels and the image, check that they match, and store both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.core.errors import BadParameter, TooLarge
from service.core.quantities import VoxelSize
from service.core.types import CancellationCheck, Selection
from service.serving.learning.annotation import Annotation, LabelProvenance, NewAnnotation, Region

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader, Source
    from service.serving.learning.annotations import AnnotationStore
    from service.serving.storage.scratch import SpaceReservation


# Maximum size of one plane of uint32 labels. The service holds a few planes in memory while it stores them.
MAX_PLANE_BYTES = 2**28


class Correction(NamedTuple):
    """Corrected labels received from a client.

    stack      file of the image
    labels     file of the labels
    selection  part of the image that was segmented; its voxel size overrides the voxel sizes in the files
    region     the annotated region in the format of `Region.parse`; None for the whole stack
    ignored, is_partial  as in `NewAnnotation`
    name       name of the stack
    folder     scratch folder for decoded pixels
    """

    stack: Path
    labels: Source
    selection: Selection
    region: str | None
    ignored: int | None
    is_partial: bool
    name: str
    owner: str | None
    provenance: LabelProvenance
    folder: Path


def store_correction(
    reader: Reader,
    annotations: AnnotationStore,
    correction: Correction,
    space: SpaceReservation,
    cancelled: CancellationCheck,
) -> Annotation:
    """Read the image and the labels, and store them. Blocks the calling thread.

    Raises BadParameter if the labels do not match the image, and the same errors as `Reader`,
    `SpaceReservation.reserve` and `AnnotationStore.add`.
    """
    stack, labels, selection, region, ignored, is_partial, name, owner, provenance, folder = correction
    description = reader.inspect(stack, selection, cancelled=cancelled)
    channels, z, y, x = description.shape
    if channels != 1:
        raise BadParameter.for_parameter(
            "channel", f"the stack has {channels} channels. Select the channel to which the labels belong."
        )
    if 4 * y * x > MAX_PLANE_BYTES:
        raise TooLarge(
            f"The planes have {y:,} x {x:,} pixels, but annotated stacks may have at most {MAX_PLANE_BYTES // 4:,}"
            " pixels per plane. Crop the stack and the labels to the corrected region."
        )
    shape = (z, y, x)
    annotated_region = None if region is None else Region.parse(region, shape)
    # Space for the image and the uint32 labels, each as decoded pixels and as a written file.
    space.reserve(2 * (description.nbytes + 4 * description.nbytes // np.dtype(description.dtype).itemsize))
    image = reader.read(stack, selection, folder, cancelled=cancelled)
    label_volume = reader.read_labels(labels, shape, folder, cancelled=cancelled)
    if selection.voxel_size is None:
        _check_voxel_size(label_volume.voxel_size, image.voxel_size)
    new_annotation = NewAnnotation(name, owner, annotated_region, provenance, ignored, is_partial)
    return annotations.add(image, label_volume, new_annotation)


def _check_voxel_size(labels_voxel_size: VoxelSize | None, stack_voxel_size: VoxelSize | None) -> None:
    """Raise BadParameter if the voxel sizes differ, because the labels may belong to a different stack."""
    if (
        labels_voxel_size is None
        or stack_voxel_size is None
        or np.allclose(tuple(labels_voxel_size), tuple(stack_voxel_size), rtol=0.01, atol=0)
    ):
        return
    sizes = [",".join(f"{edge_length:g}" for edge_length in size) for size in (labels_voxel_size, stack_voxel_size)]
    raise BadParameter.for_parameter(
        "voxel_size",
        f"the labels specify {sizes[0]} micrometers (Z,Y,X), but the stack specifies {sizes[1]}. Save the labels"
        f" without a voxel size, or set the correct voxel size, for example voxel_size={sizes[1]}.",
        suggested={"voxel_size": sizes[1]},
    )
