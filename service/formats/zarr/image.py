"""Find the image in an OME-Zarr store and parse its metadata: axes, channels, colors and voxel size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.quantities import TimeInterval
from service.formats import sampling
from service.formats.axes import select_scene
from service.formats.sampling import Calibration
from service.formats.zarr import store as zarr_store
from service.formats.zarr.array import ZarrArray, open_array
from service.formats.zarr.store import Store, read_json, translate_errors

# Maximum number of images in a collection from which one can be selected.
_MAX_IMAGES = 1000
# Versions whose metadata has no axes, because all images have the axes TCZYX.
_VERSIONS_WITHOUT_AXES = ("", "0.1", "0.2")
_LABEL_NOTE = "The image contains labels, not intensities. Segment the image to which they belong instead."
_TRANSLATION_NOTE = (
    "The metadata of the image shifts it by a translation. Only labels that are written into the OME-Zarr image have"
    " the same translation, because separate results begin at 0."
)
_IMAGE_ADVICE = "Choose the folder of a single image, whose metadata contains `multiscales`."


@dataclass(frozen=True)
class ZarrImage:
    """Full resolution of an OME-Zarr image. `axes` has one letter per stored dimension.

    scenes            names of the images from which one can be selected, as in `Description.scenes`
    metadata_problem  clause that explains why the axes in the metadata cannot be used, or ""
    """

    container: str
    array: ZarrArray
    axes: str
    channel_names: tuple[str, ...]
    colors: tuple[str, ...]
    calibration: Calibration
    time_interval: TimeInterval | None
    notes: tuple[str, ...]
    scenes: tuple[str, ...] = ()
    metadata_problem: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""
        return self.array.codec.dtype


def find_image(store: Store, scene: int | str | None = None) -> ZarrImage:
    """Find the selected or the first image in a store, and open its full resolution.

    Raises BadFile, BadParameter, TooLarge.
    """
    folder, attributes, scenes = _find_group(store, scene)
    with translate_errors("its OME metadata"):
        multiscale, scenes = _choose_multiscale(attributes, scenes, scene)
        finest_candidates = _list_finest_candidates(list(multiscale["datasets"]))
    array, dataset = _open_finest(store, folder, finest_candidates)
    with translate_errors("its OME metadata"):
        version = str(attributes.get("version") or multiscale.get("version") or "")
        axes = _find_axes(multiscale, dataset)
        if axes is None and version in _VERSIONS_WITHOUT_AXES and len(array.shape) == 5:
            axes = "tczyx"
        letters, units = _parse_axes(axes, len(array.shape))
        scale = _parse_scale(dataset, multiscale, len(array.shape))
        scale_by_axis = dict(zip(letters, zip(scale, units, strict=True), strict=True)) if scale else {}
        names, colors = _parse_channels(attributes)
        return ZarrImage(
            f"OME-Zarr {version}".strip(),
            array,
            letters,
            names,
            colors,
            _parse_calibration(scale_by_axis),
            sampling.parse_time_interval(*scale_by_axis["T"]) if "T" in scale_by_axis else None,
            _make_scene_notes(scenes, scene)
            + (_LABEL_NOTE,) * ("image-label" in attributes)
            + (_TRANSLATION_NOTE,) * _has_translation(dataset, multiscale),
            scenes if len(scenes) > 1 else (),
            _find_order_problem(letters, array.dimension_names),
        )


def _choose_multiscale(
    attributes: dict[str, Any], scenes: tuple[str, ...], scene: int | str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the selected or the first image of a group, and the names of all images of the store."""
    multiscales = attributes["multiscales"]
    if len(multiscales) == 1 or scenes:
        return multiscales[0], scenes
    names = tuple(str(multiscale.get("name") or "") for multiscale in multiscales)
    return multiscales[select_scene(names, 0 if scene is None else scene)], names


def _make_scene_notes(scenes: tuple[str, ...], scene: int | str | None) -> tuple[str, ...]:
    if len(scenes) <= 1 or scene is not None:
        return ()
    return (
        f"The store contains {len(scenes)} images. The first one is used. To use another one, set scene to its index.",
    )


