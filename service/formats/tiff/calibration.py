"""Read the voxel size of a TIFF from every place in which programs write it.

The sources are the descriptions (OME-XML, ImageJ, SCIFIO, tifffile, MetaSeries), the tags and headers of acquisition
programs, and the resolution tags. A source that is missing, damaged or incomplete is replaced by the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from tifffile import TiffFile, TiffPage
from tifffile.tifffile import shaped_description_metadata

from service.formats import sampling
from service.formats.sampling import Calibration, Resolution

_METADATA_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
# Values of UnitsID in the header of NIH Image, beginning with the first one that is a unit of length.
_NIH_UNITS = ("nm", "um", "mm", "cm", "m", "km", "inch", "ft", "mi")
_NIH_FIRST_UNIT = 5
# Tag of each page of Micro-Manager, which contains JSON.
_MICROMANAGER_TAG = 51123
_NUMBER = r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?"


def find_calibration(tiff: TiffFile, page: TiffPage, preferred: Iterable[Calibration]) -> Calibration:
    """Return the voxel size of an image.

    preferred  voxel sizes that take precedence over those that this module reads
    """
    return sampling.combine_calibrations(chain(preferred, _read_all(tiff, page)))


def _read_all(tiff: TiffFile, page: TiffPage) -> Iterator[Calibration]:
    """Yield the voxel size from each source in order of precedence. Damaged sources are skipped."""
    for read in _READERS:
        try:
            yield read(tiff, page)
        except _METADATA_ERRORS:
            continue


def read_resolution(page: TiffPage) -> Resolution:
    """Read the resolution tags."""
    ratios = [page.tags.valueof(tag) for tag in ("XResolution", "YResolution")]
    x, y = (ratio if isinstance(ratio, tuple) and len(ratio) == 2 else None for ratio in ratios)
    return Resolution((x, y), {2: "inch", 3: "cm"}.get(page.tags.valueof("ResolutionUnit", 2), ""))


def read_container_calibration(tiff: TiffFile, page: TiffPage, kind: str) -> Calibration:
    """Read the voxel size from the metadata of a container or, for other containers, from the resolution tags."""
    return _CONTAINER_READERS.get(kind, _read_tags)(tiff, page)


def _read_tags(_tiff: TiffFile, page: TiffPage) -> Calibration:
    return read_resolution(page).get_calibration()


def _read_imagej(tiff: TiffFile, page: TiffPage) -> Calibration:
    header = tiff.imagej_metadata or {}
    calibrations = [sampling.parse_imagej_calibration(header, read_resolution(page), "ImageJ metadata")]
    if "scales" in header:
        # SCIFIO never writes `spacing`.
        scifio = sampling.parse_scifio_calibration(header, "SCIFIO metadata")
        without_default = sampling.parse_imagej_calibration(header, read_resolution(page), "ImageJ metadata", None)
        calibrations = [scifio, calibrations[0] if "spacing" in header else without_default]
    return sampling.combine_calibrations(calibrations)


def _read_shaped(_tiff: TiffFile, page: TiffPage) -> Calibration:
    header: dict[str, Any] = shaped_description_metadata(page.shaped_description or "{}")
    if any(f"PhysicalSize{axis}" in header for axis in "XYZ"):
        sizes = [header.get(f"PhysicalSize{axis}") for axis in "ZYX"]
        units = [str(header.get(f"PhysicalSize{axis}Unit") or "µm") for axis in "ZYX"]
        return sampling.parse_calibration(sizes, units, "tifffile metadata")
    # tifffile writes the keys of ImageJ only if they are given. It does not omit a spacing of 1.
    return sampling.parse_imagej_calibration(header, read_resolution(page), "tifffile metadata", None)


def _read_micromanager(tiff: TiffFile, page: TiffPage) -> Calibration:
    """Read the header of a Micro-Manager stack or, for a single file without a header, the tag of the page."""
    page_header = page.tags.valueof(_MICROMANAGER_TAG)
    page_header = page_header if isinstance(page_header, Mapping) else {}
    summary = _read_micromanager_summary(tiff) or page_header.get("Summary") or {}
    pixel_sizes = (summary.get("PixelSize_um"), page_header.get("PixelSizeUm"), page_header.get("PixelSize_um"))
    pixel_size = next((size for size in pixel_sizes if size), None)
    step = summary.get("z-step_um") or page_header.get("z-step_um") or None
    return sampling.parse_calibration([step, pixel_size, pixel_size], "um", "Micro-Manager metadata")


def _read_micromanager_summary(tiff: TiffFile) -> Mapping[str, Any] | None:
    try:
        return (tiff.micromanager_metadata or {}).get("Summary")
    except _METADATA_ERRORS:
        return None


def _read_lsm(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.lsm_metadata or {}
    return sampling.parse_calibration([header.get(f"VoxelSize{axis}") for axis in "ZYX"], "m", "LSM header")


def _read_metamorph(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.stk_metadata or {}
    # The distance of each plane from the previous one. The first plane may have none.
    z = next((float(distance) for distance in header.get("ZDistance", ()) if distance), None)
    sizes = [z, header.get("YCalibration"), header.get("XCalibration")]
    return sampling.parse_calibration(sizes, str(header.get("CalibrationUnits", "")), "MetaMorph header")


def _read_metaseries(tiff: TiffFile, _page: TiffPage) -> Calibration:
    """Read the XML description of MetaSeries, which MetaMorph writes into TIFF files."""
    if "spatial-calibration-x" not in tiff.pages.first.description:
        return sampling.UNKNOWN_CALIBRATION
    headers = [
        dict(re.findall(r'<prop id="([\w-]+)"[^>]{0,80}?value="([^"]*)"', tiff.pages[index].aspage().description))
        for index in range(min(2, len(tiff.pages)))
    ]
    first = headers[0]
    if first.get("spatial-calibration-state", "on").lower() != "on":
        return sampling.UNKNOWN_CALIBRATION
    positions = [float(header["z-position"]) for header in headers if header.get("z-position")]
    step = positions[1] - positions[0] if len(positions) == 2 else 0.0
    sizes = [step or None, first.get("spatial-calibration-y"), first.get("spatial-calibration-x")]
    unit = first.get("spatial-calibration-units", "")
    return sampling.parse_calibration(sizes, ("um", unit, unit), "MetaSeries metadata")


def _read_fluoview(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.fluoview_metadata or {}
    dimensions = {
        str(name).lower(): (step or None, str(unit)) for name, _, _, step, unit in header.get("Dimensions", ())
    }
    sizes, units = zip(*(dimensions.get(axis, (None, "")) for axis in "zyx"), strict=True)
    return sampling.parse_calibration(sizes, units, "FluoView header")


def _read_scanimage(tiff: TiffFile, page: TiffPage) -> Calibration:
    """Read the plane distance of ScanImage, and the pixel size from the corners of the field of view."""
    if not tiff.is_scanimage:
        return sampling.UNKNOWN_CALIBRATION
    header = read_scanimage_header(tiff)
    sizes = [_find_scanimage_step(header), *_find_scanimage_pixel_size(header, page)]
    return sampling.parse_calibration(sizes, "um", "ScanImage header")


def read_scanimage_header(tiff: TiffFile) -> str:
    """Return the properties of an acquisition with ScanImage, one per line.

    Depending on the version, they are in the header of the file, the tag Software or the description.
    """
    page = tiff.pages.first
    frame_data = (tiff.scanimage_metadata or {}).get("FrameData") or {}
    return "\n".join([*(f"{key} = {value}" for key, value in frame_data.items()), page.software, page.description])


def _find_scanimage_step(text: str) -> float | None:
    """Return the first plane distance that is not zero."""
    steps = re.findall(rf"(?:actualStackZStepSize|stackZStepSize|acq\.zStepSize)\s*=\s*({_NUMBER})", text)
    return next((float(step) for step in steps if float(step)), None)


def _find_scanimage_pixel_size(text: str, page: TiffPage) -> tuple[float | None, float | None]:
    """Return the pixel size along y and x from the four corners of the field of view."""
    corners = re.search(r"imagingFovUm\s*=\s*([^\n]{0,400})", text)
    numbers = [float(number) for number in re.findall(_NUMBER, corners[1])] if corners else []
    if len(numbers) != 8:
        return None, None
    height, width = (max(numbers[axis::2]) - min(numbers[axis::2]) for axis in (1, 0))
    return height / page.imagelength or None, width / page.imagewidth or None


def _read_nih_image(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.nih_metadata or {}
    unit_index = int(header["UnitsID"]) + _NIH_FIRST_UNIT * (header["Version"] <= 153) - _NIH_FIRST_UNIT
    scale = float(header["XScale"])
    if not 0 <= unit_index < len(_NIH_UNITS) or scale <= 0:
        return sampling.UNKNOWN_CALIBRATION
    x, aspect_ratio = 1 / scale, float(header["PixelAspectRatio"])
    sizes = [float(header["SliceSpacing"]) or 1.0, x / aspect_ratio if aspect_ratio > 0 else x, x]
    return sampling.parse_calibration(sizes, _NIH_UNITS[unit_index], "NIH Image header")


def _read_olympus_sis(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.sis_metadata or {}
    return sampling.parse_calibration(
        [None, header.get("pixelsizey"), header.get("pixelsizex")], "m", "Olympus SIS header"
    )


def _read_fei(tiff: TiffFile, _page: TiffPage) -> Calibration:
    scan = (tiff.fei_metadata or {}).get("Scan") or {}
    return sampling.parse_calibration([None, scan.get("PixelHeight"), scan.get("PixelWidth")], "m", "FEI header")


def _read_zeiss_sem(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.sem_metadata or {}
    _, size, unit = header.get("ap_image_pixel_size") or header["ap_pixel_size"]
    return sampling.parse_calibration([None, size, size], str(unit), "Zeiss SEM header")


def _read_tvips(tiff: TiffFile, _page: TiffPage) -> Calibration:
    header = tiff.tvips_metadata or {}
    return sampling.parse_calibration(
        [None, header.get("PixelSizeY") or None, header.get("PixelSizeX") or None], "nm", "TVIPS header"
    )


_Reader = Callable[[TiffFile, TiffPage], Calibration]

_CONTAINER_READERS: Mapping[str, _Reader] = {
    "imagej": _read_imagej,
    "shaped": _read_shaped,
    "lsm": _read_lsm,
    "stk": _read_metamorph,
    "mmstack": _read_micromanager,
    "fluoview": _read_fluoview,
    "scanimage": _read_scanimage,
}
_READERS: tuple[_Reader, ...] = (
    _read_imagej,
    _read_micromanager,
    _read_lsm,
    _read_metamorph,
    _read_metaseries,
    _read_fluoview,
    _read_scanimage,
    _read_nih_image,
    _read_olympus_sis,
    _read_fei,
    _read_zeiss_sem,
    _read_tvips,
    _read_shaped,
    _read_tags,
)
