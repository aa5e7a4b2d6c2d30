"""Variants in which the C++ kernels are built, for different x86-64 microarchitecture levels.

`hatch_build.py` runs this file on its own, so it must not import other modules of the package.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

# Folder that contains the built libraries.
LIBRARY_FOLDER = Path(__file__).parent

# Flags in /proc/cpuinfo that the x86-64 microarchitecture levels require (https://gitlab.com/x86-psABIs/x86-64-ABI).
X86_64_V3_FLAGS = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
X86_64_V4_FLAGS = X86_64_V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Variant(NamedTuple):
    """A build of the library with compiler `options`, for processors that have the `required_flags`."""

    name: str
    options: tuple[str, ...] = ()
    required_flags: frozenset[str] = frozenset()

    @property
    def library_path(self) -> Path:
        """Path of the library, which exists if the package was built with this variant."""
        return LIBRARY_FOLDER / f"kernels-{self.name}.so"


X86_64_VARIANTS = (
    Variant("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), X86_64_V4_FLAGS | {"avx512_bf16"}),
    Variant("x86-64-v4", ("-march=x86-64-v4",), X86_64_V4_FLAGS),
    Variant("x86-64-v3", ("-march=x86-64-v3",), X86_64_V3_FLAGS),
)


def list_variants(machine: str | None = None) -> tuple[Variant, ...]:
    """Return all variants for `machine`, such as x86_64 (None: the architecture of this machine), fastest first."""
    machine = machine or platform.machine()
    return X86_64_VARIANTS if machine == "x86_64" else (Variant(machine),)


def list_supported_variants() -> tuple[Variant, ...]:
    """Return the variants that this processor supports, fastest first."""
    flags = _read_cpu_flags()
    return tuple(variant for variant in list_variants() if variant.required_flags <= flags)


def _read_cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))
