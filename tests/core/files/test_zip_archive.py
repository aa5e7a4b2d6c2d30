"""Validation of untrusted zip archives: every archive that two readers could interpret differently is rejected."""

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
from hostile_archives import encode_members, make_ambiguous_archive
from torch import nn

from service.core.files.zip_archive import (
    MAX_DECOMPRESSED_BYTES,
    MAX_DEPTH,
    TORCH_LIMITS,
    ZipLimits,
    copy_members,
    locate_stored_member,
    open_archive,
    open_torch_archive,
)

MEMBERS = {"a/code/net.py": b"first", "a/data.pkl": b"second"}


def make_archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.comment = comment
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


ARCHIVE = make_archive(MEMBERS)


def make_overlapping_archive() -> bytes:
    """Return an archive in which one member is inside another."""
    inner, directory = encode_members({"b": b"inside"}, 31)
    body, outer = encode_members({"a": inner}, 0)
    directory = outer + directory
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)


def patch(content: bytes, offset: int, value: bytes) -> bytes:
    return content[:offset] + value + content[offset + len(value) :]


def make_archive_with_entry(change: Callable[[zipfile.ZipInfo], object]) -> bytes:
    entry, file = zipfile.ZipInfo("a/link"), io.BytesIO()
    change(entry)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    return file.getvalue()


def set_file_type(kind: int) -> Callable[[zipfile.ZipInfo], object]:
    return lambda entry: setattr(entry, "external_attr", (kind | 0o644) << 16)


def read_members(path: Path, content: bytes) -> dict[str, bytes]:
    path.write_bytes(content)
    with open_torch_archive(path) as archive, zipfile.ZipFile(copy_members(archive)) as copy:
        return {name: copy.read(name) for name in copy.namelist()}


