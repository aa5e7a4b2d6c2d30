"""A job on a folder: its stacks, one after the other, through the queue of a device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from service.core.errors import BadFile, BadParameter, Cancelled, OutOfStorage, RateLimited
from service.core.types import Options, Volume
from service.serving.devices.queue.job import Job, Progress
from service.serving.jobs.folder_records import REPORT, TABLE
from service.serving.jobs.folder_work import Done, FolderWork, StackCalls, is_free, select_stacks
from service.serving.parameters import Query, SegmentationRequest
from service.serving.reading import Pixels, PixelSource
from service.serving.results.metadata import AnswerMetadata
from service.serving.segmentation import DeviceRequest, queue_work
from service.serving.storage.host_files import HostFiles, Source

if TYPE_CHECKING:
    from service.inference.types import Result, Series, Sizing
    from service.serving.devices.reservation import Reservation
    from service.serving.runtime import Runtime
    from service.serving.storage.scratch import Hold
    from service.serving.storage.threads import FairThreadPool

# How often a stack that is read or segmented is asked after, to see whether it is still wanted.
POLL_SECONDS = 0.2
# How long to wait before space for decoded pixels is asked for again.
SPACE_SECONDS = 1.0
# Stacks that the warnings of a job speak of; the report speaks of all.
MAX_WARNINGS = 20

T = TypeVar("T")


class FolderPlaces(NamedTuple):
    """Places of the folders of stacks and of results as requests write them, which files are stacks, and who asks."""

    stacks: str
    results: str
    glob: str | None
    caller: str | None

    @classmethod
    def of(cls, query: Query, caller: str | None) -> FolderPlaces:
        """Return the places that a query names."""
        assert query.input is not None  # noqa: S101 - the job is one on a folder
        assert query.output_to is not None  # noqa: S101 - it was refused without
        return cls(query.input, query.output_to, query.glob, caller)

    def find_stacks(self, host_files: HostFiles) -> list[str]:
        """Return the names of the stacks. Raises BadParameter where there is none."""
        files = host_files.list_stacks(self.stacks, self.results, self.caller, self.glob)
        if stacks := select_stacks(files, self.glob):
            return stacks
        wanted = self.glob or "*.tif"
        raise BadParameter.about("input", f"{self.stacks} holds no stack that matches {wanted}; say which with glob=.")

    def check(self, host_files: HostFiles, *, overwrite: bool) -> None:
        """Raise BadParameter where the folders cannot be used, or something else is in that of the results."""
        self.find_stacks(host_files)
        with host_files.open_results(self.results, self.caller) as results:
            if not is_free(results) and not overwrite:
                raise BadParameter.about(
                    "output_to",
                    f"{self.results} holds something else already; name another, or say overwrite=true.",
                    suggested={"overwrite": "true"},
                )


class FolderRun:
    """The stacks of a folder at work, in a thread of its own; each has its turn in the queue of a device.

    model   name
    job     of the whole folder
    space   for what is decoded
    credit  called once a stack is done
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self, runtime: Runtime, query: Query, model: str, job: Job[Any], space: Hold, credit: Callable[[], object]
    ) -> None:
        self._runtime, self._job, self._space, self._credit = runtime, job, space, credit
        self._spec = runtime.models.servable_spec(model)
        self._places = FolderPlaces.of(query, job.owner)
        given = query.model_dump(exclude_unset=True)
        # What decides about the result of a stack: the same as at the command line.
        self._query = Query.model_validate({name: given[name] for name in given.keys() - _NOT_OF_STACKS})
        self.stacks = Progress()
        # Of the stack that is at work.
        self._part: Job[Any] | None = None
        self._began, self._begun = time.monotonic(), 0

    @property
    def stage(self) -> str:
        """The stage that the stack at work is at."""
        part = self._part
        return "windows" if part is not None and part.state == "running" else "prepare"

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last stack is done, at the pace so far; None before there is one."""
        part = self._part
        windows = Progress() if part is None else part.progress
        done = self._begun - 1 + (windows.done / windows.total if windows.total else 0)
        if done <= 0:
            return None
        return (time.monotonic() - self._began) * (self.stacks.total - self.stacks.done - done % 1) / done

    def run(self) -> Done:
        """Segment the stacks that are not done.

        Raises BadParameter where the folders cannot be used, what `FolderWork.run` raises, and Cancelled, also once the
        service was told to stop.
        """
        host_files, places = self._runtime.host_files, self._places
        estimator = self._runtime.estimator(self._spec)
        estimated = estimator.plan(self._query.options).estimated
        measured = estimator.output(self._query.options) == "labels"
        calls = StackCalls(
            open=self._open,
            read=partial(self._read, measured=measured),
            segment=self._segment,
            estimate_diameter=self._estimate_diameter if estimated else None,
            begin=self._begin,
            check=self._check,
        )
        with (
            host_files.open_results(places.results, places.caller) as results,
            tempfile.TemporaryDirectory(dir=self._runtime.scratch.requests) as scratch,
        ):
            stacks = places.find_stacks(host_files)
            self.stacks = Progress(0, len(stacks))
            return FolderWork(results, self._spec, calls, Path(scratch)).run(stacks, self._query)

    def describe(self, done: Done, name: str, seconds: dict[str, float]) -> tuple[AnswerMetadata, str]:
        """Return the metadata of the answer, and its content as JSON. Raises BadFile where every stack failed."""
        faults, doubts = done.faults, done.doubts
        if len(faults) == len(done.records):
            raise BadFile(f"None of the {len(faults)} stacks could be segmented. The first: {faults[0]}")
        kind = self._runtime.estimator(self._spec).output(self._query.options)
        warnings = [*faults, *doubts]
        more = len(warnings) - MAX_WARNINGS
        notes = [*warnings[:MAX_WARNINGS], *([f"{REPORT} has {more} more."] if more > 0 else [])]
        metadata = AnswerMetadata(
            model=self._spec.identifier,
            media_type="application/json",
            file_name=f"{name}_saved.json",
            kind=kind,
            seconds=seconds,
            notes=tuple(notes),
            objects=done.objects,
            stacks=(len(done.records) - len(faults), len(done.records)),
        )
        place = self._places.results.removesuffix("/")
        content = {
            "output": place,
            "report": f"{place}/{REPORT}",
            "table": f"{place}/{TABLE}",
            "model": metadata.model,
            "objects": done.objects,
            "stacks": done.describe(),
        }
        return metadata, json.dumps(content)

    def _check(self) -> None:
        if self._job.cancelled() or self._runtime.draining:
            raise Cancelled("given up between two stacks")

    def _begin(self, _name: str, number: int, count: int) -> None:
        self._check()
        if number:
            self.stacks = Progress(number - 1, count)
            if not self._begun:
                self._began = time.monotonic()
            else:
                self._credit()
            self._begun += 1

    @contextmanager
    def _open(self, name: str) -> Iterator[Path]:
        place = f"{self._places.stacks.removesuffix('/')}/{name}"
        with self._runtime.host_files.open_input(place, self._places.caller) as source:
            assert isinstance(source, Source)  # noqa: S101 - the place was found in a folder
            yield source.path

    def _read(self, path: Path, query: Query, scratch: Path, *, measured: bool) -> Pixels:
        """Read a stack in its turn; one that takes much room waits for that."""
        query = Query.model_validate(query.model_dump(exclude_none=True) | {"input": self._places.stacks})
        request = SegmentationRequest(query, path, scratch, self._job.owner, self._job.cancelled)
        source = replace(PixelSource.sandboxed(self._runtime.reader, request, path), measured=measured)
        self._space.add(-self._space.nbytes)
        pixels = self._in_turn(self._runtime.read_threads, source.read_small_pixels)
        if isinstance(pixels, Pixels):
            return pixels
        self._reserve(pixels.nbytes)
        return self._in_turn(self._runtime.decode_threads, source.read_pixels)

    def _in_turn(self, threads: FairThreadPool, call: Callable[[], T]) -> T:
        try:
            return threads.submit(self._job.owner or "", call).result()
        except CancelledError:
            raise Cancelled("the service stops") from None

    def _reserve(self, nbytes: int) -> None:
        while True:
            try:
                self._space.reserve(nbytes)
            except (OutOfStorage, RateLimited):
                self._check()
                time.sleep(SPACE_SECONDS)
            else:
                return

    def _segment(self, pixels: Volume | Series, options: Options) -> Result:
        def segment(reservation: Reservation, job: Job[Result]) -> Result:
            return reservation.segment(job, pixels, options)

        result = self._on_device(pixels, options, segment)
        count = result.segmentation.count
        self._runtime.metrics.count_segmentation(self._spec.name, pixels.voxels, count, result.seconds)
        return result

    def _estimate_diameter(self, volume: Volume, options: Options) -> Sizing | None:
        def estimate(reservation: Reservation, job: Job[Sizing | None]) -> Sizing | None:
            return reservation.estimate_diameter(job, volume, options)

        return self._on_device(volume, options, estimate)

    def _on_device(self, pixels: Volume | Series, options: Options, call: Callable[[Reservation, Job[T]], T]) -> T:
        """Queue work for a device, as a request of its own would be, and wait for it. Raises what it raises."""
        request = DeviceRequest(self._spec, pixels, options, self._job.owner)
        job = queue_work(self._runtime, request, call, wait=True)
        self._part = job
        try:
            return self._wait(job)
        finally:
            self._part = None

    def _wait(self, job: Job[T]) -> T:
        while True:
            try:
                return job.future.result(POLL_SECONDS)
            except TimeoutError:
                if job.future.done():
                    raise
                if self._job.cancelled():
                    job.cancel()
            except CancelledError:
                raise Cancelled("given up while a stack waited") from None


# Parameters of the whole folder.
_NOT_OF_STACKS = {"input", "output_to", "overwrite", "glob", "model"}
