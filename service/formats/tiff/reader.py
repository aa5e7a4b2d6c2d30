"""Read TIFF: ImageJ hyperstacks, OME-TIFF, plain pages and microscope vendors' TIFFs, with the codecs of imagecodecs.

Classic TIFF and BigTIFF are supported in both byte orders. Files that a TIFF refers to are never opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from tifffile import TiffFile

from service.core.types import Selection
from service.formats import axes
from service.formats.axes import Layout
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, StoreBlock
from service.formats.tiff import ifd, metadata, pixels, series
from service.formats.tiff.planes.decompression import check_lossless
from service.formats.tiff.planes.stored_image import StoredImage, translate_errors


@dataclass(frozen=True)
class TiffStack(OpenStack):
    """An open TIFF with its image, axes and selected part."""

    image: StoredImage
    tiff: TiffFile

    @property
    def colors(self) -> tuple[str, ...]:
        """One color per stored channel, or "" if unknown."""
        return _get_channel_colors(self.image, self.layout)

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the images of an OME-TIFF."""
        return self.image.scenes

    @property
    def decoded_bytes(self) -> int:
        """Decoded size of all pages or tiles that contain a part of the selection."""
        return pixels.count_decoded_bytes(self.image, self.layout, self.part)

    def locate(self) -> Placement | None:
        """Locate the selected pixels, or return None if they are compressed or scattered across the file."""
        return pixels.locate(self.image, self.layout, self.part)

    def decode(self, store_block: StoreBlock) -> None:
        """Decode the selected part page by page."""
        pixels.decode(self.tiff, self.image, self.layout, self.part, store_block)


def open_stack(stream: BinaryIO, selection: Selection, limit_bytes: int) -> OpenStack:
    """Open a TIFF from a stream, which must stay open, and validate everything that can be validated without decoding.

    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    structure = ifd.scan(stream)
    stream.seek(0)
    with translate_errors("reading the tags"):
        tiff = series.open_pages(stream)
        image = series.find_image(tiff, structure, selection)
        if selection.is_labels:
            for page in image.pages:
                check_lossless(page)
        layout = axes.resolve_axes(image.axes, image.shape, selection.axes, image.metadata_problem)
        channel_names = _get_channel_names(image, layout)
        part = axes.select_part(layout, channel_names, selection)
        pixels.check_image(image, structure, layout, part, limit_bytes)
    return TiffStack(image, layout, part, channel_names, tiff)


def _get_channel_colors(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one color per channel, or "" if the file has none. Color samples are red, green and blue."""
    channel_count, sample_count = layout.get_length("C"), layout.get_length("S")
    if sample_count > 1:
        rgb = ("#ff0000", "#00ff00", "#0000ff") if sample_count in {3, 4} else ()
        return (*rgb, *("",) * (sample_count - len(rgb))) * channel_count
    return axes.match_channels(image.colors, channel_count)


def _get_channel_names(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one name per channel and color sample, such as "DAPI" or "GFP red", or "" if the file has none."""
    channel_count, sample_count = layout.get_length("C"), layout.get_length("S")
    names = axes.match_channels(image.channel_names, channel_count * sample_count)
    if any(names):
        return names
    channel_names = axes.match_channels(image.channel_names, channel_count)
    sample_names = metadata.get_sample_names(image.page, sample_count) if sample_count > 1 else ("",)
    return tuple(f"{channel} {sample}".strip() for channel in channel_names for sample in sample_names)