def _list_finest_candidates(datasets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metadata of the arrays that may have the full resolution, beginning with the finest scale.

    The specification requires that the first array is the largest, but some programs write the reverse order, and
    sorting paths as text puts `10` before `2`. The scales reveal the finest array without opening all of them.
    """
    scales = [_multiply_scales(dataset) for dataset in datasets]
    finest = min(range(len(datasets)), key=lambda index: scales[index])
    indices = dict.fromkeys((finest, 0, len(datasets) - 1))
    return [datasets[index] for index in indices]


def _multiply_scales(dataset: dict[str, Any]) -> float:
    """Return the size of a pixel of an array, in any unit; infinity if it is unknown."""
    sizes = [values for kind, values in _list_transformations(dataset, {}) if kind == "scale" and values]
    return math.prod(abs(float(size)) for values in sizes for size in values) if sizes else math.inf


def _open_finest(store: Store, folder: str, candidates: Sequence[dict[str, Any]]) -> tuple[ZarrArray, dict[str, Any]]:
    """Return the largest of several arrays, or the first of the largest ones, and its metadata in `multiscales`.

    Raises BadFile and TooLarge if the first one cannot be opened.
    """
    arrays = [(_open_dataset(store, folder, candidates[0]), candidates[0])]
    for dataset in candidates[1:]:
        # Only the full resolution is needed. Coarser ones may not have been copied.
        with suppress(BadFile, TooLarge):
            arrays.append((_open_dataset(store, folder, dataset), dataset))
    return max(arrays, key=lambda entry: math.prod(entry[0].shape))


def _open_dataset(store: Store, folder: str, dataset: dict[str, Any]) -> ZarrArray:
    """Open an array that the metadata of an image lists. Raises BadFile, TooLarge."""
    with translate_errors("its OME metadata"):
        path = zarr_store.join(folder, dataset["path"])
    return open_array(store, path)


def _find_group(store: Store, scene: int | str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the group of the image, its OME metadata, and the names of all images of a collection.

    Raises BadFile, BadParameter.
    """
    folder, attributes, scenes = "", _read_attributes(store, ""), tuple[str, ...]()
    if "multiscales" not in attributes and "bioformats2raw.layout" in attributes:
        groups = _list_groups(store)
        scenes = ("",) * len(groups)
        folder = groups[select_scene(scenes, 0 if scene is None else scene)]
        attributes = _read_attributes(store, folder)
    if not attributes.get("multiscales"):
        kind = "a plate" if "plate" in attributes else "a well" if "well" in attributes else "no OME-Zarr image"
        raise BadFile(f"The Zarr store contains {kind}. {_IMAGE_ADVICE}")
    return folder, attributes, scenes


def _list_groups(store: Store) -> tuple[str, ...]:
    """Return the groups of the images in a collection. They are numbered, unless the metadata of the store lists them.

    See https://ngff.openmicroscopy.org/specifications/0.5/index.html#bf2raw
    """
    series = _read_attributes(store, "OME").get("series")
    if isinstance(series, list) and series and all(isinstance(path, str) for path in series):
        return tuple(zarr_store.join("", path) for path in series[:_MAX_IMAGES])
    numbers = itertools.takewhile(lambda number: _read_attributes(store, str(number)), range(1, _MAX_IMAGES))
    return "0", *map(str, numbers)


def _read_attributes(store: Store, folder: str) -> dict[str, Any]:
    """Return the OME metadata of a group. Raises BadFile."""
    prefix = f"{folder}/" if folder else ""
    group = read_json(store, f"{prefix}zarr.json")
    with translate_errors("zarr.json"):
        if group is not None:
            if group["node_type"] != "group":
                raise BadFile(f"The folder is a single Zarr array. {_IMAGE_ADVICE}")
            return _select_ome(group.get("attributes") or {})
        return _select_ome(read_json(store, f"{prefix}.zattrs") or {})


def _select_ome(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the OME attributes of a group. From version 0.5 on, they are in `ome`.

    Some programs combine Zarr format 3 with the attributes of version 0.4, or format 2 with those of version 0.5.
    """
    return dict(attributes.get("ome", attributes))


def _find_axes(multiscale: dict[str, Any], dataset: dict[str, Any]) -> Any:
    """Return the metadata of the axes, or None if there is none.

    From version 0.6 on, the axes are those of the coordinate system that the transformations of the array lead to.
    """
    if "coordinateSystems" not in multiscale:
        return multiscale.get("axes")
    outputs = [transformation["output"] for transformation in dataset["coordinateTransformations"]]
    names = [output["name"] if isinstance(output, dict) else output for output in outputs]
    axes_by_name = {system["name"]: system["axes"] for system in multiscale["coordinateSystems"]}
    return axes_by_name[names[-1]]


def _parse_axes(metadata: Any, dimension_count: int) -> tuple[str, list[str]]:
    """Return the letter and the unit of each dimension. Unsupported dimensions get the letter Q."""
    letters, units = "", []
    for axis in metadata or ["?"] * dimension_count:
        fields = axis if isinstance(axis, dict) else {"name": axis}
        name = str(fields["name"]).upper()
        letters += {"time": "T", "channel": "C"}.get(str(fields.get("type")), name if name in {*"TCZYX"} else "Q")
        units.append(str(fields.get("unit") or ""))
    if len(letters) != dimension_count:
        raise BadFile(f"The OME metadata has {len(letters)} axes, but the array has {dimension_count} dimensions.")
    return letters, units


def _find_order_problem(letters: str, dimension_names: Sequence[str]) -> str:
    """Return a clause that explains why the axes cannot be used if the array names them in another order, or ""."""
    names = [name.upper() for name in dimension_names]
    if names == list(letters) or sorted(names) != sorted(letters):
        return ""
    return (
        f"the OME metadata lists the axes {','.join(letters).lower()}, but the array names its dimensions"
        f" {','.join(names).lower()}"
    )


def _parse_scale(dataset: dict[str, Any], multiscale: dict[str, Any], dimension_count: int) -> list[float]:
    """Return the pixel size along each dimension, or [] if the metadata has no scale."""
    transformations = _list_transformations(dataset, multiscale)
    unsupported = sorted({kind for kind, _ in transformations} - {"scale", "translation", "identity"})
    if unsupported and "coordinateSystems" in multiscale:
        raise BadFile(
            f"The OME metadata has a transformation of the type {unsupported[0][:40]!r} between the array and its axes,"
            " which is not supported. Save the image with a scale and a translation only."
        )
    pixel_sizes: list[float] = []
    for kind, values in transformations:
        if kind == "scale":
            if values is None:
                # The scale is stored in another array.
                return []
            if len(values) != dimension_count:
                raise BadFile(f"The OME metadata has {len(values)} scale factors for {dimension_count} axes.")
            pixel_sizes = list(map(mul, pixel_sizes or [1.0] * dimension_count, map(float, values)))
    return pixel_sizes


def _has_translation(dataset: dict[str, Any], multiscale: dict[str, Any]) -> bool:
    """Return whether the metadata of an array translates it. The values may be in an array, or invalid."""
    transformations = _list_transformations(dataset, multiscale)
    translations = (values for kind, values in transformations if kind == "translation")
    return any(not isinstance(values, list) or any(value != 0 for value in values) for values in translations)


def _list_transformations(dataset: dict[str, Any], multiscale: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the types of the transformations of an array, each with its values, or None without values."""
    listed = list[tuple[str, Any]]()
    # From version 0.6 on, the transformations of the whole image lead to other coordinate systems.
    sources = (dataset,) if "coordinateSystems" in multiscale else (dataset, multiscale)
    for transformation in itertools.chain(*(source.get("coordinateTransformations") or () for source in sources)):
        kind = transformation.get("type")
        parts = transformation.get("transformations") or () if kind == "sequence" else [transformation]
        listed += [(str(part.get("type")), part.get(part.get("type"))) for part in parts]
    return listed


def _parse_calibration(scale_by_axis: Mapping[str, tuple[float, str]]) -> Calibration:
    """Return the voxel size from the pixel size and unit along each axis."""
    sizes_and_units = [scale_by_axis.get(axis, (None, "")) for axis in "ZYX"]
    return sampling.parse_calibration(
        [size for size, _ in sizes_and_units], [unit for _, unit in sizes_and_units], "OME-Zarr"
    )


def _parse_channels(attributes: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names and the colors of the channels, each () if the metadata has no channels."""
    channels = (attributes.get("omero") or {}).get("channels") or ()
    names = tuple(str(channel.get("label") or "")[:200] for channel in channels)
    return names, tuple(_parse_color(channel.get("color")) for channel in channels)


def _parse_color(value: Any) -> str:
    """Return a color as #rrggbb, or "" if it is missing or invalid."""
    is_color = isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{6}", value)
    return f"#{value.lower()}" if is_color else ""
