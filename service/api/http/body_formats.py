"""Media types and encodings of the request bodies that the service accepts."""

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
        # The default of curl with --data-binary.
        "application/x-www-form-urlencoded",
    }
)

# Form field for the stack.
STACK_FIELD = "file"


class BodyFormat(NamedTuple):
    """Accepted formats of a request body with one file, which is the raw body or a field of a form.

    media_types       accepted media types of a raw body
    encodings         accepted content encodings of a raw body
    file_description  description of the file for error messages
    form_field        form field for the file
    """

    media_types: frozenset[str] = RAW_TYPES
    encodings: frozenset[str] = frozenset({"identity"})
    file_description: str = "the TIFF file"
    form_field: str = STACK_FIELD


STACK_BODY = BodyFormat()
LABELS_BODY = BodyFormat(
    RAW_TYPES | {"application/x-npy", "application/gzip", "application/x-gzip"},
    frozenset({"identity", "gzip"}),
    "the labels as a TIFF or .npy file",
    "labels",
)
