"""Errors of the libraries that read vendor formats."""

from __future__ import annotations

import zlib
from xml.etree.ElementTree import ParseError

import pytest

from service.core.errors import BadFile, TooLarge
from service.formats.vendor.scene import translate_errors


@pytest.mark.parametrize(
    "error", [zlib.error("incorrect header"), ParseError("no element"), EOFError(), KeyError("Size")]
)
def test_errors_of_libraries_name_the_format_and_the_way_to_convert_the_file(error: Exception) -> None:
    advice = r"The Nikon ND2 file is damaged .*File > Import > Bio-Formats"
    with pytest.raises(BadFile, match=advice), translate_errors("Nikon ND2"):
        raise error


def test_exhausted_memory_is_reported_as_a_file_that_is_too_large() -> None:
    with pytest.raises(TooLarge, match="memory limit"), translate_errors("Nikon ND2"):
        raise MemoryError
