"""Folder of one block-wise run on storage that all workers share: its plan, what workers hand on, and what is done.

A file gets its name once its content is safe on disk, and the record of a block is written after all files of it. So
whatever was interrupted is done again, and nothing else.
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
from service.core.files.whole_file import write_whole
from service.core.quantities import Diameter, Size, VoxelSize, is_index
from service.core.types import Array, Options, OutputKind, Selection, StackShape
from service.inference.blockwise.layout import Layout, choose_windows
from service.inference.preprocessing.normalize import IntensityScaling
from service.inference.preprocessing.resample import working_size
from service.inference.types import Sizing, Skipped
from service.models.repository import read_spec
from service.models.spec import ModelSpec

Step = Literal["count", "survey", "scores", "tile", "link", "join", "labels"]


@dataclass(frozen=True)
class BlockTask:
    """One piece of work for a worker: which step of the run in `folder`, an absolute path, and which block of it."""

    folder: str
    step: Step
    number: int = 0


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run, which stays the same when the run is resumed.

    source    path of the image, and what tells whether it was replaced meanwhile
    weights   SHA-256 of the model's weights
    choices   of the operator for engine and windows, as JSON
    layout    on the grid that the network works on
    shape     of the stack, with its `voxel_size`: a plan is the `Extent` of the stack
    diameter  of the objects, where the stack is resampled by it
    workers   that the volume is cut for
    measured  whether objects are measured as their labels are written
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
        """Return the plan for objects of another diameter."""
        size, old = working_size(self, spec, diameter), self.layout
        windows = choose_windows(size, old.roi, old.overlap, self.workers, self.size)
        return replace(self, diameter=diameter, layout=replace(old, size=size, windows=windows))


@dataclass(frozen=True)
class Survey:
    """Facts about a volume that are known once all of it was read.

    scalings  one for each channel
    skipped   windows that are not computed, None where all are
    scores    that stand for those of these, one for each output
    engine    that is to compute the windows
    sizing    estimate of the diameter of the objects, None where none was wanted
    """

    scalings: tuple[IntensityScaling, ...]
    notes: tuple[str, ...]
    skipped: Skipped | None
    scores: tuple[float, ...]
    engine: str
    sizing: Sizing | None


_FOLDERS = ("records", "survey", "scores", "tiles", "links", "measured")
_PLAN, _SETTINGS, _SURVEY = TypeAdapter(RunPlan), TypeAdapter(Settings), TypeAdapter(Survey)


class RunFolder:
    """Folder of a run, as its driver and its workers see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from driving the run until the end of the block. Raises BadParameter where one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(folder, self.path)
            yield
        finally:
            os.close(folder)

    def begin(self, plan: RunPlan, settings: Settings) -> RunPlan:
        """Write the plan, or return that of the run which is to be resumed; its layout then stays what it was.

        Raises BadParameter where the folder holds another run, or something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "plan.json").exists():
            before = self._read_plan()
            if before is not None and _same(plan, before):
                self._write_text("settings.json", settings.model_dump_json())
                return before
            raise BadParameter(
                f"{self.path} holds a run of another stack, model or options, or of another version; resume that one as"
                " it was begun, or name another folder."
            )
        if not all(map(_is_begun, self.path.iterdir())):
            raise BadParameter(f"{self.path} holds something else already; name an empty folder, or one to make.")
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        # First, as a folder with a plan is known for that of a run.
        self._write_text("plan.json", _PLAN.dump_json(plan).decode())
        self._write_text("settings.json", settings.model_dump_json())
        return plan

    def _read_plan(self) -> RunPlan | None:
        """Return the plan, None where it is damaged or of another version."""
        with suppress(ValueError):
            return self.plan
        return None

    @property
    def plan(self) -> RunPlan:
        """Plan of the run."""
        return _PLAN.validate_json((self.path / "plan.json").read_bytes())

    @property
    def settings(self) -> Settings:
        """Settings of the workers."""
        return lift_limit(Settings.model_validate_json((self.path / "settings.json").read_bytes()))

    @property
    def survey(self) -> Survey:
        """Survey of the volume."""
        return _SURVEY.validate_json((self.path / "survey.json").read_bytes())

    def write_survey(self, survey: Survey, skipped: Array) -> None:
        """Write the survey, and the first voxels of the windows that are not computed, int64 [N, 3]."""
        self.write_array("skipped.npy", skipped)
        self._write_text("survey.json", _SURVEY.dump_json(survey).decode())

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file, which gets its name after the block, once its content is on disk."""
        named = self.path / f"{name}.part-{os.getpid()}"
        with write_whole(self.path / name, named) as partial, partial.open("wb") as file:
            yield file

    def _write_text(self, name: str, text: str) -> None:
        with self.writing(name) as file:
            file.write(text.encode())

    def write_array(self, name: str, array: Array) -> None:
        """Write an array of NumPy."""
        with self.writing(name) as file:
            np.save(file, array)

    def read_array(self, name: str) -> Array:
        """Map an array of NumPy."""
        return np.load(self.path / name, mmap_mode="r")  # type: ignore[no-any-return]

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write an archive of compressed arrays, as NumPy does, but several times as fast."""
        with self.writing(name) as file, ZipFile(file, "w", ZIP_DEFLATED, compresslevel=1) as archive:
            for key, array in arrays.items():
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def read_arrays(self, name: str) -> NpzFile:
        """Open an archive of arrays, each of which is read where it is asked for."""
        return np.load(self.path / name)  # type: ignore[no-any-return]

    def write_record(self, task: BlockTask, facts: dict[str, Any]) -> None:
        """Note that a block is done."""
        self._write_text(_record(task.step, task.number), json.dumps(facts))

    def read_record(self, step: Step, number: int = 0) -> dict[str, Any]:
        """Return what was noted of a block. Raises FileNotFoundError."""
        content: dict[str, Any] = json.loads((self.path / _record(step, number)).read_bytes())
        return content

    def write_levels(self, facts: dict[str, Any]) -> None:
        """Write where the result goes, and of which resolutions and blocks it is."""
        self._write_text("levels.json", json.dumps(facts))

    @property
    def levels(self) -> dict[str, Any]:
        """Place of the result, with its resolutions and their blocks, as `write_levels` has stored it."""
        content: dict[str, Any] = json.loads((self.path / "levels.json").read_bytes())
        return content

    def forget(self, step: Step) -> None:
        """Have all blocks of a step done again."""
        for number in self.done(step):
            (self.path / _record(step, number)).unlink()

    def done(self, step: Step) -> set[int]:
        """Return the blocks of a step that are done."""
        named = (path.stem.partition("-") for path in (self.path / "records").glob(f"{step}-*.json"))
        return {int(number) for _, _, number in named if is_index(number)}


def lift_limit(settings: Settings) -> Settings:
    """Return settings by which a volume has as many windows as it needs."""
    return override_settings(settings, "limits", {"windows": sys.maxsize})


def _is_begun(path: Path) -> bool:
    """Return whether a run has made this, and ended before it had a plan."""
    is_folder = path.name in _FOLDERS and path.is_dir() and not any(path.iterdir())
    return is_folder or path.name.startswith("plan.json.part-")


def _lock(folder: int, path: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadParameter(f"{path} is in use by another process; wait for it, or name another folder.") from None
    except OSError:
        # Not every file system has locks.
        pass


def _record(step: Step, number: int) -> str:
    return f"records/{step}-{number}.json"


def _same(one: RunPlan, other: RunPlan) -> bool:
    """Return whether two plans have the same result, whether or not it is taken and however the volume is cut."""
    left_out: dict[str, Any] = {"layout": {"windows"}, "options": {"strict"}, "workers": True}
    shown = [_PLAN.dump_python(plan, mode="json", exclude=left_out) for plan in (one, other)]
    return bool(shown[0] == shown[1])


@lru_cache(maxsize=4)
def open_run(path: str, *, surveyed: bool = False) -> OpenRun:
    """Open the folder of a run, once in each process; after the survey with the diameter that was estimated there."""
    folder = RunFolder(Path(path))
    plan, spec = folder.plan, read_spec(folder.plan.model)
    sizing = folder.survey.sizing if surveyed else None
    if sizing is not None and sizing.resampled_by is not None:
        plan = plan.with_diameter(sizing.resampled_by, spec)
    return OpenRun(folder, plan, spec)


@dataclass(frozen=True)
class OpenRun:
    """A run as a worker has it open."""

    folder: RunFolder
    plan: RunPlan
    spec: ModelSpec
