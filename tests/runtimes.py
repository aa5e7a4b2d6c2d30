"""Runtimes with fake segmenters, for tests of what they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter

from service.core import hardware
from service.core.config import Settings
from service.core.errors import NotReady
from service.core.hardware import Driver
from service.core.types import Options, Volume
from service.inference.types import Result
from service.serving.devices.job import Job
from service.serving.devices.model_registry import ModelRegistry
from service.serving.runtime import Runtime


def settings(folder: Path, scratch: Path, **sections: Any) -> Settings:
    return Settings.model_validate(
        {"models": {"folder": folder}, "server": {"scratch_folder": scratch, "drain_seconds": 0.2}} | sections
    )


@contextmanager
def running(chosen: Settings, load: Any = FakeSegmenter, driver: Driver = hardware) -> Iterator[Runtime]:
    runtime = Runtime(chosen, load, lambda _name: driver)
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.stop()


def submitted(runtime: Runtime, spec: Any, volume: Volume, options: Options) -> Job[Result]:
    """A job whose result is what the segmenter gives."""
    return runtime.submit(spec, volume, options, lambda result: result)


def loaded_segmenter(models: ModelRegistry, name: str | None) -> Any:
    """The loaded model; raises NotReady for one that is not loaded."""
    spec = models.spec(name)
    segmenter = models.loaded(spec.name)
    if segmenter is None:
        raise NotReady(f"The model {spec.name} is not loaded.")
    return segmenter
