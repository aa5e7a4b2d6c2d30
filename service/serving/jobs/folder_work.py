"""All stacks of a folder: one width of objects, labels and a table for each, one table and one report, resumption."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from service.core.errors import (
    BadParameter,
    CapacityError,
    DeviceLost,
    NonFiniteScores,
    OutOfStorage,
    RequestError,
    StackSegError,
    StorageUnavailable,
)
from service.core.files.bundled import software_version
from service.core.quantities import VoxelSize
from service.core.telemetry import Stages
from service.core.types import Options, Volume
from service.formats import thumbnail, writers
from service.inference import measurements
from service.inference.series.diameter import choose_diameter, sample
from service.inference.types import Result, Series, Sizing
from service.serving.jobs.folder_records import RECORDS, Records, StackRecord, printable, write_report, write_table
from service.serving.parameters import Query
from service.serving.results.answers import TIFF_SUFFIX, answer_name, measure_objects
from service.serving.results.provenance import describe_origin, hash_file
from service.serving.storage.disk import translate_disk_faults

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.serving.reading import Pixels
    from service.serving.storage.result_folder import ResultFolder

# Stacks whose widths are estimated for all.
SAMPLED_STACKS = 5
# Errors that concern one stack, but for DeviceLost among them.
_OWN_FAULTS = (RequestError, CapacityError, NonFiniteScores, OSError)


class StackCalls(NamedTuple):
    """Calls by which one stack is segmented. They raise errors that concern that stack alone, or DeviceLost.

    open               opens a stack by its name until the end of a block, in which the path is valid
    read               returns the volume or the time points to segment, and what objects are measured in; from a path,
                       parameters, and an empty folder for decoded pixels
    segment            takes them and the parameters
    estimate_diameter  of objects in a volume; None where every width is told
    begin              is told the name of the stack whose turn it is, its number from 1, and how many there are; of a
                       stack that is only looked at for the width of its objects, the number is 0
    check              raises Cancelled where nobody wants the rest any more
    reword             changes what users are told into the words of who asked
    """

    open: Callable[[str], AbstractContextManager[Path]]
    read: Callable[[Path, Query, Path], Pixels]
    segment: Callable[[Volume | Series, Options], Result]
    estimate_diameter: Callable[[Volume, Options], Sizing | None] | None
    begin: Callable[[str, int, int], None] = lambda _name, _number, _count: None
    check: Callable[[], None] = lambda: None
    reword: Callable[[str | StackSegError], str] = str


class Done(NamedTuple):
    """The outcome of a folder: records of its stacks that have one, by their names, and the number done before."""

    records: dict[str, StackRecord]
    skipped: int

    @property
    def faults(self) -> list[str]:
        """Faults, a sentence for each stack that failed."""
        return [f"{printable(name)}: {record.problem}" for name, record in self.records.items() if record.problem]

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust results, a sentence for each such stack."""
        return [f"{printable(name)}: {record.notes[0]}" for name, record in self.records.items() if record.doubtful]

    def describe(self) -> list[dict[str, object]]:
        """Return what is known of each stack, to be told as JSON."""
        return [
            {
                "stack": printable(name),
                "labels": printable(record.result) or None,
                "objects": record.objects,
                "seconds": record.seconds,
                "warnings": list(record.notes),
                "doubtful": record.doubtful,
                "problem": record.problem or None,
            }
            for name, record in self.records.items()
        ]

    @property
    def objects(self) -> int | None:
        """The sum of objects, None where there are none to count."""
        counts = [record.objects for record in self.records.values() if record.objects is not None]
        return sum(counts) if counts else None


class _Width(NamedTuple):
    """Parameters of all stacks, one width of objects among them, and notes about how it was chosen."""

    query: Query
    note: str


def select_stacks(files: Iterable[str], glob: str | None) -> list[str]:
    """Return the files that are stacks, sorted: those that are no hidden ones, and without a pattern all TIFFs.

    Raises BadParameter where several would have one result.
    """
    visible = (name for name in files if not Path(name).name.startswith("."))
    stacks = sorted(name for name in visible if glob or TIFF_SUFFIX.search(name))
    places = set[str]()
    for place in map(_place, stacks):
        if place in places:
            raise BadParameter(f"Several stacks would have one result, {place}; rename one, or choose by a pattern.")
        places.add(place)
    return stacks


def is_free(out: ResultFolder) -> bool:
    """Return whether a folder has nothing in it, or results of a folder of stacks."""
    return out.empty or out.has(RECORDS)


def _place(name: str) -> str:
    """Return the place of a stack without the end of its name, to which those of its results are added."""
    return str(Path(name).with_name(answer_name(Path(name).name, "")))


