"""The steps from a stack to its result: read, plan, queue, segment, write and cache.

`SegmentationTask` performs all steps for a stack that was sent with a request. Jobs and folders perform additional work
between the steps, but call the same functions: `PixelSource` reads, `queue_work` plans and queues,
`segment_pixels` segments, and `write_answer` writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Protocol, TypeVar

from service.core.errors import Cancelled
from service.core.files.atomic_files import make_descriptor_path
from service.core.telemetry import Stages
from service.core.types import Options, Volume
from service.inference.types import Series
from service.serving.devices.queue.job import Job
from service.serving.reading import DeferredPixels, Pixels, PixelSource
from service.serving.results.answers import (
    Answer,
    compute_fingerprint,
    confirm_delivery,
    describe_answer,
    encode_small_answer,
    write_answer,
)
from service.serving.results.metadata import ResultMetadata, make_answer_name
from service.serving.storage.threads import FILE_THREADS, FairThreadPool, run_in_thread, wait_for

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from service.formats.sandbox.reader import Source
    from service.inference.types import Result
    from service.models.spec import ModelSpec
    from service.serving.devices.reservation import Reservation
    from service.serving.parameters import SegmentationRequest
    from service.serving.runtime import Runtime
    from service.serving.storage.scratch import SpaceReservation

log = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum size of a response that is kept in memory while it is sent.
MAX_SMALL_ANSWER_BYTES = 2**20


class ReceivedStack(Protocol):
    """A stack that was sent with a request, or that the request refers to.

    request  the request; its `source` and `digest` are known after `complete`
    name     file name of the stack
    space    disk space that is reserved for the request
    """

    request: SegmentationRequest
    name: str
    space: SpaceReservation

    @property
    def source(self) -> Source:
        """The source from which the stack is read. Available after `complete`."""

    def complete(self) -> str | None:
        """Write content that is not on disk yet; return the digest, or None for a file that may change.

        Blocks the calling thread.
        """

    def drop_content(self) -> None:
        """Free the content held in memory, because it has been read."""


class DeviceRequest(NamedTuple):
    """A segmentation to queue: the model, the pixels, the options and the name of the API key."""

    spec: ModelSpec
    pixels: Volume | Series
    options: Options
    caller: str | None


def queue_work(
    runtime: Runtime,
    request: DeviceRequest,
    work: Callable[[Reservation, Job[T]], T],
    *,
    allow_full_queue: bool = False,
) -> Job[T]:
    """Queue work on the device that is expected to complete it first. The work starts once the model is loaded.

    The function `work` runs in a thread of the device's queue. If `allow_full_queue` is set, the job is added even
    if the queue is full.

    Raises BadParameter and TooLarge and, unless `allow_full_queue` is set, QueueFull and NotReady.
    """
    spec, pixels, options, caller = request
    time_point_count = len(pixels.times) if isinstance(pixels, Series) else 1
    window_count = time_point_count * runtime.estimate(spec, pixels, options).windows
    reservation = runtime.reserve(spec.name, caller)
    needs = partial(reservation.estimate_needs, pixels, options)
    job: Job[T] = Job(
        spec.name, partial(work, reservation), window_count=window_count, needs=needs, is_ready=False, owner=caller
    )
    queue = reservation.queue
    if allow_full_queue:
        queue.put(job)
    else:
        queue.offer(job)
    reservation.request_model(job)
    return job


def segment_pixels(reservation: Reservation, job: Job[Any], pixels: Volume | Series, options: Options) -> Result:
    """Segment a volume or a series on the reserved device, in a thread of its queue.

    Raises the same errors as `DeviceModel.segment` or, for a series, as `Reservation.segment_series`.
    """
    if isinstance(pixels, Series):
        return reservation.segment_series(job, pixels, options)
    return reservation.model.segment(job, pixels, options, reservation.request, job.advance)


class StackResult(NamedTuple):
    """The result of a request, ready to be sent.

    path          path of the result file
    content       content of a small result, for which no file may exist; None for a large result
    file_status   status of the file, if the file exists and was written for this request
    cache_key     cache key, which covers everything that affects the result; None if unknown
    cache_status  whether the result was found in the cache; None without a cache
    file          open file of a cached result, which must be closed after the result has been sent
    """

    path: Path
    metadata: ResultMetadata
    content: bytes | None = None
    file_status: os.stat_result | None = None
    cache_key: str | None = None
    cache_status: Literal["hit", "miss"] | None = None
    file: BinaryIO | None = None


class QueuedSegmentation(NamedTuple):
    """The pixels of a request, and the job that segments them."""

    pixels: Pixels
    job: Job[Result]


class SegmentationTask:
    """The segmentation of one stack that was sent with a request.

    stack      the stack, which has been received completely
    cancelled  event that is set when the client has disconnected
    """

    def __init__(self, runtime: Runtime, stack: ReceivedStack, spec: ModelSpec, stages: Stages) -> None:
        self._runtime, self._stack, self._spec, self._stages = runtime, stack, spec, stages
        self.cancelled = threading.Event()
        self._request = stack.request._replace(cancelled=self.cancelled.is_set)
        self._decoded_bytes = 0

    async def run(self) -> StackResult:
        """Return the result from the cache, or read the stack, segment it on a device, and write the result.

        Raises the same errors as its steps, such as `queue_work` and `segment_pixels`, and Cancelled if the
        service stops.
        """
        if (cached_result := await self._run_step(self._complete_and_look_up, FILE_THREADS)) is not None:
            return cached_result
        work = await self._run_in_turn(self._read_and_queue, self._runtime.read_threads)
        if isinstance(work, DeferredPixels):
            await self._run_step(partial(self._reserve_disk_space, work), FILE_THREADS)
            work = await self._run_in_turn(self._decode_and_queue, self._runtime.decode_threads)
        result = await self._wait_for_job(work.job)
        self._stages.add("queue", work.job.seconds_waited)
        self._stages.update(result.seconds)
        host_threads = self._runtime.host_threads.for_client(self._stack.space.client)
        threads = FILE_THREADS if self._request.query.output_to is None else host_threads
        return await self._run_step(partial(self._make_result, work.pixels, result), threads)

    def _run_step(self, work: Callable[[], T], executor: Executor) -> Awaitable[T]:
        """Run a step in a thread. The step can poll `cancelled`."""
        return run_in_thread(work, executor, self.cancelled)

    def _complete_and_look_up(self) -> StackResult | None:
        """Complete the file on disk. Return the cached result for the file, or None if there is none."""
        runtime, stack, stages = self._runtime, self._stack, self._stages
        with stages.measure("receive"):
            self._request = self._request._replace(digest=stack.complete())
        if not runtime.result_cache.is_enabled or (key := self._compute_cache_key()) is None:
            return None
        cached_entry = runtime.result_cache.get(key, self._request.caller)
        runtime.metrics.cache_lookups("miss" if cached_entry is None else "hit").inc()
        if cached_entry is None:
            return None
        stack.drop_content()
        # The cache may evict the file while it is being sent, so the request accounts for its disk space.
        stack.space.add(os.fstat(cached_entry.file.fileno()).st_size)
        metadata, suffix = cached_entry.metadata
        seconds = {**stages.seconds, "total": stages.total_seconds}
        metadata = replace(metadata, file_name=make_answer_name(stack.name, suffix), seconds=seconds)
        path = make_descriptor_path(cached_entry.file.fileno())
        return StackResult(path, metadata, cache_key=key, cache_status="hit", file=cached_entry.file)

    def _run_in_turn(self, work: Callable[[], T], threads: FairThreadPool) -> Awaitable[T]:
        """Run a step when it is this client's turn. The time until then counts as reading."""
        queue_time = time.perf_counter()

        def begin() -> T:
            self._stages.add("read", time.perf_counter() - queue_time)
            self._check_cancelled()
            return work()

        return self._run_step(begin, threads.for_client(self._stack.space.client))

    def _read_and_queue(self) -> DeferredPixels | QueuedSegmentation:
        """Read a small file, and queue its segmentation. Do not decode a large file."""
        with self._stages.measure("read"):
            pixels = self._make_source().read_small_pixels()
        return pixels if isinstance(pixels, DeferredPixels) else self._queue_segmentation(pixels)

    def _decode_and_queue(self) -> QueuedSegmentation:
        """Decode a large file, and queue its segmentation."""
        with self._stages.measure("read"):
            pixels = self._make_source().read_pixels()
        return self._queue_segmentation(pixels)

    def _make_source(self) -> PixelSource:
        reader = self._runtime.reader.for_client(self._stack.space.client)
        return PixelSource.from_sandbox(reader, self._request, self._stack.source)

    def _reserve_disk_space(self, pixels: DeferredPixels) -> None:
        """Reserve disk space for decoded pixels, after checking that the volume can be segmented."""
        self._runtime.estimate(self._spec, pixels.segmentation_input, self._request.query.options)
        self._stack.space.reserve(pixels.nbytes)
        self._decoded_bytes = pixels.nbytes

    def _queue_segmentation(self, pixels: Pixels) -> QueuedSegmentation:
        """Queue the segmentation."""
        self._stack.drop_content()
        self._check_cancelled()
        # The model may have been replaced while the file was being received and read.
        self._spec = self._runtime.models.get_servable_spec(self._spec.name)
        request = DeviceRequest(
            self._spec, pixels.segmentation_input, self._request.query.options, self._request.caller
        )
        work = partial(segment_pixels, pixels=request.pixels, options=request.options)
        return QueuedSegmentation(pixels, queue_work(self._runtime, request, work))

    async def _wait_for_job(self, job: Job[Result]) -> Result:
        """Wait for the job. If the client disconnects, cancel the job without waiting, because its device may hang."""
        try:
            return await wait_for(job.future)
        except asyncio.CancelledError:
            job.cancel()
            raise

    def _make_result(self, pixels: Pixels, result: Result) -> StackResult:
        """Write, describe, count and cache the result."""
        if result.series is not None and result.series.error is not None:
            raise result.series.error
        runtime, stages = self._runtime, self._stages
        answer, status = encode_small_answer(self._request, result), None
        if answer is None:
            answer, status = self._write(pixels, result)
        nbytes = status.st_size if status is not None else len(answer.content or b"")
        # The decoded pixels are freed when this method returns. The result is kept until the client has received it.
        self._stack.space.add(nbytes - self._decoded_bytes)
        # The device may have loaded a newer version of the model before the job started.
        self._spec = result.spec or self._spec
        stages.update(answer.seconds)
        object_count = result.segmentation.count
        runtime.metrics.count_segmentation(
            self._spec.name, pixels.segmentation_input.voxel_count, object_count, stages.seconds
        )
        metadata = describe_answer(self._stack.name, answer, result, {**stages.seconds, "total": stages.total_seconds})
        # The key depends on the engine of the model, which is known only after the model is loaded.
        key = self._compute_cache_key()
        stack_result = StackResult(answer.path, metadata, answer.content, status, key)
        if key is None or not runtime.result_cache.is_enabled:
            return stack_result
        return self._cache_result(stack_result._replace(cache_status="miss"), key, answer.suffix)

    def _write(self, pixels: Pixels, result: Result) -> tuple[Answer, os.stat_result]:
        """Write the result, and read it back if it is small.

        Both steps run in one call, so that only the result is left on the host if the client disconnects.
        """
        self._check_cancelled()
        try:
            answer = write_answer(self._runtime.host_files, self._request, pixels.measurement_input, result)
            confirm_delivery(self._runtime.host_files, self._request)
            status = answer.path.stat()
            if status.st_size <= MAX_SMALL_ANSWER_BYTES:
                answer = answer._replace(content=answer.path.read_bytes())
        finally:
            # The folder of the request may have been deleted before the result was written to it.
            if self.cancelled.is_set():
                shutil.rmtree(self._request.folder, ignore_errors=True)
        return answer, status

    def _cache_result(self, stack_result: StackResult, key: str, suffix: str) -> StackResult:
        """Cache the result. An error such as a full disk is only logged."""
        content = stack_result.path if stack_result.content is None else stack_result.content
        try:
            self._runtime.result_cache.put(key, self._request.caller, content, (stack_result.metadata, suffix))
        except OSError as error:
            log.warning("a result could not be cached: %s", error)
        return stack_result

    def _compute_cache_key(self) -> str | None:
        """Return a cache key that covers everything that affects the result.

        Return None if the file or the result is outside the scratch folder, where other programs may change it, or if
        the model has been replaced.
        """
        request, model, models = self._request, self._spec.name, self._runtime.models
        if request.digest is None or request.query.output_to is not None or models.specs.get(model) is not self._spec:
            return None
        settings = self._runtime.get_execution_settings(model)
        return compute_fingerprint(request.caller, request.digest, models.spec_json[model], request.query, settings)

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled("The client disconnected.")
