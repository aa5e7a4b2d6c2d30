"""OME-XML: dimensions, the page of every plane, and what is refused."""

from __future__ import annotations

import pytest

from service.core.errors import BadFile
from service.formats.tiff import ome
from service.formats.tiff.ome import UnusableOme

NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
SIZES = 'SizeX="8" SizeY="6" SizeZ="3" SizeC="2" SizeT="1"'


def xml(inside: str, *, sizes: str = SIZES, order: str = "XYZCT", more: str = "", root: str = "") -> str:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><OME xmlns="{NAMESPACE}" {root}><Image ID="Image:0" Name="cells">'
        f'<Pixels ID="Pixels:0" DimensionOrder="{order}" Type="uint16" {sizes} {more}>{inside}</Pixels></Image></OME>'
    )


def test_dimensions_channels_and_sizes() -> None:
    channels = '<Channel ID="C:0" Name="DAPI"/><Channel ID="C:1"/>'
    more = 'PhysicalSizeX="0.1" PhysicalSizeY="100" PhysicalSizeYUnit="nm"'

    (image,) = ome.parse(xml(channels + "<TiffData/>", more=more), 6)

    assert (image.name, image.axes, image.shape) == ("cells", "TCZ", (1, 2, 3))
    assert (image.size_y, image.size_x, image.samples) == (6, 8, 1)
    assert image.channels == ("DAPI", "")
    assert image.pages == (0, 1, 2, 3, 4, 5)
    assert image.sizes == ("", "100", "0.1")
    assert image.units == ("µm", "nm", "µm")


@pytest.mark.parametrize(
    ("order", "axes", "shape"), [("XYZCT", "TCZ", (1, 2, 3)), ("XYCZT", "TZC", (1, 3, 2)), ("XYTZC", "CZT", (2, 3, 1))]
)
def test_planes_are_ordered_as_stated(order: str, axes: str, shape: tuple[int, ...]) -> None:
    (image,) = ome.parse(xml("<TiffData/>", order=order), 6)

    assert (image.axes, image.shape) == (axes, shape)


def test_planes_may_be_scattered_over_the_pages() -> None:
    planes = "".join(
        f'<TiffData IFD="{page}" FirstZ="{z}" FirstC="{c}" PlaneCount="1"/>'
        for page, (c, z) in enumerate([(1, 2), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1)])
    )

    (image,) = ome.parse(xml(planes), 6)

    assert image.pages == (1, 4, 3, 2, 5, 0)


def test_without_tiffdata_the_pages_count_if_their_number_fits() -> None:
    assert ome.parse(xml(""), 6)[0].pages == (0, 1, 2, 3, 4, 5)


def test_samples_inside_a_page_are_no_planes() -> None:
    sizes = 'SizeX="8" SizeY="6" SizeZ="3" SizeC="3" SizeT="1"'

    (image,) = ome.parse(xml('<Channel ID="C:0" SamplesPerPixel="3"/><TiffData/>', sizes=sizes), 3)

    assert (image.shape, image.samples) == ((1, 1, 3), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="1000000" SizeC="2" SizeT="1"'),
            "promises 2000000 planes",
        ),
        (xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="0" SizeC="2" SizeT="1"'), "without any plane"),
        (xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="-3" SizeC="2" SizeT="1"'), "SizeZ='-3'"),
        (xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeC="2" SizeT="1"'), "SizeZ=None"),
        (xml("<TiffData/>", sizes='SizeX="eight" SizeY="6" SizeZ="3" SizeC="2" SizeT="1"'), "SizeX='eight'"),
        (xml("<TiffData/>", order="XYZ"), "DimensionOrder='XYZ'"),
        (xml("<TiffData/>", order="ZCXYT"), "DimensionOrder"),
        (xml('<TiffData IFD="3" PlaneCount="6"/>'), "cut short or damaged"),
        (xml('<TiffData IFD="0" PlaneCount="2147483647"/>'), "cut short or damaged"),
        (xml('<TiffData IFD="0" FirstZ="3" PlaneCount="1"/>'), "FirstZ=3"),
        (xml('<TiffData IFD="0" PlaneCount="5"/>'), "places only 5"),
        (xml('<TiffData IFD="0"/>'), "places only 1"),
        (xml("", sizes=SIZES.replace('SizeZ="3"', 'SizeZ="2"')), "places only 0"),
        (xml('<TiffData IFD="0"/><TiffData IFD="1"/>'), "plane 0 in the file twice"),
        (f'<OME xmlns="{NAMESPACE}"><Image/></OME>', "exactly one Pixels"),
        (f'<!DOCTYPE OME [<!ENTITY a "aaaa">]><OME xmlns="{NAMESPACE}">&a;</OME>', "entities"),
        (f'<!DOCTYPE OME [<!ENTITY a SYSTEM "file:///etc/passwd">]><OME xmlns="{NAMESPACE}">&a;</OME>', "entities"),
        (f'<!DOCTYPE OME SYSTEM "http://example.org/ome.dtd"><OME xmlns="{NAMESPACE}"/>', "document type"),
    ],
)
def test_what_cannot_be_true_is_a_bad_file(text: str, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        ome.parse(text, 6)


UUID = '<TiffData IFD="{}" FirstZ="{}" PlaneCount="1"><UUID FileName="{}">urn:uuid:{}</UUID></TiffData>'
STACK = 'SizeX="8" SizeY="6" SizeZ="2" SizeC="1" SizeT="1"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<OME><Image", "not well-formed"),
        (
            f'<OME xmlns="{NAMESPACE}"><BinaryOnly MetadataFile="a.companion.ome" UUID="urn:uuid:1"/></OME>',
            "another file",
        ),
        (f'<OME xmlns="{NAMESPACE}"/>', "no image"),
        (
            xml('<Channel SamplesPerPixel="3"/><Channel SamplesPerPixel="1"/><TiffData/>'),
            "different numbers of samples",
        ),
        (xml("<TiffData/><ModuloAlongZ/>"), "ModuloAlong"),
        (xml(UUID.format(0, 0, "a.tif", 1) + UUID.format(0, 1, "b.tif", 2), sizes=STACK), "several files"),
        (xml(UUID.format(0, 0, "a.tif", 2), sizes=STACK, root='UUID="urn:uuid:1"'), "several files"),
        (xml('<TiffData IFD="0" PlaneCount="1"/>' + UUID.format(0, 1, "../b.tif", 2), sizes=STACK), "several files"),
    ],
)
def test_what_leaves_the_pages_open_is_unclear(text: str, message: str) -> None:
    with pytest.raises(UnusableOme, match=message):
        ome.parse(text, 2)


@pytest.mark.parametrize("root", ["", 'UUID="urn:uuid:1"'])
def test_a_single_file_may_have_been_renamed(root: str) -> None:
    planes = UUID.format(0, 0, "old-name.tif", 1) + UUID.format(1, 1, "old-name.tif", 1)

    assert ome.parse(xml(planes, sizes=STACK, root=root), 2)[0].pages == (0, 1)
