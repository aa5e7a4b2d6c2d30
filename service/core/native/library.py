"""The C++ kernels that were built with the package (`hatch_build.py`), called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch  # noqa: F401 (The kernels have no OpenMP of their own: they use the one that torch loads.)

from service.core.native.variants import Variant, list_supported


def load_library(supported: Sequence[Variant] | None = None) -> ctypes.CDLL:
    """Load the first of these libraries that the package has; by default the best that this processor runs.

    Raises OSError, which says what to do, where the package has none, or it does not load.
    """
    supported = list_supported() if supported is None else supported
    if not supported:
        raise OSError("the C++ kernels need a processor with AVX2")
    for variant in supported:
        if variant.library.exists():
            return ctypes.CDLL(str(variant.library))
    raise OSError(
        "StackSeg has no C++ kernels for this machine; install its wheel for it, or g++ and then StackSeg again"
    )


class CppFunctions:
    """Some functions of the library.

    signatures  (name, argument types, result type) of each function, types by their letters in `KINDS`
    load        returns the library, or raises OSError
    """

    KINDS: ClassVar[dict[str, Any]] = {
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
        """The reason why the functions are missing; None where they are there."""
        try:
            library = load()
        except OSError as error:
            self.problem = str(error)
            return
        self._functions = library
        """Functions that release the GIL."""
        self._functions_with_gil = ctypes.PyDLL(library._name, handle=library._handle)
        """Functions that hold the GIL: taking it back would cost more than a call of less than about 30 us."""
        for name, arguments, result in signatures:
            for loaded in (self._functions, self._functions_with_gil):
                function = getattr(loaded, name, None)
                if function is None:
                    self.problem = "the C++ kernels are those of another version; install StackSeg again"
                    return
                function.argtypes, function.restype = [self.KINDS[letter] for letter in arguments], self.KINDS[result]

    @property
    def ready(self) -> bool:
        """Whether the functions can be called."""
        return self.problem is None

    def require(self) -> None:
        """Raise OSError, which says what to do, where the functions are missing."""
        if self.problem is not None:
            raise OSError(self.problem)
