"""A device of this host: its threads, its watchdog, and how models are loaded there."""

from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from service.core.config import Settings
from service.core.hardware import devices
from service.core.hardware.devices import Driver
from service.engine.compile import torch_compile
from service.inference.runner.estimator import Estimator
from service.inference.windows.batching.batcher import make_batcher
from service.models.spec import ModelSpec
from service.serving.devices.device import DeviceState, Scheduler, make_queue
from service.serving.devices.local.torch_device import ModelPlace, TorchDevice
from service.serving.devices.local.watchdog import Watchdog
from service.serving.devices.models.eviction import LoadedModel
from service.serving.devices.models.guess import HOST_WEIGHT_COPIES, guess_estimator
from service.serving.devices.models.model import JobCounters
from service.serving.devices.models.served import ServedModels
from service.serving.devices.queue.memory import JobMemory
from service.serving.metrics import Metrics

if TYPE_CHECKING:
    from service.serving.devices.local.model import LocalModel

# Requests that run on a GPU at the same time: one is prepared, the windows of another are computed, and the labels of
# two more are decoded and written.
GPU_JOBS = 4
# Age up to which a measurement of the free memory is used again.
FREE_MEMORY_SECONDS = 0.02


LoadModel = Callable[[ModelSpec, Settings, ModelPlace], "LocalModel"]


class LocalParts(NamedTuple):
    """What all devices of this host share.

    load          loads a model onto a device
    loading_lock  held while a model is loaded
    """

    load: LoadModel
    metrics: Metrics
    loading_lock: torch_compile.LoadingLock


class LocalLoader:
    """Loads models on a device of this host, as `ModelLoader`.

    load      loads a model onto the device
    may_tune  returns whether ways to run a model of this name may race before it runs, which takes minutes
    """

    def __init__(self, settings: Settings, load: LoadModel, place: ModelPlace, may_tune: Callable[[str], bool]) -> None:
        self._settings, self._load, self._place, self._may_tune = settings, load, place, may_tune

    @property
    def weight_copies(self) -> int:
        """Copies of a model's weights that the device's memory has to hold."""
        return HOST_WEIGHT_COPIES if self._place.device.on_host else 1

    def load(self, spec: ModelSpec) -> LocalModel:
        """Load a model and make it ready to run. Raises what `ModelRunner` raises, and DeviceLost."""
        device = self._place.device
        with device.report_loss():
            model = self._load(spec, self._settings, self._place)
            warm_up = partial(model.segmenter.warm_up, tune=self._may_tune(spec.name))
            if device.on_host:
                warm_up()
            else:
                # Recorded graphs belong to the thread that recorded them.
                self._place.batcher.call(partial(contextvars.copy_context().run, warm_up))
        return model

    def free_memory(self) -> None:
        """Free cycles of objects that an unloaded model has left behind, and memory that torch keeps for later."""
        torch_compile.drop_generated_code()
        gc.collect()
        self._place.device.release_memory()

    def guess_estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model that was never loaded, as most models run on the device."""
        return guess_estimator(spec, self._settings, self._place.device.total_bytes)


class LocalDevice:
    """The owner of one device's threads, as `Device`. Raises ConfigError for a device that does not exist.

    name      None for the only device
    settings  with `device.name` for this device
    driver    tells about the device
    """

    is_required = True
    host = None

    def __init__(self, name: str | None, settings: Settings, parts: LocalParts, driver: Driver = devices) -> None:
        device = TorchDevice(settings.device.name, driver, self._report_lost)
        self.name = name or str(device.device)
        self._batcher = make_batcher(settings, device.device, on_host=device.on_host)
        subject = "the device" if name is None else f"the device {name}"
        self.watchdog = Watchdog(self._batcher, settings.watchdog, device=subject)
        place = ModelPlace(device, self._batcher, JobCounters(parts.metrics, self.name))
        loader = LocalLoader(settings, parts.load, place, self._is_starting)
        memory = JobMemory(device.free_memory, FREE_MEMORY_SECONDS)
        self.scheduler = Scheduler(
            make_queue(settings, memory, always=1 if device.on_host else GPU_JOBS),
            ServedModels(self.name, settings.models.memory_bytes, loader, parts.metrics, parts.loading_lock),
        )

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""
        self._batcher.start()
        self.scheduler.start(specs, first)
        self.watchdog.start()

    def stop(self, seconds: float) -> bool:
        """End the threads after `Scheduler.cancel_requests`; return False if one runs after up to four times that."""
        self.watchdog.stop()
        self.scheduler.close(seconds)
        self._batcher.close()
        return self._batcher.join(seconds) and self.scheduler.join(seconds)

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""
        return self.scheduler.ended and self._batcher.join(0)

    @property
    def state(self) -> DeviceState:
        return DeviceState.UP if self.problem is None else DeviceState.LOST

    @property
    def problem(self) -> str | None:
        """The reason why the device cannot be used, one sentence; None while it can."""
        if self.watchdog.problem is None and not self._batcher.alive:
            return "A thread that owns the device is not running."
        return self.watchdog.problem

    @property
    def serves(self) -> bool:
        """Whether requests in the queue are computed."""
        return self.problem is None

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The loaded models by name."""
        return self.scheduler.models.cache.loaded_models

    def _is_starting(self, model: str) -> bool:
        # A race needs the device alone, as it is until the models of the start are loaded.
        return model in self.scheduler.models.cache.starting

    def _report_lost(self, reason: str) -> None:
        self.watchdog.report_lost(reason)
