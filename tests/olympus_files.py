"""Write OIB files and OIFs with the structure that FluoView writes."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import tifffile

SECTOR_BYTES = 512
END_OF_CHAIN, NO_STREAM, ALLOCATION_TABLE, UNUSED = 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFD, 0xFFFFFFFF
LENGTH_SETTINGS = """[Axis {number} Parameters Common]
AxisCode="{code}"
MaxSize={count}
StartPosition={start}
EndPosition={end}
UnitName="{unit}"
Interval={interval}
"""


def make_settings(stack: np.ndarray, z_interval: int = 1500, time_interval: int = 30_000, **lengths: int) -> str:
    """Return the settings of a stack [T, C, Z, Y, X]; `lengths` are the stated lengths of axes, if they differ."""
    num_times, num_channels, num_planes, height, width = stack.shape
    axes = {
        "X": (width, 0, 0.25 * (width - 1), "um", 0),
        "Y": (height, 0, 0.5 * (height - 1), "um", 0),
        "C": (num_channels, 1, num_channels, "Ch", 0),
        "Z": (num_planes, -4000, -4000 + 1500 * (num_planes - 1), "nm", z_interval),
        "T": (num_times, 0, 60_000, "ms", time_interval),
    }
    text = ""
    for number, (code, (count, start, end, unit, interval)) in enumerate(axes.items()):
        stated = lengths.get(code, count if count > 1 else 0)
        text += LENGTH_SETTINGS.format(
            number=number, code=code, count=stated, start=start, end=end, unit=unit, interval=interval
        )
    for channel, dye in enumerate(("DAPI", "", "None")[:num_channels], 1):
        text += f'[Channel {channel} Parameters]\nCH Name="CH{channel}"\nDyeName="{dye}"\n'
    return text + '[Reference Image Parameter]\nWidthConvertValue=0.25\nWidthUnit="um"\n'


def make_files(stack: np.ndarray, settings: str) -> dict[str, bytes]:
    """Return the settings, planes and lookup tables of a stack [T, C, Z, Y, X] by their names."""
    files = {"cell.oif": settings.replace("\n", "\r\n").encode("utf-16")}
    for t, c, z in np.ndindex(stack.shape[:3]):
        content = io.BytesIO()
        tifffile.imwrite(content, stack[t, c, z], photometric="minisblack", metadata=None)
        letters = "".join(
            f"{axis}{index + 1:03}"
            for axis, index, length in zip("CZT", (c, z, t), np.array(stack.shape)[[1, 2, 0]], strict=True)
            if length > 1
        )
        files[f"cell.oif.files/s_{letters}.tif"] = content.getvalue()
    for channel in range(stack.shape[1]):
        color = np.array([[0, 0, 255], [0, 255, 0], [255, 0, 0]], np.float32)[channel][::-1]
        table = np.linspace(0, 1, 16, dtype=np.float32)[:, np.newaxis] * np.append(color, 0)
        header = "[FileInformation]\r\nResolution=16\r\n[ColorLUTData]\r\n".encode("utf-16")
        files[f"cell.oif.files/s_LUT{channel + 1}.lut"] = header + table.astype(np.uint8).tobytes()
    return files


def write_oif(path: Path, images: dict[str, dict[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a zip archive with one OIF in each folder ("" for none)."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for folder, files in images.items():
            for name, content in files.items():
                archive.writestr(folder + name.replace("cell", folder.strip("/") or "cell"), content)
    return path


def write_oib(path: Path, files: dict[str, bytes]) -> Path:
    """Write a compound file whose streams have numbers instead of names."""
    streams, in_root = dict[str, bytes](), set[str]()
    lines = ["[OibSaveInfo]", "Storage00001=cell.oif.files"]
    for number, (name, content) in enumerate(files.items(), 1):
        stream = f"Stream{number:05}"
        streams[stream] = content
        lines.append(f"{stream}={name.replace('cell.oif.files', 'Storage00001')}")
        if "/" not in name:
            lines.append(f"MainFileName={stream}")
            in_root.add(stream)
    streams["OibInfo.txt"] = "\r\n".join(lines).encode("utf-16")
    path.write_bytes(_encode_compound_file(streams, in_root | {"OibInfo.txt"}))
    return path


def _encode_compound_file(streams: dict[str, bytes], in_root: set[str]) -> bytes:
    """Return a compound file whose streams are in the root or in a storage.

    All streams are in sectors of the usual size, because the limit for small streams is zero.
    """
    sectors, table = bytearray(), list[int]()

    def add(content: bytes) -> int:
        first, count = len(table), max(1, -(-len(content) // SECTOR_BYTES))
        sectors.extend(content.ljust(count * SECTOR_BYTES, b"\0"))
        table.extend([*range(first + 1, first + count), END_OF_CHAIN])
        return first

    order = sorted(streams, key=lambda name: name not in in_root)
    num_root_streams = len(in_root)
    entries = [_encode_entry("Root Entry", 5, END_OF_CHAIN, 0, child=1)]
    entries.append(_encode_entry("Storage00001", 1, 0, 0, child=2 + num_root_streams, right=2))
    for number, name in enumerate(order, 2):
        is_last = number in {1 + num_root_streams, 1 + len(order)}
        entries.append(
            _encode_entry(name, 2, add(streams[name]), len(streams[name]), right=NO_STREAM if is_last else number + 1)
        )
    directory = add(b"".join(entries))
    num_tables = -(-(len(table) + 2) // (SECTOR_BYTES // 4 - 1))
    tables = list(range(len(table), len(table) + num_tables))
    table += [ALLOCATION_TABLE] * num_tables
    table += [UNUSED] * (-len(table) % (SECTOR_BYTES // 4))
    header = struct.pack("<8s16xHHHHH6xIII4xIIIII", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0x3E, 3, 0xFFFE, 9, 6, 0,
                         num_tables, directory, 0, END_OF_CHAIN, 0, END_OF_CHAIN, 0)  # fmt: skip
    header += struct.pack("<109I", *tables, *[UNUSED] * (109 - len(tables)))
    return header + bytes(sectors) + struct.pack(f"<{len(table)}I", *table)


def _encode_entry(name: str, kind: int, start: int, size: int, child: int = NO_STREAM, right: int = NO_STREAM) -> bytes:
    text = name.encode("utf-16-le") + b"\0\0"
    return struct.pack(
        "<64sHBBIII16sIQQIQ", text, len(text), kind, 1, NO_STREAM, right, child, b"", 0, 0, 0, start, size
    )
