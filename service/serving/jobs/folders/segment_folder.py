"""Segmentation of a folder of stacks with a shared object diameter, one table and one report. Runs can be resumed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from service.core.files.bundled import get_software_version
from service.core.quantities import VoxelSize
from service.core.telemetry import Stages
from service.core.types import Options, Volume
from service.formats import writers
from service.inference import measurements
from service.inference.series.diameter import choose_diameter, select_evenly_spaced
from service.inference.types import DiameterEstimate, Result, Series
from service.serving.jobs.folders.find_stacks import get_result_stem, measure_stack
from service.serving.jobs.folders.records import RECORDS_FILE, RecordFile, StackRecord
from service.serving.jobs.folders.report import to_printable, write_report, write_table
from service.serving.parameters import Query
from service.serving.results.answers import measure_objects
from service.serving.results.provenance import describe_provenance, hash_file
from service.serving.storage.disk import translate_disk_errors

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.serving.reading import Pixels
    from service.serving.storage.result_folder import ResultFolder

# Number of stacks whose diameter estimates determine the shared diameter.
SAMPLED_STACK_COUNT = 5
# Errors that affect only a single stack. DeviceLost is a CapacityError, but affects all stacks.
_SINGLE_STACK_ERRORS = (RequestError, CapacityError, NonFiniteScores, OSError)


class StackCallbacks(NamedTuple):
    """Functions that process a single stack. They raise DeviceLost, or an error that affects only this stack.

    open               context manager that opens a stack by name; the path is valid inside the block
    read               reads a stack from a path with the parameters of the request; the third argument is an empty
                       folder for decoded pixels
    segment            segments a volume or a series of time points
    estimate_diameter  estimates the object diameter in a volume; None if no estimate is needed
    begin              called with the name of the next stack, its position (1 for the first stack), and the number of
                       stacks. The position is 0 if the stack is used only to estimate the diameter.
    check_cancelled    raises Cancelled if the run has been canceled
    reword             adapts messages to the user interface, for example to option names of the command line
    """

    open: Callable[[str], AbstractContextManager[Path]]
    read: Callable[[Path, Query, Path], Pixels]
    segment: Callable[[Volume | Series, Options], Result]
    estimate_diameter: Callable[[Volume, Options], DiameterEstimate | None] | None
    begin: Callable[[str, int, int], None] = lambda _name, _position, _stack_count: None
    check_cancelled: Callable[[], None] = lambda: None
    reword: Callable[[str | StackSegError], str] = str


class FolderOutcome(NamedTuple):
    """The outcome of a run: the records of the stacks by name, and the number of stacks finished in earlier runs."""

    records: dict[str, StackRecord]
    skipped_count: int

    @property
    def failures(self) -> list[str]:
        """One sentence for each stack that failed."""
        return [f"{to_printable(name)}: {record.problem}" for name, record in self.records.items() if record.problem]

    @property
    def confidence_warnings(self) -> list[str]:
        """One sentence for each stack whose result has low confidence."""
        return [f"{to_printable(name)}: {record.notes[0]}" for name, record in self.records.items() if record.doubtful]

    def describe(self) -> list[dict[str, object]]:
        """Return the outcome of each stack in a form that can be serialized as JSON."""
        return [
            {
                "stack": to_printable(name),
                "labels": to_printable(record.result) or None,
                "objects": record.objects,
                "seconds": record.seconds,
                "warnings": list(record.notes),
                "doubtful": record.doubtful,
                "problem": record.problem or None,
            }
            for name, record in self.records.items()
        ]

    @property
    def object_count(self) -> int | None:
        """Total number of objects; None if the output has no objects."""
        counts = [record.objects for record in self.records.values() if record.objects is not None]
        return sum(counts) if counts else None


class _SharedParameters(NamedTuple):
    """The parameters for all stacks, including the shared diameter, and a note about how the diameter was chosen."""

    query: Query
    note: str


def can_hold_results(results: ResultFolder) -> bool:
    """Return whether a folder is empty or contains the results of an earlier run."""
    return results.is_empty or results.has_file(RECORDS_FILE)


class FolderSegmentation:
    """Segments the stacks in a folder with one model.

    Raises BadParameter if the records of an earlier run are damaged.
    """

    def __init__(self, results: ResultFolder, spec: ModelSpec, callbacks: StackCallbacks, scratch: Path) -> None:
        self._results, self._spec, self._callbacks, self._scratch = results, spec, callbacks, scratch
        self._records = RecordFile(results)
        self._skipped_count = 0
        self._key = ""
        self._is_zarr = False

    def run(self, stacks: Sequence[str], query: Query) -> FolderOutcome:
        """Segment the stacks that have no result with these parameters, and write the table and the report.

        The table and the report are written even if an error ends the run. Raises OutOfStorage or
        StorageUnavailable if results cannot be written. Also raises DeviceLost, and all other errors that affect more
        than one stack.
        """
        self._is_zarr = query.format == "zarr"
        try:
            self._segment_all(stacks, query)
        finally:
            self._write_summary(stacks)
        return FolderOutcome({name: self._records[name] for name in stacks}, self._skipped_count)

    def _segment_all(self, stacks: Sequence[str], query: Query) -> None:
        parameters = json.dumps(
            [query.canonical_json, self._spec.identifier, self._spec.weights.sha256, get_software_version()]
        )
        shared_parameters = self._find_shared_parameters(stacks, query, parameters)
        self._key = json.dumps([parameters, shared_parameters.query.diameter])
        for number, name in enumerate(stacks, 1):
            if self._has_result(name):
                self._skipped_count += 1
                continue
            self._callbacks.begin(name, number, len(stacks))
            record = self._segment_stack(name, shared_parameters)
            with _translate_write_errors():
                self._records.add(name, record)

    def _has_result(self, name: str) -> bool:
        with suppress(*_SINGLE_STACK_ERRORS), self._callbacks.open(name) as stack:
            return self._records.has_result_for(name, self._key, *measure_stack(stack))
        return False

    def _write_summary(self, stacks: Sequence[str]) -> None:
        """Write the table of all objects and the report for the stacks finished so far."""
        # Records with a different key are from an earlier run.
        records = {name: record for name, record in self._records.items() if record.key == self._key}
        with _translate_write_errors():
            write_table(
                self._results,
                [(name, get_result_stem(name)) for name in stacks if name in records and records[name].result],
            )
            write_report(
                self._results,
                self._spec.identifier,
                [(name, get_result_stem(name), records.get(name)) for name in stacks],
            )

    def _find_shared_parameters(self, stacks: Sequence[str], query: Query, parameters: str) -> _SharedParameters:
        """Add the recorded diameter or a new estimate to the parameters, unless the request specifies a diameter."""
        if self._callbacks.estimate_diameter is None:
            return _SharedParameters(query, "")
        if (diameter_and_note := self._records.find_diameter(parameters)) is None:
            if (diameter_and_note := self._estimate_diameter(stacks, query, self._callbacks.estimate_diameter)) is None:
                return _SharedParameters(query, "")
            self._records.record_diameter(parameters, diameter_and_note)
        diameter, note = diameter_and_note
        return _SharedParameters(
            Query.model_validate(query.model_dump(exclude_none=True) | {"diameter": diameter}), note
        )

    def _estimate_diameter(
        self, stacks: Sequence[str], query: Query, estimate: Callable[[Volume, Options], DiameterEstimate | None]
    ) -> tuple[str, str] | None:
        """Return the median diameter of sampled stacks as a parameter value, and a note.

        Return None if no diameter can be estimated.
        """
        estimates = list[tuple[DiameterEstimate, VoxelSize | None]]()
        sampled_names = select_evenly_spaced(stacks, SAMPLED_STACK_COUNT)
        remaining_names = (name for name in stacks if name not in sampled_names)
        for name in chain(sampled_names, takewhile(lambda _: not estimates, remaining_names)):
            self._callbacks.begin(name, 0, len(stacks))
            try:
                with self._callbacks.open(name) as stack, tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
                    pixels = self._callbacks.read(stack, query, Path(scratch)).segmentation_input
                    volume = pixels if isinstance(pixels, Volume) else pixels.read(pixels.times[0])[0]
                    if (diameter_estimate := estimate(volume, query.options)) is not None:
                        estimates.append((diameter_estimate, volume.voxel_size))
            except DeviceLost:
                raise
            except _SINGLE_STACK_ERRORS:
                self._callbacks.check_cancelled()
        return choose_diameter(estimates, f"{len(sampled_names)} stacks of the folder") if estimates else None

    def _segment_stack(self, name: str, shared_parameters: _SharedParameters) -> StackRecord:
        """Segment one stack and return its record. If segmentation failed, the record contains the problem.

        Raises DeviceLost, and OutOfStorage or StorageUnavailable if the result cannot be written.
        """
        record, is_writing = StackRecord(self._key, 0, 0), False
        try:
            with self._callbacks.open(name) as stack, tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
                size, mtime = measure_stack(stack)
                record = record._replace(size=size, mtime=mtime)
                if to_printable(name) != name:
                    raise BadParameter("The file name is not valid UTF-8. Rename the file.")
                stages = Stages()
                with stages.measure("read"):
                    pixels = self._callbacks.read(stack, shared_parameters.query, Path(scratch))
                options = replace(shared_parameters.query.options, may_correct_diameter=False)
                result = self._callbacks.segment(pixels.segmentation_input, options)
                stages.update(result.seconds)
                result = result._replace(notes=tuple(filter(None, (shared_parameters.note, *result.notes))))
                provenance = describe_provenance(shared_parameters.query, result, Path(name).name, hash_file(stack))
                is_writing = True
                with stages.measure("write"), _translate_write_errors():
                    labels_path = self._write_results(name, pixels, result, provenance)
        except _SINGLE_STACK_ERRORS as error:
            if isinstance(error, DeviceLost) or (is_writing and isinstance(error, OutOfStorage | StorageUnavailable)):
                raise
            self._callbacks.check_cancelled()
            message = error if isinstance(error, StackSegError) else error.strerror or str(error)
            return record._replace(problem=self._callbacks.reword(message))
        series_problem = result.series.error if result.series else None
        return record._replace(
            result=labels_path,
            objects=result.segmentation.count,
            seconds=round(stages.total_seconds, 3),
            notes=tuple(map(self._callbacks.reword, result.warnings)),
            problem="" if series_problem is None else self._callbacks.reword(series_problem),
            doubtful=result.quality_warning is not None,
        )

    def _write_results(self, name: str, pixels: Pixels, result: Result, provenance: dict[str, str]) -> str:
        """Write the labels, the preview image and the table of a stack. Return the path of the labels."""
        segmentation, staging, stem = result.segmentation, self._results.staging, get_result_stem(name)
        labels_path = f"{stem}_{segmentation.kind}.ome.{'zarr' if self._is_zarr else 'tif'}"
        staged_name = Path(labels_path).name
        writers.write(segmentation, staging / staged_name, provenance)
        volume = pixels.segmentation_input
        if isinstance(volume, Series):
            volume = volume.read(volume.times[0])[0]
            segmentation = replace(segmentation, pixels=segmentation.pixels[0])
        (staging / "picture").write_bytes(writers.draw_thumbnail(volume, segmentation))
        if (table := measure_objects(result, pixels.measurement_input)) is not None:
            measurements.write_csv(table, staging / "table")
            self._results.put("table", f"{stem}_objects.csv")
        self._results.put("picture", f"{stem}.png")
        self._results.put(staged_name, labels_path)
        return labels_path


@contextmanager
def _translate_write_errors() -> Iterator[None]:
    """Raise OutOfStorage or StorageUnavailable for a disk error that occurs while results are written."""
    try:
        with translate_disk_errors():
            yield
    except OutOfStorage as error:
        raise OutOfStorage(
            "The disk that contains the results is full. Free up some space and start the run again."
            " The results of finished stacks are retained."
        ) from error
