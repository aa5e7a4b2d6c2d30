"""POST /segment: a TIFF in, a label TIFF out."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from service.api.admission import PREFER, REQUEST, RESPOND_ASYNC, admission, async_jobs_of, runtime_of, wants_a_job
from service.api.direct_route import Direct
from service.api.request_body import Posted, posted, while_connected
from service.api.responses import ANSWER, Found, LabelResponse, opened, respond
from service.api.routes.jobs import ACCEPTED, accept
from service.api.threads import FILES, NAMED_FILES, followed, in_thread
from service.core.errors import Cancelled, NotReady
from service.core.timing import Stages
from service.inference.result import Result
from service.models.spec import ModelSpec
from service.serving.job import Job
from service.serving.job_record import AnswerMetadata
from service.serving.result_cache import CachedResult
from service.serving.results import (
    Answer,
    Pixels,
    answer_name,
    describe_answer,
    encode_small_answer,
    fingerprint,
    read_pixels,
    settle,
    write_answer,
)
from service.serving.runtime import Runtime

router = APIRouter(tags=["segmentation"], route_class=Direct)

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
    With `Prefer: respond-async` the answer is that of `POST /jobs`.
    """
    runtime = await runtime_of(request)
    admitted = await admission(request, runtime)
    query = admitted.query
    if wants_a_job(request):
        response = await accept(request, runtime, await async_jobs_of(request), query)
        response.headers["Preference-Applied"] = RESPOND_ASYNC
        return response
    stages = Stages()
    async with posted(request, runtime, query, stages) as arrived:
        work = _Work(runtime, arrived, admitted.model(runtime, arrived.query), stages)
        answer = await while_connected(request, work.answer())
        answer.held.push_async_callback(arrived.keep().aclose)
        return answer


class _Known(NamedTuple):
    """The result of an earlier request for the same, under its key."""

    key: str
    result: CachedResult[tuple[AnswerMetadata, str]]


class _Made(NamedTuple):
    """A segmentation, and the answer that was made of it at once because it is small."""

    result: Result
    answer: Answer | None


