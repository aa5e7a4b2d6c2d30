"""Refuse arrays whose metadata is contradictory or requires an extension, instead of ignoring it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pixels import noise
from zarr_files import write_zarr

from service.core.errors import AmbiguousAxes, BadFile
from service.core.types import Selection
from service.formats import stack_reader

LIMIT = 2**28
PIXELS = noise(4, 16, 20)
METADATA_NAMES = {"0.4": ".zarray", "0.5": "zarr.json"}


def write_with_metadata(folder: Path, version: str, changes: dict[str, Any], pixels: Any = PIXELS) -> Path:
    """Write an image, and change the metadata of its full resolution."""
    store = write_zarr(folder / "a.ome.zarr", pixels, "zyx", version, chunks=(2, 16, 10))
    (path,) = store.glob(f"*/{METADATA_NAMES[version]}")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return store


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("0.4", {"order": "A"}),
        ("0.4", {"fill_value": -1}),
        ("0.4", {"fill_value": 0.5}),
        ("0.4", {"fill_value": "NaN"}),
        ("0.5", {"fill_value": 70_000}),
        ("0.5", {"node_type": "group"}),
        ("0.5", {"zarr_format": 4}),
        ("0.5", {"extension": {"must_understand": True}}),
        ("0.5", {"extension": 1}),
    ],
)
def test_metadata_that_cannot_be_followed_is_rejected(version: str, changes: dict[str, Any], tmp_path: Path) -> None:
    store = write_with_metadata(tmp_path, version, changes)

    with pytest.raises(BadFile, match=r"Copy or export the store again|not supported"):
        stack_reader.inspect(store, Selection(), LIMIT)


@pytest.mark.parametrize(
    "changes", [{"fill_value": 65_535}, {"extension": {"must_understand": False}}, {"dimension_names": ["z", "y", "x"]}]
)
def test_metadata_that_can_be_ignored_is_accepted(changes: dict[str, Any], tmp_path: Path) -> None:
    store = write_with_metadata(tmp_path, "0.5", changes)

    np.testing.assert_array_equal(stack_reader.read(store, Selection(), LIMIT).read_all()[0], PIXELS)


def test_dimension_names_in_another_order_make_the_axes_ambiguous(tmp_path: Path) -> None:
    store = write_with_metadata(tmp_path, "0.5", {"dimension_names": ["x", "y", "z"]})

    with pytest.raises(AmbiguousAxes, match="lists the axes z,y,x, but the array names its dimensions x,y,z"):
        stack_reader.inspect(store, Selection(), LIMIT)
    assert stack_reader.inspect(store, Selection(axes="ZYX"), LIMIT).axes == "ZYX"


@pytest.mark.parametrize(("version", "pattern"), [("0.4", "*/1/0/*"), ("0.5", "*/c/1/0/*")])
def test_missing_chunks_of_the_selection_are_noted(version: str, pattern: str, tmp_path: Path) -> None:
    store = write_with_metadata(tmp_path, version, {})
    assert not any("not stored" in note for note in stack_reader.read(store, Selection(), LIMIT).notes)
    chunks = list(store.glob(pattern))
    for chunk in chunks:
        chunk.unlink()

    for scratch in (None, tmp_path):
        volume = stack_reader.read(store, Selection(), LIMIT, scratch)

        assert any("2 of 4 chunks of the selection are not stored" in note for note in volume.notes)
        assert np.unique(volume.read_all()[0, 2:]).tolist() == [0]
    assert len(chunks) == 2
