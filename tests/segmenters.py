"""Segmenters for tests: on one thread of the CPU, eager in float32 unless a test says otherwise."""

from service.core.config import Settings
from service.core.sections.computing import Device, Engine, Windows
from service.inference.runner.model_runner import ModelRunner


def settings_of(kind="eager", **engine) -> Settings:
    return Settings(
        device=Device(name="cpu", threads=1),
        engine=Engine(kind=kind, precision=engine.pop("precision", "fp32"), **engine),
        windows=Windows(sw_batch_size=2),
    )


def started(spec, settings) -> ModelRunner:
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    return runner


def with_network(spec, network, settings=None) -> ModelRunner:
    """A runner whose windows run through `network` instead of the model's."""
    runner = ModelRunner(spec, settings or settings_of())
    runner.scores.module.network.forward = network
    return runner
