"""Archives of others: one layout is read, and whatever two readers could read in two ways is refused."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile_archives import lay_out, with_two_directories
from torch import nn

from service.core.files.zip_archive import (
    MAX_COMPRESSED_BYTES,
    MAX_DEPTH,
    TORCH_LIMITS,
    ZipLimits,
    copy_members,
    locate_stored,
    open_archive,
    open_torch_archive,
)

MEMBERS = {"a/code/net.py": b"first", "a/data.pkl": b"second"}


def packed(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.comment = comment
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


PACKED = packed(MEMBERS)


def with_overlap() -> bytes:
    """An archive of which one member lies inside of another."""
    inner, directory = lay_out({"b": b"inside"}, 31)
    body, outer = lay_out({"a": inner}, 0)
    directory = outer + directory
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)


def patched(content: bytes, place: int, value: bytes) -> bytes:
    return content[:place] + value + content[place + len(value) :]


def with_entry(change: Callable[[zipfile.ZipInfo], object]) -> bytes:
    entry, file = zipfile.ZipInfo("a/link"), io.BytesIO()
    change(entry)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    return file.getvalue()


def of_kind(kind: int) -> Callable[[zipfile.ZipInfo], object]:
    return lambda entry: setattr(entry, "external_attr", (kind | 0o644) << 16)


def opened(path: Path, content: bytes) -> dict[str, bytes]:
    path.write_bytes(content)
    with open_torch_archive(path) as archive, zipfile.ZipFile(copy_members(archive)) as copy:
        return {name: copy.read(name) for name in copy.namelist()}


DIRECTORY = PACKED.index(b"PK\1\2")
HOSTILE = {
    "nothing": (b"", "no zip archive"),
    "text": (b"no archive" * 20, "no zip archive"),
    "prefix": (b"#!/bin/sh\n" + PACKED, "before or behind"),
    "bytes behind": (PACKED + b"behind", "no zip archive that ends with its directory"),
    "an archive behind": (PACKED + packed({"a/code/other.py": b""}), "before or behind"),
    "comment": (PACKED[:-2] + b"\4\0more", "no zip archive that ends with its directory"),
    "two directories": (with_two_directories(MEMBERS, {"a/code/net.py": b"other"}), "directory is ambiguous"),
    "overlap": (with_overlap(), "overlaps with the next entry|before its"),
    "two sizes": (patched(PACKED, DIRECTORY + 24, struct.pack("<L", 4)), "states two sizes"),
    "same name": (packed({"a/data.pkl": b"1", "a/DATA.pkl": b"2"}), "the same name"),
    **{
        f"member {name}": (packed({name: b"x"}), "wants to write outside")
        for name in ("../escaped", "/tmp/escaped", "a/../../escaped", "a\\..\\escaped")
    },
    "link": (with_entry(of_kind(stat.S_IFLNK)), "'a/link': the archive wants to write outside"),
    "device": (with_entry(of_kind(stat.S_IFCHR)), "'a/link': the archive wants to write outside"),
    "pipe": (with_entry(of_kind(stat.S_IFIFO)), "'a/link': the archive wants to write outside"),
    "encrypted": (
        patched(patched(PACKED, 6, b"\1"), DIRECTORY + 8, b"\1"),
        "'a/code/net.py': is encrypted",
    ),
    "other method": (packed({"a": b"x"}, zipfile.ZIP_LZMA), "another method than deflate"),
    "folders": (packed({"d/" * MAX_DEPTH + "f": b""}), "folders deep"),
    "many members": (
        packed({f"{number}": b"" for number in range(TORCH_LIMITS.entries + 1)}),
        "10001 entries; no more than 10000 are read",
    ),
    "long directory": (
        packed({f"{number}".rjust(60_000, "n"): b"" for number in range(TORCH_LIMITS.directory_bytes // 60_000 + 1)}),
        "its directory is longer",
    ),
    "bomb": (packed({"a/code/net.py": bytes(MAX_COMPRESSED_BYTES + 1)}, zipfile.ZIP_DEFLATED), "is compressed"),
    "many bombs": (
        packed({f"{n}": bytes(MAX_COMPRESSED_BYTES // 4) for n in range(5)}, zipfile.ZIP_DEFLATED),
        "is compressed",
    ),
    "more than is stated": (
        patched(packed({"a": bytes(100)}, zipfile.ZIP_DEFLATED), -22 - 46 - 1 + 24, b"\1"),
        "Bad CRC",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_readers_could_read_in_two_ways_is_refused(kind: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[kind]
    with pytest.raises(zipfile.BadZipFile, match=reason):
        opened(tmp_path / "hostile.zip", content)


def test_room_between_members_is_refused(tmp_path: Path) -> None:
    """A directory that leaves out a member, with which another directory could begin."""
    body, directory = lay_out({"a": b"shown", "b": b"hidden", "c": b"shown"}, 0)
    first, last = directory.index(b"PK\1\2", 1), directory.rindex(b"PK\1\2")
    directory = directory[:first] + directory[last:]
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)
    with pytest.raises(zipfile.BadZipFile, match="'a': overlaps with the next entry, or something lies between"):
        opened(tmp_path / "room.zip", body + directory + end)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_copy_holds_the_members_that_were_read(tmp_path: Path, method: int) -> None:
    assert opened(tmp_path / "plain.zip", packed(MEMBERS, method)) == MEMBERS


def test_archives_of_torch_are_read(tmp_path: Path) -> None:
    network, image = nn.Conv3d(1, 2, 1).eval(), torch.rand(1, 1, 4, 4, 4)
    torch.save(network.state_dict(), tmp_path / "n.pt")
    torch.jit.script(network).save(str(tmp_path / "n.ts"))
    torch.export.save(torch.export.export(network, (image,)), tmp_path / "n.pt2")
    for name in ("n.pt", "n.ts", "n.pt2"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        assert opened(tmp_path / name, (tmp_path / name).read_bytes()) == members


def test_no_byte_of_an_archive_changes_what_is_read_unseen(tmp_path: Path) -> None:
    """Whatever byte is changed, the archive is refused, or every reader reads the same members."""
    for place in range(len(PACKED)):
        changed = patched(PACKED, place, bytes([PACKED[place] ^ 255]))
        try:
            members = opened(tmp_path / "changed.zip", changed)
        except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError):
            continue
        assert list(members.values()) == list(MEMBERS.values())


WITH_COMMENT = ZipLimits(entries=10, directory_bytes=1000, comment=True)


@pytest.mark.parametrize("comment", [b"", b'{"ome": {"version": "0.5"}}', b"c" * 65535, b"PK\5"])
def test_a_comment_is_read_where_it_is_allowed(comment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    path.write_bytes(packed(MEMBERS, comment=comment))
    with path.open("rb") as file:
        with open_archive(file, WITH_COMMENT) as archive:
            assert archive.comment == comment
            for name, content in MEMBERS.items():
                place = locate_stored(file.fileno(), archive.getinfo(name))
                assert os.pread(file.fileno(), len(content), place) == content
        if comment:
            with pytest.raises(zipfile.BadZipFile, match="ends with its directory"):
                open_archive(file, WITH_COMMENT._replace(comment=False))


@pytest.mark.parametrize("comment", [b"PK\5\6", PACKED, PACKED[-22:], b"PK\5\6" + bytes(18)])
def test_a_comment_hides_no_directory(comment: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or behind"):
        open_archive(io.BytesIO(packed(MEMBERS, comment=comment)), WITH_COMMENT)


@pytest.mark.parametrize("behind", [b"x", b"\0", PACKED])
def test_bytes_behind_are_no_comment(behind: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or behind"):
        open_archive(io.BytesIO(packed(MEMBERS, comment=b"text") + behind), WITH_COMMENT)
