from __future__ import annotations

import torch

from scripts.recipes.decoding import decode
from service.models.spec import ModelSpec


def test_keys_of_decoding_are_changed_one_at_a_time(random_nuclei: ModelSpec) -> None:
    scores = torch.full((1, 2, 8, 8, 24), -5.0)
    scores[0, :, 1:7, 1:7, 1:7] = 2.0
    scores[0, :, 1:7, 1:7, 12:14] = 1.0
    assert decode(random_nuclei, {"minimum_size": 1, "minimum_fraction": 0.0}, scores).max() == 2
    assert decode(random_nuclei, {"minimum_size": 100, "minimum_fraction": 0.0}, scores).max() == 1
