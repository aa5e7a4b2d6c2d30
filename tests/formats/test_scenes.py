"""Select one of several images of a file with `scene`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from zarr_files import write_zarr, zip_store

from service.core.errors import BadFile, BadParameter
from service.core.types import Selection
from service.formats import axes, stack_reader
from service.formats.sandbox.reader import Reader

LIMIT = 2**28
NAMES = ("left", "right", "right", "")


def make_stack(scene: int) -> np.ndarray:
    """Return a stack whose size and pixels differ between scenes."""
    return np.random.default_rng(scene).integers(0, 60_000, (2 + scene, 9, 11)).astype(np.uint16)


def write_ome_tiff(path: Path) -> Path:
    with tifffile.TiffWriter(path, ome=True) as writer:
        for scene, name in enumerate(NAMES):
            metadata = {"axes": "ZYX", "PhysicalSizeX": 1 + scene, "PhysicalSizeY": 1, "PhysicalSizeZ": 1}
            writer.write(
                make_stack(scene), photometric="minisblack", metadata=metadata | {"Name": name} if name else metadata
            )
    return path


def write_collection(root: Path, folders: tuple[str, ...], *, lists_folders: bool) -> Path:
    """Write a collection as bioformats2raw does."""
    root.mkdir()
    (root / ".zattrs").write_text('{"bioformats2raw.layout": 3}')
    (root / ".zgroup").write_text('{"zarr_format": 2}')
    for scene, folder in enumerate(folders):
        write_zarr(root / folder, make_stack(scene), version="0.4")
    if lists_folders:
        (root / "OME").mkdir()
        (root / "OME" / ".zattrs").write_text(json.dumps({"series": folders}))
    return root


@pytest.mark.parametrize("kind", ["ome-tiff", "collection", "listed collection", "zipped collection", "one group"])
def test_each_scene_is_read(kind: str, reader: Reader, tmp_path: Path) -> None:
    if kind == "ome-tiff":
        path = write_ome_tiff(tmp_path / "scenes.ome.tif")
    elif kind == "one group":
        path = write_zarr(tmp_path / "a.zarr", make_stack(0), version="0.4")
        attributes = json.loads((path / ".zattrs").read_text())
        (multiscale,) = attributes["multiscales"]
        for scene in range(1, 4):
            shutil.move(
                write_zarr(tmp_path / "b.zarr", make_stack(scene), version="0.4") / "0", path / f"image-{scene}"
            )
            datasets = [multiscale["datasets"][0] | {"path": f"image-{scene}"}]
            attributes["multiscales"].append(multiscale | {"datasets": datasets, "name": NAMES[scene]})
        (path / ".zattrs").write_text(json.dumps(attributes))
    else:
        folders = ("a", "b/1", "b/2", "c") if kind == "listed collection" else tuple("0123")
        path = write_collection(tmp_path / "c.zarr", folders, lists_folders=kind == "listed collection")
        path = zip_store(path) if kind == "zipped collection" else path

    for scene in range(4):
        selection = Selection(scene=scene)
        np.testing.assert_array_equal(stack_reader.read(path, selection, LIMIT).read_all()[0], make_stack(scene))
        description = reader.inspect(path, selection)
        assert (description.shape[1], len(description.scenes), description.problem) == (2 + scene, 4, "")
        np.testing.assert_array_equal(reader.read(path, selection, tmp_path).read_all()[0], make_stack(scene))
        assert not any("images" in note for note in description.notes)


def test_a_scene_is_selected_by_its_name(tmp_path: Path) -> None:
    path = write_ome_tiff(tmp_path / "scenes.ome.tif")

    description = stack_reader.inspect(path, Selection(scene="left"), LIMIT)

    assert (description.scenes[:3], description.shape) == (("left", "right", "right"), (1, 2, 9, 11))


def test_by_default_the_largest_image_of_an_ome_tiff_is_used_with_a_note(tmp_path: Path) -> None:
    path = write_ome_tiff(tmp_path / "scenes.ome.tif")

    description = stack_reader.inspect(path, Selection(), LIMIT)

    assert (description.shape[1], description.voxel_size and description.voxel_size.x, description.problem) == (
        5,
        4,
        "",
    )
    assert any("4 images" in note and "set scene" in note for note in description.notes)


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        (4, r"no scene 4\. It has 4 scenes: 0 \(left\), 1 \(right\), 2 \(right\), 3.*scene=0 to scene=3"),
        ("top", "no scene 'top'"),
        ("right", "2 scenes of the file have the name 'right'"),
    ],
)
def test_a_scene_that_does_not_exist_is_refused_with_a_list(scene: int | str, message: str) -> None:
    with pytest.raises(BadParameter, match=message) as caught:
        axes.select_scene(NAMES, scene)

    assert (caught.value.parameter, caught.value.suggested) == ("scene", {"scene": "0"})


def test_long_lists_are_shortened() -> None:
    with pytest.raises(BadParameter, match=r"19 and 80 more\. "):
        axes.select_scene(("",) * 100, "a")


@pytest.mark.parametrize("scene", [0, 1, "left"])
@pytest.mark.parametrize("kind", ["tiff", "zarr"])
def test_a_file_with_one_image_has_only_scene_0(kind: str, scene: int | str, tmp_path: Path) -> None:
    if kind == "tiff":
        path = tmp_path / "a.tif"
        tifffile.imwrite(path, make_stack(0), imagej=True, metadata={"axes": "ZYX"})
    else:
        path = write_zarr(tmp_path / "a.zarr", make_stack(0))

    if scene == 0:
        assert stack_reader.inspect(path, Selection(scene=0), LIMIT) == stack_reader.inspect(path, Selection(), LIMIT)
    else:
        with pytest.raises(BadParameter, match="It has one scene: 0"):
            stack_reader.inspect(path, Selection(scene=scene), LIMIT)


def test_paths_of_a_collection_cannot_leave_the_store(tmp_path: Path) -> None:
    write_zarr(tmp_path / "secret", make_stack(0), version="0.4")
    path = write_collection(tmp_path / "c.zarr", ("0",), lists_folders=True)
    (path / "OME" / ".zattrs").write_text('{"series": ["../secret"]}')

    with pytest.raises(BadFile, match="not a path inside the store"):
        stack_reader.inspect(path, Selection(), LIMIT)
