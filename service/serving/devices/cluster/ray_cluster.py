"""Actors of a Ray cluster. Apart from `service.api`, only this module imports Ray.

Ray schedules actors, restarts them when they end, and may add hosts for actors that wait for resources.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from service.core.errors import ConfigError
from service.core.sections.computing import Cluster
from service.serving.devices.cluster.actor import Actor, ActorFactory, WorkerLost

# Methods that can take as long as a request. Other methods run in separate control threads.
LONG_RUNNING_METHODS = frozenset({"load", "segment", "estimate_diameter", "run_block"})
# Number of control threads of an actor.
CONTROL_THREAD_COUNT = 2

log = logging.getLogger(__name__)


def make_actor_factory(cluster: Cluster, max_concurrent_calls: int, actor_class: type, *arguments: Any) -> ActorFactory:
    """Connect to the cluster, and return a function that requests an actor of class `actor_class`.

    Ray starts the actor when resources are available. The actor runs up to `max_concurrent_calls` long calls
    concurrently. `arguments` are the arguments of its constructor.

    Raises ConfigError if Ray is not installed, the cluster does not respond, or token authentication is not enabled.
    """
    ray = _connect(cluster.address)
    make_handle = _make_handle_factory(ray, actor_class, cluster, max_concurrent_calls)
    return lambda: RayActor(ray, make_handle(*arguments))


def make_actors(address: str, cluster: Cluster, count: int, actor_class: type) -> list[Actor]:
    """Request `count` actors of class `actor_class` from the cluster at `address`. Each runs one long call at a time.

    Raises ConfigError for the same reasons as `make_actor_factory`.
    """
    ray = _connect(address)
    if shortage := describe_shortage(ray.cluster_resources(), cluster, count):
        log.warning(shortage)
    make_handle = _make_handle_factory(ray, actor_class, cluster, 1)
    return [RayActor(ray, make_handle()) for _ in range(count)]


def check_ray() -> None:
    """Raise ConfigError if Ray is not installed, or if token authentication is not enabled."""
    if find_spec("ray") is None:
        raise ConfigError(
            "A cluster requires Ray, which is not installed. Install it on all hosts: pip install 'stackseg[ray]'."
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "Token authentication of Ray is not enabled, so anyone with network access to the cluster could run code on"
            " it. Start the cluster and this command with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN."
        )


def describe_shortage(resources: Mapping[str, float], cluster: Cluster, count: int) -> str | None:
    """Return a message if the cluster has too few resources for `count` actors, else None.

    resources  amount of each resource of the cluster, by the name that Ray uses
    """
    required_amounts = {"GPU": cluster.gpus * count, "CPU": cluster.cpus * count}
    shortages = [
        f"{resources.get(name, 0):g} of the {required_amount:g} {name}s"
        for name, required_amount in required_amounts.items()
        if resources.get(name, 0) < required_amount
    ]
    if not shortages:
        return None
    return (
        f"The cluster has only {' and '.join(shortages)} that {count} workers need. The remaining workers wait until"
        " hosts are added. cluster.gpus and cluster.cpus set the resources of each worker; with `cluster.gpus: 0`,"
        " workers use CPUs."
    )


def _make_handle_factory(
    ray: Any, actor_class: type, cluster: Cluster, max_concurrent_calls: int
) -> Callable[..., Any]:
    """Return a function that creates an actor, which runs up to `max_concurrent_calls` long calls concurrently."""
    concurrency_groups = {"long": max_concurrent_calls, "control": CONTROL_THREAD_COUNT}
    # Ray must not retry calls: the callers retry them, on actors that are up, and count the attempts.
    remote_class = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups=concurrency_groups)(actor_class)
    make_handle: Callable[..., Any] = remote_class.options(
        num_gpus=cluster.gpus, num_cpus=cluster.cpus, scheduling_strategy="SPREAD"
    ).remote
    return make_handle


def _connect(address: str | None) -> Any:
    check_ray()
    import ray  # noqa: PLC0415 - an extra

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, ignore_reinit_error=True, configure_logging=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"The Ray cluster {address} cannot be used: {reason}") from error
    return ray


class RayActor:
    """`Actor` implementation for an actor of a Ray cluster."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. The future raises WorkerLost if the process has ended or is starting."""
        future = _CallFuture()
        concurrency_group = "long" if method in LONG_RUNNING_METHODS else "control"
        try:
            reference = getattr(self._handle, method).options(concurrency_group=concurrency_group).remote(*arguments)
        except self._ray.exceptions.RayError as error:
            future.set_exception(WorkerLost(_get_first_line(error)))
            return future
        future.reference = reference
        reference.future().add_done_callback(lambda ray_future: self._complete_future(future, ray_future))
        return future

    def cancel_call(self, future: Future[Any]) -> None:
        """Cancel a call that has not started."""
        if isinstance(future, _CallFuture) and future.reference is not None:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(future.reference)

    def kill(self) -> None:
        """Terminate the process and do not restart it."""
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._handle)

    def _complete_future(self, future: _CallFuture, ray_future: Future[Any]) -> None:
        error = ray_future.exception()
        if error is None:
            future.set_result(ray_future.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            # Ray raises a subclass of both RayTaskError and the original type. Pass on the original exception.
            future.set_exception(getattr(error, "cause", error))
        elif isinstance(error, self._ray.exceptions.RayError):
            future.set_exception(WorkerLost(_get_first_line(error)))
        else:
            future.set_exception(error)


class _CallFuture(Future[Any]):
    """The future of a call. It holds Ray's reference, because Ray deletes results without references."""

    reference: Any = None


def _get_first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
