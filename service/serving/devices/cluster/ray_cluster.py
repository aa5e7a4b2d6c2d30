"""Actors of a Ray cluster: the only module below `api` that imports Ray.

Ray places actors, starts them anew wherever they end, and adds hosts for those that wait for a place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from service.core.config import Settings
from service.core.errors import ConfigError
from service.core.sections.computing import Cluster
from service.serving.devices.cluster.actor import Actor, MakeActor, WorkerLost
from service.serving.devices.cluster.device_actor import DeviceActor, actor_settings
from service.serving.devices.local.device import LoadModel

# Calls that last as long as a request; others have threads of their own.
LONG_CALLS = frozenset({"load", "segment", "estimate_diameter", "run_block"})
CONTROL_THREADS = 2

log = logging.getLogger(__name__)


def connect_cluster(settings: Settings, load: LoadModel) -> MakeActor:
    """Connect to the cluster, and return what asks it for an actor, which Ray starts when it has a place for it.

    load  loads a model onto the actor's device

    Raises ConfigError where Ray is not installed, the cluster does not answer, or does not ask for a token.
    """
    cluster = settings.cluster
    ray = _connect(cluster.address)
    # Requests of an actor that is lost run in those that are up.
    make = _maker(ray, DeviceActor, cluster, 2 * settings.limits.at_once)
    return lambda: RayActor(ray, make(actor_settings(settings), load))


def make_actors(address: str, cluster: Cluster, count: int, kind: type) -> list[Actor]:
    """Ask the cluster at `address` for so many actors of a class, each of which does one long call at a time.

    Raises ConfigError as `connect_cluster` does.
    """
    ray = _connect(address)
    if shortage := describe_shortage(ray.cluster_resources(), cluster, count):
        log.warning(shortage)
    make = _maker(ray, kind, cluster, 1)
    return [RayActor(ray, make()) for _ in range(count)]


def check_usable() -> None:
    """Raise ConfigError where no cluster can be connected to: Ray is not installed, or there is no token for it."""
    if find_spec("ray") is None:
        raise ConfigError("A cluster needs Ray; install it here and on every host: pip install 'stackseg[ray]'.")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "Whoever reaches a Ray cluster runs programs there. Start it, and this command, with RAY_AUTH_MODE=token"
            " and the same RAY_AUTH_TOKEN."
        )


def describe_shortage(resources: Mapping[str, float], cluster: Cluster, count: int) -> str | None:
    """Return what so many actors take of a cluster and it does not have, by Ray's names; None where it has all."""
    needed = {"GPU": cluster.gpus * count, "CPU": cluster.cpus * count}
    short = [
        f"{resources.get(name, 0):g} of {most:g} {name}s"
        for name, most in needed.items()
        if resources.get(name, 0) < most
    ]
    if not short:
        return None
    return (
        f"The cluster has {' and '.join(short)} that {count} workers take; those without a place wait for hosts."
        " cluster.gpus and cluster.cpus say what each takes: with gpus: 0 they compute on CPUs."
    )


def _maker(ray: Any, kind: type, cluster: Cluster, at_once: int) -> Callable[..., Any]:
    """Return what makes an actor that does so many long calls at a time."""
    groups = {"long": at_once, "control": CONTROL_THREADS}
    # A call is tried again by whoever counts how often, and sends it where an actor is up.
    remote = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups=groups)(kind)
    made: Callable[..., Any] = remote.options(
        num_gpus=cluster.gpus, num_cpus=cluster.cpus, scheduling_strategy="SPREAD"
    ).remote
    return made


def _connect(address: str | None) -> Any:
    check_usable()
    import ray  # noqa: PLC0415 - an extra

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, ignore_reinit_error=True, configure_logging=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"The Ray cluster {address} cannot be used: {reason}") from error
    return ray


class RayActor:
    """A handle of an actor, as `Actor` has it."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method; the future raises WorkerLost where the process is gone or starts."""
        answer = _Answer()
        group = "long" if method in LONG_CALLS else "control"
        try:
            reference = getattr(self._handle, method).options(concurrency_group=group).remote(*arguments)
        except self._ray.exceptions.RayError as error:
            answer.set_exception(WorkerLost(_first_line(error)))
            return answer
        answer.reference = reference
        reference.future().add_done_callback(lambda done: self._settle(answer, done))
        return answer

    def give_up(self, future: Future[Any]) -> None:
        """Let a call not begin if it has not begun."""
        if isinstance(future, _Answer) and future.reference is not None:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(future.reference)

    def kill(self) -> None:
        """End the process for good."""
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._handle)

    def _settle(self, answer: _Answer, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            # Of a subclass of both; the other one is what was raised.
            answer.set_exception(getattr(error, "cause", error))
        elif isinstance(error, self._ray.exceptions.RayError):
            answer.set_exception(WorkerLost(_first_line(error)))
        else:
            answer.set_exception(error)


class _Answer(Future[Any]):
    """A future of a call, with Ray's reference, without which Ray forgets the result."""

    reference: Any = None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
