"""ONNX files of packages: taken in with the files that hold their tensors, and what they say of their input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.importers.package import member
from service.models.onnx import file as onnxfile
from service.models.onnx.network import image_of


def whole(path: Path) -> bytes:
    """The file with all tensors inside. Raises UnsupportedPackage where one lies outside of the file's folder."""

    def beside(location: str, offset: int, length: int | None) -> bytes:
        with member(path.parent, location).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    try:
        return onnxfile.embedded(path.read_bytes(), beside)
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError) as error:
        raise UnsupportedPackage(f"{path.name}: cannot be read as ONNX: {error}") from error


def stated(path: Path) -> dict[str, Any]:
    """`channels` and `roi_size` of a model file, where the shape of the input is fixed. Raises BrokenModel."""
    channels, *size = (image_of(onnxfile.parse(whole(path), path)).shape or (None,) * 5)[1:]
    found: dict[str, Any] = {} if channels is None else {"channels": channels}
    return found if None in size else found | {"roi_size": size}
