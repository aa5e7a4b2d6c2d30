"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.api.admission import PREFER, REQUEST, RESPOND_ASYNC, admit, prefers_async, select_model
from service.api.cancellation import run_while_connected
from service.api.dependencies import get_async_jobs, get_runtime
from service.api.direct_route import DirectRoute
from service.api.headers import get_header
from service.api.request_body import ReceivedFile, receive_file
from service.api.responses import ANSWER, FileSnapshot, ResultResponse, build_response
from service.api.routes.jobs import ACCEPTED, accept_job, answer_part
from service.api.threads import FILE_THREADS, HOST_FILE_THREADS, run_and_follow, run_in_thread
from service.core.errors import Cancelled, NotReady
from service.core.timing import Stages
from service.formats.sandbox.parent import descriptor_path
from service.inference.types import Result
from service.models.spec import ModelSpec
from service.serving.devices.job import Job
from service.serving.results.answers import (
    Answer,
    LargePixels,
    Pixels,
    answer_name,
    describe_answer,
    encode_small_answer,
    fingerprint,
    read_pixels,
    settle,
    write_answer,
)
from service.serving.results.cache import CachedResult
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.parts import choose_media_type
from service.serving.runtime import Runtime

router = APIRouter(tags=["segmentation"], route_class=DirectRoute)

log = logging.getLogger(__name__)


@router.post(
    "/segment",
    response_class=FileResponse,
    responses=ANSWER | ACCEPTED,
    openapi_extra=REQUEST | {"parameters": [*REQUEST["parameters"], PREFER]},
)
async def segment(request: Request) -> Response:
    """Segment a 3D stack.

    Post the TIFF itself (`curl --data-binary @stack.tif`), or a form with the field `file`, or name a file of the
    service's host with `input`. Axes and voxel size are taken from the file; what it does not say can be stated, and
    what is ambiguous is refused rather than guessed.
    `Accept` chooses the form of the labels as at `GET /jobs/{id}/result`.
    With `Prefer: respond-async` the answer is that of `POST /jobs`.
    """
    runtime = await get_runtime(request)
    query, spec = await admit(request, runtime)
    if prefers_async(request):
        response = await accept_job(request, runtime, await get_async_jobs(request), query)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    stages = Stages()
    async with receive_file(request, runtime, query, stages) as file:
        work = _SegmentRequest(runtime, file, spec or select_model(runtime, file.received.query), stages)
        answer = await run_while_connected(request, work.answer(request))
        answer.resources.push_async_callback(file.resources.pop_all().aclose)
        return answer


class _CacheHit(NamedTuple):
    """The result of an earlier request for the same, under its cache key."""

    key: str
    result: CachedResult[tuple[AnswerMetadata, str]]


class _NewResult(NamedTuple):
    """A segmentation, and the file to send where it is small enough to be made at once."""

    result: Result
    answer: Answer | None


