"""Malformed ZIP archives, built byte by byte."""

from __future__ import annotations

import struct
import zlib


def encode_members(members: dict[str, bytes], base: int) -> tuple[bytes, bytes]:
    """Encode uncompressed members that begin at offset `base` of an archive. Return them and their directory."""
    body = directory = b""
    for name, content in members.items():
        shared = struct.pack("<5H3LH", 20, 0, 0, 0, 0, zlib.crc32(content), len(content), len(content), len(name))
        location = struct.pack("<4H2L", 0, 0, 0, 0, 0, base + len(body))
        directory += struct.pack("<4sH", b"PK\1\2", 20) + shared + location + name.encode()
        body += b"PK\3\4" + shared + bytes(2) + name.encode() + content
    return body, directory


def make_ambiguous_archive(shown: dict[str, bytes], loaded: dict[str, bytes]) -> bytes:
    """Build an archive that readers interpret in two ways.

    Readers that expect the ZIP64 record directly before its locator find the members `shown`. Readers that follow the
    offset in the locator find the members `loaded`.
    """

    def record(members: dict[str, bytes], length: int, start: int) -> bytes:
        return struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, len(members), len(members), length, start)

    body, directory = encode_members(loaded, 0)
    file = body + directory
    location, start = len(file), len(file) + 56
    file += record(loaded, len(directory), len(body))
    body, directory = encode_members(shown, start)
    file += body + directory + record(shown, len(directory), start + len(body))
    counts = struct.pack("<4H2LH", 0, 0, len(shown), len(shown), len(directory), start + len(body), 0)
    return file + struct.pack("<4sLQL", b"PK\6\7", 0, location, 1) + b"PK\5\6" + counts
