from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.core.errors import BadParameter
from service.serving.storage.result_folder import STAGING_PREFIX, lock_results, open_results


@pytest.mark.parametrize("path", ["../secret", "inner/../../secret", "inner/..", "link/secret"])
def test_paths_outside_the_folder_are_not_accessible(path: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("confidential")
    folder = tmp_path / "out"
    (folder / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    with open_results(folder) as results:
        assert not results.has_file(path)
        with pytest.raises(OSError, match=r"link|directory|symbolic"), results.open(path):
            pass


def test_files_of_another_run_are_not_deleted_without_file_locks(tmp_path: Path) -> None:
    # An O_PATH descriptor cannot be locked, just like a folder on a file system without locks.
    folder_fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with lock_results(folder_fd) as first:
            (first.staging / "half").write_text("written")
            with (
                pytest.raises(BadParameter, match=rf"delete {STAGING_PREFIX}\w+ in the"),
                lock_results(folder_fd),
            ):
                pass
            assert (first.staging / "half").read_text() == "written"
        assert list(tmp_path.iterdir()) == []
        (tmp_path / f"{STAGING_PREFIX}killed").mkdir()
        with pytest.raises(BadParameter, match="not support locks"), lock_results(folder_fd):
            pass
    finally:
        os.close(folder_fd)
    with open_results(tmp_path) as results:
        assert results.is_empty
        assert not (tmp_path / f"{STAGING_PREFIX}killed").exists()
        with pytest.raises(BadParameter, match=r"in use by another run\. Wait"), open_results(tmp_path):
            pass
        assert results.staging.is_dir()
