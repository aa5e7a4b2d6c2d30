"""The floating-point dtype that a network runs in on a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from service.core.sections.computing import Precision

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

NO_FAULTS: Mapping[torch.dtype, str] = MappingProxyType({})


class ChosenPrecision(NamedTuple):
    """A precision by its configuration name, and a warning where the operator should know more."""

    name: str
    warning: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose(
    setting: Precision, native: frozenset[torch.dtype], faulty: Mapping[torch.dtype, str] = NO_FAULTS
) -> ChosenPrecision:
    """Choose a precision: for `auto` BF16 where it is native, else FP16, else FP32.

    An explicit setting is honoured, with a warning if the device does not have it, or not without faults.

    faulty  as from `devices.faulty_precisions`
    """
    if setting == "auto":
        name = next(name for name in ("bf16", "fp16", "fp32") if DTYPES[name] in native)
        reason = next((faulty[dtype] for dtype in DTYPES.values() if dtype in faulty), None)
        return ChosenPrecision(name, None if reason is None else f"{reason} Until then, {name} is used.")
    if DTYPES[setting] in native:
        return ChosenPrecision(setting)
    if DTYPES[setting] in faulty:
        return ChosenPrecision(
            setting, f"{setting} is used, as engine.precision is set to it. {faulty[DTYPES[setting]]}"
        )
    return ChosenPrecision(
        setting, f"This device has no {setting} units; {setting} is emulated and likely slower than fp32."
    )


def list_precisions(setting: Precision, native: frozenset[torch.dtype]) -> tuple[str, ...]:
    """Return the precisions to try, the narrowest and so the fastest first: what is set, or everything native."""
    return tuple(name for name, dtype in DTYPES.items() if dtype in native) if setting == "auto" else (setting,)
