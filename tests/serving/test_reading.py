"""Reading of pixels, with files that are read in this process instead of the sandbox."""

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
    """A reader that creates the folder for decoded pixels after the request was cancelled."""

    is_cancelled = False

    def inspect(self, source: Path, selection: Any, **_options: Any) -> Any:
        return stack_reader.inspect(source, selection, 2**20)

    def read_small(self, *_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("the time points of a series must be read one at a time")

    def read(self, _source: Path, _selection: Any, *, scratch: Path, **_options: Any) -> Any:
        self.is_cancelled = True
        scratch.mkdir()
        raise Cancelled("cancelled")


def test_cancelled_series_leaves_no_folder(tmp_path: Path) -> None:
    stack, folder, reader = tmp_path / "series.tif", tmp_path / "request", SlowReader()
    stack.write_bytes(as_tiff(np.zeros((2, 3, 8, 8), np.uint8), metadata={"axes": "TZYX"}))
    request = SegmentationRequest(Query(time="all"), stack, folder, cancelled=lambda: reader.is_cancelled)
    pixels = PixelSource.from_sandbox(cast(Reader, reader), request, stack).read_pixels()
    assert isinstance(pixels.segmentation_input, Series)
    with pytest.raises(Cancelled):
        pixels.segmentation_input.read(0)
    assert not folder.exists()
