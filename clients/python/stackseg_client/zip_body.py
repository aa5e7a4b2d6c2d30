"""A request body that is a zip archive of files, made while it is sent."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stackseg_client.body_protocol import Body

# Records of the zip format. All sizes are in extra fields, with 64 bits (zip64), so that the lengths of the records do
# not depend on the sizes.
_LOCAL_HEADER, _LOCAL_EXTRA = struct.Struct("<4sHHHLLLLHH"), struct.Struct("<HHQQ")
_DESCRIPTOR = struct.Struct("<4sLQQ")
_DIRECTORY_ENTRY, _DIRECTORY_EXTRA = struct.Struct("<4sHHHHLLLLHHHHHLL"), struct.Struct("<HHQQQ")
_END_RECORDS = struct.Struct("<4sQHHLLQQQQ 4sLQL 4sHHHHLLH")
_ENTRY_BYTES = sum(
    record.size for record in (_LOCAL_HEADER, _LOCAL_EXTRA, _DESCRIPTOR, _DIRECTORY_ENTRY, _DIRECTORY_EXTRA)
)
_VERSION = 45
_IN_EXTRA = 0xFFFFFFFF
# Names are in UTF-8. The CRC-32 follows the content, because it is computed while the content is sent.
_FLAGS = 0x808
# 1980-01-01, so that archives of the same files are the same.
_DATE = 0x210000
_COMMON_FIELDS = (_VERSION, _FLAGS, 0, _DATE)


@dataclass(frozen=True)
class ZipBody:
    """An uncompressed zip archive of members, by path in the archive."""

    name: str
    members: Mapping[str, Body]

    @property
    def nbytes(self) -> int:
        """The size of the archive."""
        return _END_RECORDS.size + sum(
            _ENTRY_BYTES + 2 * len(path.encode()) + member.nbytes for path, member in self.members.items()
        )

    def read_blocks(self) -> Iterator[bytes | memoryview]:
        """Make the archive block by block. Raises the errors of its members."""
        directory, position = bytearray(), 0
        for path, member in self.members.items():
            name, nbytes, checksum = path.encode(), member.nbytes, 0
            sizes = (_IN_EXTRA, _IN_EXTRA, len(name))
            yield _LOCAL_HEADER.pack(b"PK\3\4", *_COMMON_FIELDS, 0, *sizes, _LOCAL_EXTRA.size)
            yield name + _LOCAL_EXTRA.pack(1, 16, nbytes, nbytes)
            for block in member.read_blocks():
                checksum = zlib.crc32(block, checksum)
                yield block
            yield _DESCRIPTOR.pack(b"PK\7\x08", checksum, nbytes, nbytes)
            head = (b"PK\1\2", _VERSION, *_COMMON_FIELDS, checksum, *sizes)
            directory += _DIRECTORY_ENTRY.pack(*head, _DIRECTORY_EXTRA.size, 0, 0, 0, 0, _IN_EXTRA)
            directory += name + _DIRECTORY_EXTRA.pack(1, 24, nbytes, nbytes, position)
            position += _LOCAL_HEADER.size + len(name) + _LOCAL_EXTRA.size + nbytes + _DESCRIPTOR.size
        yield bytes(directory)
        count, end = len(self.members), position + len(directory)
        zip64_end = (b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(directory), position)
        locator = (b"PK\6\7", 0, end, 1)
        yield _END_RECORDS.pack(*zip64_end, *locator, b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)
