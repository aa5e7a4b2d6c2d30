from __future__ import annotations

from pathlib import Path

import numpy as np

from service.core.types import Volume
from service.formats.array_writer import write_npy


def test_npy_holds_the_first_channel(tmp_path: Path) -> None:
    pixels = np.arange(2 * 20 * 3 * 4, dtype=np.uint16).reshape(2, 20, 3, 4)
    write_npy(Volume.from_array(pixels), tmp_path / "a.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), pixels[0])
