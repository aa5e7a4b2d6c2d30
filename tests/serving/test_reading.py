"""Tests of reading, with files that are read in this process instead of the sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from live import as_tiff

from service.core.errors import Cancelled
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader
from service.inference.types import Series
from service.serving.parameters import Query, SegmentationRequest
from service.serving.reading import PixelSource


class SlowReader:
    """Makes the folder for decoded pixels after whoever waited has given up."""

    given_up = False

    def inspect(self, source: Path, selection: Any, **_more: Any) -> Any:
        return stack_reader.inspect(source, selection, 2**20)

    def read_small(self, *_file: Any, **_more: Any) -> Any:
        raise AssertionError("a series is read point by point")

    def read(self, _source: Path, _selection: Any, *, scratch: Path, **_more: Any) -> Any:
        self.given_up = True
        scratch.mkdir()
        raise Cancelled("given up")


def test_a_series_that_is_given_up_leaves_no_folder(tmp_path: Path) -> None:
    stack, folder, reader = tmp_path / "series.tif", tmp_path / "request", SlowReader()
    stack.write_bytes(as_tiff(np.zeros((2, 3, 8, 8), np.uint8), metadata={"axes": "TZYX"}))
    request = SegmentationRequest(Query(time="all"), stack, folder, cancelled=lambda: reader.given_up)
    pixels = PixelSource.sandboxed(cast(Reader, reader), request, stack).read_pixels()
    assert isinstance(pixels.segmented, Series)
    with pytest.raises(Cancelled):
        pixels.segmented.read(0)
    assert not folder.exists()
