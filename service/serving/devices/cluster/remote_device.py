"""A device of another host."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from service.core.buffers import make_allocator
from service.core.config import Settings
from service.serving.devices.cluster.remote_model import RemoteModel, RemotePlace
from service.serving.devices.device import DeviceState, Scheduler, make_queue
from service.serving.devices.models.guess import HOST_WEIGHT_COPIES, guess_estimator
from service.serving.devices.models.model import JobCounters
from service.serving.devices.models.served import ServedModels

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.models.spec import ModelSpec
    from service.serving.devices.cluster.actor_pool import ActorPool
    from service.serving.devices.cluster.exchange import Status
    from service.serving.devices.cluster.remote_actor import RemoteActor
    from service.serving.devices.models.eviction import LoadedModel
    from service.serving.metrics import Metrics


class RemoteLoader:
    """Loads models in an actor, as `ModelLoader`. What is expected of them is what a CPU of this host would take."""

    weight_copies = HOST_WEIGHT_COPIES

    def __init__(self, settings: Settings, place: RemotePlace) -> None:
        self._settings, self._place = settings, place

    def load(self, spec: ModelSpec) -> RemoteModel:
        """Load a model in the actor. Raises the error of loading it there, and what `ActorPool.run` raises."""
        return RemoteModel(spec, self._place)

    def free_memory(self) -> None:
        """Free cycles of objects, so that the actor is no longer asked to keep the model."""
        gc.collect()

    def guess_estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model that was never loaded."""
        return guess_estimator(spec, self._settings)


class RemoteDevice:
    """The queue of an actor, and the models that are loaded there, as `Device`.

    Its requests run in other actors while its own is not up.
    """

    is_required = False

    def __init__(self, actor: RemoteActor, pool: ActorPool, settings: Settings, metrics: Metrics) -> None:
        here = settings.model_copy(update={"device": settings.device.model_copy(update={"name": "cpu"})})
        self.name = actor.name
        self._actor, self._pool = actor, pool
        allocate = make_allocator(settings.server.scratch_folder)
        loader = RemoteLoader(here, RemotePlace(actor, pool, JobCounters(metrics, actor.name), allocate))
        # The actor's own queue minds the memory there.
        self.scheduler = Scheduler(
            make_queue(here), ServedModels(actor.name, settings.models.memory_bytes, loader, metrics)
        )

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""
        self._actor.start()
        self.scheduler.start(specs, first)

    def stop(self, seconds: float) -> bool:
        """End the threads after `Scheduler.cancel_requests`; return False if one runs after up to four times that."""
        self.scheduler.close(seconds)
        self._actor.close()
        return self._actor.join(seconds) and self.scheduler.join(seconds)

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""
        return self.scheduler.ended and self._actor.join(0)

    @property
    def state(self) -> DeviceState:
        if self._actor.given_back:
            return DeviceState.GIVEN_BACK
        if self.status is None:
            return DeviceState.STARTING
        return DeviceState.UP if self._actor.up else DeviceState.LOST

    @property
    def problem(self) -> str | None:
        """Why the actor cannot be used, one sentence; None while it can, and where it was given back."""
        return self._actor.problem

    @property
    def serves(self) -> bool:
        """Whether requests in the queue are computed, in this actor or another one."""
        return any(actor.up for actor in self._pool.actors)

    @property
    def host(self) -> str | None:
        """The host that the actor was last seen on; None before it is up."""
        return self.status and self.status.host

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The models that are loaded in the actor by name."""
        return {} if self._actor.given_back else self.scheduler.models.cache.loaded_models

    @property
    def status(self) -> Status | None:
        """The latest state of the actor; None before it is up."""
        return self._actor.status
