"""A child process of the reader, without pyseccomp, that the kernel kills while it decodes PackBits.

The decoder never returns, and limits the CPU time of its process to about one second.
"""

from __future__ import annotations

import resource
import sys
from typing import NoReturn

import imagecodecs

from service.formats.sandbox import child_main


def loop_forever(*_: object, **__: object) -> NoReturn:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    while True:
        pass


if __name__ == "__main__":
    sys.modules["pyseccomp"] = None  # type: ignore[assignment]
    # tifffile only accepts codecs from this package.
    loop_forever.__module__ = imagecodecs.__name__
    imagecodecs.packbits_decode = loop_forever
    child_main.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
