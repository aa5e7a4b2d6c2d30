"""Folder of one block-wise run on storage that all workers share.

The folder contains the plan, intermediate results and records. A file gets its final name only when its content is on
disk, and the record of a block is written after all other files of the block. Therefore, only blocks that were
interrupted have to be repeated.
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
from service.inference.blockwise.layout import Layout, choose_group_shape
from service.inference.preprocessing.normalize import IntensityScaling
from service.inference.preprocessing.resample import compute_working_size
from service.inference.types import DiameterEstimate, SkippedWindows
from service.models.repository import read_spec
from service.models.spec import ModelSpec

Step = Literal["count", "survey", "scores", "tile", "region", "join", "holes", "objects", "labels"]


@dataclass(frozen=True)
class BlockTask:
    """Block to process: the folder of the run (absolute path), the step, and the number of the block in the step."""

    folder: str
    step: Step
    number: int = 0


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run, which stays the same when the run is resumed.

    source              path of the image
    source_stamp        stamp that shows whether the image was overwritten since the run started
    weights             SHA-256 of the model's weights
    computing_settings  settings under `engine` and `windows`, as JSON
    layout              groups and tiles on the grid of the network
    shape               shape of the stack; `shape` and `voxel_size` make the plan an `Extent`
    diameter            object diameter for which the stack is resampled; None: no diameter is used
    workers             number of workers that the division of the volume is designed for
    measures_objects    whether objects are measured when their labels are written
    version             version of StackSeg, because files of a run may have another format in another version
    """

    source: Path
    source_stamp: str
    selection: Selection
    model: Path
    weights: str
    computing_settings: str
    options: Options
    output: OutputKind
    layout: Layout
    shape: StackShape
    voxel_size: VoxelSize | None
    diameter: Diameter | None
    workers: int
    measures_objects: bool
    version: str

    @property
    def size(self) -> Size:
        """Number of voxels of the stack along (z, y, x)."""
        _, z, y, x = self.shape
        return z, y, x

    def with_diameter(self, diameter: Diameter, spec: ModelSpec) -> RunPlan:
        """Return the plan for a different object diameter."""
        size, layout = compute_working_size(self, spec, diameter), self.layout
        group_shape = choose_group_shape(size, layout.roi, layout.overlap, self.workers, self.size)
        return replace(self, diameter=diameter, layout=replace(layout, size=size, group_shape=group_shape))


@dataclass(frozen=True)
class Survey:
    """Properties of a volume that are known only after the whole volume has been read.

    scalings           intensity scaling of each channel
    notes              notes about the preprocessing of the volume
    skipped            skipped windows; None if no windows may be skipped
    scores             scores of the skipped windows, one per output
    engine             description of the engine that runs the network
    diameter_estimate  estimate of the object diameter; None if it was not needed
    """

    scalings: tuple[IntensityScaling, ...]
    notes: tuple[str, ...]
    skipped: SkippedWindows | None
    scores: tuple[float, ...]
    engine: str
    diameter_estimate: DiameterEstimate | None


_FOLDERS = ("records", "survey", "scores", "tiles", "regions", "holes", "measured")
_PLAN_ADAPTER, _SETTINGS_ADAPTER, _SURVEY_ADAPTER = TypeAdapter(RunPlan), TypeAdapter(Settings), TypeAdapter(Survey)


