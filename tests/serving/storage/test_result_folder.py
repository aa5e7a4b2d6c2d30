from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.core.errors import BadParameter
from service.serving.storage.result_folder import STAGING, hold_results, open_results


@pytest.mark.parametrize("place", ["../secret", "inner/../../secret", "inner/..", "link/secret"])
def test_nothing_outside_of_the_folder_is_looked_up(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of others")
    out = tmp_path / "out"
    (out / "inner").mkdir(parents=True)
    (out / "link").symlink_to(tmp_path)
    with open_results(out) as results:
        assert not results.has(place)
        with pytest.raises(OSError, match=r"link|directory|symbolic"), results.open(place):
            pass


def test_without_file_locks_the_files_of_another_run_are_left_alone(tmp_path: Path) -> None:
    # A descriptor that stands for a place alone cannot be locked, as no file can on some file systems.
    folder = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with hold_results(folder) as first:
            (first.staging / "half").write_text("written")
            with pytest.raises(BadParameter, match=rf"delete {STAGING}\w+ in it"), hold_results(folder):
                pass
            assert (first.staging / "half").read_text() == "written"
        assert list(tmp_path.iterdir()) == []
        (tmp_path / f"{STAGING}killed").mkdir()
        with pytest.raises(BadParameter, match="no locks"), hold_results(folder):
            pass
    finally:
        os.close(folder)
    with open_results(tmp_path) as results:
        assert results.empty
        assert not (tmp_path / f"{STAGING}killed").exists()
        with pytest.raises(BadParameter, match="in use by another run; wait"), open_results(tmp_path):
            pass
        assert results.staging.is_dir()