DIRECTORY = ARCHIVE.index(b"PK\1\2")
HOSTILE = {
    "empty file": (b"", "not a zip archive"),
    "text": (b"no archive" * 20, "not a zip archive"),
    "prefix": (b"#!/bin/sh\n" + ARCHIVE, "before or after"),
    "trailing bytes": (ARCHIVE + b"behind", "not a zip archive, or has content after its central directory"),
    "trailing archive": (ARCHIVE + make_archive({"a/code/other.py": b""}), "before or after"),
    "comment": (ARCHIVE[:-2] + b"\4\0more", "not a zip archive, or has content after its central directory"),
    "two directories": (make_ambiguous_archive(MEMBERS, {"a/code/net.py": b"other"}), "central directory is ambiguous"),
    "overlap": (make_overlapping_archive(), "overlaps the next entry|before its"),
    "two sizes": (patch(ARCHIVE, DIRECTORY + 24, struct.pack("<L", 4)), "specifies two different sizes"),
    "same name": (make_archive({"a/data.pkl": b"1", "a/DATA.pkl": b"2"}), "the same name"),
    **{
        f"member {name}": (make_archive({name: b"x"}), "would be extracted outside")
        for name in ("../escaped", "/tmp/escaped", "a/../../escaped")
    },
    "backslashes": (make_archive({"a\\..\\escaped": b"x"}), "has backslashes instead of slashes. Pack the folder"),
    "link": (make_archive_with_entry(set_file_type(stat.S_IFLNK)), "'a/link' would be extracted outside"),
    "device": (make_archive_with_entry(set_file_type(stat.S_IFCHR)), "'a/link' would be extracted outside"),
    "pipe": (make_archive_with_entry(set_file_type(stat.S_IFIFO)), "'a/link' would be extracted outside"),
    "encrypted": (
        patch(patch(ARCHIVE, 6, b"\1"), DIRECTORY + 8, b"\1"),
        "'a/code/net.py' is encrypted",
    ),
    "other method": (make_archive({"a": b"x"}, zipfile.ZIP_LZMA), "a compression method other than deflate"),
    "folders": (make_archive({"d/" * MAX_DEPTH + "f": b""}), "folders deep"),
    "many members": (
        make_archive({f"{number}": b"" for number in range(TORCH_LIMITS.max_entries + 1)}),
        "10001 entries; the maximum is 10000",
    ),
    "long directory": (
        make_archive(
            {f"{number}".rjust(60_000, "n"): b"" for number in range(TORCH_LIMITS.max_directory_bytes // 60_000 + 1)}
        ),
        "the central directory is larger",
    ),
    "bomb": (make_archive({"a/code/net.py": bytes(MAX_DECOMPRESSED_BYTES + 1)}, zipfile.ZIP_DEFLATED), "is compressed"),
    "many bombs": (
        make_archive({f"{n}": bytes(MAX_DECOMPRESSED_BYTES // 4) for n in range(5)}, zipfile.ZIP_DEFLATED),
        "is compressed",
    ),
    "larger than its specified size": (
        patch(make_archive({"a": bytes(100)}, zipfile.ZIP_DEFLATED), -22 - 46 - 1 + 24, b"\1"),
        "Bad CRC",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_ambiguous_or_unsafe_archive_is_rejected(kind: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[kind]
    with pytest.raises(zipfile.BadZipFile, match=reason):
        read_members(tmp_path / "hostile.zip", content)


def test_gap_between_members_is_rejected(tmp_path: Path) -> None:
    """The directory omits a member, which could be part of another directory."""
    body, directory = encode_members({"a": b"shown", "b": b"hidden", "c": b"shown"}, 0)
    first, last = directory.index(b"PK\1\2", 1), directory.rindex(b"PK\1\2")
    directory = directory[:first] + directory[last:]
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(body), 0)
    with pytest.raises(zipfile.BadZipFile, match="'a' overlaps the next entry, or there are extra bytes between"):
        read_members(tmp_path / "gap.zip", body + directory + end)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_copy_contains_the_same_members(tmp_path: Path, method: int) -> None:
    assert read_members(tmp_path / "plain.zip", make_archive(MEMBERS, method)) == MEMBERS


def test_archives_written_by_torch_are_accepted(tmp_path: Path) -> None:
    network, image = nn.Conv3d(1, 2, 1).eval(), torch.rand(1, 1, 4, 4, 4)
    torch.save(network.state_dict(), tmp_path / "n.pt")
    torch.jit.script(network).save(str(tmp_path / "n.ts"))
    torch.export.save(torch.export.export(network, (image,)), tmp_path / "n.pt2")
    for name in ("n.pt", "n.ts", "n.pt2"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        assert read_members(tmp_path / name, (tmp_path / name).read_bytes()) == members


def test_changing_any_byte_is_rejected_or_leaves_the_members_unchanged(tmp_path: Path) -> None:
    """If any single byte is changed, the archive is rejected, or all readers find the same members."""
    for offset in range(len(ARCHIVE)):
        changed = patch(ARCHIVE, offset, bytes([ARCHIVE[offset] ^ 255]))
        try:
            members = read_members(tmp_path / "changed.zip", changed)
        except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError):
            continue
        assert list(members.values()) == list(MEMBERS.values())


WITH_COMMENT = ZipLimits(max_entries=10, max_directory_bytes=1000, allows_comment=True)


@pytest.mark.parametrize("comment", [b"", b'{"ome": {"version": "0.5"}}', b"c" * 65535, b"PK\5"])
def test_comment_is_accepted_if_it_is_allowed(comment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    path.write_bytes(make_archive(MEMBERS, comment=comment))
    with path.open("rb") as file:
        with open_archive(file, WITH_COMMENT) as archive:
            assert archive.comment == comment
            for name, content in MEMBERS.items():
                offset = locate_stored_member(file.fileno(), archive.getinfo(name))
                assert os.pread(file.fileno(), len(content), offset) == content
        if comment:
            with pytest.raises(zipfile.BadZipFile, match="content after its central directory"):
                open_archive(file, WITH_COMMENT._replace(allows_comment=False))


@pytest.mark.parametrize("comment", [b"PK\5\6", ARCHIVE, ARCHIVE[-22:], b"PK\5\6" + bytes(18)])
def test_comment_with_a_directory_record_is_rejected(comment: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or after"):
        open_archive(io.BytesIO(make_archive(MEMBERS, comment=comment)), WITH_COMMENT)


@pytest.mark.parametrize("behind", [b"x", b"\0", ARCHIVE])
def test_bytes_after_the_comment_are_rejected(behind: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile, match=r"directory|before or after"):
        open_archive(io.BytesIO(make_archive(MEMBERS, comment=b"text") + behind), WITH_COMMENT)
