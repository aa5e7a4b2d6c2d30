"""The path of one stack from its source to its answer: read, plan, admit, run, write, cache.

`SegmentationTask` takes a posted stack all the way. Jobs and folders, which do more between the steps, call the same
functions: `PixelSource` reads, `queue_work` plans and admits, `Reservation.segment` runs, `write_answer` writes.
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
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, Protocol, TypeVar

from service.core.errors import Cancelled
from service.core.files.whole_file import descriptor_path
from service.core.telemetry import Stages
from service.core.types import Options, Volume
from service.inference.types import Series
from service.serving.devices.queue.job import Job
from service.serving.reading import LargePixels, Pixels, PixelSource
from service.serving.results.answers import (
    Answer,
    answer_name,
    describe_answer,
    encode_small_answer,
    fingerprint,
    settle,
    write_answer,
)
from service.serving.storage.threads import FILE_THREADS, HOST_FILE_THREADS, run_in_thread, wait_for

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from service.formats.sandbox.reader import Source
    from service.inference.types import Result
    from service.models.spec import ModelSpec
    from service.serving.devices.reservation import Reservation
    from service.serving.parameters import SegmentationRequest
    from service.serving.results.metadata import AnswerMetadata
    from service.serving.runtime import Runtime
    from service.serving.storage.scratch import Hold

log = logging.getLogger(__name__)

T = TypeVar("T")

# The largest answer that is kept in memory while it is sent.
SMALL_ANSWER_BYTES = 2**20


class ReceivedStack(Protocol):
    """A stack that came with a request or is named by it.

    received  the request; its `source` and `digest` are known once the file is complete
    name      of the file
    space     disk space that the request holds
    """

    received: SegmentationRequest
    name: str
    space: Hold

    @property
    def source(self) -> Source:
        """What the stack is read from, once it is complete."""

    def complete(self) -> str | None:
        """Write what is not on disk yet; return the digest, None for a file that others may change. Blocks."""

    def drop_content(self) -> None:
        """Forget content in memory that was read."""


class DeviceRequest(NamedTuple):
    """A segmentation to queue: the model, the pixels, the options and the caller."""

    spec: ModelSpec
    pixels: Volume | Series
    options: Options
    caller: str | None


def queue_work(
    runtime: Runtime, request: DeviceRequest, work: Callable[[Reservation, Job[T]], T], *, wait: bool = False
) -> Job[T]:
    """Queue work for the device that answers a request first. It begins once the model is loaded.

    work  runs in a thread of the device's queue
    wait  whether the job waits for a place in a full queue instead of being refused

    Raises BadParameter, TooLarge, and unless it waits QueueFull and NotReady.
    """
    spec, pixels, options, caller = request
    points = len(pixels.times) if isinstance(pixels, Series) else 1
    windows = points * runtime.estimate(spec, pixels, options).windows
    reservation = runtime.reserve(spec.name, caller)
    needs = partial(reservation.needs, pixels, options)
    job: Job[T] = Job(spec.name, partial(work, reservation), windows=windows, needs=needs, ready=False, owner=caller)
    queue = reservation.queue
    if wait:
        queue.put(job)
    else:
        queue.offer(job)
    reservation.take(job)
    return job


class SegmentedStack(NamedTuple):
    """The answer to a request, ready to be sent.

    path      its file
    content   of the file if that is small, which then need not exist; None: it is large
    status    of the file if it exists and was written for this request
    key       identifies everything that decided about it; None if that is not known
    cache     whether it comes from the cache, or was not there; None without a cache
    file      the open file of a cached answer, to be closed once it is sent
    """

    path: Path
    metadata: AnswerMetadata
    content: bytes | None = None
    status: os.stat_result | None = None
    key: str | None = None
    cache: Literal["hit", "miss"] | None = None
    file: BinaryIO | None = None


class SegmentationTask:
    """One posted stack on its way from its file to its answer.

    stack      the file, which has been received
    cancelled  set once the client has disconnected
    """

    def __init__(self, runtime: Runtime, stack: ReceivedStack, spec: ModelSpec, stages: Stages) -> None:
        self._runtime, self._stack, self._spec, self._stages = runtime, stack, spec, stages
        self.cancelled = threading.Event()
        self._request = stack.received._replace(cancelled=self.cancelled.is_set)
        self._decoded_bytes = 0

    async def run(self) -> SegmentedStack:
        """Find the answer in the cache, or read the stack, segment it on a device, and write the answer.

        Raises what reading, `queue_work`, `Reservation.segment` and writing raise, and Cancelled if the service stops.
        """
        if (cached := await self._run(self._find_cached, FILE_THREADS)) is not None:
            return cached
        pixels = await self._read()
        job = await self._run(partial(self._queue, pixels), FILE_THREADS)
        result = await self._wait(job)
        self._stages.add("queue", job.seconds_waited)
        self._stages.update(result.seconds)
        threads = FILE_THREADS if self._request.query.output_to is None else HOST_FILE_THREADS
        return await self._run(partial(self._answer, pixels, result), threads)

    def _run(self, work: Callable[[], T], executor: Executor) -> Awaitable[T]:
        """Run a step in a thread; it can poll `cancelled`."""
        return run_in_thread(work, executor, self.cancelled)

    def _find_cached(self) -> SegmentedStack | None:
        """Complete the file, and return the cached answer for it."""
        runtime, stack, stages = self._runtime, self._stack, self._stages
        with stages.measure("receive"):
            self._request = self._request._replace(digest=stack.complete())
        if not runtime.result_cache.enabled or (key := self._cache_key()) is None:
            return None
        cached = runtime.result_cache.get(key, self._request.caller)
        runtime.metrics.cache_lookups("miss" if cached is None else "hit").inc()
        if cached is None:
            return None
        stack.drop_content()
        # It may have to make room for others in the cache while it is sent.
        stack.space.add(os.fstat(cached.file.fileno()).st_size)
        metadata, suffix = cached.metadata
        seconds = {**stages.seconds, "total": stages.total}
        metadata = replace(metadata, file_name=answer_name(stack.name, suffix), seconds=seconds)
        path = descriptor_path(cached.file.fileno())
        return SegmentedStack(path, metadata, key=key, cache="hit", file=cached.file)

    async def _read(self) -> Pixels:
        """Read the file in this client's turn. A large one has another turn, once it is known that there is space."""
        client, runtime = self._stack.space.client, self._runtime
        pixels = await self._run(self._timed(PixelSource.read_small_pixels), runtime.read_threads.of(client))
        if isinstance(pixels, Pixels):
            return pixels
        await self._run(partial(self._reserve, pixels), FILE_THREADS)
        return await self._run(self._timed(PixelSource.read_pixels), runtime.decode_threads.of(client))

    def _timed(self, read: Callable[[PixelSource], T]) -> Callable[[], T]:
        """Return a call that reads, and counts the time until its turn and that of reading."""
        asked = time.perf_counter()

        def read_in_turn() -> T:
            self._check_cancelled()
            try:
                return read(PixelSource.sandboxed(self._runtime.reader, self._request, self._stack.source))
            finally:
                self._stages.add("read", time.perf_counter() - asked)

        return read_in_turn

    def _reserve(self, pixels: LargePixels) -> None:
        """Reserve space for decoded pixels, if they may be segmented."""
        self._runtime.estimate(self._spec, pixels.segmented, self._request.query.options)
        self._stack.space.reserve(pixels.nbytes)
        self._decoded_bytes = pixels.nbytes

    def _queue(self, pixels: Pixels) -> Job[Result]:
        """Queue the segmentation."""
        self._stack.drop_content()
        self._check_cancelled()
        # While the file came and was read, the model may have been replaced.
        self._spec = self._runtime.models.servable_spec(self._spec.name)
        options, caller = self._request.query.options, self._request.caller

        def segment(reservation: Reservation, job: Job[Result]) -> Result:
            return reservation.segment(job, pixels.segmented, options)

        return queue_work(self._runtime, DeviceRequest(self._spec, pixels.segmented, options, caller), segment)

    async def _wait(self, job: Job[Result]) -> Result:
        """Wait for the job. A job whose client has gone is cancelled and left behind: its device may hang."""
        try:
            return await wait_for(job.future)
        except asyncio.CancelledError:
            job.cancel()
            raise

    def _answer(self, pixels: Pixels, result: Result) -> SegmentedStack:
        """Write, describe, count and cache the answer."""
        if result.series is not None and result.series.fault is not None:
            raise result.series.fault
        runtime, stages = self._runtime, self._stages
        answer, status = encode_small_answer(self._request, result), None
        if answer is None:
            answer, status = self._write(pixels, result)
        nbytes = status.st_size if status is not None else len(answer.content or b"")
        # Nothing refers to decoded pixels once this returns; the answer stays until the client has taken it.
        self._stack.space.add(nbytes - self._decoded_bytes)
        # A device may have loaded another model of this name by the time the job began.
        self._spec = result.spec or self._spec
        stages.update(answer.seconds)
        objects = result.segmentation.count
        runtime.metrics.count_segmentation(self._spec.name, pixels.segmented.voxels, objects, stages.seconds)
        metadata = describe_answer(self._stack.name, answer, result, {**stages.seconds, "total": stages.total})
        # The key depends on how the model runs, which is known only once it is loaded.
        key = self._cache_key()
        stack = SegmentedStack(answer.path, metadata, answer.content, status, key)
        if key is None or not runtime.result_cache.enabled:
            return stack
        return self._cache(stack._replace(cache="miss"), key, answer.suffix)

    def _write(self, pixels: Pixels, result: Result) -> tuple[Answer, os.stat_result]:
        """Write the answer, and read it back if it is small.

        One call does both, so that a client that disconnects meanwhile leaves nothing on the host but its result.
        """
        self._check_cancelled()
        try:
            answer = write_answer(self._runtime.host_files, self._request, pixels.measured, result)
            settle(self._runtime.host_files, self._request)
            status = answer.path.stat()
            if status.st_size <= SMALL_ANSWER_BYTES:
                answer = answer._replace(content=answer.path.read_bytes())
        finally:
            # The request may have deleted its folder before the answer was written.
            if self.cancelled.is_set():
                shutil.rmtree(self._request.folder, ignore_errors=True)
        return answer, status

    def _cache(self, stack: SegmentedStack, key: str, suffix: str) -> SegmentedStack:
        """Cache the answer; on a full disk this caller gets it nevertheless."""
        content = stack.path if stack.content is None else stack.content
        try:
            self._runtime.result_cache.put(key, self._request.caller, content, (stack.metadata, suffix))
        except OSError as error:
            log.warning("A result is not kept: %s", error)
        return stack

    def _cache_key(self) -> str | None:
        """Return a key of all that decides about the answer.

        None for a file that others may read or change, and where the model was replaced meanwhile.
        """
        request, model, models = self._request, self._spec.name, self._runtime.models
        if request.digest is None or request.query.output_to is not None or models.specs.get(model) is not self._spec:
            return None
        settings = self._runtime.execution_settings(model)
        return fingerprint(request.caller, request.digest, models.spec_json[model], request.query, settings)

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled("Nobody waits for the answer any more.")
