from __future__ import annotations

import torch

from scripts.recipes.decoding import decode
from service.core.files.bundled import get_bundled_folder
from service.models.repository import read_spec


def test_decode_applies_changed_parameters() -> None:
    nuclei = read_spec(get_bundled_folder("models") / "nuclei")
    scores = torch.full((1, 2, 8, 8, 24), -5.0)
    scores[0, :, 1:7, 1:7, 1:7] = 4.0
    scores[0, :, 1:7, 1:7, 12:14] = 3.0
    assert decode(nuclei, {"minimum_size": 1, "minimum_fraction": 0.0}, scores).max() == 2
    assert decode(nuclei, {"minimum_size": 100, "minimum_fraction": 0.0}, scores).max() == 1
