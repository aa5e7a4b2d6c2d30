"""Responses with a result: the stored file, a part of it, or another file format, as the client prefers."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from fastapi import Request, Response

from service.api.dependencies import get_quota_name
from service.api.messages.headers import get_list_header
from service.api.requests.admission import Admission
from service.api.requests.downloads import ResultResponse, build_response, is_cached
from service.core.errors import BadParameter
from service.core.files.bundled import get_software_version
from service.core.quantities import TimeRange
from service.serving.results.conversion import convert_result
from service.serving.results.media_types import MEDIA_TYPES, choose_media_type
from service.serving.results.metadata import ResultMetadata
from service.serving.runtime import Runtime
from service.serving.segmentation import StackResult
from service.serving.storage.disk import translate_disk_errors
from service.serving.storage.threads import run_in_thread

ConversionFunction = Callable[[Path], tuple[Path, ResultMetadata]]


async def build_stack_response(request: Request, runtime: Runtime, stack: StackResult) -> ResultResponse:
    """Return the response with the result for a stack, in the format that the `Accept` header selects.

    Raises the errors of `choose_media_type`, and closes the file of the result.
    """
    response = build_response(stack.path, stack.metadata, stack.content, stack.file_status)
    if stack.file is not None:
        response.resources.callback(stack.file.close)
    try:
        media_type = choose_media_type(get_list_header(request.scope, b"accept"), stack.metadata)
    except BadParameter:
        await response.resources.aclose()
        raise
    if media_type == stack.metadata.media_type:
        if stack.cache_key is not None:
            response.headers["ETag"] = make_etag(stack.cache_key)
    else:
        async with response.resources:
            file = await run_in_thread(response.open)
            convert = partial(convert_result, runtime.reader, file, stack.metadata, media_type)
            response = await build_converted_response(request, runtime, file, convert, media_type)
            if stack.cache_key is not None:
                response.headers["ETag"] = make_derived_etag(stack.cache_key, media_type)
    if stack.cache_status is not None:
        response.headers["X-Cache"] = stack.cache_status
    return response


def check_accept_header(request: Request, runtime: Runtime, admission: Admission) -> None:
    """Raise BadParameter if a request accepts none of the formats of its result. Forms are checked after segmentation.

    A form may select another model, or other results.
    """
    query, spec = admission
    if spec is not None and query.output_to is None:
        kind = runtime.get_estimator(spec).get_output_kind(query.options)
        time_points = (1, 1) if isinstance(query.selection.time, TimeRange) else None
        metadata = ResultMetadata(spec.name, MEDIA_TYPES[query.measurements], "", kind, {}, time_points=time_points)
        choose_media_type(get_list_header(request.scope, b"accept"), metadata)


async def build_derived_response(
    request: Request, runtime: Runtime, file: BinaryIO, convert: ConversionFunction, variant: str
) -> Response:
    """Return the response with a conversion like `build_converted_response`, or 304 if the client already has it.

    The headers If-Match and If-None-Match are compared before anything is converted. Raises HTTPException 412.
    """
    with ExitStack() as exit_stack:
        exit_stack.callback(file.close)
        etag = _make_variant_etag(os.fstat(file.fileno()), variant)
        if is_cached(request.scope, etag):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"Cache-Control": "no-store", "ETag": etag})
        exit_stack.pop_all()
    return await build_converted_response(request, runtime, file, convert, variant)


async def build_converted_response(
    request: Request, runtime: Runtime, file: BinaryIO, convert: ConversionFunction, variant: str
) -> ResultResponse:
    """Return the response with part of a result, or with the labels converted to another format.

    `convert` reads `file`, writes the content to a file in the given folder, and returns the path and the metadata. The
    folder is deleted after the response has been sent. Closes `file`.

    `variant` is a text that differs for conversions with different content. It determines the ETag, together with the
    modification time of `file`, so that a client can resume a download although the content is written again.
    """
    with translate_disk_errors(), ExitStack() as exit_stack:
        exit_stack.callback(file.close)
        space = exit_stack.enter_context(runtime.scratch_space.make_reservation(get_quota_name(request)))
        folder = runtime.scratch.make_request_folder()
        exit_stack.callback(partial(shutil.rmtree, folder, ignore_errors=True))
        path, part_metadata = await run_in_thread(
            partial(convert, folder), runtime.decode_threads.for_client(space.client)
        )
        stored_status = os.fstat(file.fileno())
        os.utime(path, ns=(stored_status.st_atime_ns, stored_status.st_mtime_ns))
        file_status = path.stat()
        space.reserve(file_status.st_size)
        response = build_response(path, part_metadata, stat_result=file_status)
        response.headers["ETag"] = _make_variant_etag(stored_status, variant)
        response.resources.callback(exit_stack.pop_all().close)
        return response


def _make_variant_etag(file_status: os.stat_result, variant: str) -> str:
    return make_derived_etag(f"{file_status.st_mtime_ns}-{file_status.st_size}", variant)


def make_etag(key: str) -> str:
    """Return a strong ETag for a cache key. Results with the same key have the same labels; stage times may differ."""
    return f'"{key[:32]}"'


def make_derived_etag(key: str, variant: str) -> str:
    """Return a strong ETag for a conversion of a stored result, which may change with the version of StackSeg."""
    return make_etag(hashlib.sha256("\n".join((key, variant, get_software_version())).encode()).hexdigest())
