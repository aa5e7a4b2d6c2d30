"""A second ImageDescription for ImageJ's own TIFF reader, which knows no OME-XML and would lose the distance of planes.

Readers of OME-TIFF take the first ImageDescription of a page; ImageJ takes the one that begins with its name.
Micro-Manager writes its files so, too.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from service.core.volume import Segmentation
from service.formats import ifd

IMAGE_DESCRIPTION = 270
_ASCII = 2


def for_imagej(segmentation: Segmentation) -> str:
    """Dimensions and sampling as ImageJ writes them; lengths in cm, as the resolution tags have no smaller unit."""
    pixels = segmentation.pixels
    lines = ["ImageJ=1.54f", f"slices={pixels.shape[-3]}"]
    if pixels.ndim == 4:
        lines += [f"channels={pixels.shape[0]}", "hyperstack=true", "mode=grayscale", "order=zct"]
    if segmentation.voxel_size is not None:
        lines += ["unit=cm", f"spacing={segmentation.voxel_size.z / 1e4:.10g}"]
    if segmentation.count is not None:
        lines += ["min=0.0", f"max={max(1, segmentation.count)}.0"]
    return "\n".join(lines) + "\n"


def append(stream: BinaryIO, text: str) -> int:
    """Give the first page of a TIFF a further ImageDescription, after the one that it has; the rest stays in place.

    Returns where the text is.
    """
    data = text.encode("ascii") + b"\0"
    flavour, offset = ifd.header(stream)
    stream.seek(offset)
    count = flavour.count.unpack(stream.read(flavour.count.size))[0]
    entries = [stream.read(flavour.entry.size) for _ in range(count)]
    following = stream.read(flavour.offset.size)
    place = _aligned_end(stream.seek(0, os.SEEK_END))
    stream.seek(place)
    stream.write(data)
    value = flavour.offset.pack(place)
    entry = flavour.entry.pack(IMAGE_DESCRIPTION, _ASCII, len(data), value)
    before = sum(flavour.entry.unpack(known)[0] <= IMAGE_DESCRIPTION for known in entries)
    entries.insert(before, entry)
    directory = _aligned_end(stream.tell())
    stream.seek(directory)
    stream.write(flavour.count.pack(count + 1) + b"".join(entries) + following)
    stream.seek(flavour.offset.size)
    stream.write(flavour.offset.pack(directory))
    return place


def _aligned_end(position: int) -> int:
    return position + -position % 8
