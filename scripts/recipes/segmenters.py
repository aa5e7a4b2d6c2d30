"""Segmenters for the recipes that score models."""

from __future__ import annotations

from service.cli.models import choose_model
from service.core.config import Settings
from service.inference.runner.model_runner import ModelRunner


def start_segmenter(model: str) -> ModelRunner:
    """Load and warm up a model by its name or folder, with the settings that a service here would have.

    Raises UnknownModel and BrokenModel.
    """
    settings = Settings()
    runner = ModelRunner(choose_model(model, settings), settings)
    runner.warm_up()
    return runner