class _SegmentRequest:
    """One request after its file was received: read it, wait for the device, segment, write, cache.

    A trip to a thread and back takes a small request longer than most of the work there. One thread therefore does all
    work before the device's queue, and the thread in which the device's work ends writes a small result.
    """

    def __init__(self, runtime: Runtime, file: ReceivedFile, spec: ModelSpec, stages: Stages) -> None:
        self._runtime, self._file, self._spec, self._stages = runtime, file, spec, stages
        self._caller, self._client = file.received.caller, file.space.client
        self._digest: str | None = None
        self._pixels: Pixels
        self._voxels = self._decoded_bytes = 0
        self._job: Job[_NewResult] | None = None
        # Set when nobody waits for the answer any more.
        self._cancelled = threading.Event()

    async def answer(self, request: Request) -> ResultResponse:
        """Return the answer, from the cache or newly computed. The job is cancelled when the caller is."""
        try:
            result = await self._find_or_compute()
            answer = self._answer_cached(result) if isinstance(result, _CacheHit) else await self._answer_new(result)
            return await self._convert(request, answer)
        finally:
            if self._job is not None:
                self._job.cancel()

    async def _find_or_compute(self) -> _NewResult | _CacheHit:
        """Return the cached result, or that of a job.

        One thread looks into the cache and reads the file, unless it has to wait for its turn to read: a cached result
        need not. What takes long to decode has another turn, once it is known how large it is.
        """
        readers, begin = self._runtime.read_threads, self._find_or_read
        if self._runtime.result_cache.enabled and readers.busy(self._client):
            cached = await run_in_thread(self._find_cached, FILE_THREADS, self._cancelled)
            if cached is not None:
                return cached
            begin = self._read_and_submit
        found = await self._read_in_turn(begin, large=False)
        if isinstance(found, LargePixels):
            found = await self._read_in_turn(partial(self._read_and_submit, large=True), large=True)
        assert not isinstance(found, LargePixels)  # noqa: S101 - all of it was read
        return found

    async def _read_in_turn(
        self, begin: Callable[[float], Future[_NewResult] | _CacheHit | LargePixels], *, large: bool
    ) -> _NewResult | _CacheHit | LargePixels:
        """Call `begin` in a thread that reads; return what it returns, or the result of the job that it submitted."""
        readers = self._runtime.decode_threads if large else self._runtime.read_threads
        try:
            found: _NewResult | _CacheHit | LargePixels = await run_and_follow(
                partial(begin, time.perf_counter()), readers.of(self._client), self._cancelled
            )
        except Cancelled:
            raise NotReady("The service stopped before the request was finished; send it again.") from None
        return found

    def _find_or_read(self, submitted: float) -> Future[_NewResult] | _CacheHit | LargePixels:
        """Look into the cache, else read and submit, without counting the time of looking as reading."""
        waited = time.perf_counter() - submitted
        return self._find_cached() or self._read_and_submit(time.perf_counter() - waited)

    def _find_cached(self) -> _CacheHit | None:
        """Complete the file and return the cached result for it. Blocks."""
        file, runtime = self._file, self._runtime
        with self._stages.measure("receive"):
            self._digest = file.complete()
        if not runtime.result_cache.enabled or (key := self._cache_key()) is None:
            return None
        cached = runtime.result_cache.get(key, self._caller)
        runtime.metrics.cache_lookups("miss" if cached is None else "hit").inc()
        if cached is None:
            return None
        file.drop_content()
        return _CacheHit(key, cached)

    def _read_and_submit(self, submitted: float, *, large: bool = False) -> Future[_NewResult] | LargePixels:
        """Read the file and submit the job, in a thread that was asked for at `submitted` on `time.perf_counter`.

        Unless `large`, return what is known of a file that takes long to decode, if it may be segmented at all.
        """
        file, stages = self._file, self._stages
        stages.add("read", time.perf_counter() - submitted)
        received, query, cancelled = file.received, file.received.query, self._cancelled.is_set
        self._check_cancelled()
        with stages.measure("read"):
            pixels = read_pixels(self._runtime.reader, query, file.source, received.folder, cancelled, large=large)
        if isinstance(pixels, LargePixels):
            self._runtime.estimate(self._spec, pixels.segmented, query.options)
            file.space.reserve(pixels.nbytes)
            self._decoded_bytes = pixels.nbytes
            return pixels
        self._pixels = pixels
        file.drop_content()
        self._voxels = self._pixels.segmented.voxels
        self._check_cancelled()
        # While the file came and was read, the model may have been replaced.
        self._spec = self._runtime.models.servable_spec(self._spec.name)
        self._job = self._runtime.submit(self._spec, self._pixels.segmented, query.options, self._finish, self._caller)
        return self._job.future

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("Nobody waits for the answer any more.")

    def _finish(self, result: Result) -> _NewResult:
        """Encode a small result in the thread that has segmented it; this may be called before `submit` returns."""
        if result.series is not None and result.series.fault is not None:
            raise result.series.fault
        answer = encode_small_answer(self._file.received._replace(digest=self._digest), result)
        if answer is not None:
            # Nothing needs the input's pixels any more.
            del self._pixels
        return _NewResult(result, answer)

    async def _convert(self, request: Request, answer: ResultResponse) -> ResultResponse:
        """Return the answer in the form that the request prefers: its labels, or a part of it."""
        metadata = answer.metadata
        media_type = choose_media_type(get_header(request.scope, b"accept"), metadata)
        if media_type == metadata.media_type:
            return answer
        async with answer.resources:
            file = await run_in_thread(answer.open)
            converted = await answer_part(request, self._runtime, file, metadata, media_type)
        if (cache := answer.headers.get("x-cache")) is not None:
            converted.headers["X-Cache"] = cache
        return converted

    def _answer_cached(self, cached: _CacheHit) -> ResultResponse:
        metadata, suffix = cached.result.metadata
        seconds = {**self._stages.seconds, "total": self._stages.total}
        metadata = replace(metadata, file_name=answer_name(self._file.name, suffix), seconds=seconds)
        file = cached.result.file
        # It may have to make room for others in the cache while it is sent.
        self._file.space.add(os.fstat(file.fileno()).st_size)
        response = build_response(descriptor_path(file.fileno()), metadata, ETag=make_etag(cached.key), X_Cache="hit")
        response.resources.callback(file.close)
        return response

    async def _answer_new(self, new: _NewResult) -> ResultResponse:
        runtime, stages, result = self._runtime, self._stages, new.result
        # A device may have loaded another one of this name by the time the job began.
        spec = self._spec = result.spec or self._spec
        assert self._job is not None  # noqa: S101 - it has made the result
        stages.add("queue", self._job.seconds_waited)
        stages.update(result.seconds)
        if new.answer is None:
            threads = FILE_THREADS if self._file.received.query.output_to is None else HOST_FILE_THREADS
            answer, snapshot = await run_in_thread(partial(self._write, result), threads)
        else:
            answer, snapshot = new.answer, FileSnapshot(None, new.answer.content)
        # Nothing refers to decoded pixels once this returns; the result stays until the client has taken it.
        self._file.space.add(snapshot.nbytes - self._decoded_bytes)
        stages.update(answer.seconds)
        runtime.metrics.count_segmentation(spec.name, self._voxels, result.segmentation.count, stages.seconds)
        seconds = {**stages.seconds, "total": stages.total}
        metadata = describe_answer(self._file.name, answer, result, seconds)
        # The key depends on how the model runs, which is known only once it is loaded.
        if (key := self._cache_key()) is None:
            return build_response(answer.path, metadata, snapshot)
        if not runtime.result_cache.enabled:
            return build_response(answer.path, metadata, snapshot, ETag=make_etag(key))
        await run_in_thread(partial(self._cache, key, answer, metadata))
        return build_response(answer.path, metadata, snapshot, ETag=make_etag(key), X_Cache="miss")

    def _cache(self, key: str, answer: Answer, metadata: AnswerMetadata) -> None:
        """Cache the answer; on a full disk this caller gets it nevertheless. Blocks."""
        content = answer.path if answer.content is None else answer.content
        try:
            self._runtime.result_cache.put(key, self._caller, content, (metadata, answer.suffix))
        except OSError as error:
            log.warning("A result is not kept: %s", error)

    def _write(self, result: Result) -> tuple[Answer, FileSnapshot]:
        """Write the answer and read it back if it is small. Blocks.

        One call does both, so that a client that disconnects meanwhile leaves nothing on the host but its result.
        """
        received = self._file.received._replace(digest=self._digest)
        answer = write_answer(self._runtime.host_files, received, self._pixels.measured, result)
        settle(self._runtime.host_files, received)
        return answer, FileSnapshot.read(answer.path)

    def _cache_key(self) -> str | None:
        """Return a key of all that decides about the answer.

        None for a file that others may read or change, and where the model was replaced meanwhile.
        """
        query = self._file.received.query
        if self._digest is None or query.output_to is not None:
            return None
        model, runtime = self._spec.name, self._runtime
        if runtime.models.specs.get(model) is not self._spec:
            return None
        facts, settings = runtime.models.spec_json[model], runtime.execution_settings(model)
        return fingerprint(self._caller, self._digest, facts, query, settings)


def make_etag(key: str) -> str:
    """Return a strong validator: equal keys mean equal labels, though not equal times in the headers."""
    return f'"{key[:32]}"'
