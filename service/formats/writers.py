"""Write a segmentation in the format that corresponds to the file name, and draw thumbnails of segmented stacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from imagecodecs import png_encode

from service.core.files.atomic_files import write_atomically
from service.core.types import Array, Segmentation, Volume
from service.formats import npy_nifti_writer
from service.formats.tiff import writer as tiff_writer
from service.formats.tiff.imagej_metadata import make_label_colors
from service.formats.zarr.store import find_labeled_image

MAX_THUMBNAIL_PIXELS = 256
TIFF_SUFFIXES = (".tif", ".tiff")
# Writers by suffix, for formats that can store only labels or classes of a single time point.
ARRAY_WRITERS = {".npy": npy_nifti_writer.write_npy, ".nii.gz": npy_nifti_writer.write_nifti}


def is_tiff(path: Path) -> bool:
    """Return whether `write` would write a TIFF to this path."""
    return path.name.lower().endswith(TIFF_SUFFIXES)


def is_zarr(path: Path) -> bool:
    """Return whether `write` would write OME-Zarr to this path, as a separate store or as labels inside an image."""
    return path.name.lower().endswith(".zarr") or find_labeled_image(path) is not None


def write(segmentation: Segmentation, path: Path, provenance: Mapping[str, str]) -> None:
    """Write a segmentation as OME-TIFF, OME-Zarr, .npy or NIfTI, depending on the suffix of the file name.

    provenance  describes how the segmentation was made; it cannot be stored in .npy or NIfTI files

    Raises BadParameter if OME-Zarr is requested and the `zarr` extra is not installed, and OSError if the file
    cannot be written.
    """
    if is_tiff(path):
        tiff_writer.write(segmentation, path, provenance)
    elif is_zarr(path):
        from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - requires the `zarr` extra

        zarr_writer.write(segmentation, path, provenance)
    else:
        (write_array,) = (write for suffix, write in ARRAY_WRITERS.items() if path.name.lower().endswith(suffix))
        with write_atomically(path) as partial_path:
            write_array(Volume.from_array(segmentation.pixels[None], segmentation.voxel_size), partial_path)


def draw_thumbnail(volume: Volume, segmentation: Segmentation) -> bytes:
    """Draw the first channel of the middle plane as a PNG with at most `MAX_THUMBNAIL_PIXELS` pixels along each edge.

    The volume [C, Z, Y, X] is drawn in gray, and the borders of labels and classes [Z, Y, X] in the colors of the label
    file.
    """
    z = volume.shape[1] // 2
    step = -(-max(volume.shape[2:]) // MAX_THUMBNAIL_PIXELS)
    labels = None if segmentation.kind == "probabilities" else segmentation.pixels[z, ::step, ::step]
    return draw_plane(volume.read(z, z + 1)[0, 0, ::step, ::step], labels)


def draw_plane(pixels: Array, labels: Array | None = None) -> bytes:
    """Draw pixels [Y, X] in gray, and the borders of labels [Y, X] in the colors of the label file, as a PNG."""
    plane = np.nan_to_num(pixels.astype(np.float32))
    low, high = np.percentile(plane, (1, 99.8))
    gray = np.clip((plane - low) / max(high - low, 1e-9), 0, 1) * 255
    image = np.repeat(gray.astype(np.uint8)[..., None], 3, axis=-1)
    if labels is not None:
        border = np.zeros(labels.shape, bool)
        border[:-1] |= labels[:-1] != labels[1:]
        border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
        image[border] = _color_labels(np.maximum(labels[border], 1))
    return bytes(png_encode(image))


def draw_labels(labels: Array) -> bytes:
    """Draw labels [Y, X] in the colors of the label file, on a black background, as a PNG."""
    return bytes(png_encode(np.where(labels[..., None] > 0, _color_labels(np.maximum(labels, 1)), np.uint8(0))))


def _color_labels(labels: Array) -> Array:
    """Return the colors, uint8 with a last axis RGB, of labels from 1."""
    colors = (np.reshape(make_label_colors(), (3, 256)).T // 257).astype(np.uint8)
    return np.asarray(colors[(labels.astype(np.int64) - 1) % 255 + 1])
