from __future__ import annotations

from pathlib import Path

import pytest

from service.core.files.atomic_files import write_atomically


@pytest.mark.parametrize("sync", [False, True])
def test_file_is_renamed_after_it_is_complete(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with write_atomically(path, sync=sync) as partial:
        partial.write_text("new")
        assert (path.read_text(), partial.parent) == ("old", tmp_path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("new", [path])


@pytest.mark.parametrize("partial", [None, "another"])
def test_failed_write_keeps_the_previous_file(tmp_path: Path, partial: str | None) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def write() -> None:
        with write_atomically(path, None if partial is None else tmp_path / partial) as file:
            assert file.name == partial or partial is None
            file.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_link_at_the_temporary_path_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "other"
    other.write_text("unrelated")
    (tmp_path / ".a.json.part").symlink_to(other)
    with write_atomically(path) as partial:
        partial.write_text("new")
    assert (path.read_text(), path.is_symlink(), other.read_text()) == ("new", False, "unrelated")


def test_error_for_a_full_disk_has_the_path(tmp_path: Path) -> None:
    path = tmp_path / "labels.tif"

    def write() -> None:
        with write_atomically(path) as partial:
            partial.symlink_to("/dev/full")
            partial.write_bytes(b"half")

    with pytest.raises(OSError, match="No space left") as error_info:
        write()
    assert (error_info.value.filename, list(tmp_path.iterdir())) == (str(path), [])
