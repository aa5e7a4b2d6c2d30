"""Zip archives by limits of their kind; `test_hostile_zip_archive` has the hostile ones."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from service.core.files.zip_archive import ZipLimits, locate_stored, open_archive

LIMITS = ZipLimits(entries=10, directory_bytes=1000, comment=True)


def packed(comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/first", b"some")
        archive.writestr("a/second", b"other")
        archive.comment = comment
    return file.getvalue()


@pytest.mark.parametrize("comment", [b"", b'{"ome": {"version": "0.5"}}', b"c" * 65535, b"PK\5"])
def test_a_comment_is_read_where_it_is_allowed(comment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    path.write_bytes(packed(comment))
    with path.open("rb") as file:
        with open_archive(file, LIMITS) as archive:
            assert archive.comment == comment
            for name, content in (("a/first", b"some"), ("a/second", b"other")):
                place = locate_stored(file.fileno(), archive.getinfo(name))
                assert os.pread(file.fileno(), len(content), place) == content
        if comment:
            with pytest.raises(zipfile.BadZipFile, match="ends with its directory"):
                open_archive(file, LIMITS._replace(comment=False))


@pytest.mark.parametrize("comment", [b"PK\5\6", packed(), packed()[-22:], b"PK\5\6" + bytes(18)])
def test_a_comment_hides_no_directory(comment: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or behind"):
        open_archive(io.BytesIO(packed(comment)), LIMITS)


@pytest.mark.parametrize("behind", [b"x", b"\0", packed()])
def test_bytes_behind_are_no_comment(behind: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or behind"):
        open_archive(io.BytesIO(packed(b"text") + behind), LIMITS)
