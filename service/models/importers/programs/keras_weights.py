"""Read the weights of Keras layers from untrusted HDF5 files, as written by `keras.Model.save_weights`.

h5py is optional, so this module is imported only when such a file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from service.core.errors import UnsupportedPackage

# Maximum number of layers, and of bytes in the list of a layer's weights.
MAX_LAYERS = 10_000
MAX_ATTRIBUTE_BYTES = 2**16


class KerasWeights:
    """Layers of an open weights file. Methods raise UnsupportedPackage for missing, linked or unexpected data."""

    def __init__(self, file: h5py.File, name: str) -> None:
        if len(file) > MAX_LAYERS:
            raise UnsupportedPackage(f"{name} contains {len(file)} layers; at most {MAX_LAYERS} are supported.")
        self._file, self._name = file, name

    def list_layers(self, kind: str) -> list[str]:
        """Return the layers to which Keras gave names such as `kind_3`, in the order in which they were created."""
        matches = [re.fullmatch(rf"{kind}(?:_v1)?(?:_(\d{{1,9}}))?", layer) for layer in self._file]
        return [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1] or 0))]

    def read(self, layer: str, weight: str, shape: Sequence[int]) -> NDArray[np.float32]:
        """Return a weight of a layer, such as `kernel`, in float32. The stored shape must be `shape`."""
        location = f"{self._name}: {layer}/{weight}"
        dataset = self._open(self._find_path(layer, weight))
        if not isinstance(dataset, h5py.Dataset) or dataset.dtype not in (np.float32, np.float64):
            raise UnsupportedPackage(f"{location} is not an array of floating-point numbers.")
        if dataset.shape != tuple(shape):
            raise UnsupportedPackage(
                f"{location} has the shape {dataset.shape}, but config.json describes a network with {tuple(shape)}."
            )
        # Arrays without stored values, and compressed ones, could be much larger than the file.
        if dataset.external or dataset.is_virtual or dataset.id.get_storage_size() < dataset.nbytes:
            raise UnsupportedPackage(f"{location} is compressed, incomplete or stored in another file.")
        values: NDArray[np.float32] = dataset[()].astype(np.float32)
        if not np.isfinite(values).all():
            raise UnsupportedPackage(f"{location} contains NaN or infinity. Train the model again.")
        return values

    def _find_path(self, layer: str, weight: str) -> str:
        """Return the path of a weight, which Keras lists in the attribute `weight_names` of the layer."""
        group = self._open(layer)
        if not isinstance(group, h5py.Group) or "weight_names" not in group.attrs:
            raise UnsupportedPackage(f"{self._name}: {layer} is not a layer saved by Keras.")
        if group.attrs.get_id("weight_names").get_storage_size() > MAX_ATTRIBUTE_BYTES:
            raise UnsupportedPackage(f"{self._name}: {layer} has too many weights.")
        names = [item.decode() if isinstance(item, bytes) else str(item) for item in group.attrs["weight_names"]]
        path = next((name for name in names if name.rpartition("/")[2].removesuffix(":0") == weight), None)
        if path is None:
            raise UnsupportedPackage(f"{self._name}: the layer {layer} has no {weight}.")
        return f"{layer}/{path}"

    def _open(self, path: str) -> Any:
        """Return the object at a path. Links to other objects and files are not followed."""
        item: Any = self._file
        for name in path.split("/"):
            link = item.get(name, getlink=True) if isinstance(item, h5py.Group) else None
            if not isinstance(link, h5py.HardLink):
                raise UnsupportedPackage(
                    f"{self._name}: {path} is missing, or it is a link. Models that config.json does not describe, and"
                    " links, are not supported."
                )
            item = item[name]
        return item


@contextmanager
def open_weights(path: Path) -> Iterator[KerasWeights]:
    """Open a weights file. Raises UnsupportedPackage if it is not HDF5."""
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise UnsupportedPackage(f"{path.name} is not an HDF5 file, or it is damaged: {error}") from error
    with file:
        yield KerasWeights(file, path.name)
