from __future__ import annotations

from pathlib import Path

import pytest

from service.serving.open_folder import open_results


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
