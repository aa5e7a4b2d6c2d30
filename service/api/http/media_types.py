"""The media types that request bodies may have."""

from __future__ import annotations

from typing import NamedTuple

MULTIPART = "multipart/form-data"
RAW_TYPES = frozenset(
    {
        "",
        "image/tiff",
        "image/tif",
        "image/x-tiff",
        "image/ome-tiff",
        "application/octet-stream",
        "application/zip",
        "application/x-zip-compressed",
        # The default of curl for --data-binary.
        "application/x-www-form-urlencoded",
    }
)


# Form field for the stack.
STACK_FIELD = "file"


class BodyFormat(NamedTuple):
    """Accepted formats of a request body that contains one file, either as a raw body or as a field of a form.

    media_types  accepted media types of a raw body
    encodings    accepted content encodings of a raw body
    name         description of the file for error messages
    form_field   form field for the file
    """

    media_types: frozenset[str] = RAW_TYPES
    encodings: frozenset[str] = frozenset({"identity"})
    name: str = "the TIFF itself"
    form_field: str = STACK_FIELD


STACK_BODY = BodyFormat()
LABELS_BODY = BodyFormat(
    RAW_TYPES | {"application/x-npy", "application/gzip", "application/x-gzip"},
    frozenset({"identity", "gzip"}),
    "labels as TIFF or .npy",
    "labels",
)
