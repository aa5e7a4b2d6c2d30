"""Model runners for tests. They use one CPU thread, and the eager engine in float32 by default."""

from service.core.config import Settings
from service.core.sections.computing import Device, Engine, Windows
from service.inference.runner.model_runner import ModelRunner


def make_settings(kind="eager", **engine) -> Settings:
    """Return settings with this engine. Keyword arguments set other keys of `engine`."""
    return Settings(
        device=Device(name="cpu", threads=1),
        engine=Engine(kind=kind, precision=engine.pop("precision", "fp32"), **engine),
        windows=Windows(sw_batch_size=2),
    )


def start_runner(spec, settings) -> ModelRunner:
    """Return a runner that is warmed up."""
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    return runner


def make_runner_with_network(spec, network, settings=None) -> ModelRunner:
    """Return a runner that computes windows with `network` instead of the model's network."""
    runner = ModelRunner(spec, settings or make_settings())
    runner.score_computer.module.network.forward = network
    return runner
