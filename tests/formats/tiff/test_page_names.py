"""Recognize pages that are channels or tiles by their names and positions, instead of reading them as a z-stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from pixels import noise

from service.core.errors import AmbiguousAxes
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**28
STACK = noise(3, 16, 20)
NAMES = ("DAPI", "CD3", "CD8")


def write_pages(path: Path, make_options: Callable[[int], dict[str, Any]]) -> Path:
    """Write one page per plane of `STACK`, with options of tifffile by the index of the page."""
    with tifffile.TiffWriter(path) as writer:
        for index, plane in enumerate(STACK):
            writer.write(plane, photometric="minisblack", metadata=None, contiguous=False, **make_options(index))
    return path


def describe_qptiff_page(index: int) -> dict[str, Any]:
    # A QPTIFF begins with an XML declaration of UTF-16, although the text is ASCII.
    xml = '<?xml version="1.0" encoding="utf-16"?><PerkinElmer-QPI-ImageDescription><Name>{}</Name></...>'
    return {"description": xml.format(NAMES[index]), "software": "PerkinElmer-QPI"}


def describe_mibi_page(index: int) -> dict[str, Any]:
    return {"description": json.dumps({"image.type": "SIMS", "channel.target": NAMES[index]})}


def name_page(names: tuple[str, ...]) -> Callable[[int], dict[str, Any]]:
    return lambda index: {"extratags": [(285, 2, 0, names[index], True)]}


@pytest.mark.parametrize("make_options", [describe_qptiff_page, describe_mibi_page])
def test_pages_whose_descriptions_name_channels_are_channels(
    make_options: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    path = write_pages(tmp_path / "a.tif", make_options)

    description = stack_reader.inspect(path, Selection(), LIMIT)

    assert (description.axes, description.channels) == ("CYX", NAMES)
    np.testing.assert_array_equal(stack_reader.read(path, Selection(channel="CD3"), LIMIT).read_all()[0, 0], STACK[1])


def test_pages_with_names_that_differ_in_letters_are_ambiguous(tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", name_page(NAMES))

    with pytest.raises(AmbiguousAxes, match="names DAPI, CD3, CD8, which may be channels"):
        stack_reader.inspect(path, Selection(), LIMIT)
    assert stack_reader.inspect(path, Selection(axes="CYX"), LIMIT).channels == NAMES
    assert stack_reader.inspect(path, Selection(axes="ZYX"), LIMIT).channels == ("",)


@pytest.mark.parametrize("names", [("z=1", "z=2", "z=3"), ("Slice 001", "Slice 002", "Slice 003"), ("a.tif",) * 3])
def test_pages_with_numbered_names_are_planes(names: tuple[str, ...], tmp_path: Path) -> None:
    path = write_pages(tmp_path / "a.tif", name_page(names))

    assert stack_reader.inspect(path, Selection(), LIMIT).axes == "ZYX"


@pytest.mark.parametrize(("pixels_per_page", "are_tiles"), [(0, False), (1, False), (18, True)])
def test_pages_at_different_positions_are_ambiguous(pixels_per_page: int, are_tiles: bool, tmp_path: Path) -> None:
    def place(index: int) -> dict[str, Any]:
        # 100 pixels per centimeter
        position = (286, 5, 1, (index * pixels_per_page, 100), True)
        return {"extratags": [position], "resolution": (100, 100), "resolutionunit": "CENTIMETER"}

    path = write_pages(tmp_path / "a.tif", place)

    if are_tiles:
        with pytest.raises(AmbiguousAxes, match="different positions"):
            stack_reader.inspect(path, Selection(), LIMIT)
    assert stack_reader.inspect(path, Selection(axes="ZYX" if are_tiles else None), LIMIT).axes == "ZYX"
