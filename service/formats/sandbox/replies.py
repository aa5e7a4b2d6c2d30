"""Validation of the replies of child processes, which a hostile file may have compromised."""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from service.core.errors import AmbiguousAxes, BadFile, BadParameter, RequestError, TooLarge, UnsupportedMedia
from service.core.types import Description
from service.formats.placement import VolumeLocation
from service.formats.sandbox.request_files import INVALID_REPLY_MESSAGE

# Maximum length of a text, such as a message or the name of a channel.
MAX_TEXT_LENGTH = 2**16
# Maximum length of all texts of a reply.
MAX_TOTAL_TEXT_LENGTH = 2**22
# Maximum number of stored dimensions.
MAX_DIMENSIONS = 32
_MAX_NUMBER = 2**63 - 1
_ERROR_TYPES = {error.slug: error for error in (AmbiguousAxes, BadFile, BadParameter, TooLarge, UnsupportedMedia)}
_DESCRIPTION_ADAPTER = TypeAdapter(Description)
_LOCATION_ADAPTER = TypeAdapter(VolumeLocation)
# The message of an error, the parameter that caused it, and suggested values.
_ERROR_ADAPTER = TypeAdapter(tuple[str, str | None, dict[str, str]])

# All functions raise ValueError, TypeError, LookupError or an error of the service for an invalid reply.


def parse_error(reply: dict[str, Any]) -> RequestError | OSError | None:
    """Return the error in a reply, or None if the reply contains a result."""
    if "errno" in reply:
        if not isinstance(reply["errno"], int) or reply["errno"] not in errno.errorcode:
            raise ValueError(INVALID_REPLY_MESSAGE)
        return OSError(reply["errno"], errno.errorcode[reply["errno"]])
    if "error" not in reply:
        return None
    message, parameter, suggested = _ERROR_ADAPTER.validate_python(
        (reply["message"], reply.get("parameter"), reply.get("suggested", {}))
    )
    _check_texts([message, parameter or "", *suggested, *suggested.values()])
    error_type: type[RequestError] = _ERROR_TYPES.get(str(reply["error"]), BadFile)
    return error_type(message, parameter=parameter, suggested=suggested)


def parse_description(result: Any) -> Description:
    """Return the description in a reply."""
    description = _DESCRIPTION_ADAPTER.validate_python(result)
    texts = (description.container, description.axes, description.dtype, description.voxel_size_from)
    lists = (description.channels, description.notes, description.colours, description.scenes)
    _check_texts([*texts, description.problem, *itertools.chain(*lists)])
    if not (_has_valid_pixels(description) and _has_valid_times(description)):
        raise ValueError(INVALID_REPLY_MESSAGE)
    return description


def _has_valid_pixels(description: Description) -> bool:
    return (
        np.dtype(description.dtype).kind in "uifcb"
        and min(description.shape) >= 1
        and len(description.stored_shape) == len(description.axes) <= MAX_DIMENSIONS
        and min(description.stored_shape, default=0) >= 0
        and max(math.prod(description.shape), math.prod(description.stored_shape)) <= _MAX_NUMBER
        and all(size is None or 0 < size < math.inf for size in description.partial_voxel_size or ())
    )


def _has_valid_times(description: Description) -> bool:
    """Return whether the selected time points and the scene of the example exist."""
    first, stop = description.time_points or (0, 1)
    return (
        1 <= description.times <= _MAX_NUMBER
        and 0 <= first < stop <= description.times
        and (description.example_scene is None or 0 <= description.example_scene < len(description.scenes))
    )


def parse_location(result: dict[str, Any], limit_bytes: int) -> VolumeLocation:
    """Return the location of pixels in a reply. Whether the pixels are within their file is checked later."""
    location = _LOCATION_ADAPTER.validate_python({**result, "placement": result})
    _check_texts([*location.channels, *location.notes])
    placement = location.placement
    if np.dtype(placement.dtype).kind not in "uif" or min(placement.shape) < 1 or placement.nbytes > limit_bytes:
        raise ValueError(INVALID_REPLY_MESSAGE)
    if len(location.channels) != placement.shape[0]:
        raise ValueError(INVALID_REPLY_MESSAGE)
    return location


def _check_texts(texts: Iterable[str]) -> None:
    lengths = [len(text) for text in texts]
    if max(lengths, default=0) > MAX_TEXT_LENGTH or sum(lengths) > MAX_TOTAL_TEXT_LENGTH:
        raise ValueError(INVALID_REPLY_MESSAGE)
