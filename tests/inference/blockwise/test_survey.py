"""The survey reads a volume by planes, whatever its chunks are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.core.volume import Selection
from service.formats import stack_reader
from service.inference.blockwise.survey import LayerReader
from tests.zarr_files import write_zarr


@pytest.mark.parametrize("depth", [1, 7])
def test_planes_of_many_layers_of_chunks_are_read_at_once(depth: int, tmp_path: Path) -> None:
    pixels = np.zeros((1100, 3, 4), np.uint16)
    pixels[::150] = np.random.default_rng(0).integers(1, 1000, (8, 3, 4))
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(depth, 3, 4))
    with stack_reader.open_blocks(source, Selection()) as stack:
        layers = LayerReader(stack, tmp_path)
        for first, end in ((0, 1100), (3, 4), (148, 161)):
            assert np.array_equal(layers.read(first, end)[0], pixels[first:end])
