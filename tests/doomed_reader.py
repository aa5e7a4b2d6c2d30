"""Child of the reader that the kernel kills while it decodes PackBits, and that lacks the binding to libseccomp."""

from __future__ import annotations

import resource
import sys
from typing import NoReturn

import imagecodecs

from service.formats.sandbox import child_main


def never_end(*_: object, **__: object) -> NoReturn:
    while True:
        pass


if __name__ == "__main__":
    sys.modules["pyseccomp"] = None  # type: ignore[assignment]
    # tifffile takes codecs of this package alone.
    never_end.__module__ = imagecodecs.__name__
    imagecodecs.packbits_decode = never_end
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    child_main.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
