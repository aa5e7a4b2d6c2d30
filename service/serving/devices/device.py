"""A device that computes requests, on this host or another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from service.models.spec import ModelSpec
from service.serving.devices.models.memory import LoadedModel
from service.serving.devices.scheduler import Scheduler


class DeviceState(StrEnum):
    """Whether a device can be used.

    UP          it computes requests
    STARTING    it was asked for and has not answered yet
    LOST        it does not work, or does not answer any more
    GIVEN_BACK  there is no such device until there is work for it
    """

    UP = "up"
    STARTING = "starting"
    LOST = "lost"
    GIVEN_BACK = "given_back"


class Device(Protocol):
    """The owner of one device: `LocalDevice` or `RemoteDevice`. Models become ready after `start` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def scheduler(self) -> Scheduler:
        """The requests of the device, and its models."""

    @property
    def is_required(self) -> bool:
        """Whether the service is unready while this device cannot be used, even if others can."""

    @property
    def state(self) -> DeviceState: ...

    @property
    def problem(self) -> str | None:
        """The reason why the device is starting or lost, one sentence; None in other states."""

    @property
    def serves(self) -> bool:
        """Whether requests in the queue are computed, by this device or one that stands in for it."""

    @property
    def host(self) -> str | None:
        """The other host that the device was last seen on; None for a device of this host."""

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The loaded models by name."""

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""

    def stop(self, seconds: float) -> bool:
        """End the threads after `Scheduler.cancel_requests`; return False if one runs after up to four times that."""


def loaded_bytes(device: Device) -> int:
    """Return the bytes of memory that the loaded models of a device take."""
    return sum(model.nbytes for model in device.loaded_models.values())
