"""Voxel sizes in the descriptions, tags and headers of microscopes and other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from service.core.quantities import VoxelSize
from service.core.types import Description, Selection
from service.formats import stack_reader

LIMIT = 2**28
SIZE = VoxelSize(0.5, 0.25, 0.2)
IN_CENTIMETERS: dict[str, Any] = {"resolution": (50_000, 40_000), "resolutionunit": "CENTIMETER"}
PER_UNIT: dict[str, Any] = {"resolution": (5, 4), "resolutionunit": "NONE"}


def inspect(path: Path, selection: Selection | None = None, **options: Any) -> Description:
    """Write a stack of 5 planes with the options of `tifffile.imwrite`, and inspect it."""
    pixels = np.arange(5 * 16 * 18, dtype=np.uint8).reshape(5, 16, 18)
    tifffile.imwrite(path, pixels, photometric="minisblack", **{"metadata": None, **options})
    return stack_reader.inspect(path, selection or Selection(), LIMIT)


def make_description(**values: Any) -> str:
    lines = {"ImageJ": "1.54f", "images": 5, "slices": 5} | values
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def make_text_tag(code: int, text: str) -> tuple[int, int, int, bytes, bool]:
    content = text.encode() + b"\0"
    return code, 2, len(content), content, True


def make_binary_tag(code: int, record: np.ndarray) -> tuple[int, int, int, bytes, bool]:
    return code, 1, record.nbytes, record.tobytes(), True


def make_fluoview_tags() -> list[Any]:
    header = np.zeros((), np.dtype(tifffile.TIFF.MM_HEADER).newbyteorder("<"))
    header["Dimensions"]["Size"] = 1
    for index, (name, length, step) in enumerate([(b"x", 18, 0.2), (b"y", 16, 0.25), (b"Z", 5, -0.5)]):
        header["Dimensions"][index] = (name, length, 0.0, step, b"um")
    return [make_binary_tag(34361, header), (34362, 12, 8, (0.0,) * 8, True)]


def make_nih_tags() -> list[Any]:
    header = np.zeros((), np.dtype(tifffile.TIFF.NIH_IMAGE_HEADER).newbyteorder("<"))
    header["Version"], header["UnitsID"], header["XScale"] = 160, 6, 5.0
    header["SliceSpacing"], header["PixelAspectRatio"], header["nSlices"] = 0.5, 0.8, 5
    return [make_binary_tag(43314, header)]


METASERIES = (
    '<MetaData><PlaneInfo><prop id="spatial-calibration-state" type="bool" value="on"/>'
    '<prop id="spatial-calibration-x" type="float" value="0.2"/>'
    '<prop id="spatial-calibration-y" type="float" value="0.25"/>'
    '<prop id="spatial-calibration-units" type="string" value="um"/></PlaneInfo></MetaData>'
)
MICROMANAGER = {"PixelSizeUm": 0.2, "Summary": {"z-step_um": -0.5, "PixelSize_um": 0.2}}
SCANIMAGE = (
    "SI.hStackManager.stackZStepSize = -0.5\nSI.hRoiManager.imagingFovUm = [-1.8 -2;1.8 -2;1.8 2;-1.8 2]\n"
    "scanimage.SI.x = 1\n"
)


@pytest.mark.parametrize(
    ("source", "size", "options"),
    [
        ("ImageJ metadata", (1.0, 0.25, 0.2), {"description": make_description(unit="micron"), **PER_UNIT}),
        ("ImageJ metadata", (1.0, 0.25, 0.2), {"description": make_description(unit="\\u00B5m"), **IN_CENTIMETERS}),
        ("ImageJ metadata", SIZE, {"description": make_description(unit="um", spacing=-0.5), **IN_CENTIMETERS}),
        (
            "SCIFIO metadata",
            SIZE,
            {
                "description": "SCIFIO=0.46.0\naxes=X,Y,Z\nlengths=18,16,5\nscales=0.2,0.25,0.5\nunits=um,um,um\n"
                "images=5\nslices=5\nunit=um\n"
            },
        ),
        ("tifffile metadata", SIZE, {"metadata": {"axes": "ZYX", "spacing": 0.5, "unit": "um"}, **PER_UNIT}),
        (
            "tifffile metadata",
            SIZE,
            {
                "metadata": {
                    "axes": "ZYX", "PhysicalSizeX": 200, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.25,
                    "PhysicalSizeZ": 0.5,
                }
            },
        ),
        ("Micro-Manager metadata", (0.5, 0.2, 0.2), {"extratags": [make_text_tag(51123, json.dumps(MICROMANAGER))]}),
        ("FluoView header", SIZE, {"extratags": make_fluoview_tags()}),
        ("NIH Image header", SIZE, {"extratags": make_nih_tags()}),
        ("ScanImage header", SIZE, {"description": SCANIMAGE}),
        ("ScanImage header", SIZE, {"software": "SI.LINE_FORMAT_VERSION = 1\n" + SCANIMAGE}),
    ],
)  # fmt: skip
def test_voxel_size_of_each_program(
    tmp_path: Path, source: str, size: tuple[float, float, float], options: dict[str, Any]
) -> None:
    description = inspect(tmp_path / "stack.tif", **options)

    assert description.voxel_size_from == source
    assert tuple(description.voxel_size or ()) == pytest.approx(tuple(size))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("y 0.25 um, x 0.2 um", {"description": METASERIES, "software": "MetaSeries"}),
        ("y 0.25 um, x 0.2 um", {"extratags": [make_text_tag(34682, "[Scan]\nPixelWidth=2e-7\nPixelHeight=2.5e-7\n")]}),
        (
            "y 0.005 um, x 0.005 um",
            {"extratags": [make_text_tag(34118, "0\nAP_IMAGE_PIXEL_SIZE\nImage Pixel Size = 5.0 nm\n")]},
        ),
        ("y 0.25 um, x 0.2 um", IN_CENTIMETERS),
    ],
)
def test_pixel_size_of_headers_without_a_plane_distance(tmp_path: Path, size: str, options: dict[str, Any]) -> None:
    description = inspect(tmp_path / "stack.tif", **options)

    assert description.voxel_size is None
    assert f"incomplete ({size})" in description.notes[-1]


def test_plane_distance_is_read_from_a_program_that_does_not_write_the_pixel_size(tmp_path: Path) -> None:
    text = "state.configName='a'\nstate.acq.zStepSize=0.5\n"

    description = inspect(tmp_path / "stack.tif", description=text, **IN_CENTIMETERS)

    assert tuple(description.voxel_size or ()) == pytest.approx(tuple(SIZE))
    assert set(description.voxel_size_from.split(" and ")) == {"ScanImage header", "resolution tags"}


def test_distance_of_metaseries_planes_is_the_difference_of_their_positions(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    with tifffile.TiffWriter(path) as tiff:
        for plane in range(3):
            prop = f'<prop id="z-position" type="float" value="{10 - plane / 2}"/>'
            description = METASERIES.replace("<PlaneInfo>", f"<PlaneInfo>{prop}")
            tiff.write(
                np.zeros((16, 18), np.uint8), description=description, software="MetaSeries", metadata=None,
                photometric="minisblack",
            )  # fmt: skip

    assert stack_reader.inspect(path, Selection(axes="ZYX"), LIMIT).voxel_size == SIZE


OME_SIZES = {"PhysicalSizeX": 0.2, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 0.5, "Channel": {"Name": "DAPI"}}


def make_ome_xml(path: Path, **changes: Any) -> str:
    tifffile.imwrite(
        path, np.zeros((5, 16, 18), np.uint8), ome=True, photometric="minisblack",
        metadata={"axes": "ZYX", **OME_SIZES, **changes},
    )  # fmt: skip
    with tifffile.TiffFile(path) as tiff:
        return str(tiff.ome_metadata)


def test_voxel_size_and_channel_names_are_kept_if_only_the_axes_of_ome_xml_are_not_usable(tmp_path: Path) -> None:
    other_file = '<TiffData IFD="0"><UUID FileName="a.tif">urn:uuid:1</UUID></TiffData><TiffData'
    ome_xml = make_ome_xml(tmp_path / "ome.tif").replace("<TiffData", other_file, 1)

    description = inspect(tmp_path / "copy.tif", Selection(axes="ZYX"), description=ome_xml.encode())

    assert (description.voxel_size, description.voxel_size_from) == (SIZE, "OME-XML")
    assert description.channels == ("DAPI",)


def test_voxel_size_is_kept_if_the_plane_count_of_imagej_is_wrong(tmp_path: Path) -> None:
    text = make_description(images=3, slices=3, unit="um", spacing=0.5)

    description = inspect(tmp_path / "stack.tif", Selection(axes="ZYX"), description=text, **PER_UNIT)

    assert (description.voxel_size, description.voxel_size_from) == (SIZE, "ImageJ metadata")


def test_negative_plane_distance_of_ome_xml_is_used_without_its_sign(tmp_path: Path) -> None:
    make_ome_xml(tmp_path / "ome.tif", PhysicalSizeZ=-0.5)

    assert stack_reader.inspect(tmp_path / "ome.tif", Selection(), LIMIT).voxel_size == SIZE


@pytest.mark.parametrize("sizes", [{"PhysicalSizeZ": 0}, {"PhysicalSizeZ": 500}, {"PhysicalSizeZ": 0.5e6}])
def test_next_source_replaces_implausible_ome_sizes_with_a_note(tmp_path: Path, sizes: dict[str, float]) -> None:
    ome_xml = make_ome_xml(tmp_path / "ome.tif", **sizes)
    tag = make_text_tag(51123, json.dumps(MICROMANAGER))

    description = inspect(tmp_path / "stack.tif", description=ome_xml.encode(), extratags=[tag])

    assert (description.voxel_size, description.voxel_size_from) == (VoxelSize(0.5, 0.2, 0.2), "Micro-Manager metadata")
    assert any("along z" in note for note in description.notes)


def test_damaged_headers_are_skipped(tmp_path: Path) -> None:
    tags = [make_text_tag(51123, "{"), make_text_tag(34118, "AP_PIXEL_SIZE\n"), (43314, 1, 4, b"abcd", True)]

    description = inspect(tmp_path / "stack.tif", extratags=tags, **IN_CENTIMETERS)

    assert "y 0.25 um, x 0.2 um" in description.notes[-1]
