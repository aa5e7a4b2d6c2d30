from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from service.core.errors import OutOfStorage
from service.serving.storage.scratch import MARKER, make_locked_folder, sweep, translate_disk_faults


def test_folders_of_killed_services_are_swept_and_those_of_living_ones_spared(tmp_path: Path) -> None:
    dead, living = (tmp_path / f"stackseg-{name}" for name in ("dead", "living"))
    os.close(make_locked_folder(dead))
    (dead / "requests" / "one").mkdir(parents=True)
    (dead / "requests" / "one" / "upload.tif").touch()
    lock = make_locked_folder(living)
    sweep(tmp_path)
    os.close(lock)
    assert list(tmp_path.iterdir()) == [living]
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_left_alone_whatever_their_name(tmp_path: Path) -> None:
    mine, linked, other = (tmp_path / name for name in ("stackseg-results", "stackseg-linked", "other"))
    os.close(make_locked_folder(other))
    for folder in (mine, linked):
        folder.mkdir()
    (mine / "labels.tif").touch()
    (linked / MARKER).symlink_to(other / MARKER)
    (tmp_path / "stackseg-link").symlink_to(other)
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, linked, other, tmp_path / "stackseg-link"}
    assert (mine / "labels.tif").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_out_of_storage(number: int) -> None:
    with pytest.raises(OutOfStorage), translate_disk_faults():
        raise OSError(number, "full")


def test_other_errors_of_the_disk_stay_what_they_are() -> None:
    with pytest.raises(PermissionError), translate_disk_faults():
        raise PermissionError(errno.EACCES, "denied")
