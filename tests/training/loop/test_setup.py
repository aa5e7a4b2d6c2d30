"""Tests of the creation of trainers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from live import eager_settings

from scripts.recipes.synthetic_nuclei import synthesize
from service.models.spec import ModelSpec, TargetName
from service.training.loop.setup import make_draft_spec, prepare_training
from service.training.model_folder import draft_model
from service.training.stacks.parts import HeldOutParts, StackPart


@pytest.mark.parametrize(
    ("has_base", "target", "chosen", "expected"),
    [
        (True, None, None, 0.001),
        (True, "boundaries", None, 0.001),
        (False, None, None, 0.003),
        (False, "affinities", 0.02, 0.02),
    ],
)
def test_random_weights_are_trained_at_a_higher_rate(
    trainable_model: ModelSpec,
    tmp_path: Path,
    has_base: bool,
    target: TargetName | None,
    chosen: float | None,
    expected: float,
) -> None:
    image, labels = synthesize(np.random.default_rng(0), (16, 16, 16))
    part = StackPart("a", image.astype(np.float32), labels, labels)
    base = trainable_model if has_base else None
    draft = make_draft_spec(draft_model([], base, "mine", is_private=False, target=target))
    settings = eager_settings(tmp_path, training={"edge": 16, "learning_rate": chosen})
    make_trainer = prepare_training(HeldOutParts([part], [part], [part]), settings, draft, base)
    assert make_trainer(settings, tmp_path, torch.float32).plan.learning_rate == expected
