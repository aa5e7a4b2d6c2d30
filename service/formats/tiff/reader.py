"""Read TIFFs: ImageJ hyperstacks, OME-TIFF, plain pages and microscope vendors' TIFFs, with the codecs of imagecodecs.

They are classic or Big, of either byte order. No file that a file names is opened.
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
from service.formats.tiff.series import StoredImage


@dataclass(frozen=True)
class TiffStack(OpenStack):
    """An open TIFF with its image, axes and selected part."""

    image: StoredImage
    tiff: TiffFile

    @property
    def colours(self) -> tuple[str, ...]:
        """One colour per stored channel."""
        return _colour_channels(self.image, self.layout)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the pages or tiles that hold a part of the selection."""
        return pixels.count_decoded_bytes(self.image, self.layout, self.part)

    def locate(self) -> Placement | None:
        """Locate uncompressed pixels at regular distances."""
        return pixels.locate(self.image, self.layout, self.part)

    def decode(self, store: StoreBlock) -> None:
        """Decode page by page."""
        pixels.decode(self.tiff, self.image, self.layout, self.part, store)


def open_stack(stream: BinaryIO, selection: Selection, limit_bytes: int) -> OpenStack:
    """Open a TIFF, which has to stay open, and check all that can be checked before a pixel is decoded.

    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    structure = ifd.scan(stream)
    stream.seek(0)
    with series.translate_errors("reading its tags"):
        tiff = series.open_pages(stream)
        image = series.find_image(tiff, structure, trust=selection.axes is None)
        layout = axes.resolve_axes(image.axes, image.shape, selection.axes, image.doubt)
        names = _name_channels(image, layout)
        part = axes.select(layout, names, selection)
        pixels.check(image, structure, layout, part, limit_bytes)
    return TiffStack(image, layout, part, names, tiff)


def _colour_channels(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one colour per channel, "" where the file has none; colour samples are red, green and blue themselves."""
    channels, samples = layout.length("C"), layout.length("S")
    if samples > 1:
        rgb = ("#ff0000", "#00ff00", "#0000ff") if samples in {3, 4} else ()
        return (*rgb, *("",) * (samples - len(rgb))) * channels
    return image.colours if len(image.colours) == channels else ("",) * channels


def _name_channels(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one name per channel and colour sample, such as "DAPI", "GFP red", or "" where the file has none."""
    channels, samples = layout.length("C"), layout.length("S")
    channel_names = image.channels if len(image.channels) == channels else ("",) * channels
    sample_names = metadata.sample_names(image.page, samples) if samples > 1 else ("",)
    return tuple(f"{channel} {sample}".strip() for channel in channel_names for sample in sample_names)
