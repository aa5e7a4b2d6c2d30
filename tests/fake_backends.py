"""Engines for tests of what selects, builds and compares them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from service.engine.base import Backend
from service.models.network import Network


class FakeBackend(Backend):
    """An engine on the CPU whose network is `make(module)`; `attributes` replace those of the class."""

    memory_formats: ClassVar = {"cpu": ("contiguous",)}

    def __init__(self, make: Callable[[nn.Module], Network], **attributes: Any) -> None:
        self._make = make
        vars(self).update(attributes)

    def build(self, module: nn.Module, /, *_: object) -> Network:
        return self._make(module)


def change(backend: Backend, **attributes: Any) -> Backend:
    """Return a copy of `backend` with other attributes."""
    changed = copy.copy(backend)
    vars(changed).update(attributes)
    return changed
