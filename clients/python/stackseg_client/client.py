"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

from numpy.typing import NDArray

from stackseg_client import operations, projects
from stackseg_client.bodies import Source, find_file
from stackseg_client.errors import ProblemError, StackSegError, Unauthorized
from stackseg_client.folders import FolderItem, FolderRun, check_concurrency, plan_folder
from stackseg_client.operations import JobFollower, Operation
from stackseg_client.parameters import Parameters
from stackseg_client.projects import Project
from stackseg_client.reports import Inspection, JobReport, Model, Stack
from stackseg_client.result_files import SavePath
from stackseg_client.results import Result
from stackseg_client.retries import Retries
from stackseg_client.transport import DEFAULT_TIMEOUT_SECONDS, EVENT_TIMEOUT_SECONDS, Connections, make_request

T = TypeVar("T")


class Client:
    """A client of a StackSeg server. Several threads may use it.

    url        URL of the server
    key        API key, if the server requires one
    timeout    seconds without progress after which a connection is considered lost
    retries    how often a request is repeated if the server is busy or cannot be reached
    trust_env  whether to use the proxies and certificates of the environment
    ca_file    PEM file with certificates to trust, in addition to those of the operating system

    >>> from stackseg_client import Client
    >>> with Client(url) as client:
    ...     result = client.segment("sample.tif")
    >>> result.objects
    16
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
        self._http = Connections(url, key, timeout, ca_file, trust_env=trust_env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def segment(
        self,
        source: Source | None = None,
        /,
        *,
        save_to: SavePath | None = None,
        table: bool = False,
        name: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Result:
        """Segment a stack.

        Args:
            source: path of a file, which is read block by block; the content of a file; or an array, whose axes are ZYX
                unless it (as in xarray) or `axes` names others; arrays with more dimensions need names or `axes`
            save_to: file for the labels: `.tif`, `.npy` (memory-mapped), `.nii.gz` or `.ozx`; the table is next to it
            table: whether to measure the objects
            name: file name of the stack, for the server's log and the record of provenance
            parameters: see `Parameters`

        Raises ProblemError if the server refuses the stack, and ConnectionFailed.

        >>> result = client.segment("sample.tif", table=True)
        >>> result.labels.shape, int(result.labels.max()), result.voxel_size
        ((32, 96, 96), 16, (0.5, 0.2, 0.2))
        >>> result.table["num_pixels"].shape
        (16,)
        >>> result = client.segment(stack, voxel_size=(0.5, 0.2, 0.2), diameter="5um", save_to="labels.npy")
        >>> type(result.labels).__name__, result.path.name
        ('memmap', 'labels.npy')
        """
        return self._run(operations.segment(source, save_to, name, parameters, table=table))

    def inspect(
        self, source: Source | None = None, /, *, name: str | None = None, **parameters: Unpack[Parameters]
    ) -> Inspection:
        """Describe a file, and estimate time and memory, without segmenting it.

        >>> inspection = client.inspect("sample.tif")
        >>> inspection.axes, inspection.shape, inspection.voxel_size, inspection.problem
        ('ZYX', (1, 32, 96, 96), (0.5, 0.2, 0.2), None)
        """
        return self._run(operations.inspect(source, name, parameters))

    def submit(
        self,
        source: Source | None = None,
        /,
        *,
        table: bool = False,
        name: str | None = None,
        idempotency_key: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Job:
        """Segment a stack in the background. The arguments are those of `segment`.

        A repeated submission with the `idempotency_key` of a job returns that job. By default, each call has its own.

        >>> job = client.submit("sample.tif", diameter="25px")
        >>> [report.state for report in job.progress()][-1], job.result().objects
        ('done', 16)
        """
        report = self._run(operations.submit(source, name, idempotency_key, parameters, table=table))
        return Job(self, report, find_file(source))

    def job(self, job_id: str, /) -> Job:
        """Return a job by its id. Raises UnknownJob."""
        return Job(self, self._run(operations.get_job(job_id)))

    def jobs(self, limit: int = 100) -> list[Job]:
        """Return your jobs, newest first."""
        return [Job(self, report) for report in self._run(operations.list_jobs(limit))]

    def segment_folder(
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
    ) -> FolderRun:
        """Segment the stacks in a folder, and yield each of them when it is finished.

        Args:
            folder: the folder with the stacks
            labels_folder: the folder for the labels
            pattern: glob pattern, such as `**/*.tif` for all TIFFs in subfolders, but not in linked ones
            suffix: format of the labels; see `segment`
            table: whether to measure the objects, and to save the tables
            overwrite_labels: whether to segment stacks again whose labels exist
            concurrency: number of stacks in progress at the same time
            parameters: see `Parameters`

        Folders of OME-Zarr are stacks; hidden files and results of StackSeg are not. A stack that the server refuses is
        reported in `FolderItem.error`. Other errors end the run. Call the function again to continue.

        >>> for item in client.segment_folder("stacks", "labels", suffix=".npy"):
        ...     print(f"{item.done}/{item.total} {item.path.name}: {item.error or item.result}")
        1/1 a.tif: <Result of nuclei/1: 16 objects, 1 warning, path='labels/a_labels.npy'>
        """
        check_concurrency(concurrency)
        items = plan_folder(folder, labels_folder, pattern, suffix, table=table, overwrite=overwrite_labels)
        run = self._run_folder(items, concurrency, parameters, table=table, overwrite=overwrite_labels)
        return FolderRun(run, len(items))

    def upload(self, source: Source, /, *, name: str | None = None) -> Stack:
        """Upload a stack once, for several requests with `stack=`.

        >>> uploaded = client.upload("sample.tif")
        >>> [client.segment(stack=uploaded.id, threshold=threshold).objects for threshold in (0.5, 0.6)]
        [16, 16]
        >>> client.delete_stack(uploaded.id)
        """
        return self._run(operations.upload(source, name))

    def delete_stack(self, stack_id: str, /) -> None:
        """Delete an uploaded stack."""
        self._run(operations.delete_stack(stack_id))

    def create_project(self, name: str, notes: str = "") -> Project:
        """Create a project, which collects the results of one experiment. Its name must be new."""
        return Project(self, self._run(projects.create(name, notes)))

    def project(self, project_id: str, /) -> Project:
        """Return a project by its id. Raises UnknownProject."""
        return Project(self, self._run(projects.get(project_id)))

    def projects(self) -> list[Project]:
        """Return your projects, newest first."""
        return [Project(self, report) for report in self._run(projects.list_all())]

    def models(self) -> list[Model]:
        """Return the models of the server.

        >>> [model.name for model in client.models() if model.is_default]
        ['nuclei']
        """
        return self._run(operations.list_models())

    def sample(self, model: str) -> bytes:
        """Return the sample stack of a model, a TIFF, to try the server without own data.

        >>> client.segment(client.sample("nuclei")).objects
        77
        """
        return self._run(operations.download_sample(model))

    def run(self, operation: Operation[T]) -> T:
        """Perform an operation that this class has no method for, such as a request to another endpoint."""
        return self._run(operation)

    def _run_folder(
        self, items: list[FolderItem], concurrency: int, parameters: Parameters, *, table: bool, overwrite: bool
    ) -> Iterator[FolderItem]:
        def run(item: FolderItem) -> FolderItem:
            if item.labels_path.exists() and not overwrite:
                return item
            try:
                operation = operations.segment(item.path, item.labels_path, None, parameters, table=table)
                result = self._run(operation, self._retries.make_patient())
            except Unauthorized:
                raise
            except ProblemError as error:
                return replace(item, error=error)
            return replace(item, result=result)

        # The threads of this pool do not keep a program alive that ends or is interrupted.
        with ThreadPool(concurrency) as pool:
            for done, item in enumerate(pool.imap_unordered(run, items), 1):
                yield replace(item, done=done, total=len(items))

    def _run(self, operation: Operation[T], retries: Retries | None = None) -> T:
        """Perform an operation, and repeat it if the server is busy or cannot be reached."""
        retries = retries or self._retries
        for attempt in count():
            try:
                return self._attempt(operation)
            except StackSegError as error:
                delay = retries.get_delay(error, attempt, is_repeatable=operation.is_repeatable)
                if delay is None:
                    raise
            time.sleep(delay)
        raise AssertionError

    def _attempt(self, operation: Operation[T]) -> T:
        content = None if operation.body is None else operation.body.read_blocks()
        with (
            self._http.stream(**make_request(operation, content)) as response,
            closing(operation.receive(response.headers)) as receiver,
        ):
            for block in response.iter_bytes():
                receiver.write(block)
            return receiver.finish()

    def _follow(self, job_id: str) -> Iterator[JobReport]:
        follower = JobFollower(job_id, self._retries)
        while not follower.has_ended:
            reason = None
            try:
                with self._http.stream(method="GET", url=follower.path, timeout=EVENT_TIMEOUT_SECONDS) as response:
                    follower.begin(response.headers)
                    for block in response.iter_bytes():
                        yield from follower.feed(block)
            except StackSegError as error:
                reason = error
            if not follower.has_ended:
                time.sleep(follower.get_delay(reason))


class Job:
    """A job, which continues if this program ends. `report` has its last known state; see `JobReport`."""

    def __init__(self, client: Client, report: JobReport, stack: Path | None = None) -> None:
        self._client, self.id, self.report, self._stack = client, report.id, report, stack

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.report.state}>"

    def refresh(self) -> JobReport:
        """Return the current state."""
        self.report = self._client._run(operations.get_job(self.id))
        return self.report

    def progress(self) -> Iterator[JobReport]:
        """Yield a report for each change until the job has ended. Continues after a restart of the server."""
        for report in self._client._follow(self.id):
            self.report = report
            yield report

    def result(self, save_to: SavePath | None = None) -> Result:
        """Wait for the job, and return its result. Raises the error of a failed job. `save_to` is as in `segment`."""
        operation = operations.download_result(self.id, save_to, self._stack)
        for _report in self.progress():
            pass
        return self._client._run(operation)

    def planes(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        axis: Literal["z", "y", "x"] = "z",
        step: tuple[int, int, int] = (1, 1, 1),
        time: int | None = None,
    ) -> NDArray[Any]:
        """Return the planes `start` to `stop` of the labels of a finished job, up to 32 MiB, in the order Z, Y, X.

        >>> job = client.submit("sample.tif")
        >>> labels = job.result().labels
        >>> bool((job.planes(10, 12) == labels[10:12]).all())
        True
        """
        return self._client._run(
            operations.get_planes(self.id, **{"from": start, "to": stop}, axis=axis, step=step, time=time)
        )

    def cancel(self) -> None:
        """Cancel the job, unless it has ended."""
        self._client._run(operations.cancel_job(self.id))

    def delete(self) -> None:
        """Delete an ended job and its result, or cancel a running one."""
        self._client._run(operations.delete_job(self.id))
