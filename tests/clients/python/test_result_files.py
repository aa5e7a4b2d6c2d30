"""Names and formats of files with results. `test_results` and `test_client` save and read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from live import as_tiff
from stackseg_client import operations
from stackseg_client.folders import STACK_SUFFIXES
from stackseg_client.result_files import MEDIA_TYPES, check_path, get_suffix, get_table_path, is_result, open_part

from service.core.types import Segmentation
from service.formats import writers
from service.formats.zarr import writer as zarr_writer

SOURCE = np.zeros((2, 4, 5), np.uint8)


@pytest.mark.parametrize(
    ("name", "suffix", "table"),
    [
        ("labels.tif", ".tif", "labels.csv"),
        ("labels.ome.tif", ".tif", "labels.csv"),
        ("day.2.TIFF", ".tiff", "day.2.csv"),
        ("größe.Npy", ".npy", "größe.csv"),
        ("labels.nii.gz", ".nii.gz", "labels.csv"),
        ("labels.ozx", ".ozx", "labels.csv"),
    ],
)
def test_suffix_selects_the_format_and_the_table_is_next_to_the_labels(name: str, suffix: str, table: str) -> None:
    assert get_suffix(Path("new", name)) == suffix
    assert suffix in MEDIA_TYPES
    assert get_table_path(Path("new", name)) == Path("new", table)


@pytest.mark.parametrize("name", ["labels", "labels.png", "labels.nii", "labels.gz", "labels.zarr", "labels.tif.bak"])
def test_other_suffixes_are_refused_with_the_supported_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in one of \.tif, \.tiff, \.npy, \.nii\.gz, \.ozx"):
        get_suffix(Path(name))


@pytest.mark.parametrize("name", ["labels.tif", "labels.zarr", "labels.ozx"])
def test_results_are_told_apart_from_stacks(tmp_path: Path, name: str) -> None:
    # The other formats are not those of stacks.
    assert not {".npy", ".nii.gz"} & set(STACK_SUFFIXES)
    labels = Segmentation(np.zeros((2, 4, 5), np.uint16), "labels", None, 0)
    if name.endswith(".ozx"):
        zarr_writer.write_archive(labels, tmp_path / name)
    else:
        writers.write(labels, tmp_path / name, {"model": "a/1"})
    assert is_result(tmp_path / name)
    (tmp_path / "stack.tif").write_bytes(as_tiff(SOURCE))
    assert not is_result(tmp_path / "stack.tif")
    assert not is_result(tmp_path)
    assert not is_result(tmp_path / "missing.tif")


def test_part_files_are_unique_and_in_the_folder_of_the_result(tmp_path: Path) -> None:
    path = tmp_path / "new" / "labels.tif"
    parts = [open_part(path) for _ in range(2)]
    for part, file in parts:
        file.close()
        assert part.parent == path.parent
        assert part.name.startswith(".")
    assert len({part for part, _ in parts}) == 2
    assert not path.exists()


def test_results_never_replace_their_stack(tmp_path: Path) -> None:
    stack = tmp_path / "stack.tif"
    stack.write_bytes(as_tiff(SOURCE))
    (tmp_path / "link.tif").symlink_to(stack)
    np.save(tmp_path / "stack.npy", SOURCE)
    mapped = np.load(tmp_path / "stack.npy", mmap_mode="r")
    for source, path in (
        (stack, stack),
        (str(stack), tmp_path / "link.tif"),
        (tmp_path / "link.tif", stack),
        (mapped, tmp_path / "stack.npy"),
        (mapped[1:], tmp_path / "stack.npy"),
    ):
        with pytest.raises(ValueError, match="would replace the stack"):
            operations.segment(source, path, None, {}, table=False)
    with pytest.raises(ValueError, match="would replace the stack"):
        operations.download_result("1", stack, stack)


def test_paths_are_checked_before_the_computation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.tif").mkdir()
    for path, error, message in (
        (tmp_path / "file" / "deep" / "a.tif", NotADirectoryError, "file is a file"),
        (tmp_path / "folder.tif", IsADirectoryError, "name of a file"),
        (tmp_path / f"{'a' * 252}.tif", ValueError, "too long"),
    ):
        with pytest.raises(error, match=message):
            check_path(path)
        with pytest.raises(error, match=message):
            operations.segment(SOURCE, path, None, {}, table=False)
        with pytest.raises(error, match=message):
            operations.download_result("1", path)
    check_path(tmp_path / "new" / "folder" / f"{'a' * 251}.tif")


def test_the_path_of_the_table_is_checked_before_the_computation(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").mkdir()
    operations.segment(SOURCE, tmp_path / "labels.tif", None, {}, table=False)
    with pytest.raises(IsADirectoryError, match=r"labels\.csv is a folder"):
        operations.segment(SOURCE, tmp_path / "labels.tif", None, {}, table=True)
