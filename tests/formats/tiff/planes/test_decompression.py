"""Labels may only be compressed without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from service.core.errors import BadFile
from service.core.types import Selection
from service.formats import stack_reader

LABELS = np.repeat(np.arange(16, dtype=np.uint8).reshape(1, 4, 4), 3, 0).repeat(16, 1).repeat(16, 2)
LOSSLESS: dict[str, Any] = {
    "none": {},
    "zlib": {"compression": "zlib"},
    "lzw": {"compression": "lzw"},
    "zstd": {"compression": "zstd"},
    "lzma": {"compression": "lzma"},
    "png": {"compression": "png"},
    "jpeg2000": {"compression": "jpeg2000"},
    "jpeg2000-tiles": {"compression": "jpeg2000", "tile": (32, 32)},
}
LOSSY: dict[str, Any] = {
    "jpeg": {"compression": "jpeg"},
    "webp": {"compression": "webp", "compressionargs": {"level": 50}},
    "jpegxl": {"compression": "jpegxl", "compressionargs": {"level": 50, "lossless": False}},
    "jpegxr": {"compression": "jpegxr", "compressionargs": {"level": 0.5}},
    "lerc": {"compression": "lerc", "compressionargs": {"level": 2}},
    "jpeg2000": {"compression": "jpeg2000", "compressionargs": {"level": 30, "reversible": False}},
}


def write(path: Path, **options: Any) -> Path:
    # WebP has only colors.
    is_color = options.get("compression") == "webp"
    pixels, axes = (np.stack([LABELS] * 3, -1), "ZYXS") if is_color else (LABELS, "ZYX")
    photometric = "rgb" if is_color else "minisblack"
    tifffile.imwrite(path, pixels, photometric=photometric, metadata={"axes": axes}, **options)
    return path


def read_labels(path: Path) -> np.ndarray:
    return stack_reader.read(path, Selection(is_labels=True), 2**28, None).read_all()[0]


@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_labels_without_loss_are_read(tmp_path: Path, options: dict[str, Any]) -> None:
    np.testing.assert_array_equal(read_labels(write(tmp_path / "labels.tif", **options)), LABELS)


@pytest.mark.parametrize("options", LOSSY.values(), ids=LOSSY)
def test_labels_with_loss_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "labels.tif", **options)
    with pytest.raises(BadFile, match="can change label numbers"):
        read_labels(path)


@pytest.mark.parametrize(("lossless", "lossy"), [("zlib", "jpeg"), ("jpeg2000", "jpeg2000")])
def test_labels_of_which_a_later_page_has_a_loss_are_refused(tmp_path: Path, lossless: str, lossy: str) -> None:
    path = tmp_path / "labels.tif"
    with tifffile.TiffWriter(path) as writer:
        for index, plane in enumerate(LABELS):
            options = LOSSY[lossy] if index == 1 else LOSSLESS[lossless]
            writer.write(plane, contiguous=False, metadata=None, **options)
    assert stack_reader.read(path, Selection(), 2**28, None).shape == (1, *LABELS.shape)
    with pytest.raises(BadFile, match="can change label numbers"):
        read_labels(path)
