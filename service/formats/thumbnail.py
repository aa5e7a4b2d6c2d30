"""Thumbnails of stacks with the outlines of the segmented objects."""

from __future__ import annotations

import numpy as np
from imagecodecs import png_encode

from service.core.types import Segmentation, Volume
from service.formats.tiff.imagej_metadata import make_label_colors

MAX_EDGE_PIXELS = 256


def draw(volume: Volume, segmentation: Segmentation) -> bytes:
    """Draw the first channel of the middle plane as a PNG with at most `MAX_EDGE_PIXELS` pixels along each edge.

    The volume [C, Z, Y, X] is drawn in gray, and the borders of labels and classes [Z, Y, X] in the colors of the label
    file.
    """
    z = volume.shape[1] // 2
    step = -(-max(volume.shape[2:]) // MAX_EDGE_PIXELS)
    plane = np.nan_to_num(volume.read(z, z + 1)[0, 0, ::step, ::step].astype(np.float32))
    low, high = np.percentile(plane, (1, 99.8))
    gray = np.clip((plane - low) / max(high - low, 1e-9), 0, 1) * 255
    image = np.repeat(gray.astype(np.uint8)[..., None], 3, axis=-1)
    if segmentation.kind != "probabilities":
        labels = segmentation.pixels[z, ::step, ::step]
        border = np.zeros(labels.shape, bool)
        border[:-1] |= labels[:-1] != labels[1:]
        border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
        colors = np.reshape(make_label_colors(), (3, 256)).T // 257
        border_labels = np.maximum(labels[border], 1).astype(np.int64)
        image[border] = colors[(border_labels - 1) % 255 + 1]
    return bytes(png_encode(image))
