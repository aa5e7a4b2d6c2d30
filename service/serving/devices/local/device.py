"""A device on this host: its threads, its watchdog, and the loading of its models."""

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
from service.serving.devices.local.torch_device import DeviceContext, TorchDevice
from service.serving.devices.local.watchdog import Watchdog
from service.serving.devices.models.default_estimator import HOST_WEIGHT_COPIES, make_default_estimator
from service.serving.devices.models.eviction import ModelUsage
from service.serving.devices.models.model import JobCounters
from service.serving.devices.models.served import ServedModels
from service.serving.devices.queue.memory import JobMemory
from service.serving.metrics import Metrics

if TYPE_CHECKING:
    from service.serving.devices.local.model import LocalModel

# Number of jobs that may always run concurrently on a GPU: one is being prepared, the network is running on the windows
# of another, and the labels of two more are being decoded and written.
GUARANTEED_GPU_JOBS = 4
# Maximum age at which a measurement of the free memory is reused.
FREE_MEMORY_MAX_AGE_SECONDS = 0.02


LoadFunction = Callable[[ModelSpec, Settings, DeviceContext], "LocalModel"]


class SharedResources(NamedTuple):
    """Objects that all devices on this host share.

    load          loads a model onto a device
    loading_lock  held while a model is loaded
    """

    load: LoadFunction
    metrics: Metrics
    loading_lock: torch_compile.LoadingLock


class LocalLoader:
    """`ModelLoader` for a device on this host.

    load      loads a model onto the device
    may_tune  returns whether a model may be tuned after loading, which takes minutes
    """

    def __init__(
        self, settings: Settings, load: LoadFunction, context: DeviceContext, may_tune: Callable[[str], bool]
    ) -> None:
        self._settings, self._load, self._context, self._may_tune = settings, load, context, may_tune

    @property
    def weight_copy_count(self) -> int:
        """Number of copies of a model's weights in the device's memory."""
        return HOST_WEIGHT_COPIES if self._context.device.uses_host_memory else 1

    def load(self, spec: ModelSpec) -> LocalModel:
        """Load a model and warm it up. Raises DeviceLost and the same errors as `ModelRunner`."""
        device = self._context.device
        with device.report_loss():
            model = self._load(spec, self._settings, self._context)
            warm_up = partial(model.segmenter.warm_up, tune=self._may_tune(spec.name))
            if device.uses_host_memory:
                warm_up()
            else:
                # CUDA graphs must be replayed in the thread that captured them.
                self._context.batcher.call(partial(contextvars.copy_context().run, warm_up))
        return model

    def release_unused_memory(self) -> None:
        """Free reference cycles that an unloaded model leaves behind, and memory that PyTorch caches."""
        torch_compile.drop_generated_code()
        gc.collect()
        self._context.device.release_memory()

    def make_default_estimator(self, spec: ModelSpec) -> Estimator:
        """Return an estimator for a model that has never been loaded. It assumes the defaults of the device."""
        return make_default_estimator(spec, self._settings, self._context.device.total_bytes)


class LocalDevice:
    """A `Device` on this host, including its threads. Raises ConfigError if the device does not exist.

    name      name of the device; None if it is the only device
    settings  settings of this device, including its `device.name`
    driver    queries the health and the memory of the device
    """

    is_required = True
    host = None

    def __init__(
        self, name: str | None, settings: Settings, shared_resources: SharedResources, driver: Driver = devices
    ) -> None:
        device = TorchDevice(settings.device.name, driver, self._report_loss)
        self.name = name or str(device.device)
        self._batcher = make_batcher(settings, device.device, uses_host_memory=device.uses_host_memory)
        subject = "the device" if name is None else f"the device {name}"
        self.watchdog = Watchdog(self._batcher, settings.watchdog, device=subject)
        context = DeviceContext(device, self._batcher, JobCounters(shared_resources.metrics, self.name))
        loader = LocalLoader(settings, shared_resources.load, context, self._is_loading_at_startup)
        memory = JobMemory(device.query_free_memory, FREE_MEMORY_MAX_AGE_SECONDS)
        self.scheduler = Scheduler(
            make_queue(settings, memory, guaranteed_job_count=1 if device.uses_host_memory else GUARANTEED_GPU_JOBS),
            ServedModels(
                self.name, settings.models.memory_bytes, loader, shared_resources.metrics, shared_resources.loading_lock
            ),
        )

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start serving models. No request runs until the models in `startup_models` have been loaded."""
        self._batcher.start()
        self.scheduler.start(specs, startup_models)
        self.watchdog.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the threads, after a call to `Scheduler.cancel_requests`; return whether they have ended.

        Wait at most four times `timeout_seconds`.
        """
        self.watchdog.stop()
        self.scheduler.close(timeout_seconds)
        self._batcher.close()
        return self._batcher.join(timeout_seconds) and self.scheduler.join(timeout_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""
        return self.scheduler.has_ended and self._batcher.join(0)

    @property
    def state(self) -> DeviceState:
        return DeviceState.UP if self.problem is None else DeviceState.LOST

    @property
    def problem(self) -> str | None:
        """Reason why the device is unavailable, in one sentence; None if it is available."""
        if self.watchdog.problem is None and not self._batcher.is_alive:
            return "The thread that owns the device is not running."
        return self.watchdog.problem

    @property
    def is_serving(self) -> bool:
        """Whether requests in the queue are processed."""
        return self.problem is None

    @property
    def loaded_models(self) -> Mapping[str, ModelUsage]:
        """Usage of each loaded model, by name."""
        return self.scheduler.models.cache.loaded_models

    def _is_loading_at_startup(self, model: str) -> bool:
        # Tuning needs exclusive use of the device, which is guaranteed until the startup models are loaded.
        return model in self.scheduler.models.cache.pending_startup_models

    def _report_loss(self, reason: str) -> None:
        self.watchdog.report_loss(reason)
