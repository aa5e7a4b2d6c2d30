"""Load the C++ kernels, which are built by `hatch_build.py` and called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch  # noqa: F401 (The kernels use the OpenMP library that torch loads.)

from service.core.native.variants import Variant, list_supported_variants


def load_library(variants: Sequence[Variant] | None = None) -> ctypes.CDLL:
    """Load the first of `variants` that the package contains.

    variants  variants in order of preference; None: the variants that this processor supports, fastest first

    Raises OSError if the package contains none of these variants, or if the library cannot be loaded. The message
    suggests a solution.
    """
    variants = list_supported_variants() if variants is None else variants
    if not variants:
        raise OSError("the C++ kernels require a processor with AVX2")
    for variant in variants:
        if variant.library_path.exists():
            return ctypes.CDLL(str(variant.library_path))
    raise OSError(
        "StackSeg has no C++ kernels for this machine; install the wheel for this platform, or install g++ and then"
        " reinstall StackSeg"
    )


class CppFunctions:
    """A set of functions of the C++ library.

    signatures  (name, argument types, result type) of each function; each type is a key of `CTYPES`
    load        returns the library, or raises OSError
    """

    CTYPES: ClassVar[dict[str, Any]] = {
        "p": ctypes.c_void_p,
        "i": ctypes.c_int32,
        "q": ctypes.c_int64,
        "f": ctypes.c_float,
        "d": ctypes.c_double,
        "-": None,
    }

    def __init__(
        self, signatures: Sequence[tuple[str, str, str]], load: Callable[[], ctypes.CDLL] = load_library
    ) -> None:
        self.signatures = signatures
        self.problem: str | None = None
        """The reason why the functions are unavailable; None if they are available."""
        try:
            library = load()
        except OSError as error:
            self.problem = str(error)
            return
        self._functions = library
        for name, argument_types, result_type in signatures:
            function = getattr(library, name, None)
            if function is None:
                self.problem = "the C++ kernels were built for another version of StackSeg; reinstall StackSeg"
                return
            function.argtypes = [self.CTYPES[key] for key in argument_types]
            function.restype = self.CTYPES[result_type]

    @property
    def is_available(self) -> bool:
        """Whether the functions can be called."""
        return self.problem is None

    def require(self) -> None:
        """Raise OSError if the functions are unavailable. The message suggests a solution."""
        if self.problem is not None:
            raise OSError(self.problem)
