from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from live import as_tiff
from zarr_files import write_zarr

from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume
from service.formats import writers
from service.formats.tiff import writer as tiff_writer
from service.formats.zarr import writer as zarr_writer
from service.serving.jobs.folders.find_stacks import measure_stack, select_stacks

PIXELS = np.arange(3 * 8 * 8, dtype=np.uint16).reshape(3, 8, 8)


def make_archive(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    return file.getvalue()


def select(folder: Path, glob: str | None = None) -> list[str]:
    """Select the stacks among all files and folders directly in a folder."""

    @contextmanager
    def open_stack(name: str) -> Iterator[Path]:
        yield folder / name

    return select_stacks([path.name for path in folder.iterdir()], glob, open_stack)


def test_stacks_are_recognized_by_suffix_or_content(tmp_path: Path) -> None:
    for name in ("a.TIFF", "b.ome.tif", "c.LSM", "d.stk", "e.btf", "without suffix", "image.dat"):
        (tmp_path / name).write_bytes(as_tiff(PIXELS))
    for name in ("notes.txt", "objects.csv", "report.html", "picture.png", "MetaData.xml"):
        (tmp_path / name).write_text("not a stack")
    write_zarr(tmp_path / "f.ome.zarr", PIXELS)
    write_zarr(tmp_path / "folder without suffix", PIXELS)
    (tmp_path / "g.ozx").write_bytes(make_archive("zarr.json"))
    (tmp_path / "h.zip").write_bytes(make_archive("scan.ome.zarr/.zgroup", "scan.ome.zarr/.zattrs"))
    (tmp_path / "i.zip").write_bytes(make_archive("cell.oif", "cell.oif.files/s_C001.tif"))
    (tmp_path / "RoiSet.zip").write_bytes(make_archive("0001-0012.roi", "0002-0044.roi"))
    expected = ["a.TIFF", "b.ome.tif", "c.LSM", "d.stk", "e.btf", "f.ome.zarr", "folder without suffix", "g.ozx"]
    assert select(tmp_path) == [*expected, "h.zip", "i.zip", "image.dat", "without suffix"]


def test_files_that_are_not_what_their_suffix_says_are_selected_so_that_they_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.tif").touch()
    (tmp_path / "page.lsm").write_text("<html>")
    (tmp_path / "archive.tif").write_bytes(make_archive("a"))
    (tmp_path / "damaged.ozx").write_bytes(b"PK\x03\x04")
    (tmp_path / "missing.tif").symlink_to("nowhere")
    assert select(tmp_path) == ["archive.tif", "damaged.ozx", "empty.tif", "missing.tif", "page.lsm"]


@pytest.mark.parametrize("glob", [None, "**/*"])
def test_hidden_files_and_files_of_operating_systems_are_never_stacks(tmp_path: Path, glob: str | None) -> None:
    content = as_tiff(PIXELS)
    names = ["._a.tif", ".a.tif", "Thumbs.db", "desktop.ini", "__MACOSX/a.tif", ".hidden/b.tif", "@eaDir/c.tif"]
    for name in [*names, "d.tif"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    @contextmanager
    def open_stack(name: str) -> Iterator[Path]:
        yield tmp_path / name

    assert select_stacks([*names, "d.tif"], glob, open_stack) == ["d.tif"]


@pytest.mark.parametrize("glob", [None, "*"])
def test_results_are_never_stacks_but_exported_images_are(tmp_path: Path, glob: str | None) -> None:
    voxel_size = VoxelSize(0.5, 0.2, 0.2)
    for dtype in (np.uint16, np.uint32):
        labels = Segmentation(PIXELS.astype(dtype), "labels", voxel_size, count=7)
        for name in (f"{dtype.__name__}.tif", f"{dtype.__name__}.ome.zarr"):
            writers.write(labels, tmp_path / name, {"model": "nuclei/1"})
    zarr_writer.write_archive(labels, tmp_path / "downloaded.ozx")
    writers.write(Segmentation(PIXELS.astype(np.uint8), "classes", voxel_size), tmp_path / "classes.tif", {})
    scores = np.zeros((2, 3, 8, 8), np.float32)
    writers.write(Segmentation(scores, "probabilities", None, names=("a", "b")), tmp_path / "scores.tif", {})
    tiff_writer.write_image(Volume.from_array(PIXELS[None], voxel_size), tmp_path / "image.tif")
    write_zarr(tmp_path / "image.ome.zarr", PIXELS, version="0.4")
    with pytest.raises(BadParameter):
        select(tmp_path, glob)
    (tmp_path / "image.tif").rename(tmp_path / "exported.tif")
    assert select(tmp_path, glob) == ["exported.tif", "image.ome.zarr"]


def test_a_pattern_selects_all_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(as_tiff(PIXELS))
    (tmp_path / "RoiSet.zip").write_bytes(make_archive("1.roi"))
    (tmp_path / "notes.txt").write_text("not a stack")
    assert select(tmp_path, "*") == ["RoiSet.zip", "a.tif", "notes.txt"]


@pytest.mark.parametrize("names", [("a.tif", "a.ome.tif"), ("a.tif", "a.OZX"), ("a.lsm", "a.zarr.zip")])
def test_two_stacks_with_the_same_result_file_are_rejected(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(as_tiff(PIXELS))
    first, second = sorted(names)
    with pytest.raises(BadParameter, match=f"{first} and {second} would have result files with the same name, a"):
        select(tmp_path)


def test_every_file_of_a_zarr_folder_counts_when_it_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    file.write_bytes(b"12345")
    assert measure_stack(file) == (5, file.stat().st_mtime_ns)
    folder = write_zarr(tmp_path / "a.zarr", PIXELS)
    size, mtime = measure_stack(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert size == sum(path.stat().st_size for path in files)
    chunk = max(files, key=lambda path: len(path.parts))
    os.utime(chunk, ns=(mtime + 10**9, mtime + 10**9))
    assert measure_stack(folder) == (size, mtime + 10**9)
