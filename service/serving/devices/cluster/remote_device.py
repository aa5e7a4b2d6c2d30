"""A device on another host, which runs in an actor."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from service.core.buffers import make_allocator
from service.core.config import Settings
from service.serving.devices.cluster.remote_model import RemoteContext, RemoteModel
from service.serving.devices.device import DeviceState, Scheduler, make_queue
from service.serving.devices.models.default_estimator import HOST_WEIGHT_COPIES, make_default_estimator
from service.serving.devices.models.model import JobCounters
from service.serving.devices.models.served import ServedModels

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.models.spec import ModelSpec
    from service.serving.devices.cluster.actor_pool import ActorPool
    from service.serving.devices.cluster.exchange import ActorStatus
    from service.serving.devices.cluster.remote_actor import RemoteActor
    from service.serving.devices.models.eviction import ModelUsage
    from service.serving.metrics import Metrics


class RemoteLoader:
    """`ModelLoader` for an actor. For a model that has never been loaded, it returns the estimator for a CPU."""

    weight_copy_count = HOST_WEIGHT_COPIES

    def __init__(self, settings: Settings, context: RemoteContext) -> None:
        self._settings, self._context = settings, context

    def load(self, spec: ModelSpec) -> RemoteModel:
        """Load a model in the actor. Raises any error that loading causes, and the same errors as `ActorPool.run`."""
        return RemoteModel(spec, self._context)

    def release_unused_memory(self) -> None:
        """Free reference cycles, because the actor keeps a model loaded while this process refers to it."""
        gc.collect()

    def make_default_estimator(self, spec: ModelSpec) -> Estimator:
        """Return an estimator for a model that has never been loaded."""
        return make_default_estimator(spec, self._settings)


class RemoteDevice:
    """A `Device` on another host: the queue of an actor, and the models that are loaded there.

    While its actor is not up, its requests run on other actors.
    """

    is_required = False

    def __init__(self, actor: RemoteActor, pool: ActorPool, settings: Settings, metrics: Metrics) -> None:
        cpu_settings = settings.model_copy(update={"device": settings.device.model_copy(update={"name": "cpu"})})
        self.name = actor.name
        self._actor, self._pool = actor, pool
        allocate = make_allocator(settings.server.scratch_folder)
        loader = RemoteLoader(cpu_settings, RemoteContext(actor, pool, JobCounters(metrics, actor.name), allocate))
        # This queue has no memory limit, because the queue in the actor manages the memory there.
        self.scheduler = Scheduler(
            make_queue(cpu_settings), ServedModels(actor.name, settings.models.memory_bytes, loader, metrics)
        )

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start serving models. No request runs until the models in `startup_models` have been loaded."""
        self._actor.start()
        self.scheduler.start(specs, startup_models)

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the threads, after a call to `Scheduler.cancel_requests`; return whether they have ended.

        Wait at most four times `timeout_seconds`.
        """
        self.scheduler.close(timeout_seconds)
        self._actor.close()
        return self._actor.join(timeout_seconds) and self.scheduler.join(timeout_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""
        return self.scheduler.has_ended and self._actor.join(0)

    @property
    def state(self) -> DeviceState:
        if self._actor.is_released:
            return DeviceState.GIVEN_BACK
        if self.status is None:
            return DeviceState.STARTING
        return DeviceState.UP if self._actor.is_up else DeviceState.LOST

    @property
    def problem(self) -> str | None:
        """Reason why the actor is unavailable, in one sentence; None if it is available or was released."""
        return self._actor.problem

    @property
    def is_serving(self) -> bool:
        """Whether requests in the queue are processed, on this actor or on another one."""
        return any(actor.is_up for actor in self._pool.actors)

    @property
    def host(self) -> str | None:
        """Name of the host on which the actor was last seen; None before it is up."""
        return self.status and self.status.host

    @property
    def loaded_models(self) -> Mapping[str, ModelUsage]:
        """Usage of each model that is loaded in the actor, by name."""
        return {} if self._actor.is_released else self.scheduler.models.cache.loaded_models

    @property
    def status(self) -> ActorStatus | None:
        """Latest status of the actor; None before it is up."""
        return self._actor.status
