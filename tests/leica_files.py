"""Write LIF files with the structure that LAS X writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

DIMENSION_IDS = {"X": 1, "Y": 2, "Z": 3, "T": 4, "λ": 5, "Λ": 9, "M": 10}
CHANNEL_ATTRIBUTES = (
    'DataType="0" ChannelTag="0" Resolution="16" NameOfMeasuredQuantity="" Min="0" Max="1" Unit="" IsLUTInverted="0"'
    ' BitInc="0"'
)
STEPS = {"X": 2e-7, "Y": 3e-7, "Z": 1.5e-6, "T": 2.0, "λ": 1e-8, "Λ": 5e-9, "M": 1.0}


def make_image(name: str, axes: str, pixels: np.ndarray, properties: Sequence[Mapping[str, str]] = ()) -> str:
    """Return the XML element of an image of 16-bit pixels whose axes may contain C.

    properties  properties of each channel, such as its dye
    """
    strides = dict(zip(axes, pixels.strides, strict=True))
    lengths = dict(zip(axes, pixels.shape, strict=True))
    channels = "".join(
        f'<ChannelDescription LUTName="{color}" BytesInc="{index * strides.get("C", 0)}" {CHANNEL_ATTRIBUTES}>'
        + "".join(
            f"<ChannelProperty><Key>{key}</Key><Value>{value}</Value></ChannelProperty>"
            for key, value in (properties[index] if properties else {}).items()
        )
        + "</ChannelDescription>"
        for index, color in enumerate(("Green", "Red", "Gray")[: lengths.get("C", 1)])
    )
    dimensions = "".join(
        f'<DimensionDescription DimID="{DIMENSION_IDS[axis]}" NumberOfElements="{length}" Origin="0"'
        f' Length="{STEPS[axis] * (length - 1)}" Unit="{"s" if axis == "T" else "m"}" BytesInc="{strides[axis]}"'
        ' BitInc="0"/>'
        for axis, length in lengths.items()
        if axis != "C"
    )
    return (
        f'<Element Name="{name}" UniqueID="{name}"><Data><Image><ImageDescription><Channels>{channels}</Channels>'
        f"<Dimensions>{dimensions}</Dimensions></ImageDescription></Image></Data>"
        f'<Memory Size="{pixels.nbytes}" MemoryBlockID="Block_{name}"/></Element>'
    )


def make_block(memory_id: str, content: bytes) -> bytes:
    head = struct.pack("<BQBI", 0x2A, len(content), 0x2A, len(memory_id)) + memory_id.encode("utf-16-le")
    return struct.pack("<II", 0x70, len(head)) + head + content


def write_lif(
    path: Path, images: dict[str, tuple[str, np.ndarray]], properties: Sequence[Mapping[str, str]] = ()
) -> Path:
    elements = "".join(make_image(name, axes, pixels, properties) for name, (axes, pixels) in images.items())
    xml = (
        f'<LMSDataContainerHeader Version="2"><Element Name="file"><Memory Size="0" MemoryBlockID="Block"/>'
        f"<Children>{elements}</Children></Element></LMSDataContainerHeader>"
    )
    text = struct.pack("<BI", 0x2A, len(xml)) + xml.encode("utf-16-le")
    blocks = (make_block(f"Block_{name}", pixels.tobytes()) for name, (_, pixels) in images.items())
    path.write_bytes(struct.pack("<II", 0x70, len(text)) + text + b"".join(blocks))
    return path
