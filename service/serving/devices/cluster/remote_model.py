"""A model that is loaded in an actor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from service.core.buffers import Allocator
from service.core.types import Options, Volume
from service.serving.devices.cluster.actor_pool import ActorPool, Attempt
from service.serving.devices.cluster.remote_actor import ModelInUse, RemoteActor

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.inference.types import DiameterEstimate, EngineReport, PlannedRequest, Result
    from service.inference.windows.batching.window_request import BatchShare
    from service.models.spec import ModelSpec
    from service.serving.devices.cluster.exchange import LoadedModelReport, StoredResult, Task
    from service.serving.devices.models.model import JobCounters, ProgressCallback
    from service.serving.devices.queue.job import Job


class RemoteContext(NamedTuple):
    """The actor in which a model is loaded, the pool of actors that can replace it, and an allocator for results."""

    actor: RemoteActor
    pool: ActorPool
    counters: JobCounters
    allocate: Allocator


class RemoteModel:
    """`DeviceModel` for a model in an actor. The constructor loads the model, and raises the error if loading fails.

    If the actor is restarted, the model is loaded there again, as long as this object exists.
    """

    def __init__(self, spec: ModelSpec, context: RemoteContext) -> None:
        self.spec, self._context = spec, context
        version = f"{spec.model_dump_json()} {spec.folder}"
        identity = f"{spec.name}-{hashlib.sha256(version.encode()).hexdigest()[:12]}"
        self._model_in_use = ModelInUse(context.actor.name, identity, spec)
        # Register the model before loading it, because actors forget models that are not in use.
        context.pool.add_model(self._model_in_use)
        self._loading_report: LoadedModelReport = self._run(
            "load", self._model_in_use.make_load_task(), lambda: False, _ignore_progress
        )

    @property
    def estimator(self) -> Estimator:
        return self._loading_report.estimator

    @property
    def nbytes(self) -> int:
        return self._loading_report.nbytes

    def report(self) -> EngineReport:
        return self._loading_report.report

    def segment(
        self,
        job: Job[Any],
        volume: Volume,
        options: Options,
        request: PlannedRequest | None,
        progress: ProgressCallback,
    ) -> Result:
        """Segment a volume [C, Z, Y, X] for a job. The queue in the actor manages the memory and the order of tasks."""
        context = self._context
        planned_request = request or self.estimator.plan_request(volume, options)
        count_share = partial(context.counters.count_share, job, self.spec.name)
        with context.pool.exchange.share_volume(volume) as stored_volume:
            task = self._model_in_use.make_load_task()._replace(
                volume=stored_volume, options=options, window_count=planned_request.estimate.windows
            )
            stored_result: StoredResult = self._run("segment", task, job.cancelled, progress, count_share)
            # Replace the spec, because the returned spec is a copy and callers compare specs by identity.
            result = stored_result.open(context.allocate)._replace(spec=self.spec)
        context.counters.count_result(self.spec.name, result)
        return result

    def estimate_diameter(self, job: Job[Any], volume: Volume, options: Options) -> DiameterEstimate | None:
        """Estimate the object diameter in a volume [C, Z, Y, X] for a job."""
        count_share = partial(self._context.counters.count_share, job, self.spec.name)
        with self._context.pool.exchange.share_volume(volume) as stored_volume:
            task = self._model_in_use.make_load_task()._replace(volume=stored_volume, options=options)
            estimate: DiameterEstimate | None = self._run(
                "estimate_diameter", task, job.cancelled, _ignore_progress, count_share
            )
            return estimate

    def _run(
        self,
        method: str,
        task: Task,
        cancelled: Callable[[], bool],
        progress: ProgressCallback,
        count_share: Callable[[BatchShare], None] = lambda _share: None,
    ) -> Any:
        """Run a task on the actor, or on another one while the actor is not up, and return its value.

        Raises the error of the task, and the same errors as `ActorPool.run`.
        """
        actor = self._context.actor
        attempt = Attempt(method, task, lambda: cancelled() or actor.is_closed, progress)
        outcome = self._context.pool.run(actor, attempt)
        if outcome.error is not None:
            raise outcome.error
        if outcome.share.device_seconds:
            count_share(outcome.share)
        if window_count := outcome.share.num_windows:
            progress(window_count, window_count)
        return outcome.value


def _ignore_progress(_done: int, _total: int) -> None:
    pass
