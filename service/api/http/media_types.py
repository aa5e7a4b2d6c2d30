"""The media types of bodies that are accepted."""

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
        # What curl sends for --data-binary when no header is given.
        "application/x-www-form-urlencoded",
    }
)


# Of a form.
STACK_PART = "file"


class BodyKinds(NamedTuple):
    """Media types and content encodings of a body that is the file itself, and what such a file is called.

    part  of a form that has the file
    """

    media_types: frozenset[str] = RAW_TYPES
    encodings: frozenset[str] = frozenset({"identity"})
    name: str = "the TIFF itself"
    part: str = STACK_PART


STACKS = BodyKinds()
LABELS = BodyKinds(
    RAW_TYPES | {"application/x-npy", "application/gzip", "application/x-gzip"},
    frozenset({"identity", "gzip"}),
    "labels as TIFF or .npy",
    "labels",
)
