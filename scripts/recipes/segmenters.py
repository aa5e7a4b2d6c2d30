"""Loading of models for the recipes that score them."""

from __future__ import annotations

from service.cli.models import choose_model
from service.core.config import Settings
from service.inference.runner.model_runner import ModelRunner


def start_segmenter(model: str) -> ModelRunner:
    """Load and warm up a model, given its name or folder, with the same settings as a service on this machine.

    Raises UnknownModel or BrokenModel.
    """
    settings = Settings()
    runner = ModelRunner(choose_model(model, settings), settings)
    runner.warm_up()
    return runner
