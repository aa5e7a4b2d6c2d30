"""Folder of one block-wise run, on storage that all workers share: its plan, intermediate results, and records.

A file gets its final name only when its content is on disk, and the record of a block is written after all its files.
So only the blocks that were interrupted have to be repeated.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from pydantic import TypeAdapter

from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.files.atomic_files import write_atomically
from service.core.quantities import Diameter, Size, VoxelSize, is_index
from service.core.types import Array, Options, OutputKind, Selection, StackShape
from service.inference.blockwise.layout import Layout, choose_windows
from service.inference.preprocessing.normalize import IntensityScaling
from service.inference.preprocessing.resample import working_size
from service.inference.types import DiameterEstimate, SkippedWindows
from service.models.repository import read_spec
from service.models.spec import ModelSpec

Step = Literal["count", "survey", "scores", "tile", "link", "join", "labels"]


@dataclass(frozen=True)
class BlockTask:
    """One block for a worker: the folder of the run (an absolute path), the step, and the number of the block in it."""

    folder: str
    step: Step
    number: int = 0


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run. It stays the same when the run is resumed.

    source    path of the image
    changed   stamp that reveals whether the image was replaced in the meantime
    weights   SHA-256 of the model's weights
    choices   settings of engine and windows, as JSON
    layout    on the grid of the network
    shape     shape of the stack; with `voxel_size` it makes a plan the `Extent` of the stack
    diameter  object diameter, if the stack is resampled accordingly
    workers   number of workers that the volume is divided for
    measured  whether objects are measured when their labels are written
    """

    source: Path
    changed: str
    selection: Selection
    model: Path
    weights: str
    choices: str
    options: Options
    output: OutputKind
    layout: Layout
    shape: StackShape
    voxel_size: VoxelSize | None
    diameter: Diameter | None
    workers: int
    measured: bool

    @property
    def size(self) -> Size:
        """Voxels of the stack along (z, y, x)."""
        _, z, y, x = self.shape
        return z, y, x

    def with_diameter(self, diameter: Diameter, spec: ModelSpec) -> RunPlan:
        """Return the plan for another object diameter."""
        size, layout = working_size(self, spec, diameter), self.layout
        windows = choose_windows(size, layout.roi, layout.overlap, self.workers, self.size)
        return replace(self, diameter=diameter, layout=replace(layout, size=size, windows=windows))


@dataclass(frozen=True)
class Survey:
    """Facts about a volume that require reading all of it.

    scalings  one per channel
    skipped   windows that are skipped; None if none may be
    scores    scores of the skipped windows, one per output
    engine    engine that computes the windows
    sizing    estimate of the object diameter; None if it was not needed
    """

    scalings: tuple[IntensityScaling, ...]
    notes: tuple[str, ...]
    skipped: SkippedWindows | None
    scores: tuple[float, ...]
    engine: str
    sizing: DiameterEstimate | None


_FOLDERS = ("records", "survey", "scores", "tiles", "links", "measured")
_PLAN_ADAPTER, _SETTINGS_ADAPTER, _SURVEY_ADAPTER = TypeAdapter(RunPlan), TypeAdapter(Settings), TypeAdapter(Survey)


