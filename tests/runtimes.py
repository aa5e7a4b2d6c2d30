"""Runtimes with fake segmenters, without HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter, wait_until

from service.core.config import Settings
from service.core.errors import NotReady
from service.core.hardware import devices
from service.core.hardware.devices import Driver
from service.core.types import Options, Volume
from service.inference.types import Result
from service.serving.build import ServiceFactories, build_runtime
from service.serving.devices.model_registry import ModelRegistry
from service.serving.devices.queue.job import Job
from service.serving.runtime import Runtime
from service.serving.segmentation import DeviceRequest, queue_work, segment_pixels

FAKE_FACTORIES: Any = ServiceFactories(load=FakeSegmenter)  # type: ignore[arg-type]


def settings(folder: Path, scratch: Path, **sections: Any) -> Settings:
    """Return settings for the models in `folder`, with a short drain time."""
    return Settings.model_validate(
        {"models": {"folder": folder}, "server": {"scratch_folder": scratch, "drain_seconds": 0.2}} | sections
    )


@contextmanager
def run_runtime(chosen: Settings, load: Any = FakeSegmenter, driver: Driver = devices) -> Iterator[Runtime]:
    """Run a runtime until the context exits, without waiting for its models."""
    runtime = build_runtime(chosen, ServiceFactories(load, lambda _name: driver))
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.stop()


@contextmanager
def run_ready_runtime(chosen: Settings, load: Any = FakeSegmenter, driver: Driver = devices) -> Iterator[Runtime]:
    """Start a runtime and wait until its initial models are loaded."""
    with run_runtime(chosen, load, driver) as runtime:
        wait_until(lambda: runtime.list_unready_reasons() == ())
        yield runtime


def list_model_caches(runtime: Runtime) -> list[Any]:
    """Return the model caches of all devices."""
    return [device.scheduler.models.cache for device in runtime.devices.all]


def submit_segmentation(runtime: Runtime, spec: Any, volume: Volume, options: Options) -> Job[Result]:
    """Queue a job that segments `volume`."""
    work = partial(segment_pixels, pixels=volume, options=options)
    return queue_work(runtime, DeviceRequest(spec, volume, options, None), work)


def get_loaded_segmenter(models: ModelRegistry, name: str | None) -> Any:
    """Return the segmenter of a loaded model. None selects the default model.

    Raises NotReady if the model is not loaded.
    """
    spec = models.get_spec(name)
    model: Any = models.get_loaded_model(spec.name)
    if model is None:
        raise NotReady(f"The model {spec.name} is not loaded.")
    return model.segmenter
