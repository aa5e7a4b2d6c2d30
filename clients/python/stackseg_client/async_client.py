"""The asynchronous client, for asyncio. Its methods are those of `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

import httpx2
from numpy.typing import NDArray

from stackseg_client import operations, projects
from stackseg_client.bodies import Source, find_file
from stackseg_client.body_protocol import Body
from stackseg_client.errors import ProblemError, StackSegError, Unauthorized, parse_problem
from stackseg_client.folders import FolderItem, check_concurrency, plan_folder
from stackseg_client.operations import JobFollower, Operation
from stackseg_client.parameters import Parameters
from stackseg_client.projects import AsyncProject
from stackseg_client.reports import Inspection, JobReport, Model, Stack
from stackseg_client.result_files import SavePath
from stackseg_client.results import Result
from stackseg_client.retries import Retries
from stackseg_client.transport import (
    DEFAULT_TIMEOUT_SECONDS,
    EVENT_TIMEOUT_SECONDS,
    make_request,
    open_connections,
    translate_errors,
)

T = TypeVar("T")


class AsyncClient:
    """A client of a StackSeg server for asyncio. Files are read and labels are decoded in threads.

    Its connections belong to an event loop, so each call of `asyncio.run` needs its own client.

    >>> import asyncio
    >>> from stackseg_client import AsyncClient
    >>> async def compare_diameters():
    ...     async with AsyncClient(url) as client:
    ...         segmentations = [client.segment("sample.tif", diameter=diameter) for diameter in ("auto", "25px")]
    ...         return [result.objects for result in await asyncio.gather(*segmentations)]
    >>> asyncio.run(compare_diameters())
    [16, 16]
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        retries: Retries = Retries(),  # noqa: B008 - immutable
        trust_env: bool = True,
        ca_file: SavePath | None = None,
    ) -> None:
        self.url, self._retries = url, retries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http = open_connections(httpx2.AsyncClient, url, key, timeout, ca_file, trust_env=trust_env)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def segment(
        self,
        source: Source | None = None,
        /,
        *,
        save_to: SavePath | None = None,
        table: bool = False,
        name: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Result:
        """Segment a stack, as `Client.segment` does."""
        return await self._run(operations.segment(source, save_to, name, parameters, table=table))

    async def inspect(
        self, source: Source | None = None, /, *, name: str | None = None, **parameters: Unpack[Parameters]
    ) -> Inspection:
        """Describe a file, and estimate time and memory, without segmenting it."""
        return await self._run(operations.inspect(source, name, parameters))

    async def submit(
        self,
        source: Source | None = None,
        /,
        *,
        table: bool = False,
        name: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncJob:
        """Segment a stack in the background, as `Client.submit` does."""
        report = await self._run(operations.submit(source, name, idempotency_key, parameters, table=table))
        return AsyncJob(self, report, find_file(source))

    async def job(self, job_id: str, /) -> AsyncJob:
        """Return a job by its id. Raises UnknownJob."""
        return AsyncJob(self, await self._run(operations.get_job(job_id)))

    async def jobs(self, limit: int = 100) -> list[AsyncJob]:
        """Return your jobs, newest first."""
        return [AsyncJob(self, report) for report in await self._run(operations.list_jobs(limit))]

    async def segment_folder(
        self,
        folder: SavePath,
        labels_folder: SavePath,
        *,
        pattern: str = "*",
        suffix: str = ".tif",
        table: bool = False,
        overwrite_labels: bool = False,
        concurrency: int = 2,
        **parameters: Unpack[Parameters],
    ) -> AsyncIterator[FolderItem]:
        """Segment the stacks in a folder, as `Client.segment_folder` does."""
        check_concurrency(concurrency)
        semaphore = asyncio.Semaphore(concurrency)

        async def run(item: FolderItem) -> FolderItem:
            async with semaphore:
                if item.labels_path.exists() and not overwrite_labels:
                    return item
                try:
                    operation = operations.segment(item.path, item.labels_path, None, parameters, table=table)
                    result = await self._run(operation, self._retries.make_patient())
                except Unauthorized:
                    raise
                except ProblemError as error:
                    return replace(item, error=error)
                return replace(item, result=result)

        items = plan_folder(folder, labels_folder, pattern, suffix, table=table, overwrite=overwrite_labels)
        tasks = [asyncio.create_task(run(item)) for item in items]
        try:
            for done, task in enumerate(asyncio.as_completed(tasks), 1):
                yield replace(await task, done=done, total=len(tasks))
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def upload(self, source: Source, /, *, name: str | None = None) -> Stack:
        """Upload a stack once, for several requests with `stack=`."""
        return await self._run(operations.upload(source, name))

    async def delete_stack(self, stack_id: str, /) -> None:
        """Delete an uploaded stack."""
        await self._run(operations.delete_stack(stack_id))

    async def create_project(self, name: str, notes: str = "") -> AsyncProject:
        """Create a project, which collects the results of one experiment. Its name must be new."""
        return AsyncProject(self, await self._run(projects.create(name, notes)))

    async def project(self, project_id: str, /) -> AsyncProject:
        """Return a project by its id. Raises UnknownProject."""
        return AsyncProject(self, await self._run(projects.get(project_id)))

    async def projects(self) -> list[AsyncProject]:
        """Return your projects, newest first."""
        return [AsyncProject(self, report) for report in await self._run(projects.list_all())]

    async def models(self) -> list[Model]:
        """Return the models of the server."""
        return await self._run(operations.list_models())

    async def sample(self, model: str) -> bytes:
        """Return the sample stack of a model, a TIFF, to try the server without own data."""
        return await self._run(operations.download_sample(model))

    async def run(self, operation: Operation[T]) -> T:
        """Perform an operation that this class has no method for, as `Client.run` does."""
        return await self._run(operation)

    async def _run(self, operation: Operation[T], retries: Retries | None = None) -> T:
        """Perform an operation, and repeat it if the server is busy or cannot be reached."""
        retries = retries or self._retries
        for attempt in count():
            try:
                return await self._attempt(operation)
            except StackSegError as error:
                delay = retries.get_delay(error, attempt, is_repeatable=operation.is_repeatable)
                if delay is None:
                    raise
            await asyncio.sleep(delay)
        raise AssertionError

    async def _attempt(self, operation: Operation[T]) -> T:
        self._check_loop()
        content = None if operation.body is None else _read_blocks(operation.body)
        with translate_errors(self.url):
            async with self._http.stream(**make_request(operation, content)) as response:
                if response.status_code >= 300:
                    raise parse_problem(response.status_code, response.headers, await response.aread())
                with closing(operation.receive(response.headers)) as receiver:
                    async for block in response.aiter_bytes():
                        receiver.write(block)
                    return await asyncio.to_thread(receiver.finish)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop not in {None, loop}:
            raise RuntimeError(
                "This AsyncClient was used in another event loop. Create a client in each call of asyncio.run()."
            )
        self._loop = loop

    async def _follow(self, job_id: str) -> AsyncIterator[JobReport]:
        self._check_loop()
        follower = JobFollower(job_id, self._retries)
        while not follower.has_ended:
            reason = None
            try:
                with translate_errors(self.url):
                    async with self._http.stream("GET", follower.path, timeout=EVENT_TIMEOUT_SECONDS) as response:
                        if response.status_code >= 300:
                            raise parse_problem(response.status_code, response.headers, await response.aread())
                        follower.begin(response.headers)
                        async for block in response.aiter_bytes():
                            for report in follower.feed(block):
                                yield report
            except StackSegError as error:
                reason = error
            if not follower.has_ended:
                await asyncio.sleep(follower.get_delay(reason))


async def _read_blocks(body: Body) -> AsyncIterator[bytes | memoryview]:
    blocks = body.read_blocks()
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


class AsyncJob:
    """A job, which continues if this program ends. `report` has its last known state; see `JobReport`."""

    def __init__(self, client: AsyncClient, report: JobReport, stack: Path | None = None) -> None:
        self._client, self.id, self.report, self._stack = client, report.id, report, stack

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}: {self.report.state}>"

    async def refresh(self) -> JobReport:
        """Return the current state."""
        self.report = await self._client._run(operations.get_job(self.id))
        return self.report

    async def progress(self) -> AsyncIterator[JobReport]:
        """Yield a report for each change until the job has ended. Continues after a restart of the server."""
        async for report in self._client._follow(self.id):
            self.report = report
            yield report

    async def result(self, save_to: SavePath | None = None) -> Result:
        """Wait for the job, and return its result. Raises the error of a failed job. `save_to` is as in `segment`."""
        operation = operations.download_result(self.id, save_to, self._stack)
        async for _report in self.progress():
            pass
        return await self._client._run(operation)

    async def planes(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        axis: Literal["z", "y", "x"] = "z",
        step: tuple[int, int, int] = (1, 1, 1),
        time: int | None = None,
    ) -> NDArray[Any]:
        """Return the planes `start` to `stop` of the labels of a finished job, up to 32 MiB, in the order Z, Y, X."""
        return await self._client._run(
            operations.get_planes(self.id, **{"from": start, "to": stop}, axis=axis, step=step, time=time)
        )

    async def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        await self._client._run(operations.cancel_job(self.id))

    async def delete(self) -> None:
        """Delete an ended job and its result, or cancel a running one."""
        await self._client._run(operations.delete_job(self.id))