class FolderWork:
    """One model at work on the stacks of a folder.

    Raises BadParameter for records that are damaged.
    """

    def __init__(self, out: ResultFolder, spec: ModelSpec, calls: StackCalls, scratch: Path) -> None:
        self._out, self._spec, self._calls, self._scratch = out, spec, calls, scratch
        self._records = Records(out)
        self._skipped = 0
        self._key = ""
        self._as_zarr = False

    def run(self, stacks: Sequence[str], query: Query) -> Done:
        """Segment the stacks that are not done with these parameters; write the table and the report in any case.

        Raises DeviceLost, OutOfStorage and StorageUnavailable where results cannot be written, and what ends the whole.
        """
        self._as_zarr = query.format == "zarr"
        try:
            self._segment_all(stacks, query)
        finally:
            self._conclude(stacks)
        return Done({name: self._records[name] for name in stacks}, self._skipped)

    def _segment_all(self, stacks: Sequence[str], query: Query) -> None:
        parameters = json.dumps([query.canonical, self._spec.identifier, self._spec.weights.sha256, software_version()])
        width = self._settle_diameter(stacks, query, parameters)
        self._key = json.dumps([parameters, width.query.diameter])
        for number, name in enumerate(stacks, 1):
            if self._is_done(name):
                self._skipped += 1
                continue
            self._calls.begin(name, number, len(stacks))
            record = self._attempt(name, width)
            with _translate_full_disk():
                self._records.add(name, record)

    def _is_done(self, name: str) -> bool:
        with suppress(*_OWN_FAULTS), self._calls.open(name) as stack:
            return self._records.is_done(name, self._key, stack.stat())
        return False

    def _conclude(self, stacks: Sequence[str]) -> None:
        """Write the table of all objects and the report, of what is done so far."""
        # Results with other parameters are of an earlier call.
        records = {name: record for name, record in self._records.items() if record.key == self._key}
        with _translate_full_disk():
            write_table(
                self._out, [(name, _place(name)) for name in stacks if name in records and records[name].result]
            )
            write_report(self._out, self._spec.identifier, [(name, _place(name), records.get(name)) for name in stacks])

    def _settle_diameter(self, stacks: Sequence[str], query: Query, parameters: str) -> _Width:
        """Estimate one width for all where each stack would have its own; one that is on record stays."""
        if self._calls.estimate_diameter is None:
            return _Width(query, "")
        if (known := self._records.series(parameters)) is None:
            if (known := self._estimate_diameter(stacks, query, self._calls.estimate_diameter)) is None:
                return _Width(query, "")
            self._records.set_series(parameters, known)
        diameter, note = known
        return _Width(Query.model_validate(query.model_dump(exclude_none=True) | {"diameter": diameter}), note)

    def _estimate_diameter(
        self, stacks: Sequence[str], query: Query, estimate: Callable[[Volume, Options], Sizing | None]
    ) -> tuple[str, str] | None:
        """Return the median width of some stacks as a parameter, and a note; None where none can be looked at."""
        estimates = list[tuple[Sizing, VoxelSize | None]]()
        sampled = sample(stacks, SAMPLED_STACKS)
        others = (name for name in stacks if name not in sampled)
        for name in chain(sampled, takewhile(lambda _: not estimates, others)):
            self._calls.begin(name, 0, len(stacks))
            try:
                with self._calls.open(name) as stack, tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
                    pixels = self._calls.read(stack, query, Path(scratch)).segmented
                    volume = pixels if isinstance(pixels, Volume) else pixels.read(pixels.times[0])[0]
                    if (sizing := estimate(volume, query.options)) is not None:
                        estimates.append((sizing, volume.voxel_size))
            except DeviceLost:
                raise
            except _OWN_FAULTS:
                self._calls.check()
        return choose_diameter(estimates, f"{len(sampled)} stacks of the folder") if estimates else None

    def _attempt(self, name: str, width: _Width) -> StackRecord:
        """Segment one stack; a record with the problem where it cannot be.

        Raises DeviceLost, and OutOfStorage or StorageUnavailable where no result can be written.
        """
        record, writing = StackRecord(self._key, 0, 0), False
        try:
            with self._calls.open(name) as stack, tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
                status = stack.stat()
                record = record._replace(size=status.st_size, mtime=status.st_mtime_ns)
                if printable(name) != name:
                    raise BadParameter("The name of the file is not text in UTF-8; rename it.")
                stages = Stages()
                with stages.measure("read"):
                    pixels = self._calls.read(stack, width.query, Path(scratch))
                result = self._calls.segment(pixels.segmented, width.query.options)
                stages.update(result.seconds)
                result = result._replace(notes=tuple(filter(None, (width.note, *result.notes))))
                origin = describe_origin(width.query, result, Path(name).name, hash_file(stack))
                writing = True
                with stages.measure("write"), _translate_full_disk():
                    labels = self._write(name, pixels, result, origin)
        except _OWN_FAULTS as error:
            if isinstance(error, DeviceLost) or (writing and isinstance(error, OutOfStorage | StorageUnavailable)):
                raise
            self._calls.check()
            message = error if isinstance(error, StackSegError) else error.strerror or str(error)
            return record._replace(problem=self._calls.reword(message))
        fault = result.series.fault if result.series else None
        return record._replace(
            result=labels,
            objects=result.segmentation.count,
            seconds=round(stages.total, 3),
            notes=tuple(map(self._calls.reword, result.warnings)),
            problem="" if fault is None else self._calls.reword(fault),
            doubtful=result.doubt is not None,
        )

    def _write(self, name: str, pixels: Pixels, result: Result, origin: dict[str, str]) -> str:
        """Write labels, picture and table of a stack; return the place of the labels."""
        segmentation, staging, place = result.segmentation, self._out.staging, _place(name)
        labels = f"{place}_{segmentation.kind}.ome.{'zarr' if self._as_zarr else 'tif'}"
        staged = Path(labels).name
        writers.write(segmentation, staging / staged, origin)
        volume = pixels.segmented
        if isinstance(volume, Series):
            volume = volume.read(volume.times[0])[0]
            segmentation = replace(segmentation, pixels=segmentation.pixels[0])
        (staging / "picture").write_bytes(thumbnail.draw(volume, segmentation))
        if (table := measure_objects(result, pixels.measured)) is not None:
            measurements.write_csv(table, staging / "table")
            self._out.put("table", f"{place}_objects.csv")
        self._out.put("picture", f"{place}.png")
        self._out.put(staged, labels)
        return labels


@contextmanager
def _translate_full_disk() -> Iterator[None]:
    """Raise OutOfStorage and StorageUnavailable for an OSError of results that cannot be written."""
    try:
        with translate_disk_faults():
            yield
    except OutOfStorage as error:
        raise OutOfStorage(
            "The disk that the results lie on is full; make room and start again: what is done stays."
        ) from error
