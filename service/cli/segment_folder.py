"""`stackseg segment FOLDER -o OUT`: all stacks of a folder, with one table, one report, and resumption."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from service.cli.folder_records import Records, StackRecord, write_report, write_table
from service.cli.models import choose_model
from service.cli.progress import ProgressBar, show_progress
from service.cli.segment import name_options
from service.core.bundled import software_version
from service.core.config import Settings
from service.core.errors import BadParameter, CapacityError, DeviceLost, NonFiniteScores, RequestError
from service.core.timing import Stages
from service.core.volume import VoxelSize
from service.formats import foreign, thumbnail, tiff_reader, tiff_writer
from service.inference import measurements
from service.inference.batcher import WindowBatcher, open_batcher
from service.inference.diameter import Sizing
from service.inference.segmenter import Segmenter
from service.inference.series_diameter import choose_diameter, sample
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.provenance import describe_origin, hash_file
from service.serving.results import TIFF_SUFFIX, answer_name

# Stacks whose widths are estimated for the whole series.
SAMPLED_STACKS = 5
# Errors that concern one stack, but for DeviceLost among them.
_OWN_FAULTS = (RequestError, CapacityError, NonFiniteScores, OSError)


class _Series(NamedTuple):
    """What holds for all stacks: the parameters, one width among them, and what is to be known about that."""

    query: Query
    note: str


def run(options: argparse.Namespace, query: Query, settings: Settings) -> int:
    """Segment the stacks of a folder that are not done yet; return 1 if any failed.

    Raises BadParameter for a folder without stacks, and for an output folder that holds something else.
    """
    folder, out = options.input, options.result
    _check_out(folder, out, force=options.force)
    stacks = find_stacks(folder, options.glob, out)
    out.mkdir(parents=True, exist_ok=True)
    spec = choose_model(query.model, settings)
    with (
        tempfile.TemporaryDirectory(prefix="segment-") as scratch,
        open_batcher(settings) as device,
        show_progress() as bar,
    ):
        bar.begin(f"loading {spec.identifier}")
        segmenter = Segmenter(spec, settings)
        device.call(segmenter.warm_up)
        work = FolderWork(folder, out, spec, segmenter, device, settings, Path(scratch), bar)
        try:
            work.segment(stacks, query)
        finally:
            work.conclude(stacks)
    failed = [(name, record.problem) for name in stacks if (record := work.records.get(name)) and record.problem]
    sys.stderr.writelines(f"stackseg: {name}: {problem}\n" for name, problem in failed)
    doubts = [(name, record.notes[0]) for name in stacks if (record := work.records.get(name)) and record.doubtful]
    sys.stderr.writelines(f"stackseg: {name}: warning: {doubt}\n" for name, doubt in doubts)
    objects = sum(work.records[name].objects or 0 for name in stacks)
    done = f"{len(stacks) - len(failed)} of {len(stacks)} stacks, {work.skipped} of them before"
    sys.stdout.write(f"{out / 'report.html'}: {done}, {objects} objects, {spec.identifier}\n")
    return 1 if failed else 0


def find_stacks(folder: Path, glob: str | None, out: Path) -> list[str]:
    """Return the stacks of a folder by their places in it, sorted. Raises BadParameter where there is none."""
    found = [path for path in folder.glob(glob or "*") if path.is_file() and not path.name.startswith(".")]
    stacks = [path for path in found if glob or TIFF_SUFFIX.search(path.name)]
    names = sorted(str(path.relative_to(folder)) for path in stacks if out.resolve() not in path.resolve().parents)
    if not names:
        image = foreign.explain_folder({path.name for path in folder.iterdir()})
        raise BadParameter(image or f"{folder} holds no stack that matches {glob or '*.tif'}; say which with --glob.")
    places = [_place(name) for name in names]
    if twice := {place for place in places if places.count(place) > 1}:
        raise BadParameter(f"Several stacks would have one result, {min(twice)}; rename one, or choose with --glob.")
    return names


def _place(name: str) -> str:
    """Return the place of a stack without the end of its name, to which those of its results are added."""
    return str(Path(name).with_name(answer_name(Path(name).name, "")))


def _check_out(folder: Path, out: Path, *, force: bool) -> None:
    if out.resolve() == folder.resolve():
        raise BadParameter(f"{out} is the folder of the stacks; name another for the results.")
    if out.exists() and not out.is_dir():
        raise BadParameter(f"{out} is a file; name a folder for the results.")
    if out.is_dir() and any(out.iterdir()) and not Records.belongs(out) and not force:
        raise BadParameter(f"{out} holds something else already; name another folder, or use it with --force.")


class FolderWork:
    """One loaded model at work on the stacks of a folder."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        folder: Path,
        out: Path,
        spec: ModelSpec,
        segmenter: Segmenter,
        device: WindowBatcher,
        settings: Settings,
        scratch: Path,
        bar: ProgressBar,
    ) -> None:
        self._folder, self._out, self._spec = folder, out, spec
        self._segmenter, self._device, self._bar = segmenter, device, bar
        self._limit, self._scratch = settings.limits.decoded_bytes, scratch
        self.records = Records(out)
        self.skipped = 0
        self._key = ""

    def segment(self, stacks: Sequence[str], query: Query) -> None:
        """Segment the stacks that are not done with these parameters, and record each."""
        parameters = json.dumps([query.canonical, self._spec.identifier, self._spec.weights.sha256, software_version()])
        series = self._settle_diameter(stacks, query, parameters)
        self._key = key = json.dumps([parameters, series.query.diameter])
        for number, name in enumerate(stacks, 1):
            if self.records.is_done(name, key, self._folder / name):
                self.skipped += 1
                continue
            self._bar.begin(f"[{number}/{len(stacks)}] {name}")
            self.records.add(name, self._attempt(name, series, key))

    def conclude(self, stacks: Sequence[str]) -> None:
        """Write the table of all objects and the report, of what is done so far."""
        # Results with other parameters are of an earlier call.
        records = {name: record for name, record in self.records.items() if record.key == self._key}
        write_table(
            self._out, [(name, _place(name)) for name in stacks if name in records and not records[name].problem]
        )
        write_report(self._out, self._spec.identifier, [(name, _place(name), records.get(name)) for name in stacks])

    def _settle_diameter(self, stacks: Sequence[str], query: Query, parameters: str) -> _Series:
        """Estimate one width for the series where each stack would have its own; one that is on record stays."""
        if (known := self.records.series(parameters)) is None:
            known = self._estimate_diameter(stacks, query)
            self.records.set_series(parameters, known)
        diameter, note = known
        stated = query.model_dump(exclude_none=True) | ({"diameter": diameter} if diameter else {})
        return _Series(Query.model_validate(stated), note)

    def _estimate_diameter(self, stacks: Sequence[str], query: Query) -> tuple[str, str]:
        """Return the median width of some stacks as a parameter, "" where none is asked for, and a note."""
        estimates: list[tuple[Sizing, VoxelSize | None]] = []
        sampled = sample(stacks, SAMPLED_STACKS)
        for name in sampled:
            self._bar.begin(f"width of objects: {name}")
            try:
                volume = tiff_reader.read(self._folder / name, query.selection, self._limit, self._scratch)
                sizing = self._segmenter.estimate_diameter(volume, query.options, run=self._device.run)
            except DeviceLost:
                raise
            except _OWN_FAULTS:
                continue
            if sizing is None:
                return "", ""
            estimates.append((sizing, volume.voxel_size))
        return choose_diameter(estimates, f"{len(sampled)} stacks")

    def _attempt(self, name: str, series: _Series, key: str) -> StackRecord:
        """Segment one stack; a record with the problem where it cannot be. Raises DeviceLost."""
        record = StackRecord(key, 0, 0)
        try:
            status = (self._folder / name).stat()
            record = record._replace(size=status.st_size, mtime=status.st_mtime_ns)
            return self._segment(name, series, record)
        except DeviceLost:
            raise
        except _OWN_FAULTS as error:
            return record._replace(problem=name_options(str(error)))

    def _segment(self, name: str, series: _Series, record: StackRecord) -> StackRecord:
        stack, query, stages = self._folder / name, series.query, Stages()
        place = self._out / _place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            with stages.measure("read"):
                volume = tiff_reader.read(stack, query.selection, self._limit, Path(scratch))
            result = self._segmenter.segment(volume, query.options, run=self._device.run, progress=self._bar.show)
            stages.update(result.seconds)
            result = result._replace(notes=tuple(filter(None, (series.note, *result.notes))))
            segmentation = result.segmentation
            with stages.measure("write"):
                origin = describe_origin(query, result, stack.name, hash_file(stack))
                labels = place.with_name(f"{place.name}_{segmentation.kind}.ome.tif")
                tiff_writer.write(segmentation, labels, origin)
                place.with_name(f"{place.name}.png").write_bytes(thumbnail.draw(volume, segmentation))
            if segmentation.kind == "labels":
                with stages.measure("measure"):
                    selection = replace(query.selection, channel=None)
                    volume = tiff_reader.read(stack, selection, self._limit, Path(scratch))
                    table = measurements.measure(segmentation, volume)
                    measurements.write_csv(table, place.with_name(f"{place.name}_objects.csv"))
        return record._replace(
            result=str(labels.relative_to(self._out)),
            objects=segmentation.count,
            seconds=round(stages.total, 3),
            notes=tuple(map(name_options, result.warnings)),
            doubtful=result.doubt is not None,
        )
