"""Choose the floating-point dtype in which a network runs on a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from service.core.sections.computing import Precision

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

NO_FAULTS: Mapping[torch.dtype, str] = MappingProxyType({})


class ChosenPrecision(NamedTuple):
    """The name of a precision in the configuration, and an optional warning for the operator."""

    name: str
    warning: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose_precision(
    setting: Precision, native_dtypes: frozenset[torch.dtype], faults: Mapping[torch.dtype, str] = NO_FAULTS
) -> ChosenPrecision:
    """Choose a precision. `auto` selects the first native one of BF16, FP16 and FP32.

    An explicit precision is always used, with a warning if the device only emulates it or has a known
    fault in this precision.

    faults  descriptions of known faults by dtype, from `devices.list_faulty_precisions`
    """
    if setting == "auto":
        name = next(name for name in ("bf16", "fp16", "fp32") if DTYPES[name] in native_dtypes)
        reason = next((faults[dtype] for dtype in DTYPES.values() if dtype in faults), None)
        return ChosenPrecision(name, None if reason is None else f"{reason} Until this is fixed, {name} is used.")
    if DTYPES[setting] in native_dtypes:
        return ChosenPrecision(setting)
    if DTYPES[setting] in faults:
        return ChosenPrecision(
            setting, f"{setting} is used because engine.precision is set to it. {faults[DTYPES[setting]]}"
        )
    return ChosenPrecision(
        setting, f"This device has no {setting} units; {setting} is emulated and likely slower than fp32."
    )


def list_precisions(setting: Precision, native_dtypes: frozenset[torch.dtype]) -> tuple[str, ...]:
    """Return the precisions to try, the fastest (narrowest) first: the setting, or all native ones for `auto`."""
    return tuple(name for name, dtype in DTYPES.items() if dtype in native_dtypes) if setting == "auto" else (setting,)
