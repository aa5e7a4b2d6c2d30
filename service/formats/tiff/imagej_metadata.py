"""Second ImageDescription tag for ImageJ's built-in TIFF reader, which ignores OME-XML and the plane spacing in it.

OME-TIFF readers use the first ImageDescription of a page. ImageJ uses the description that begins with "ImageJ=".
Micro-Manager writes both descriptions as well.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.core.types import Segmentation

COLOR_MAP_TAG = 320
# Namespace of the annotation in OME-XML that describes how a result was made.
PROVENANCE_NAMESPACE = "stackseg/origin"


def make_description(segmentation: Segmentation) -> str:
    """Return the dimensions and the voxel size in ImageJ's syntax.

    Lengths are in cm, the smallest unit of the resolution tags. The display range of labels is chosen so
    that up to 255 labels have distinct colors. Probabilities are displayed from 0 to 1; otherwise ImageJ would use the
    range of the first plane.
    """
    pixels = segmentation.pixels
    lines = ["ImageJ=1.54f", f"slices={pixels.shape[-3]}"]
    axis_sizes = dict(zip(segmentation.axes, pixels.shape, strict=True))
    lines += [f"{key}={axis_sizes[axis]}" for axis, key in (("C", "channels"), ("T", "frames")) if axis in axis_sizes]
    if pixels.ndim > 3:
        lines += ["hyperstack=true", "mode=grayscale", "order=zct"]
    interval = segmentation.time_interval
    if interval is not None:
        lines += [f"finterval={interval.length:.10g}", f"tunit={interval.unit.replace('µ', 'u')}"]
    if segmentation.voxel_size is not None:
        lines += ["unit=cm", f"spacing={segmentation.voxel_size.z / 1e4:.10g}"]
    if segmentation.count is not None:
        lines += ["min=0.0", f"max={max(255, segmentation.count)}.0"]
    elif segmentation.kind == "probabilities":
        lines += ["min=0.0", "max=1.0"]
    return "\n".join(lines) + "\n"


def make_gray_value_notes(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if ImageJ shows other gray values than the stored ones, as for images with signed integers."""
    if "cf" not in header:
        return ()
    formula = f" ({header.get('c0')} + {header.get('c1')} x stored value)" if header["cf"] == 0 else ""
    return (f"ImageJ converts the gray values of the file{formula}. The stored values are used, also in measurements.",)


def make_provenance_lines(provenance: Mapping[str, str]) -> str:
    """Return the provenance of an image as additional description lines, which Image > Show Info displays in ImageJ."""
    lines = (f"stackseg_{name}={''.join(filter(str.isprintable, value))}\n" for name, value in provenance.items())
    return "".join(lines).encode("ascii", "replace").decode()


@cache
def make_label_colors() -> tuple[int, ...]:
    """Return the ColorMap tag for labels: 256 red, 256 green and 256 blue values of 16 bits. Color 0 is black.

    Hues follow the golden ratio, so consecutive labels are spread over the whole color wheel.
    """
    colors = [(0.0, 0.0, 0.0)]
    for label in range(255):
        colors.append(
            colorsys.hsv_to_rgb(label * 0.618034 % 1, (1.0, 0.55, 0.8)[label % 3], (1.0, 0.9, 0.7)[label % 3])
        )
    return tuple(round(65535 * color[channel]) for channel in range(3) for color in colors)
