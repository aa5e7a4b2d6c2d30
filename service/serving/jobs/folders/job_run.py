"""Jobs on a folder of stacks, which segment one stack at a time through the queue of a device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from service.core.errors import BadFile, BadParameter, Cancelled, OutOfStorage, RateLimited
from service.core.types import CancellationCheck, Options, Volume
from service.serving.devices.queue.job import Job, Progress
from service.serving.jobs.folders.find_stacks import select_stacks
from service.serving.jobs.folders.report import REPORT_FILE, TABLE_FILE
from service.serving.jobs.folders.segment_folder import (
    FolderOutcome,
    FolderSegmentation,
    StackCallbacks,
    can_hold_results,
)
from service.serving.parameters import Query, SegmentationRequest
from service.serving.reading import Pixels, PixelSource
from service.serving.results.metadata import ResultMetadata
from service.serving.segmentation import DeviceRequest, queue_work, segment_pixels
from service.serving.storage.host_files import HostFiles, Source

if TYPE_CHECKING:
    from service.inference.types import DiameterEstimate, Result, Series
    from service.serving.devices.reservation import Reservation
    from service.serving.runtime import Runtime
    from service.serving.storage.scratch import SpaceReservation
    from service.serving.storage.threads import FairThreadPool

# Interval between cancellation checks while a job waits for a stack.
CANCELLATION_POLL_SECONDS = 0.2
# Interval between attempts to reserve space for decoded pixels.
SPACE_POLL_SECONDS = 1.0
# Maximum number of warnings about stacks in the metadata of a job. The report contains all warnings.
MAX_WARNINGS = 20

T = TypeVar("T")


class FolderPaths(NamedTuple):
    """The input folder and results folder as written in a request, the file name pattern, and the caller."""

    input_folder: str
    results_folder: str
    glob: str | None
    caller: str | None

    @classmethod
    def from_query(cls, query: Query, caller: str | None) -> FolderPaths:
        """Return the folders that a query specifies."""
        assert query.input is not None  # noqa: S101 - only called for jobs on a folder
        assert query.output_to is not None  # noqa: S101 - checked at admission
        return cls(query.input, query.output_to, query.glob, caller)

    def find_stacks(self, host_files: HostFiles, cancelled: CancellationCheck) -> list[str]:
        """Return the names of the stacks. Raises Cancelled, and BadParameter if there are no stacks."""
        files = host_files.list_stacks(self.input_folder, self.results_folder, self.caller, self.glob, cancelled)

        def open_stack(name: str) -> AbstractContextManager[Path]:
            if cancelled():
                raise Cancelled("The job was canceled while the stacks were being listed.")
            return self.open_stack(host_files, name)

        if stacks := select_stacks(files, self.glob, open_stack):
            return stacks
        selection = "file in a supported format" if self.glob is None else f"stack that matches {self.glob}"
        raise BadParameter.for_parameter(
            "input", f"{self.input_folder} contains no {selection}. Set glob to a pattern that matches the stacks."
        )

    @contextmanager
    def open_stack(self, host_files: HostFiles, name: str) -> Iterator[Path]:
        """Context manager that opens a stack of the input folder. Raises BadParameter."""
        with host_files.open_input(f"{self.input_folder.removesuffix('/')}/{name}", self.caller) as source:
            assert isinstance(source, Source)  # noqa: S101 - stacks of a folder are local files
            yield source.path

    def check_folders(self, host_files: HostFiles, cancelled: CancellationCheck, *, overwrite: bool) -> None:
        """Raise BadParameter if a folder cannot be used. Also raises Cancelled.

        Unless `overwrite` is set, also raise BadParameter if the results folder contains files other than results.
        """
        self.find_stacks(host_files, cancelled)
        with host_files.open_results(self.results_folder, self.caller) as results:
            if not can_hold_results(results) and not overwrite:
                raise BadParameter.for_parameter(
                    "output_to",
                    f"{self.results_folder} contains files other than results. Choose another folder, or set"
                    " overwrite=true.",
                    suggested={"overwrite": "true"},
                )


class FolderRun:
    """Runs a job on a folder of stacks in its own thread. Each stack waits in the queue of a device.

    model           name of the model
    job             job in the folder queue
    space           reserved scratch space for decoded pixels
    reset_attempts  called when a stack is finished
    progress        number of finished stacks, and total number of stacks
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        runtime: Runtime,
        query: Query,
        model: str,
        job: Job[Any],
        space: SpaceReservation,
        reset_attempts: Callable[[], object],
    ) -> None:
        self._runtime, self._job, self._space, self._reset_attempts = runtime, job, space, reset_attempts
        self._spec = runtime.models.get_servable_spec(model)
        self._paths = FolderPaths.from_query(query, job.owner)
        parameters = query.model_dump(exclude_unset=True)
        # The parameters of a single stack. They are the same as on the command line, so a job can resume a run that was
        # started on the command line.
        self._query = Query.model_validate({name: parameters[name] for name in parameters.keys() - _FOLDER_PARAMETERS})
        self.progress = Progress()
        # The device job of the current stack.
        self._device_job: Job[Any] | None = None
        self._start_time, self._started_count = time.monotonic(), 0

    @property
    def stage(self) -> str:
        """The stage of the current stack."""
        device_job = self._device_job
        return "windows" if device_job is not None and device_job.state == "running" else "prepare"

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last stack is finished, estimated from the speed so far; None if unknown."""
        device_job = self._device_job
        window_progress = Progress() if device_job is None else device_job.progress
        completed_count = (
            self._started_count - 1 + (window_progress.done / window_progress.total if window_progress.total else 0)
        )
        if completed_count <= 0:
            return None
        return (
            (time.monotonic() - self._start_time)
            * (self.progress.total - self.progress.done - completed_count % 1)
            / completed_count
        )

    def run(self) -> FolderOutcome:
        """Segment the stacks that have no result yet.

        Raises BadParameter if the folders cannot be used, and the errors of `FolderSegmentation.run`. Raises Cancelled
        if the job is canceled or the service is stopping.
        """
        host_files, paths = self._runtime.host_files, self._paths
        estimator = self._runtime.get_estimator(self._spec)
        needs_estimate = estimator.plan(self._query.options).needs_diameter_estimate
        needs_measurements = estimator.get_output_kind(self._query.options) == "labels"
        callbacks = StackCallbacks(
            open=partial(self._paths.open_stack, self._runtime.host_files),
            read=partial(self._read_stack, has_measurements=needs_measurements),
            segment=self._segment,
            estimate_diameter=self._estimate_diameter if needs_estimate else None,
            begin=self._begin_stack,
            check_cancelled=self._check_cancelled,
        )
        with (
            host_files.open_results(paths.results_folder, paths.caller) as results,
            tempfile.TemporaryDirectory(dir=self._runtime.scratch.requests_folder) as scratch,
        ):
            stacks = paths.find_stacks(host_files, self._job.cancelled)
            self.progress = Progress(0, len(stacks))
            return FolderSegmentation(results, self._spec, callbacks, Path(scratch)).run(stacks, self._query)

    def describe(self, outcome: FolderOutcome, name: str, seconds: dict[str, float]) -> tuple[ResultMetadata, str]:
        """Return the metadata and the JSON content of the result. Raises BadFile if every stack failed."""
        failures, confidence_warnings = outcome.failures, outcome.confidence_warnings
        if len(failures) == len(outcome.records):
            raise BadFile(f"None of the {len(failures)} stacks could be segmented. First error: {failures[0]}")
        output_kind = self._runtime.get_estimator(self._spec).get_output_kind(self._query.options)
        warnings = [*failures, *confidence_warnings]
        omitted_count = len(warnings) - MAX_WARNINGS
        notes = [
            *warnings[:MAX_WARNINGS],
            *([f"{REPORT_FILE} lists {omitted_count} more warnings."] if omitted_count > 0 else []),
        ]
        metadata = ResultMetadata(
            model=self._spec.identifier,
            media_type="application/json",
            file_name=f"{name}_saved.json",
            kind=output_kind,
            seconds=seconds,
            notes=tuple(notes),
            objects=outcome.object_count,
            stacks=(len(outcome.records) - len(failures), len(outcome.records)),
        )
        path = self._paths.results_folder.removesuffix("/")
        content = {
            "output": path,
            "report": f"{path}/{REPORT_FILE}",
            "table": f"{path}/{TABLE_FILE}",
            "model": metadata.model,
            "objects": outcome.object_count,
            "stacks": outcome.describe(),
        }
        return metadata, json.dumps(content)

    def _check_cancelled(self) -> None:
        if self._job.cancelled() or self._runtime.is_draining:
            raise Cancelled("The job was canceled between two stacks.")

    def _begin_stack(self, _name: str, stack_number: int, stack_count: int) -> None:
        self._check_cancelled()
        if stack_number:
            self.progress = Progress(stack_number - 1, stack_count)
            if not self._started_count:
                self._start_time = time.monotonic()
            else:
                self._reset_attempts()
            self._started_count += 1

    def _read_stack(self, path: Path, query: Query, scratch: Path, *, has_measurements: bool) -> Pixels:
        """Read a stack in the shared read threads. Wait until there is enough scratch space for a large stack."""
        query = Query.model_validate(query.model_dump(exclude_none=True) | {"input": self._paths.input_folder})
        request = SegmentationRequest(query, path, scratch, self._job.owner, self._job.cancelled)
        source = replace(
            PixelSource.from_sandbox(self._runtime.reader, request, path), has_measurements=has_measurements
        )
        self._space.add(-self._space.nbytes)
        pixels = self._run_in_pool(self._runtime.read_threads, source.read_small_pixels)
        if isinstance(pixels, Pixels):
            return pixels
        self._reserve_space(pixels.nbytes)
        return self._run_in_pool(self._runtime.decode_threads, source.read_pixels)

    def _run_in_pool(self, pool: FairThreadPool, function: Callable[[], T]) -> T:
        try:
            return pool.submit(self._job.owner or "", function).result()
        except CancelledError:
            raise Cancelled("The job was interrupted, because the service is stopping.") from None

    def _reserve_space(self, nbytes: int) -> None:
        while True:
            try:
                self._space.reserve(nbytes)
            except (OutOfStorage, RateLimited):
                self._check_cancelled()
                time.sleep(SPACE_POLL_SECONDS)
            else:
                return

    def _segment(self, pixels: Volume | Series, options: Options) -> Result:
        work = partial(segment_pixels, pixels=pixels, options=options)
        result: Result = self._run_on_device(pixels, options, work)
        object_count = result.segmentation.count
        self._runtime.metrics.count_segmentation(self._spec.name, pixels.voxel_count, object_count, result.seconds)
        return result

    def _estimate_diameter(self, volume: Volume, options: Options) -> DiameterEstimate | None:
        def estimate(reservation: Reservation, job: Job[DiameterEstimate | None]) -> DiameterEstimate | None:
            return reservation.model.estimate_diameter(job, volume, options)

        return self._run_on_device(volume, options, estimate)

    def _run_on_device(self, pixels: Volume | Series, options: Options, work: Callable[[Reservation, Job[T]], T]) -> T:
        """Queue work for a device as a separate request, and wait. Return the result of the work or raise its error."""
        request = DeviceRequest(self._spec, pixels, options, self._job.owner)
        job = queue_work(self._runtime, request, work, allow_full_queue=True)
        self._device_job = job
        try:
            return self._wait_for_job(job)
        finally:
            self._device_job = None

    def _wait_for_job(self, job: Job[T]) -> T:
        while True:
            try:
                return job.future.result(CANCELLATION_POLL_SECONDS)
            except TimeoutError:
                if job.future.done():
                    raise
                if self._job.cancelled():
                    job.cancel()
            except CancelledError:
                raise Cancelled("The job was canceled while a stack was waiting.") from None


# Parameters that apply to the folder rather than to single stacks.
_FOLDER_PARAMETERS = {"input", "output_to", "overwrite", "glob", "model"}
