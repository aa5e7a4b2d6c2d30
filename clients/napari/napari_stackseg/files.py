"""Results of StackSeg in files, and sample stacks of models, as layers with voxel size."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import tifffile

from napari_stackseg.connection import CONNECTION, Connection

LayerData = tuple[Any, dict[str, Any], str]

# Namespace of the record of provenance, which all results have.
_NAMESPACE = "stackseg/origin"
_NAMES = {"T": "t", "C": "c", "Z": "z", "Y": "y", "X": "x"}


def get_reader(path: str | list[str]) -> Callable[[str], list[LayerData]] | None:
    """Return the reader for a result of StackSeg; None for all other files, which other plugins read."""
    if not isinstance(path, str):
        return None
    try:
        with tifffile.TiffFile(path) as tiff:
            return read_result if _NAMESPACE in (tiff.ome_metadata or "") else None
    except (tifffile.TiffFileError, OSError):
        return None


def read_result(path: str) -> list[LayerData]:
    """Read labels, classes or probabilities, with the voxel size in micrometers."""
    with tifffile.TiffFile(path) as tiff:
        image = tifffile.xml2dict(tiff.ome_metadata or "")["OME"]["Image"]
        pixels = image["Pixels"]
        series, axes = tiff.series[0], tiff.series[0].axes
        data = series.asarray()
    kind = image["Name"]
    # Stacks of a single plane.
    while "Z" not in axes and data.ndim < 3:
        data, axes = data[None], f"Z{axes}"
    arguments = {"name": kind, **_read_scales(pixels, axes.replace("C", ""))}
    if kind != "probabilities":
        return [(data, arguments, "labels")]
    if "C" in axes:
        arguments["channel_axis"] = axes.index("C")
        arguments["name"] = [channel["Name"] for channel in _as_list(pixels["Channel"])]
    return [(data, arguments, "image")]


def _read_scales(pixels: dict[str, Any], axes: str) -> dict[str, Any]:
    sizes = {axis: pixels.get(f"PhysicalSize{axis}") for axis in "ZYX"} | {"T": pixels.get("TimeIncrement")}
    units = {axis: pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "ZYX"}
    units["T"] = pixels.get("TimeIncrementUnit", "s")
    return {
        "scale": [float(sizes[axis] or 1) for axis in axes],
        "units": [units[axis] if sizes[axis] else "pixel" for axis in axes],
        "axis_labels": [_NAMES[axis] for axis in axes],
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def read_sample(connection: Connection, model: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the sample stack of a model (None: the default model), and the arguments of its layer."""
    with connection.open() as client:
        if model is None:
            model = next(model.name for model in client.models() if model.is_default)
        content = client.sample(model)
        inspection = client.inspect(content, model=model)
    data = tifffile.imread(BytesIO(content)).reshape(inspection.stored_shape)
    arguments: dict[str, Any] = {"name": f"{model} sample"}
    if inspection.voxel_size is not None:
        sizes = dict(zip("ZYX", inspection.voxel_size, strict=True))
        arguments["scale"] = [sizes.get(axis, 1) for axis in inspection.axes]
        arguments["units"] = ["µm" if axis in sizes else "pixel" for axis in inspection.axes]
    arguments["axis_labels"] = [_NAMES.get(axis, axis) for axis in inspection.axes]
    return data, arguments


def open_sample() -> list[LayerData]:
    """Return the sample of the default model of the server, for the menu File > Open Sample."""
    data, arguments = read_sample(CONNECTION, None)
    return [(data, arguments, "image")]
