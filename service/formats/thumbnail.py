"""A small picture of a stack with the outlines of what was found in it."""

from __future__ import annotations

import numpy as np
from imagecodecs import png_encode

from service.core.types import Segmentation, Volume
from service.formats.tiff.imagej_writer import label_colours

EDGE = 256


def draw(volume: Volume, segmentation: Segmentation) -> bytes:
    """Return a PNG of at most `EDGE` pixels along an edge: the first channel of the middle plane in grey.

    The volume is [C, Z, Y, X]; of labels and classes [Z, Y, X] the borders are drawn, in the colours of the label file.
    """
    z = volume.shape[1] // 2
    step = -(-max(volume.shape[2:]) // EDGE)
    plane = np.nan_to_num(volume.read(z, z + 1)[0, 0, ::step, ::step].astype(np.float32))
    low, high = np.percentile(plane, (1, 99.8))
    grey = np.clip((plane - low) / max(high - low, 1e-9), 0, 1) * 255
    picture = np.repeat(grey.astype(np.uint8)[..., None], 3, axis=-1)
    if segmentation.kind != "probabilities":
        labels = segmentation.pixels[z, ::step, ::step]
        border = np.zeros(labels.shape, bool)
        border[:-1] |= labels[:-1] != labels[1:]
        border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
        colours = np.reshape(label_colours(), (3, 256)).T // 257
        shown = np.maximum(labels[border], 1).astype(np.int64)
        picture[border] = colours[(shown - 1) % 255 + 1]
    return bytes(png_encode(picture))
