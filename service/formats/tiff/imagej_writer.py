"""A second ImageDescription for ImageJ's own TIFF reader, which ignores OME-XML and so would lose the voxel depth.

Readers of OME-TIFF take the first ImageDescription of a page; ImageJ takes the one that begins with its name.
Micro-Manager writes both descriptions, too.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.core.types import Segmentation

COLOR_MAP = 320


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


@cache
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
