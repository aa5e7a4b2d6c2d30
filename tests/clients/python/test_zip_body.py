from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from stackseg_client.bodies import BytesBody, make_body
from stackseg_client.errors import StackChanged
from stackseg_client.zip_body import ZipBody

from service.core.files.zip_archive import ZipLimits, open_archive


def test_archive_has_the_members_and_the_announced_size() -> None:
    contents = {"zarr.json": b"{}", "0/c/1/0": bytes(range(256)) * 5000, "0/c/empty": b"", "größe/µm": b"x"}
    body = ZipBody("scan.zip", {path: BytesBody(content) for path, content in contents.items()})
    archived = b"".join(body.read_blocks())
    assert len(archived) == body.nbytes
    assert b"".join(body.read_blocks()) == archived
    for archive in (
        zipfile.ZipFile(io.BytesIO(archived)),
        open_archive(io.BytesIO(archived), ZipLimits(max_entries=10, max_directory_bytes=10_000)),
    ):
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == contents


def test_large_members_are_read_block_by_block(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text("{}")
    with (tmp_path / "shard").open("wb") as file:
        file.truncate(3 * 2**30)
    body = make_body(tmp_path)
    assert 0 < body.nbytes - 3 * 2**30 < 1000
    assert max(len(block) for _, block in zip(range(20), body.read_blocks(), strict=False)) <= 2**20


def test_files_must_not_change_while_they_are_sent(tmp_path: Path) -> None:
    (tmp_path / ".zgroup").write_text("{}")
    (tmp_path / "chunk").write_bytes(b"1234")
    body = make_body(tmp_path)
    (tmp_path / "chunk").write_bytes(b"12345")
    with pytest.raises(StackChanged):
        b"".join(body.read_blocks())
