"""Parse OME-XML: dimensions, the page of every plane, and invalid documents."""

from __future__ import annotations

import pytest

from service.core.errors import BadFile
from service.formats.tiff.ome import parser
from service.formats.tiff.ome.document import InconsistentOme, UnusableOme

NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
SIZES = 'SizeX="8" SizeY="6" SizeZ="3" SizeC="2" SizeT="1"'


def make_xml(content: str, *, sizes: str = SIZES, order: str = "XYZCT", extra: str = "", root: str = "") -> str:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><OME xmlns="{NAMESPACE}" {root}><Image ID="Image:0" Name="cells">'
        f'<Pixels ID="Pixels:0" DimensionOrder="{order}" Type="uint16" {sizes} {extra}>{content}</Pixels></Image></OME>'
    )


def test_dimensions_channels_and_sizes() -> None:
    channels = '<Channel ID="C:0" Name="DAPI"/><Channel ID="C:1"/>'
    extra = 'PhysicalSizeX="0.1" PhysicalSizeY="100" PhysicalSizeYUnit="nm"'

    (image,) = parser.parse(make_xml(channels + "<TiffData/>", extra=extra), 6)

    assert (image.name, image.axes, image.shape) == ("cells", "TCZ", (1, 2, 3))
    assert (image.size_y, image.size_x, image.samples_per_pixel) == (6, 8, 1)
    assert image.channel_names == ("DAPI", "")
    assert image.page_indices == (0, 1, 2, 3, 4, 5)
    assert image.physical_sizes == ("", "100", "0.1")
    assert image.physical_size_units == ("µm", "nm", "µm")


@pytest.mark.parametrize(
    ("order", "axes", "shape"), [("XYZCT", "TCZ", (1, 2, 3)), ("XYCZT", "TZC", (1, 3, 2)), ("XYTZC", "CZT", (2, 3, 1))]
)
def test_planes_have_the_order_of_the_metadata(order: str, axes: str, shape: tuple[int, ...]) -> None:
    (image,) = parser.parse(make_xml("<TiffData/>", order=order), 6)

    assert (image.axes, image.shape) == (axes, shape)


def test_planes_may_be_scattered_over_the_pages() -> None:
    planes = "".join(
        f'<TiffData IFD="{page}" FirstZ="{z}" FirstC="{c}" PlaneCount="1"/>'
        for page, (c, z) in enumerate([(1, 2), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1)])
    )

    (image,) = parser.parse(make_xml(planes), 6)

    assert image.page_indices == (1, 4, 3, 2, 5, 0)


def test_without_tiffdata_pages_are_planes_if_their_number_matches() -> None:
    assert parser.parse(make_xml(""), 6)[0].page_indices == (0, 1, 2, 3, 4, 5)


def test_samples_are_not_planes() -> None:
    sizes = 'SizeX="8" SizeY="6" SizeZ="3" SizeC="3" SizeT="1"'

    (image,) = parser.parse(make_xml('<Channel ID="C:0" SamplesPerPixel="3"/><TiffData/>', sizes=sizes), 3)

    assert (image.shape, image.samples_per_pixel) == ((1, 1, 3), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            make_xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="1000000" SizeC="2" SizeT="1"'),
            "declares 2000000 planes",
        ),
        (make_xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="0" SizeC="2" SizeT="1"'), "has no planes"),
        (make_xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="-3" SizeC="2" SizeT="1"'), "SizeZ='-3'"),
        (make_xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeC="2" SizeT="1"'), "SizeZ=None"),
        (make_xml("<TiffData/>", sizes='SizeX="eight" SizeY="6" SizeZ="3" SizeC="2" SizeT="1"'), "SizeX='eight'"),
        (make_xml("<TiffData/>", order="XYZ"), "DimensionOrder='XYZ'"),
        (make_xml("<TiffData/>", order="ZCXYT"), "DimensionOrder"),
        (make_xml('<TiffData IFD="3" PlaneCount="6"/>'), "truncated or damaged"),
        (make_xml('<TiffData IFD="0" PlaneCount="2147483647"/>'), "truncated or damaged"),
        (make_xml('<TiffData IFD="0" FirstZ="3" PlaneCount="1"/>'), "FirstZ=3"),
        (make_xml('<TiffData IFD="0" PlaneCount="5"/>'), "assigns pages to 5"),
        (make_xml('<TiffData IFD="0"/>'), "assigns pages to 1"),
        (make_xml("", sizes=SIZES.replace('SizeZ="3"', 'SizeZ="2"')), "assigns pages to 0"),
        (make_xml('<TiffData IFD="0"/><TiffData IFD="1"/>'), "plane 0 to two pages"),
        (f'<OME xmlns="{NAMESPACE}"><Image/></OME>', "exactly one Pixels"),
        (f'<!DOCTYPE OME [<!ENTITY a "aaaa">]><OME xmlns="{NAMESPACE}">&a;</OME>', "entities"),
        (f'<!DOCTYPE OME [<!ENTITY a SYSTEM "file:///etc/passwd">]><OME xmlns="{NAMESPACE}">&a;</OME>', "entities"),
        (f'<!DOCTYPE OME SYSTEM "http://example.org/ome.dtd"><OME xmlns="{NAMESPACE}"/>', "document type"),
    ],
)
def test_impossible_metadata_is_a_bad_file(text: str, message: str) -> None:
    with pytest.raises((BadFile, InconsistentOme), match=message):
        parser.parse(text, 6)


UUID_TIFFDATA = '<TiffData IFD="{}" FirstZ="{}" PlaneCount="1"><UUID FileName="{}">urn:uuid:{}</UUID></TiffData>'
TWO_PLANES = 'SizeX="8" SizeY="6" SizeZ="2" SizeC="1" SizeT="1"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<OME><Image", "not well-formed"),
        (
            f'<OME xmlns="{NAMESPACE}"><BinaryOnly MetadataFile="a.companion.ome" UUID="urn:uuid:1"/></OME>',
            "another file",
        ),
        (f'<OME xmlns="{NAMESPACE}"/>', "does not describe an image"),
        (
            make_xml('<Channel SamplesPerPixel="3"/><Channel SamplesPerPixel="1"/><TiffData/>'),
            "different numbers of samples",
        ),
        (make_xml("<TiffData/><ModuloAlongZ/>"), "ModuloAlong"),
        (
            make_xml(UUID_TIFFDATA.format(0, 0, "a.tif", 1) + UUID_TIFFDATA.format(0, 1, "b.tif", 2), sizes=TWO_PLANES),
            "several files",
        ),
        (make_xml(UUID_TIFFDATA.format(0, 0, "a.tif", 2), sizes=TWO_PLANES, root='UUID="urn:uuid:1"'), "several files"),
        (
            make_xml(
                '<TiffData IFD="0" PlaneCount="1"/>' + UUID_TIFFDATA.format(0, 1, "../b.tif", 2), sizes=TWO_PLANES
            ),
            "several files",
        ),
    ],
)
def test_metadata_without_usable_pages_is_unusable(text: str, message: str) -> None:
    with pytest.raises(UnusableOme, match=message):
        parser.parse(text, 2)


