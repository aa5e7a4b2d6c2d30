"""Fake engines for tests of engine selection and tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from service.engine.base import Backend
from service.models.network import Network


class FakeBackend(Backend):
    """An engine for the CPU that builds `make(module)`. `attributes` override the class attributes."""

    memory_formats: ClassVar = {"cpu": ("contiguous",)}

    def __init__(self, make: Callable[[nn.Module], Network], **attributes: Any) -> None:
        self._make = make
        vars(self).update(attributes)

    def build(self, module: nn.Module, /, *_: object) -> Network:
        return self._make(module)


def copy_with(backend: Backend, **attributes: Any) -> Backend:
    """Return a copy of `backend` with these attributes replaced."""
    changed = copy.copy(backend)
    vars(changed).update(attributes)
    return changed