class RunFolder:
    """Folder of a run, as used by its driver and workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run against other drivers within the context. Raises BadParameter if another process drives it."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(folder, self.path)
            yield
        finally:
            os.close(folder)

    def create_or_resume(self, plan: RunPlan, settings: Settings) -> RunPlan:
        """Write the plan, or return the plan of the run to resume, whose layout stays the same.

        Raises BadParameter if the folder contains another run or other files.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "plan.json").exists():
            previous = self._read_plan()
            if previous is not None and _has_same_result(plan, previous):
                self._write_text("settings.json", settings.model_dump_json())
                return previous
            raise BadParameter(
                f"{self.path} contains a run of another stack, model, options or version. Use the original options to"
                " resume it, or choose another folder."
            )
        if not all(map(_is_leftover, self.path.iterdir())):
            raise BadParameter(f"{self.path} contains other files. Choose an empty or new folder.")
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        # Write the plan first, because it identifies the folder of a run.
        self._write_text("plan.json", _PLAN_ADAPTER.dump_json(plan).decode())
        self._write_text("settings.json", settings.model_dump_json())
        return plan

    def _read_plan(self) -> RunPlan | None:
        """Return the plan, or None if it is damaged or from another version."""
        with suppress(ValueError):
            return self.plan
        return None

    @property
    def plan(self) -> RunPlan:
        """Plan of the run."""
        return _PLAN_ADAPTER.validate_json((self.path / "plan.json").read_bytes())

    @property
    def settings(self) -> Settings:
        """Settings of the workers, without a limit on windows."""
        return remove_window_limit(Settings.model_validate_json((self.path / "settings.json").read_bytes()))

    @property
    def survey(self) -> Survey:
        """Survey of the volume."""
        return _SURVEY_ADAPTER.validate_json((self.path / "survey.json").read_bytes())

    def write_survey(self, survey: Survey, skipped: Array) -> None:
        """Write the survey, and the first voxels of the skipped windows, int64 [N, 3]."""
        self.write_array("skipped.npy", skipped)
        self._write_text("survey.json", _SURVEY_ADAPTER.dump_json(survey).decode())

    @contextmanager
    def open_for_writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for writing. It gets its name after the context, when its content is on disk."""
        partial_path = self.path / f"{name}.part-{os.getpid()}"
        with write_atomically(self.path / name, partial_path) as partial, partial.open("wb") as file:
            yield file

    def _write_text(self, name: str, text: str) -> None:
        with self.open_for_writing(name) as file:
            file.write(text.encode())

    def write_array(self, name: str, array: Array) -> None:
        """Write a NumPy array."""
        with self.open_for_writing(name) as file:
            np.save(file, array)

    def read_array(self, name: str) -> Array:
        """Map a NumPy array."""
        return np.load(self.path / name, mmap_mode="r")  # type: ignore[no-any-return]

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write an archive of compressed arrays like `numpy.savez_compressed`, but several times as fast."""
        with self.open_for_writing(name) as file, ZipFile(file, "w", ZIP_DEFLATED, compresslevel=1) as archive:
            for key, array in arrays.items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def read_arrays(self, name: str) -> NpzFile:
        """Open an archive of arrays. Each array is read on access."""
        return np.load(self.path / name)  # type: ignore[no-any-return]

    def write_record(self, task: BlockTask, facts: dict[str, Any]) -> None:
        """Record that a block is finished."""
        self._write_text(_record(task.step, task.number), json.dumps(facts))

    def read_record(self, step: Step, number: int = 0) -> dict[str, Any]:
        """Return the record of a block. Raises FileNotFoundError."""
        content: dict[str, Any] = json.loads((self.path / _record(step, number)).read_bytes())
        return content

    def write_levels(self, facts: dict[str, Any]) -> None:
        """Write the path of the result, and its levels and blocks."""
        self._write_text("levels.json", json.dumps(facts))

    @property
    def levels(self) -> dict[str, Any]:
        """Path, levels and blocks of the result, as written by `write_levels`."""
        content: dict[str, Any] = json.loads((self.path / "levels.json").read_bytes())
        return content

    def discard_records(self, step: Step) -> None:
        """Delete the records of a step, so that all its blocks are repeated."""
        for number in self.finished_blocks(step):
            (self.path / _record(step, number)).unlink()

    def finished_blocks(self, step: Step) -> set[int]:
        """Return the numbers of the finished blocks of a step."""
        stems = (path.stem.partition("-") for path in (self.path / "records").glob(f"{step}-*.json"))
        return {int(number) for _, _, number in stems if is_index(number)}


def remove_window_limit(settings: Settings) -> Settings:
    """Return settings without a limit on the windows of a volume."""
    return override_settings(settings, "limits", {"windows": sys.maxsize})


def _is_leftover(path: Path) -> bool:
    """Return whether a run created this file or folder, and was interrupted before it had a plan."""
    is_folder = path.name in _FOLDERS and path.is_dir() and not any(path.iterdir())
    return is_folder or path.name.startswith("plan.json.part-")


def _lock(folder: int, path: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadParameter(f"{path} is in use by another process. Wait for it, or choose another folder.") from None
    except OSError:
        # Not every file system supports locks.
        pass


def _record(step: Step, number: int) -> str:
    return f"records/{step}-{number}.json"


def _has_same_result(plan_a: RunPlan, plan_b: RunPlan) -> bool:
    """Return whether two plans have the same result, regardless of `strict` and of how the volume is divided."""
    excluded: dict[str, Any] = {"layout": {"windows"}, "options": {"strict"}, "workers": True}
    comparable = [_PLAN_ADAPTER.dump_python(plan, mode="json", exclude=excluded) for plan in (plan_a, plan_b)]
    return bool(comparable[0] == comparable[1])


@lru_cache(maxsize=4)
def open_run(path: str, *, surveyed: bool = False) -> OpenRun:
    """Open the folder of a run, once per process. `surveyed` applies the diameter that the survey estimated."""
    folder = RunFolder(Path(path))
    plan, spec = folder.plan, read_spec(folder.plan.model)
    sizing = folder.survey.sizing if surveyed else None
    if sizing is not None and sizing.resampling_diameter is not None:
        plan = plan.with_diameter(sizing.resampling_diameter, spec)
    return OpenRun(folder, plan, spec)


@dataclass(frozen=True)
class OpenRun:
    """Open run, as seen by a worker."""

    folder: RunFolder
    plan: RunPlan
    spec: ModelSpec
