"""Loading of the C++ kernels, which `hatch_build.py` builds and ctypes calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch  # noqa: F401 (The kernels use the OpenMP library that torch loads.)

from service.core.native.variants import Variant, list_supported


def load_library(supported: Sequence[Variant] | None = None) -> ctypes.CDLL:
    """Load the first of the `supported` variants that the package contains.

    supported  variants in order of preference; None: the variants that this processor supports, fastest first

    Raises OSError if the package contains none of them or the library cannot be loaded; the message has a solution.
    """
    supported = list_supported() if supported is None else supported
    if not supported:
        raise OSError("the C++ kernels need a processor with AVX2")
    for variant in supported:
        if variant.library.exists():
            return ctypes.CDLL(str(variant.library))
    raise OSError(
        "StackSeg has no C++ kernels for this machine; install the wheel for this platform, or install g++ and then"
        " reinstall StackSeg"
    )


class CppFunctions:
    """A set of functions of the C++ library.

    signatures  (name, argument types, result type) of each function; each type is a letter of `KINDS`
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
        """The reason why the functions are unavailable; None if they are available."""
        try:
            library = load()
        except OSError as error:
            self.problem = str(error)
            return
        self._functions = library
        """Functions that release the GIL."""
        self._functions_with_gil = ctypes.PyDLL(library._name, handle=library._handle)
        """Functions that hold the GIL, for calls below about 30 us: reacquiring the GIL would take longer."""
        for name, arguments, result in signatures:
            for loaded in (self._functions, self._functions_with_gil):
                function = getattr(loaded, name, None)
                if function is None:
                    self.problem = "the C++ kernels belong to another version of StackSeg; reinstall StackSeg"
                    return
                function.argtypes, function.restype = [self.KINDS[letter] for letter in arguments], self.KINDS[result]

    @property
    def ready(self) -> bool:
        """Whether the functions can be called."""
        return self.problem is None

    def require(self) -> None:
        """Raise OSError, with a solution in its message, if the functions are unavailable."""
        if self.problem is not None:
            raise OSError(self.problem)