class RunFolder:
    """Folder of a run, as used by its driver and workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold an exclusive lock on the run within the context. Raises BadParameter if another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock_folder(folder_fd, self.path)
            yield
        finally:
            os.close(folder_fd)

    def create_or_resume(self, plan: RunPlan, settings: Settings) -> RunPlan:
        """Write the plan of a new run, or return the stored plan of the run to resume.

        The layout of the stored plan may be different. Raises BadParameter if the folder contains a different run or
        other files.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "plan.json").exists():
            previous_plan = self._read_plan()
            if previous_plan is None or previous_plan.version != plan.version:
                raise BadParameter(
                    f"{self.path} contains a run that another version of StackSeg has started, or its plan is damaged."
                    " The run cannot be resumed. Delete the folder to start again, or choose another folder."
                )
            if _have_same_result(plan, previous_plan):
                self._write_text("settings.json", settings.model_dump_json())
                return previous_plan
            raise BadParameter(
                f"{self.path} contains a run with a different stack, model or options. Use the original"
                " options to resume that run, or choose another folder."
            )
        if not all(map(_is_left_over, self.path.iterdir())):
            raise BadParameter(f"{self.path} contains other files. Choose a new or empty folder.")
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        # Write the plan first, because a folder with a plan is recognized as the folder of a run.
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
        """Settings for the workers, without a limit on the number of windows."""
        return remove_window_limit(Settings.model_validate_json((self.path / "settings.json").read_bytes()))

    @property
    def survey(self) -> Survey:
        """Survey of the volume."""
        return _SURVEY_ADAPTER.validate_json((self.path / "survey.json").read_bytes())

    def write_survey(self, survey: Survey, skipped_positions: Array) -> None:
        """Write the survey. `skipped_positions` contains the first voxels of the skipped windows, int64 [N, 3]."""
        self.write_array("skipped.npy", skipped_positions)
        self._write_text("survey.json", _SURVEY_ADAPTER.dump_json(survey).decode())

    @contextmanager
    def open_for_writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for writing. The file gets its name at the end of the context, when its content is on disk."""
        partial_path = self.path / f"{name}.part-{os.getpid()}"
        with write_atomically(self.path / name, partial_path) as temporary_path, temporary_path.open("wb") as file:
            yield file

    def _write_text(self, name: str, text: str) -> None:
        with self.open_for_writing(name) as file:
            file.write(text.encode())

    def write_array(self, name: str, array: Array) -> None:
        """Write a NumPy array to a file."""
        with self.open_for_writing(name) as file:
            np.save(file, array)

    def read_array(self, name: str) -> Array:
        """Open a NumPy array as a memory map."""
        return np.load(self.path / name, mmap_mode="r")  # type: ignore[no-any-return]

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write an archive of compressed arrays like `numpy.savez_compressed`, but several times as fast."""
        with self.open_for_writing(name) as file, ZipFile(file, "w", ZIP_DEFLATED, compresslevel=1) as archive:
            for key, array in arrays.items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def read_arrays(self, name: str) -> NpzFile:
        """Open an archive of arrays. Each array is read when it is accessed."""
        return np.load(self.path / name)  # type: ignore[no-any-return]

    def write_record(self, task: BlockTask, content: dict[str, Any]) -> None:
        """Write the record of a block, which marks the block as finished."""
        self._write_text(_get_record_name(task.step, task.number), json.dumps(content))

    def read_record(self, step: Step, number: int = 0) -> dict[str, Any]:
        """Return the record of a block. Raises FileNotFoundError if the block is not finished."""
        content: dict[str, Any] = json.loads((self.path / _get_record_name(step, number)).read_bytes())
        return content

    def write_levels(self, content: dict[str, Any]) -> None:
        """Write the path, levels and blocks of the result."""
        self._write_text("levels.json", json.dumps(content))

    @property
    def levels(self) -> dict[str, Any]:
        """Path, levels and blocks of the result, as written by `write_levels`."""
        content: dict[str, Any] = json.loads((self.path / "levels.json").read_bytes())
        return content

    def discard_records(self, step: Step) -> None:
        """Delete the records of a step, so that all blocks of the step are repeated."""
        for number in self.find_finished_blocks(step):
            (self.path / _get_record_name(step, number)).unlink()

    def find_finished_blocks(self, step: Step) -> set[int]:
        """Return the numbers of the finished blocks of a step."""
        stems = (path.stem.partition("-") for path in (self.path / "records").glob(f"{step}-*.json"))
        return {int(number) for _, _, number in stems if is_index(number)}


def remove_window_limit(settings: Settings) -> Settings:
    """Return the settings without a limit on the number of windows of a volume."""
    return override_settings(settings, "limits", {"windows": sys.maxsize})


def _is_left_over(path: Path) -> bool:
    """Return whether this file or folder is left over from a run that was interrupted before its plan was written."""
    is_folder = path.name in _FOLDERS and path.is_dir() and not any(path.iterdir())
    return is_folder or path.name.startswith("plan.json.part-")


def _lock_folder(folder_fd: int, path: Path) -> None:
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadParameter(
            f"{path} is in use by another process. Wait until that process has finished, or choose another folder."
        ) from None
    except OSError:
        # Not every file system supports locks.
        pass


def _get_record_name(step: Step, number: int) -> str:
    return f"records/{step}-{number}.json"


def _have_same_result(plan_a: RunPlan, plan_b: RunPlan) -> bool:
    """Return whether two plans produce the same result, ignoring `strict` and the division of the volume."""
    excluded_fields: dict[str, Any] = {"layout": {"group_shape"}, "options": {"strict"}, "workers": True}
    comparable_plans = [
        _PLAN_ADAPTER.dump_python(plan, mode="json", exclude=excluded_fields) for plan in (plan_a, plan_b)
    ]
    return bool(comparable_plans[0] == comparable_plans[1])


@lru_cache(maxsize=4)
def open_run(path: str, *, has_survey: bool = False) -> OpenRun:
    """Open and cache the folder of a run. If `has_survey` is true, the plan has the diameter from the survey."""
    folder = RunFolder(Path(path))
    plan, spec = folder.plan, read_spec(folder.plan.model)
    diameter_estimate = folder.survey.diameter_estimate if has_survey else None
    if diameter_estimate is not None and diameter_estimate.resampling_diameter is not None:
        plan = plan.with_diameter(diameter_estimate.resampling_diameter, spec)
    return OpenRun(folder, plan, spec)


@dataclass(frozen=True)
class OpenRun:
    """Folder, plan and model of a run, as a worker uses them."""

    folder: RunFolder
    plan: RunPlan
    spec: ModelSpec
