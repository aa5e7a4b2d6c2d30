"""Segmentation of a folder of stacks with a fake model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from live import as_tiff

from service.core.errors import BadFile, DeviceLost, OutOfMemory
from service.core.quantities import Diameter
from service.core.types import Options, Segmentation, Volume
from service.formats import stack_reader
from service.inference.types import DiameterEstimate, Result, Series
from service.models.spec import ModelSpec
from service.serving.jobs.folders.records import RECORDS_FILE
from service.serving.jobs.folders.segment_folder import FolderOutcome, FolderSegmentation, StackCallbacks
from service.serving.parameters import Query
from service.serving.reading import Pixels
from service.serving.storage.result_folder import open_results

NAMES = [f"{number}.tif" for number in range(8)]


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    folder = tmp_path / "stacks"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(as_tiff(np.zeros((2, 8, 8), np.uint8)))
    return folder


def segment_folder(
    stacks: Path,
    spec: ModelSpec,
    error: Exception | None = None,
    broken_names: tuple[str, ...] = (),
    used_diameters: list[str] | None = None,
) -> FolderOutcome:
    """Segment the folder with a fake model that finds one object per stack.

    Diameter estimates raise `error`. Reading one of the stacks in `broken_names` raises BadFile. The diameters used for
    segmentation are appended to `used_diameters`.
    """

    @contextmanager
    def open_stack(name: str) -> Iterator[Path]:
        yield stacks / name

    def read(path: Path, query: Query, scratch: Path) -> Pixels:
        if path.name in broken_names:
            raise BadFile("The file is truncated.")
        volume = stack_reader.read(path, query.selection, 2**20, scratch)
        return Pixels(volume, volume)

    def segment(volume: Volume | Series, options: Options) -> Result:
        if used_diameters is not None:
            used_diameters.append(str(options.diameter))
        assert isinstance(volume, Volume)
        labels = np.ones(volume.shape[1:], np.uint16)
        return Result(Segmentation(labels, "labels", volume.voxel_size, count=1), {}, ())

    def estimate(_volume: Volume, _options: Options) -> DiameterEstimate:
        if error is not None:
            raise error
        return DiameterEstimate(next(diameters, None), matches_model=False, num_objects=0, num_windows=1)

    diameters = iter([Diameter((size, size, size), "px") for size in (7.0, 9.0, 20.0)])

    with open_results(stacks.parent / "out") as results:
        callbacks = StackCallbacks(open_stack, read, segment, estimate)
        return FolderSegmentation(results, spec, callbacks, stacks.parent).run(NAMES, Query())


def read_records(stacks: Path) -> str:
    path = stacks.parent / "out" / RECORDS_FILE
    return path.read_text() if path.exists() else ""


def test_all_stacks_share_one_estimated_diameter(stacks: Path, random_nuclei: ModelSpec) -> None:
    used_diameters = list[str]()
    outcome = segment_folder(stacks, random_nuclei, used_diameters=used_diameters)
    assert used_diameters == [str(Diameter((9.0, 9.0, 9.0), "px"))] * len(NAMES)
    (note,) = {note for record in outcome.records.values() for note in record.notes}
    assert note.startswith("Objects seem to be 9 px wide (measured in 3 of 5 stacks of the folder)")


def test_no_diameter_is_recorded_if_the_device_is_lost(stacks: Path, random_nuclei: ModelSpec) -> None:
    with pytest.raises(DeviceLost):
        segment_folder(stacks, random_nuclei, DeviceLost("The device is gone."))
    assert read_records(stacks) == ""


def test_no_diameter_is_recorded_if_no_estimate_succeeds(stacks: Path, random_nuclei: ModelSpec) -> None:
    assert segment_folder(stacks, random_nuclei, OutOfMemory("There is no memory.", 1)).object_count == len(NAMES)
    assert '"series"' not in read_records(stacks)
    # The new estimate may differ, so all stacks are segmented again.
    assert segment_folder(stacks, random_nuclei).skipped_count == 0
    assert '"series"' in read_records(stacks)


def test_other_stacks_are_sampled_if_the_sampled_stacks_are_broken(stacks: Path, random_nuclei: ModelSpec) -> None:
    outcome = segment_folder(stacks, random_nuclei, broken_names=tuple(name for name in NAMES if name != "2.tif"))
    assert '"series"' in read_records(stacks)
    assert [error.partition(":")[0] for error in outcome.failures] == [name for name in NAMES if name != "2.tif"]


def test_symbolic_link_at_a_result_path_is_replaced_and_a_folder_fails_the_stack(
    stacks: Path, random_nuclei: ModelSpec
) -> None:
    secret, results = stacks.parent / "secret", stacks.parent / "out"
    secret.write_text("confidential")
    results.mkdir()
    (results / "1_labels.ome.tif").symlink_to(secret)
    (results / "2_labels.ome.tif").mkdir()
    outcome = segment_folder(stacks, random_nuclei)
    assert secret.read_text() == "confidential"
    assert not (results / "1_labels.ome.tif").is_symlink()
    assert [error.partition(" ")[0] for error in outcome.failures] == ["2.tif:"]
    assert not [path for path in results.iterdir() if path.name.startswith(".")]
