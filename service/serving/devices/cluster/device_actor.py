"""The actor that owns a device on another host. Pixels and labels are exchanged through files."""

from __future__ import annotations

import socket
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from service.core.config import Settings
from service.core.errors import Cancelled, StackSegError
from service.core.hardware import gpus, host
from service.core.sections.computing import Cluster
from service.core.sections.serving import Access, References
from service.core.telemetry import configure_logging
from service.engine.compile import torch_compile
from service.inference.windows.batching.window_request import BatchShare
from service.serving.devices.cluster.actor import ActorFactory
from service.serving.devices.cluster.exchange import (
    ActorStatus,
    LoadedModelReport,
    Outcome,
    StoredResult,
    StoredVolume,
    Task,
    store_result,
)
from service.serving.devices.cluster.ray_cluster import make_actor_factory
from service.serving.devices.local.device import LoadFunction, LocalDevice, SharedResources
from service.serving.devices.queue.job import Job, ResourceNeeds
from service.serving.devices.reservation import Reservation
from service.serving.metrics import Metrics

# Maximum number of canceled tasks to remember, because a task may be canceled before it arrives.
MAX_CANCELLED_TASKS = 1000
# Grace period of the watchdog. A lost device needs a new process, which the cluster starts immediately.
GRACE_SECONDS = 1.0


def make_actor_settings(settings: Settings) -> Settings:
    """Return the settings for an actor, which uses the device assigned by the cluster and its own scratch folder.

    API keys and the locations of files are removed.
    """
    cluster = settings.cluster
    threads = settings.device.threads or (0 if cluster.gpus else max(int(cluster.cpus), 1))
    return settings.model_copy(
        update={
            "access": Access(),
            "cluster": Cluster(),
            "references": References(),
            "device": settings.device.model_copy(update={"name": "auto", "serve": (), "threads": threads}),
            "server": settings.server.model_copy(update={"scratch_folder": None}),
            "watchdog": settings.watchdog.model_copy(update={"grace_seconds": GRACE_SECONDS}),
        }
    )


class DeviceActor:
    """Owner of one device in a separate process. Its methods are called concurrently by several threads.

    settings  settings returned by `make_actor_settings`
    load      loads a model onto the device
    """

    def __init__(self, settings: Settings, load: LoadFunction) -> None:
        configure_logging(settings.logging.level, settings.logging.format)
        self._device = LocalDevice(None, settings, SharedResources(load, Metrics(), torch_compile.LoadingLock()))
        self._device.start({}, ())
        self._models, self._queue = self._device.scheduler.models, self._device.scheduler.queue
        self._served_models: set[str] = set()
        # The model and the job of each task, by task id.
        self._jobs: dict[str, tuple[str, Job[Any]]] = {}
        self._cancelled_ids: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, task: Task) -> Outcome:
        """Load the model of a task."""

        def report_model(_job: Job[Any], reservation: Reservation) -> LoadedModelReport:
            model = reservation.model
            return LoadedModelReport(model.estimator, model.report(), model.nbytes)

        return self._run(task, report_model)

    def segment(self, task: Task) -> Outcome:
        """Segment the volume of a task. The labels are written to a new file in the same folder as the pixels."""
        stored_volume = _require_volume(task)

        def segment(job: Job[Any], reservation: Reservation) -> StoredResult:
            # Without a name for the volume, so that its pixels are freed before the labels are written.
            result = reservation.model.segment(
                job, stored_volume.open(), task.options, reservation.request, job.advance
            )
            return store_result(result, stored_volume.path.with_name(f"labels-{uuid.uuid4().hex[:12]}"))

        return self._run(task, segment)

    def estimate_diameter(self, task: Task) -> Outcome:
        """Estimate the object diameter in the volume of a task."""
        stored_volume = _require_volume(task)
        return self._run(
            task, lambda job, reservation: reservation.model.estimate_diameter(job, stored_volume.open(), task.options)
        )

    def cancel(self, task_id: str) -> None:
        """Cancel a running task, or one that has not arrived yet."""
        with self._lock:
            self._cancelled_ids[task_id] = None
            if len(self._cancelled_ids) > MAX_CANCELLED_TASKS:
                self._cancelled_ids.popitem(last=False)
            _, job = self._jobs.get(task_id, (None, None))
        if job is not None:
            job.cancel()

    def report_status(self, models: Collection[str]) -> ActorStatus:
        """Return the status of the device, and stop serving all models except `models` and the models of tasks.

        The models of tasks remain available, because a task can arrive before the status call that lists its model.
        """
        with self._lock:
            progress = {task_id: job.progress for task_id, (_, job) in self._jobs.items()}
            unused_models = self._served_models.difference(models, (model for model, _ in self._jobs.values()))
            self._served_models -= unused_models
            for model in unused_models:
                self._models.forget(model)
        return ActorStatus(socket.gethostname(), self._device.problem, gpus.query_gpus(), host.query_host(), progress)

    def _run(self, task: Task, work: Callable[[Job[Any], Reservation], Any]) -> Outcome:
        """Queue the work of a task, and wait for it. The work starts after the model is loaded."""
        reservation = Reservation(self._device.scheduler, task.model)
        job: Job[Any] = Job(
            task.spec.name,
            lambda job: work(job, reservation),
            window_count=task.window_count,
            needs=ResourceNeeds
            if task.volume is None
            else partial(reservation.estimate_needs, task.volume, task.options),
            is_ready=False,
        )
        with self._lock:
            self._served_models.add(task.model)
            self._models.serve(task.model, task.spec)
            self._jobs[task.id] = (task.model, job)
            if task.id in self._cancelled_ids:
                job.cancel()
        try:
            self._queue.put(job)
            reservation.request_model(job)
            value = job.future.result()
            return Outcome(value, share=BatchShare(job.progress.done, job.device_slots, job.device_seconds))
        except CancelledError:
            return Outcome(error=Cancelled("The job was canceled before it started."))
        except StackSegError as error:
            return Outcome(error=error)
        finally:
            with self._lock:
                del self._jobs[task.id]


def connect_cluster(settings: Settings, load: LoadFunction) -> ActorFactory:
    """Connect to the cluster, and return a function that requests a `DeviceActor`.

    load  loads a model onto the actor's device

    Raises the same errors as `make_actor_factory`.
    """
    # Twice the limit on concurrent requests, because an actor also runs the requests of lost actors.
    max_concurrent_calls = 2 * settings.limits.at_once
    return make_actor_factory(settings.cluster, max_concurrent_calls, DeviceActor, make_actor_settings(settings), load)


def _require_volume(task: Task) -> StoredVolume:
    if task.volume is None:
        raise ValueError("the task has no volume")
    return task.volume
