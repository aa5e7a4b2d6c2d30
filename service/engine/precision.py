"""Which floating dtype a network runs in on a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from service.core.config import Precision

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Choice(NamedTuple):
    """A precision by its configuration name, and a warning where the operator should know more."""

    name: str
    warning: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose(setting: Precision, native: frozenset[torch.dtype]) -> Choice:
    """`auto`: BF16 where it is native, else FP16, else FP32. What is set explicitly is honoured, with a warning."""
    if setting == "auto":
        return Choice(next(name for name in ("bf16", "fp16", "fp32") if DTYPES[name] in native))
    if DTYPES[setting] in native:
        return Choice(setting)
    return Choice(setting, f"This device has no {setting} units; {setting} is emulated and likely slower than fp32.")


def candidates(setting: Precision, native: frozenset[torch.dtype]) -> tuple[str, ...]:
    """What to try, the narrowest and so the fastest first: what is set, or everything native."""
    return tuple(name for name, dtype in DTYPES.items() if dtype in native) if setting == "auto" else (setting,)