class _Work:
    """Everything about one request after it has come: read, wait for the device, segment, write, keep.

    Each way to a thread and back takes a small request longer than most of what is done there. So one thread does all
    until the device is waited for, and that in which the work on the device ends writes what is small.
    """

    def __init__(self, runtime: Runtime, posted: Posted, spec: ModelSpec, stages: Stages) -> None:
        self._runtime, self._posted, self._spec, self._stages = runtime, posted, spec, stages
        self._caller = posted.received.caller
        self._digest: str | None = None
        self._pixels: Pixels
        self._voxels = 0
        self._job: Job[_Made] | None = None
        # Set when nobody waits for the answer any more.
        self._gone = threading.Event()

    async def answer(self) -> LabelResponse:
        """The answer of this request, or of an earlier one for the same. The job is cancelled when the caller is."""
        try:
            outcome = await self._outcome()
            return self._again(outcome) if isinstance(outcome, _Known) else await self._answer(outcome)
        finally:
            if self._job is not None:
                self._job.cancel()

    async def _outcome(self) -> _Made | _Known:
        """What is kept, or what the job makes. One thread sees to both, unless the one would wait for other files."""
        readers, begin = self._runtime.read_threads, self._look_or_read
        if self._runtime.result_cache.enabled and readers.all_busy:
            known = await in_thread(self._look, FILES, self._gone)
            if known is not None:
                return known
            begin = self._read
        try:
            outcome: _Made | _Known = await followed(partial(begin, time.perf_counter()), readers, self._gone)
        except Cancelled:
            raise NotReady("The service stopped before the request was finished; send it again.") from None
        return outcome

    def _look_or_read(self, asked: float) -> Future[_Made] | _Known:
        waited = time.perf_counter() - asked
        return self._look() or self._read(time.perf_counter() - waited)

    def _look(self) -> _Known | None:
        """In a thread: let the file land, and find the result that is kept for it."""
        posted, runtime = self._posted, self._runtime
        with self._stages.measure("receive"):
            self._digest = posted.land()
        if not runtime.result_cache.enabled or (key := self._key()) is None:
            return None
        kept = runtime.result_cache.get(key)
        runtime.metrics.count_cache("miss" if kept is None else "hit")
        if kept is None:
            return None
        posted.let_go()
        return _Known(key, kept)

    def _read(self, asked: float) -> Future[_Made]:
        """In a thread, for which was `asked` on the clock `perf_counter`: read the file and wait for the device."""
        posted, stages = self._posted, self._stages
        stages.add("read", time.perf_counter() - asked)
        received, query = posted.received, posted.query
        self._check_wanted()
        with stages.measure("read"):
            self._pixels = read_pixels(self._runtime.reader, query, posted.source, received.folder, self._caller)
            posted.let_go()
        self._voxels = self._pixels.segmented.voxels
        self._check_wanted()
        # Which may be over at once.
        self._job = self._runtime.submit(self._spec, self._pixels.segmented, query.options, self._finish)
        return self._job.future

    def _check_wanted(self) -> None:
        if self._gone.is_set():
            raise Cancelled("Nobody waits for the answer any more.")

    def _finish(self, result: Result) -> _Made:
        """In the thread that has segmented."""
        answer = encode_small_answer(self._posted.received, result)
        if answer is not None:
            # Nobody looks at its pixels any more.
            del self._pixels
        return _Made(result, answer)

    def _again(self, known: _Known) -> LabelResponse:
        outcome, suffix = known.result.metadata
        seconds = {**self._stages.seconds, "total": self._stages.total}
        outcome = replace(outcome, file_name=answer_name(self._posted.name, suffix), seconds=seconds)
        response = respond(opened(known.result.file), outcome, ETag=etag(known.key), X_Cache="hit")
        response.held.callback(known.result.file.close)
        return response

    async def _answer(self, made: _Made) -> LabelResponse:
        runtime, stages, spec, result = self._runtime, self._stages, self._spec, made.result
        assert self._job is not None  # noqa: S101 - it has made this
        stages.add("queue", self._job.seconds_waited)
        stages.update(result.seconds)
        if made.answer is None:
            answer, found = await in_thread(
                partial(self._write, result), FILES if self._posted.query.output_to is None else NAMED_FILES
            )
        else:
            answer, found = made.answer, Found(None, made.answer.content)
        stages.update(answer.seconds)
        runtime.metrics.count_segmentation(spec.name, self._voxels, result.segmentation.count, stages.seconds)
        seconds = {**stages.seconds, "total": stages.total}
        outcome = describe_answer(spec.identifier, self._posted.name, answer, result, seconds)
        # Only once a model is loaded it is known how it runs.
        if (key := self._key()) is None:
            return respond(answer.path, outcome, found)
        if not runtime.result_cache.enabled:
            return respond(answer.path, outcome, found, ETag=etag(key))
        await in_thread(partial(self._keep, key, answer, outcome))
        return respond(answer.path, outcome, found, ETag=etag(key), X_Cache="miss")

    def _keep(self, key: str, answer: Answer, outcome: AnswerMetadata) -> None:
        """In a thread, for who asks the same again; where the disk is full, this caller has an answer nevertheless."""
        kept = answer.path if answer.content is None else answer.content
        try:
            self._runtime.result_cache.put(key, kept, (outcome, answer.suffix))
        except OSError as error:
            log.warning("A result is not kept: %s", error)

    def _write(self, result: Result) -> tuple[Answer, Found]:
        """In one go: a client that hangs up meanwhile leaves nothing beside what was written on the host."""
        received = self._posted.received
        written = write_answer(self._runtime.host_files, received, self._pixels.measured, result, self._spec.identifier)
        settle(self._runtime.host_files, received)
        return written, Found.at(written.path)

    def _key(self) -> str | None:
        """Of what decides about the answer; None where that is not known, or where there is none to keep."""
        query = self._posted.query
        if self._digest is None or query.output_to is not None:
            # A file that others may change does not tell whether it is still the same.
            return None
        model, runtime = self._spec.name, self._runtime
        return fingerprint(
            self._caller, self._digest, runtime.models.spec_json(model), query, runtime.execution_settings(model)
        )


def etag(key: str) -> str:
    """A strong validator: the same key has the same labels, though not the same times beside them."""
    return f'"{key[:32]}"'
