"""The floating-point dtype that a network runs in on a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from service.core.config import Precision

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ChosenPrecision(NamedTuple):
    """A precision by its configuration name, and a warning where the operator should know more."""

    name: str
    warning: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose(setting: Precision, native: frozenset[torch.dtype]) -> ChosenPrecision:
    """Choose a precision: for `auto` BF16 where it is native, else FP16, else FP32.

    An explicit setting is honoured, with a warning where the device does not have it.
    """
    if setting == "auto":
        return ChosenPrecision(next(name for name in ("bf16", "fp16", "fp32") if DTYPES[name] in native))
    if DTYPES[setting] in native:
        return ChosenPrecision(setting)
    return ChosenPrecision(
        setting, f"This device has no {setting} units; {setting} is emulated and likely slower than fp32."
    )


def list_precisions(setting: Precision, native: frozenset[torch.dtype]) -> tuple[str, ...]:
    """Return the precisions to try, the narrowest and so the fastest first: what is set, or everything native."""
    return tuple(name for name, dtype in DTYPES.items() if dtype in native) if setting == "auto" else (setting,)
