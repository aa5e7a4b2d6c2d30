"""A second ImageDescription for ImageJ's own TIFF reader, which ignores OME-XML and so would lose the voxel depth.

Readers of OME-TIFF take the first ImageDescription of a page; ImageJ takes the one that begins with its name.
Micro-Manager writes both descriptions, too.
"""

from __future__ import annotations

import colorsys
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO

from service.formats.tiff import ifd

if TYPE_CHECKING:
    from service.core.types import Segmentation

IMAGE_DESCRIPTION, COLOR_MAP = 270, 320
_ASCII = 2


def describe(segmentation: Segmentation) -> str:
    """Return dimensions and sampling in ImageJ's syntax; lengths in cm, the smallest unit of the resolution tags.

    The display range of labels is such that each of up to 255 has a colour of its own.
    """
    pixels = segmentation.pixels
    lines = ["ImageJ=1.54f", f"slices={pixels.shape[-3]}"]
    lengths = dict(zip(segmentation.axes, pixels.shape, strict=True))
    lines += [f"{word}={lengths[axis]}" for axis, word in (("C", "channels"), ("T", "frames")) if axis in lengths]
    if pixels.ndim > 3:
        lines += ["hyperstack=true", "mode=grayscale", "order=zct"]
    interval = segmentation.time_interval
    if interval is not None:
        lines += [f"finterval={interval.length:.10g}", f"tunit={interval.unit.replace('µ', 'u')}"]
    if segmentation.voxel_size is not None:
        lines += ["unit=cm", f"spacing={segmentation.voxel_size.z / 1e4:.10g}"]
    if segmentation.count is not None:
        lines += ["min=0.0", f"max={max(255, segmentation.count)}.0"]
    return "\n".join(lines) + "\n"


def describe_origin(origin: Mapping[str, str]) -> str:
    """Return facts about an image as further lines of a description, which ImageJ shows with Image > Show Info."""
    lines = (f"stackseg_{name}={''.join(filter(str.isprintable, fact))}\n" for name, fact in origin.items())
    return "".join(lines).encode("ascii", "replace").decode()


def label_colours() -> tuple[int, ...]:
    """Return 256 reds, greens and blues of 16 bits, as the tag ColorMap has them; 0 is black, neighbours differ.

    Hues follow the golden ratio, so that any run of labels is spread over the circle. ImageJ reads the tag with grey
    images of 8, 16 and 32 bits; other readers look at it for palette images only.
    """
    colours = [(0.0, 0.0, 0.0)]
    for label in range(255):
        colours.append(
            colorsys.hsv_to_rgb(label * 0.618034 % 1, (1.0, 0.55, 0.8)[label % 3], (1.0, 0.9, 0.7)[label % 3])
        )
    return tuple(round(65535 * colour[channel]) for channel in range(3) for colour in colours)


def append_description(stream: BinaryIO, text: str) -> int:
    """Add an ImageDescription to the first page of a TIFF, after its present one, and return the text's position.

    Text and a longer copy of the page directory go to the end of the file; everything else stays in place.
    """
    data = text.encode("ascii") + b"\0"
    packing, offset = ifd.read_header(stream)
    stream.seek(offset)
    count = packing.count.unpack(stream.read(packing.count.size))[0]
    entries = [stream.read(packing.entry.size) for _ in range(count)]
    following = stream.read(packing.offset.size)
    position = _aligned_end(stream.seek(0, os.SEEK_END))
    stream.seek(position)
    stream.write(data)
    value = packing.offset.pack(position)
    entry = packing.entry.pack(IMAGE_DESCRIPTION, _ASCII, len(data), value)
    before = sum(packing.entry.unpack(known)[0] <= IMAGE_DESCRIPTION for known in entries)
    entries.insert(before, entry)
    directory = _aligned_end(stream.tell())
    stream.seek(directory)
    stream.write(packing.count.pack(count + 1) + b"".join(entries) + following)
    stream.seek(packing.offset.size)
    stream.write(packing.offset.pack(directory))
    return position


def _aligned_end(position: int) -> int:
    return position + -position % 8
