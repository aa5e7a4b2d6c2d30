"""Write ND2 files with the structure that NIS-Elements writes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SIGNATURE = 0x0ABECEDA
# Sizes of the data of the first chunk, and of the name of all others: their data begins at a multiple of 4096.
HEADER = struct.Struct("<IIQ")
PAGE_BYTES = 4096
MAP_NAME, MAP_SIGNATURE = b"ND2 FILEMAP SIGNATURE NAME 0001!", b"ND2 CHUNK MAP SIGNATURE 0000001!"
FILE_NAME = b"ND2 FILE SIGNATURE CHUNK NAME01!"
LOOP_TYPES = {"T": 1, "P": 2, "Z": 4}
CHANNELS = (("DAPI", 0xFF0000), ("GFP", 0x00FF00))


def write_nd2(
    path: Path,
    stack: np.ndarray,
    loops: str = "TPZ",
    *,
    is_compressed: bool = False,
    missing: tuple[int, ...] = (),
    period_ms: float = 0,
) -> Path:
    """Write frames [..., C, Y, X] whose leading axes are `loops`, a subset of TPZ with at least one axis.

    The frames with the numbers in `missing` are left out. Frames are acquired at intervals of one second.
    """
    num_channels, height, width = stack.shape[-3:]
    frames = stack.reshape(-1, num_channels, height, width)
    row_bytes = (width * num_channels * stack.itemsize + 3) // 4 * 4
    attributes = {
        "uiWidth": width,
        "uiWidthBytes": row_bytes,
        "uiHeight": height,
        "uiComp": num_channels,
        "uiBpcInMemory": 8 * stack.itemsize,
        "uiBpcSignificant": 8 * stack.itemsize,
        "uiSequenceCount": len(frames),
        "eCompression": 0 if is_compressed else 2,
        "dCompressionParam": 1.0,
    }
    chunks = {
        "ImageAttributesLV!": _encode({"SLxImageAttributes": attributes}),
        "ImageMetadataSeqLV|0!": _encode({"SLxPictureMetadata": _describe_channels(num_channels)}),
        "ImageMetadataLV!": _encode({"SLxExperiment": _describe_loops(loops, stack.shape, period_ms)}),
    }
    for number, frame in enumerate(frames):
        if number not in missing:
            rows = np.ascontiguousarray(np.moveaxis(frame, 0, -1)).reshape(height, -1).view(np.uint8)
            pixels = np.pad(rows, ((0, 0), (0, row_bytes - rows.shape[1]))).tobytes()
            time = struct.pack("<d", 100 + 1000 * number)
            chunks[f"ImageDataSeq|{number}!"] = time + (zlib.compress(pixels) if is_compressed else pixels)
    path.write_bytes(_encode_chunks(chunks))
    return path


def _describe_channels(num_channels: int) -> dict[str, Any]:
    planes = {
        f"a{index}": {
            "uiCompCount": 1,
            "uiSampleIndex": index,
            "pFluorescentProbe": {"m_sName": name},
            "sDescription": name,
            "uiColor": color,
        }
        for index, (name, color) in enumerate(CHANNELS[:num_channels])
    }
    return {
        "dCalibration": 0.25,
        "dAspect": 1.0,
        "bCalibrated": True,
        "sPicturePlanes": {"uiCount": num_channels, "uiCompCount": num_channels, "sPlaneNew": planes},
    }


def _describe_loops(loops: str, shape: tuple[int, ...], period_ms: float) -> dict[str, Any]:
    """Return the description of the outermost loop, which contains that of the next one."""
    axis, count = loops[0], shape[0]
    parameters: dict[str, Any] = {"uiCount": count}
    if axis == "T":
        parameters |= {"dStart": 0.0, "dPeriod": period_ms, "dDuration": period_ms * count}
    elif axis == "Z":
        parameters |= {"dZLow": 0.0, "dZHigh": 1.5 * (count - 1), "dZStep": 1.5, "dZHome": 0.0, "wsZDevice": "Piezo"}
    else:
        parameters["Points"] = {
            f"i{index:010}": {"dPosX": float(index), "dPosY": 0.0, "dPosZ": 0.0, "dPosName": f"well {index}"}
            for index in range(count)
        }
    loop = {"eType": LOOP_TYPES[axis], "uLoopPars": parameters}
    return loop | {"ppNextLevelEx": {"": _describe_loops(loops[1:], shape[1:], period_ms)}} if loops[1:] else loop


def _encode(values: Mapping[str, Any]) -> bytes:
    """Encode nested values as records with a type, a name and a value."""
    return b"".join(_encode_record(name, value) for name, value in values.items())


def _encode_record(name: str, value: Any) -> bytes:
    text = (name + "\0").encode("utf-16-le")
    if isinstance(value, bool):
        kind, content = 1, struct.pack("B", value)
    elif isinstance(value, int):
        kind, content = 3, struct.pack("<I", value)
    elif isinstance(value, float):
        kind, content = 6, struct.pack("<d", value)
    elif isinstance(value, str):
        kind, content = 8, (value + "\0").encode("utf-16-le")
    else:
        kind, nested = 11, _encode(value)
        # The size includes the header of the record. The offsets of the nested records follow.
        size = 2 + len(text) + 12 + len(nested)
        content = struct.pack("<IQ", len(value), size) + nested + bytes(8 * len(value))
    return struct.pack("BB", kind, len(name) + 1) + text + content


def _encode_chunks(chunks: Mapping[str, bytes]) -> bytes:
    content = bytearray(HEADER.pack(SIGNATURE, 32, 64) + FILE_NAME + b"Ver3.0".ljust(64, b"\0"))
    chunk_map = b""
    for name, data in chunks.items():
        content += bytes(-len(content) % PAGE_BYTES)
        # The pixels of a frame begin at the next multiple of the page size, after the time of acquisition.
        name_bytes = PAGE_BYTES - HEADER.size - 8
        chunk_map += name.encode() + struct.pack("<QQ", len(content), len(data))
        content += HEADER.pack(SIGNATURE, name_bytes, len(data)) + name.encode().ljust(name_bytes, b"\0") + data
    position = len(content)
    chunk_map += MAP_SIGNATURE + struct.pack("<Q", position)
    content += HEADER.pack(SIGNATURE, len(MAP_NAME), len(chunk_map)) + MAP_NAME + chunk_map
    return bytes(content)
