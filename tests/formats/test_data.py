"""Public test files in all formats are read as tifffile reads them, or rejected with the expected error.

The files are in a folder next to the repository. `pixel_sha256` in the manifest is the hash of the whole stored array.
The test reads every channel of every time point and restores the stored order to compute the hash.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from paths import SHARED_DATA as DATA

from service.core.errors import AmbiguousAxes, BadFile, RequestError, UnsupportedMedia
from service.core.quantities import VoxelSize
from service.core.types import Description, Selection
from service.formats import stack_reader

LIMIT = 2**30
MISSING_DATA = "the folder of public test files, ../shared/data, does not exist"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=MISSING_DATA)


def read_manifest(folder: str) -> list[dict[str, Any]]:
    path = DATA / folder / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def parametrize_entries(entries: list[dict[str, Any]]) -> pytest.MarkDecorator:
    parameters = entries or [pytest.param({}, marks=pytest.mark.skip(MISSING_DATA))]
    return pytest.mark.parametrize("entry", parameters, ids=[entry["file"] for entry in entries] or ["none"])


EXPECTED_ERRORS: dict[str, type[RequestError]] = {
    "codecs/BigTIFFSubIFD8.tif": AmbiguousAxes,
    "codecs/off_l16.tif": BadFile,
    "codecs/subsubifds.tif": AmbiguousAxes,
    "derived/dtype_complex64.tif": BadFile,
    "ome/181003_multi_pos_time_course_1_MMStack.ome.tif": AmbiguousAxes,
    "ome/multifile_companion/multifile.companion.ome": UnsupportedMedia,
    "stacks/plantseg_rgb_3D_c_raw_CZYX_as_QQYX.tif": AmbiguousAxes,
    "stacks/shapes_multi_color.tif": BadFile,
    "stacks/shapes_tiled_multi.tif": AmbiguousAxes,
}


def sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))).hexdigest()


def read_stored_array(path: Path, description: Description) -> NDArray[Any]:
    """Read the whole file time point by time point, and return the array in its stored order."""
    parts = [stack_reader.read(path, Selection(time=time), LIMIT).read_all() for time in range(description.times)]
    lengths = dict(zip(description.axes, description.stored_shape, strict=True))
    letters = "TCSZYX"
    order = [axis for axis in letters if axis not in description.axes] + list(description.axes)
    array = np.stack(parts).reshape([lengths.get(axis, 1) for axis in letters])
    array = array.transpose([letters.index(axis) for axis in order])
    return array.reshape(description.stored_shape)


@parametrize_entries(read_manifest("formats"))
def test_every_format_is_read_or_rejected_as_expected(entry: dict[str, Any]) -> None:
    path = DATA / "formats" / entry["file"]
    if entry["file"] in EXPECTED_ERRORS:
        with pytest.raises(EXPECTED_ERRORS[entry["file"]]) as caught:
            stack_reader.inspect(path, Selection(), LIMIT)
        assert "axes=" in str(caught.value) or not isinstance(caught.value, AmbiguousAxes)
        return

    description = stack_reader.inspect(path, Selection(), LIMIT)

    assert entry["reads"] == "ok"
    assert description.axes == entry["axes"].replace("Q", "Z").replace("I", "Z")
    assert list(description.stored_shape) == entry["shape"]
    assert description.dtype == entry["dtype"]
    assert sha256(read_stored_array(path, description)) == entry["pixel_sha256"]


@parametrize_entries([entry for entry in read_manifest("formats") if "logical_zyx_sha256" in entry])
def test_all_containers_contain_the_same_volume(entry: dict[str, Any], tmp_path: Path) -> None:
    path = DATA / "formats" / entry["file"]

    volume = stack_reader.read(path, Selection(channel=0, time=0), LIMIT, tmp_path)

    assert volume.shape[0] == 1
    assert sha256(volume.read_all()[0]) == entry["logical_zyx_sha256"]


@pytest.mark.parametrize(
    ("name", "axes", "voxel_size"),
    [
        ("arabidopsis_lateral_root_nuclei", "ZYX", None),
        ("arabidopsis_ovule_nuclei_1135", "ZYX", (0.2837, 0.1268, 0.1268)),
        ("celegans_membrane_t046", "ZYX", (0.43, 0.18, 0.18)),
        ("drosophila_nuclear_envelope", "ZYX", (1.0, 0.2416, 0.2416)),
        ("fluorescent_beads_imagexpress", "ZYX", (5.0, 1.3668, 1.3668)),
        ("mesospim_brain_nuclei_c5", "ZYX", None),
        ("mouse_brain_s2p_large", "ZYX", (5.0, 2.0, 2.0)),
        ("mouse_embryo_8cell", "ZYX", None),
        ("single_nucleus_confocal_vs_widefield", "ZCYX", (0.4994, 0.5119, 0.5119)),
        ("synthetic_nuclei_stardist", "ZYX", None),
    ],
)
def test_descriptions_of_real_volumes(name: str, axes: str, voxel_size: tuple[float, ...] | None) -> None:
    (entry,) = (entry for entry in read_manifest("real") if entry["name"] == name)

    description = stack_reader.inspect(DATA / "real" / name / "image.tif", Selection(), LIMIT)

    assert description.axes == axes
    assert list(description.stored_shape) == entry["shape"]
    assert description.dtype == entry["dtype"]
    assert (description.voxel_size and tuple(description.voxel_size)) == (
        voxel_size and pytest.approx(voxel_size, abs=5e-5)
    )


@pytest.mark.parametrize(
    ("file", "voxel_size", "note"),
    [
        ("derived/ome_zyx.ome.tif", VoxelSize(1.744, 0.8, 0.8), ""),
        ("derived/imagej_zyx_be.tif", VoxelSize(1.744, 0.8, 0.8), ""),
        ("stacks/float32_10z_32y_40x.tiff", None, "4.0 mm along z"),
        ("ome/cells-2t.ome.tif", VoxelSize(1.0, 0.25, 0.25), ""),
        ("ome/time-series.ome.tif", None, "time=0 to time=6"),
        ("vendor/test.lsm", None, "1e-19 m along z"),
        ("stacks/mri.tif", None, "color palette"),
    ],
)
def test_voxel_sizes_and_notes(file: str, voxel_size: VoxelSize | None, note: str) -> None:
    description = stack_reader.inspect(DATA / "formats" / file, Selection(), LIMIT)

    assert description.voxel_size == voxel_size
    assert note in " ".join((description.problem, *description.notes))


def test_single_file_of_a_multifile_set_is_read_with_a_note() -> None:
    description = stack_reader.inspect(
        DATA / "formats" / "ome" / "multifile_companion" / "multifile-Z3.ome.tiff", Selection(), LIMIT
    )

    assert description.shape == (1, 1, 24, 18)
    assert "never opened" in description.notes[0]