@pytest.mark.parametrize("root", ["", 'UUID="urn:uuid:1"'])
def test_renamed_single_file_is_accepted(root: str) -> None:
    planes = UUID_TIFFDATA.format(0, 0, "old-name.tif", 1) + UUID_TIFFDATA.format(1, 1, "old-name.tif", 1)

    assert parser.parse(make_xml(planes, sizes=TWO_PLANES, root=root), 2)[0].page_indices == (0, 1)


RGB_SIZES = 'SizeX="8" SizeY="6" SizeZ="3" SizeC="3" SizeT="1"'


@pytest.mark.parametrize(
    "channels", ["", '<Channel ID="C:0"/>', '<Channel ID="C:0" SamplesPerPixel="1"/>', '<Channel ID="C:0"/>' * 3]
)
def test_pages_determine_the_number_of_samples_if_the_metadata_does_not(channels: str) -> None:
    (image,) = parser.parse(make_xml(channels + "<TiffData/>", sizes=RGB_SIZES), 3, 3)

    assert (image.shape, image.samples_per_pixel) == ((1, 1, 3), 3)


def test_channels_in_separate_pages_are_not_samples() -> None:
    (image,) = parser.parse(make_xml('<Channel ID="C:0"/>' * 3 + "<TiffData/>", sizes=RGB_SIZES), 9, 1)

    assert (image.shape, image.samples_per_pixel) == ((1, 3, 3), 1)


def test_missing_planes_are_allowed_on_request() -> None:
    planes = "".join(f'<TiffData IFD="{page}" FirstC="{page % 2}" FirstZ="{page // 2}"/>' for page in range(6))
    with pytest.raises(BadFile, match="declares 6 planes, but the file has 5"):
        parser.parse(make_xml(planes), 5)

    (image,) = parser.parse(make_xml(planes), 5, allow_incomplete=True)

    assert (image.axes, image.shape, image.page_indices) == ("TCZ", (1, 2, 2), (0, 2, 1, 3))
    assert (image.declared_count, image.stored_count) == (6, 5)


def test_huge_number_of_missing_planes_takes_no_memory() -> None:
    text = make_xml('<TiffData IFD="0" PlaneCount="5"/>', sizes=SIZES.replace('SizeZ="3"', 'SizeZ="2000000000"'))

    (image,) = parser.parse(text, 5, allow_incomplete=True)

    assert (image.shape, image.stored_count) == ((1, 1, 5), 5)


@pytest.mark.parametrize(
    "content", ["".join(f'<TiffData FirstZ="{z}" {ifd} PlaneCount="1"/>' for z in range(3)) for ifd in ("", 'IFD="0"')]
)
def test_page_that_is_several_planes_is_an_error_unless_axes_are_given(content: str) -> None:
    xml = make_xml(content, sizes='SizeX="8" SizeY="6" SizeZ="3" SizeC="1" SizeT="1"')

    with pytest.raises(InconsistentOme, match=r"assigns page 0 to 3 planes.*axes=ZYX"):
        parser.parse(xml, 3)


def test_images_cannot_share_pages() -> None:
    xml = make_xml("<TiffData/>", sizes='SizeX="8" SizeY="6" SizeZ="3" SizeC="1" SizeT="1"')
    image = xml[xml.index("<Image") : xml.index("</OME>")]

    with pytest.raises(InconsistentOme, match="assigns page 0 to 2 planes"):
        parser.parse(xml.replace("</OME>", f"{image}</OME>"), 6)
