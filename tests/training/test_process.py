from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.core.types import Segmentation, Volume
from service.formats.tiff import writer as tiff_writer
from service.models.spec import ModelSpec
from service.training.process import read_stacks

SHAPE = (12, 32, 32)
IGNORED = 7


@pytest.mark.parametrize("is_partial", [False, True])
def test_ignored_voxels_of_an_annotated_stack_are_unknown(
    trainable_model: ModelSpec, tmp_path: Path, is_partial: bool
) -> None:
    labels = np.full(SHAPE, IGNORED, np.uint16)
    labels[::4] = 0
    labels[3:6, 8:14, 8:14] = 1
    tiff_writer.write_image(Volume.from_array(np.zeros((1, *SHAPE), np.uint8)), tmp_path / "image.tif")
    tiff_writer.write(Segmentation(labels, "labels"), tmp_path / "labels.tif")
    stack = {"name": "planes", "image": tmp_path / "image.tif", "labels": tmp_path / "labels.tif", "region": None}
    stack |= {"diameter": None, "ignored": IGNORED, "is_partial": is_partial}
    request = {"stacks": [stack], "is_partial": False, "has_partial_planes": False, "target": None}
    (annotated,) = read_stacks(request, trainable_model)
    unknown = annotated.unknown
    assert unknown is not None
    assert np.array_equal(annotated.labels, np.where(labels == 1, 1, 0))
    assert unknown[labels == IGNORED].all()
    assert not unknown[labels == 1].any()
    # If the annotation is partial, planes without objects are unknown as well.
    assert bool(unknown[8].any()) == is_partial
