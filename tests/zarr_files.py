"""OME-Zarr stores for tests, written with zarr-python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import zarr

UNITS = {"t": "second", "z": "micrometer", "y": "micrometer", "x": "micrometer"}
SCALE = {"t": 2.0, "c": 1.0, "z": 0.5, "y": 0.2, "x": 0.2}


def write_zarr(
    path: Path,
    pixels: np.ndarray,
    axes: str = "zyx",
    version: str = "0.5",
    channels: tuple[str, ...] = (),
    **options: Any,
) -> Path:
    """Write a single-resolution image with voxels of 0.5 x 0.2 x 0.2 um. `options` go to `Group.create_array`."""
    group = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    keys: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if version == "0.4" else {}
    if version != "0.4":
        keys["dimension_names"] = list(axes)
    array = group.create_array("0", shape=pixels.shape, dtype=pixels.dtype, **(keys | options))
    array[...] = pixels
    kinds = {"t": "time", "c": "channel"}
    multiscales: dict[str, Any] = {
        "axes": [
            {"name": axis, "type": kinds.get(axis, "space")} | ({"unit": UNITS[axis]} if axis in UNITS else {})
            for axis in axes
        ],
        "datasets": [
            {
                "path": "0",
                "coordinateTransformations": [{"type": "scale", "scale": [SCALE[axis] for axis in axes]}],
            }
        ],
    }
    ome: dict[str, Any] = {"multiscales": [multiscales]}
    if channels:
        ome["omero"] = {"channels": [{"label": label, "color": "00FF00"} for label in channels]}
    if version == "0.4":
        multiscales["version"] = version
        group.attrs.update(ome)
    else:
        group.attrs["ome"] = {"version": version} | ome
    return path


def zip_store(folder: Path) -> Path:
    """Write a ZIP file of a store, including its folder, next to it. Return its path."""
    return Path(shutil.make_archive(str(folder), "zip", folder.parent, folder.name))
