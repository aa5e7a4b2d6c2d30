"""Import ONNX files: embed tensors that are stored in other files, and read the shape of the input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.exporters.model_keys import NAME, parse_model_keys
from service.models.graphs.onnx import file as onnxfile
from service.models.importers.draft import find_file


def embed_external_data(path: Path) -> bytes:
    """Return the bytes of an ONNX file with all tensors embedded.

    Raises UnsupportedPackage if a tensor is stored outside the folder that contains the file.
    """

    def read_part(location: str, offset: int, length: int | None) -> bytes:
        with find_file(path.parent, location).open("rb") as file:
            # Limit the length to the size of the file, because a read allocates memory for the whole length first.
            available_bytes = max(os.fstat(file.fileno()).st_size - offset, 0)
            file.seek(offset)
            return file.read(available_bytes if length is None else min(length, available_bytes))

    try:
        return onnxfile.embed_external_data(onnxfile.read_bytes(path), read_part)
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError) as error:
        raise UnsupportedPackage(f"{path.name} cannot be read as ONNX: {error}") from error


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of an exported model, or {}, and the input settings `channels` and `roi_size` of an ONNX file.

    Raises BrokenModel, or UnsupportedPackage if the stored keys cannot be read.
    """
    model = onnxfile.parse_model(embed_external_data(path), path)
    text = model.metadata.get(NAME)
    keys = {} if text is None else parse_model_keys(text, f"metadata_props.{NAME}")
    shape = onnxfile.find_image(model).shape
    _, channels, *size = shape or (None,) * 5
    content: dict[str, Any] = {} if channels is None else {"channels": channels}
    return keys, content if None in size else content | {"roi_size": size}
