"""Media types of results, as sent in the header Content-Type, and their selection by the header Accept."""

from __future__ import annotations

from collections.abc import Sequence

from service.core.errors import BadParameter
from service.core.quantities import parse_float
from service.serving.results.metadata import ResultMetadata

TIFF_TYPE = "image/tiff"
TABLE_TYPE = "text/csv"
ARCHIVE_TYPE = "application/zip"
# A result that is saved on the host as an OME-Zarr, and the description of a result that was saved on the host.
ZARR_TYPE = "application/vnd+zarr"
RECEIPT_TYPE = "application/json"
# Formats to which stored labels can be converted. GZIP_TYPE is another name of compressed NIfTI.
NPY_TYPE = "application/x-npy"
NIFTI_TYPE = "application/x-nifti"
GZIP_TYPE = "application/gzip"
OZX_TYPE = "application/x-ozx"
LABEL_TYPES = (NPY_TYPE, NIFTI_TYPE, GZIP_TYPE, OZX_TYPE)

# By value of the parameter `measurements`.
MEDIA_TYPES = {None: TIFF_TYPE, "csv": TABLE_TYPE, "zip": ARCHIVE_TYPE}
# Allowed suffixes of a result that is saved on the host, by media type.
OUTPUT_SUFFIXES = {TIFF_TYPE: (".tif", ".tiff", ".zarr"), TABLE_TYPE: (".csv",), ARCHIVE_TYPE: (".zip",)}
# Media ranges that accept any result, and those of errors, which clients often send by default.
_UNSPECIFIC_TYPES = frozenset(("", "*", "application/octet-stream"))
_ERROR_TYPES = frozenset(("application/json", "application/problem+json"))
MAX_QUOTED_CHARS = 200


def choose_media_type(accept_header: str, metadata: ResultMetadata) -> str:
    """Return the media type that is available for a result and preferred by an Accept header.

    Preferences follow RFC 9110, section 12.5.1. Among equal preferences, the first one in the header wins. If the
    header accepts none of the available media types, return the stored media type if the result is a receipt, or if
    the header contains an unspecific type, or types of errors and none of results. Otherwise, raise BadParameter.
    """
    available_types = _list_available_types(metadata)
    ranks = _parse_accept_header(accept_header)
    best_type = max(available_types, key=lambda media_type: _get_rank(media_type, ranks))
    if _get_rank(best_type, ranks) > _LOWEST_RANK:
        return best_type
    accepted_types = [name for name, (quality, _) in ranks.items() if quality > 0]
    names_result = not {ARCHIVE_TYPE, TABLE_TYPE, TIFF_TYPE, *LABEL_TYPES}.isdisjoint(accepted_types)
    default_types = _UNSPECIFIC_TYPES if names_result else _UNSPECIFIC_TYPES | _ERROR_TYPES
    if metadata.media_type == RECEIPT_TYPE or not default_types.isdisjoint(accepted_types):
        return metadata.media_type
    raise _make_accept_error(accept_header, accepted_types, metadata, available_types)


def _list_available_types(metadata: ResultMetadata) -> list[str]:
    """Return the media types that a result has, or can be converted to."""
    available_types = [metadata.media_type]
    if metadata.media_type == ARCHIVE_TYPE:
        available_types += [TIFF_TYPE, TABLE_TYPE]
    # Files in the label formats have no time or channel axis.
    if (
        metadata.media_type in {ARCHIVE_TYPE, TIFF_TYPE}
        and metadata.time_points is None
        and metadata.kind != "probabilities"
    ):
        available_types += LABEL_TYPES
    return available_types


def _make_accept_error(
    accept_header: str, accepted_types: Sequence[str], metadata: ResultMetadata, available_types: Sequence[str]
) -> BadParameter:
    """Return the error about an Accept header. It suggests a value of `measurements` that the header accepts."""
    message = (
        f"Accept: {accept_header[:MAX_QUOTED_CHARS]!r} accepts none of the formats of this result, which are"
        f" {', '.join(available_types)}."
    )
    values = {TABLE_TYPE: "csv", ARCHIVE_TYPE: "zip"}
    if metadata.media_type == TABLE_TYPE:
        # An archive contains both the labels and the table.
        label_types = LABEL_TYPES if metadata.time_points is None else ()
        values |= dict.fromkeys((TIFF_TYPE, *label_types), "zip")
    value = next((values[name] for name in accepted_types if name in values), None)
    if value is None or metadata.kind != "labels":
        return BadParameter(f"{message} Accept one of these, or omit the header.")
    return BadParameter(
        f"{message} Segment the stack with measurements={value}, or accept one of these formats.",
        parameter="measurements",
        suggested={"measurements": value},
    )


_LOWEST_RANK = (0.0, 0)


def _parse_accept_header(accept_header: str) -> dict[str, tuple[float, int]]:
    """Return the rank of each media range: the quality from 0 to 1, and a number that is higher for earlier ranges."""
    ranks: dict[str, tuple[float, int]] = {}
    for position, element in enumerate(accept_header.split(",")):
        media_range, *parameters = (token.strip().lower() for token in element.split(";"))
        qualities = (token[2:] for token in parameters if token.startswith("q="))
        try:
            quality = parse_float(next(qualities, "1"))
        except ValueError:
            quality = 1.0
        ranks.setdefault(media_range, (quality, -position))
    return ranks


def _get_rank(media_type: str, ranks: dict[str, tuple[float, int]]) -> tuple[float, int]:
    """Return the rank of the most specific media range that contains a media type."""
    main_type = media_type.partition("/")[0]
    rank = next((ranks[name] for name in (media_type, f"{main_type}/*", "*/*") if name in ranks), _LOWEST_RANK)
    return rank if rank[0] > 0 else _LOWEST_RANK
