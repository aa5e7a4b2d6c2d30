"""The models that one device serves, and what is known of how each runs there."""

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
from service.serving.devices.models.cache import ModelCache, too_large_message
from service.serving.devices.models.model import DeviceModel
from service.serving.metrics import Metrics

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator

# Seconds to load a model that was never loaded.
ASSUMED_LOAD_SECONDS = 10.0

log = logging.getLogger(__name__)


class ModelLoader(Protocol):
    """How a device loads models, and what it knows of them before."""

    @property
    def weight_copies(self) -> int:
        """Copies of a model's weights that the device's memory has to hold."""

    def load(self, spec: ModelSpec) -> DeviceModel:
        """Load a model and make it ready to run."""

    def free_memory(self) -> None:
        """Free cycles of objects that an unloaded model has left behind, and memory that the device keeps for later."""

    def guess_estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model that was never loaded, as most models run on the device."""


class ServedModels:
    """The models of one device by name, of which `cache` loads those that requests ask for.

    device   name of the device, for metrics and the log
    engines  how each model runs here that was loaded at some time, by its name
    loading  progress of each model that is being loaded here, by its name
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
        # Models that take the place of those in `_specs` once they are loaded.
        self._renewed: dict[str, ModelSpec] = {}
        self._load_seconds: dict[str, float] = {}
        self._estimators: dict[str, Estimator] = {}
        self.engines: dict[str, str] = {}
        self.loading: dict[str, LoadingProgress] = {}
        self.cache: ModelCache[DeviceModel] = ModelCache(
            memory_bytes, self._load, guess=self._guess_bytes, unloaded=self._unloaded, lock=lock
        )

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""
        self._specs.update(specs)
        self.cache.start(first)

    def renew(self, spec: ModelSpec, *, load: bool, keep: bool) -> None:
        """Serve a model in place of the earlier one of its name, if there is one; wait until it is loaded if `load`.

        If the earlier one is kept and the new one cannot be loaded, nothing changes. Raises the error of loading.
        """
        if not load:
            # Never without one of them: a request in between would find that the model is gone.
            self._specs[spec.name] = spec
            self._drop(spec.name)
            return
        self._renewed[spec.name] = spec
        self.cache.reload(spec.name, keep=keep).result()

    def serve(self, name: str, spec: ModelSpec) -> None:
        """Serve one more model by this name; one that is served by it stays loaded as it is."""
        self._specs[name] = spec

    def forget(self, name: str) -> None:
        """Stop serving a model. Requests that use it keep it."""
        self._specs.pop(name, None)
        self._drop(name)

    def estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model as it runs here or last did, or else as most do."""
        return self._estimators.get(spec.name) or self._loader.guess_estimator(spec)

    def load_seconds(self, name: str) -> float:
        """Estimate the seconds until a request may use a model; 0 if it is loaded, or is being loaded."""
        if self.cache.get(name) is not None or self.cache.is_awaited(name):
            return 0.0
        return self._load_seconds.get(name, ASSUMED_LOAD_SECONDS)

    def _drop(self, name: str) -> None:
        self.cache.forget(name)
        self._estimators.pop(name, None)
        self.engines.pop(name, None)

    def _guess_bytes(self, name: str) -> int:
        """Return the bytes that a model may take; 0 if it or its file is gone, which loading it then reports."""
        try:
            return self._specs[name].weights_path.stat().st_size * self._loader.weight_copies
        except (OSError, KeyError):
            return 0

    def _load(self, name: str) -> DeviceModel:
        """Load a model and make it ready to run."""
        spec = self._renewed.pop(name, None) or self._specs.get(name)
        if spec is None:
            raise UnknownModel(f"The model {name} is served no longer.")
        # The files may have changed since the service has read the model file.
        check_weights(spec)
        weights = spec.weights_path.stat().st_size
        if weights > self._memory_bytes:
            raise BrokenModel(too_large_message(name, weights, self._memory_bytes))
        began = time.monotonic()
        progress = self.loading[name] = LoadingProgress(f"loading {spec.identifier}")
        try:
            with progress.follow():
                model = self._loader.load(spec)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            needed = self._guess_bytes(name)
            raise OutOfMemory(f"There is not enough memory to load {name}; try again later.", needed) from error
        finally:
            del self.loading[name]
        self._specs[name] = spec
        self._load_seconds[name] = time.monotonic() - began
        self._record_loaded(name, model)
        return model

    def _record_loaded(self, name: str, model: DeviceModel) -> None:
        self._estimators[name] = model.estimator
        report = model.report()
        layout = f"{report.precision} {report.memory_format} x{report.sw_batch_size}"
        self.engines[name] = f"{report.engine} ({report.compile_mode}) {layout} on {report.device_name}"
        how = f"{report.engine}, {report.precision}, {self._device}, warm-up {report.warm_up_seconds:.1f} s"
        log.info("%s is ready: %s, %.0f MiB", model.spec.identifier, how, model.nbytes / 2**20)
        self._metrics.loads(name).inc()

    def _unloaded(self, name: str) -> None:
        self._metrics.unloads(name).inc()
        self._loader.free_memory()
