"""The models that one device serves, with their engines, estimators and load times."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from service.core.errors import BrokenModel, OutOfMemory, UnknownModel
from service.core.hardware.devices import is_out_of_memory
from service.core.telemetry import Progress as LoadingProgress
from service.models.repository import check_weights
from service.models.spec import ModelSpec
from service.serving.devices.models.cache import ModelCache, format_too_large_error
from service.serving.devices.models.model import DeviceModel
from service.serving.metrics import Metrics

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator

# Assumed load time of a model that has never been loaded.
ASSUMED_LOAD_SECONDS = 10.0

log = logging.getLogger(__name__)


class ModelLoader(Protocol):
    """Loads models on a device, and provides estimators for models that have not been loaded."""

    @property
    def weight_copy_count(self) -> int:
        """Number of copies of a model's weights in the device's memory."""

    def load(self, spec: ModelSpec) -> DeviceModel:
        """Load a model and prepare it for running."""

    def release_unused_memory(self) -> None:
        """Free reference cycles that an unloaded model leaves behind, and memory that is cached for the device."""

    def make_default_estimator(self, spec: ModelSpec) -> Estimator:
        """Return an estimator for a model that has never been loaded. It assumes the defaults of the device."""


class ServedModels:
    """The models that one device serves. `cache` loads them when requests need them.

    device            name of the device, for metrics and the log
    engines           descriptions of the engines of all models that have been loaded so far, by model
    loading_progress  progress of the models that are being loaded, by model
    """

    def __init__(
        self,
        device: str,
        memory_bytes: int,
        loader: ModelLoader,
        metrics: Metrics,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._device, self._memory_bytes, self._loader, self._metrics = device, memory_bytes, loader, metrics
        self._specs: dict[str, ModelSpec] = {}
        # Specs of new model versions. They replace the specs in `_specs` after the new versions have been loaded.
        self._new_specs: dict[str, ModelSpec] = {}
        self._load_seconds: dict[str, float] = {}
        self._estimators: dict[str, Estimator] = {}
        self.engines: dict[str, str] = {}
        self.loading_progress: dict[str, LoadingProgress] = {}
        self.cache: ModelCache[DeviceModel] = ModelCache(
            memory_bytes, self._load, estimate_bytes=self._estimate_bytes, after_unload=self._after_unload, lock=lock
        )

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start serving models. No request runs until the models in `startup_models` have been loaded."""
        self._specs.update(specs)
        self.cache.start(startup_models)

    def update(self, spec: ModelSpec, *, load: bool, keep_previous: bool) -> None:
        """Replace a model with a new version.

        load           whether to load the new version now, and wait until it is loaded
        keep_previous  whether to continue to serve the previous version if the new version cannot be loaded

        If loading fails, raises the error.
        """
        if not load:
            # Replace the spec before unloading the model, so that concurrent requests always find a spec.
            self._specs[spec.name] = spec
            self._discard(spec.name)
            return
        self._new_specs[spec.name] = spec
        self.cache.reload(spec.name, keep_previous=keep_previous).result()

    def serve(self, name: str, spec: ModelSpec) -> None:
        """Serve a model under this name. If a model of this name is loaded, it stays loaded."""
        self._specs[name] = spec

    def forget(self, name: str) -> None:
        """Stop serving a model. Running requests continue to use it."""
        self._specs.pop(name, None)
        self._discard(name)

    def get_estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator from the last time the model was loaded, or a default estimator if there is none."""
        return self._estimators.get(spec.name) or self._loader.make_default_estimator(spec)

    def estimate_load_seconds(self, name: str) -> float:
        """Estimate the seconds to load a model; 0 if it is loaded or is being loaded."""
        if self.cache.get(name) is not None or self.cache.is_load_pending(name):
            return 0.0
        return self._load_seconds.get(name, ASSUMED_LOAD_SECONDS)

    def _discard(self, name: str) -> None:
        self.cache.forget(name)
        self._estimators.pop(name, None)
        self.engines.pop(name, None)

    def _estimate_bytes(self, name: str) -> int:
        """Estimate the memory of a model in bytes from the size of its file.

        Return 0 if the model or its file is missing, which is reported when the model is loaded.
        """
        try:
            return self._specs[name].weights_path.stat().st_size * self._loader.weight_copy_count
        except (OSError, KeyError):
            return 0

    def _load(self, name: str) -> DeviceModel:
        """Load a model and make it ready to run."""
        spec = self._new_specs.pop(name, None) or self._specs.get(name)
        if spec is None:
            raise UnknownModel(f"The model {name} is no longer served.")
        # The files may have changed since the repository was read.
        check_weights(spec)
        weights_bytes = spec.weights_path.stat().st_size
        if weights_bytes > self._memory_bytes:
            raise BrokenModel(format_too_large_error(name, weights_bytes, self._memory_bytes))
        start_time = time.monotonic()
        progress = self.loading_progress[name] = LoadingProgress(f"loading {spec.identifier}")
        try:
            with progress.record_steps():
                model = self._loader.load(spec)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            needed_bytes = self._estimate_bytes(name)
            raise OutOfMemory(
                f"There is not enough memory to load the model {name}. Try again later.", needed_bytes
            ) from error
        finally:
            del self.loading_progress[name]
        self._specs[name] = spec
        self._load_seconds[name] = time.monotonic() - start_time
        self._record_loaded(name, model)
        return model

    def _record_loaded(self, name: str, model: DeviceModel) -> None:
        self._estimators[name] = model.estimator
        report = model.report()
        layout = f"{report.precision} {report.memory_format} x{report.sw_batch_size}"
        self.engines[name] = f"{report.engine} ({report.compile_mode}) {layout} on {report.device_name}"
        summary = f"{report.engine}, {report.precision}, {self._device}, warm-up {report.warm_up_seconds:.1f} s"
        log.info("%s is ready: %s, %.0f MiB", model.spec.identifier, summary, model.nbytes / 2**20)
        self._metrics.model_loads(name).inc()

    def _after_unload(self, name: str) -> None:
        self._metrics.model_unloads(name).inc()
        self._loader.release_unused_memory()
