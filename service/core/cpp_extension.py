"""Kernels in C++ that come as source: compiled for the processor at hand, and kept for the next start."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from service.core import hardware

COMPILER_SECONDS = 120
WRITABLE_BY_OTHERS = 0o002
WRITABLE_BY_GROUP = 0o020
STICKY = 0o1000

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

log = logging.getLogger(__name__)


class _CompilerFailed(OSError):
    """It said no; asking it again, elsewhere, is no use."""


class ExtensionCache:
    """Where compiled kernels are kept; nowhere until `use` has named a folder."""

    def __init__(self, compiler_seconds: float = COMPILER_SECONDS) -> None:
        self._folder: Path | None = None
        self._seconds = compiler_seconds

    def use(self, folder: Path) -> None:
        """Keep what is compiled from now on in `folder`, and take it from there."""
        self._folder = folder.resolve()

    def load(self, source: Path, flags: Sequence[str]) -> ctypes.CDLL:
        """The library that the compiler (CXX, else g++) makes of `source`, at this start or at an earlier one.

        What was kept counts for the same source, flags, compiler and processor, and is loaded only from where nobody
        else can write: it is code. Raises OSError where there is no compiler, or it fails.
        """
        compiler = (os.environ.get("CXX") or "g++").split()
        folder = self._own_folder()
        if folder is None:
            return self._compiled(compiler, source, flags)
        kept = folder / f"{source.stem}-{_digest(compiler, source, flags)}.so"
        if not _is_ours(kept):
            try:
                self._keep(compiler, source, flags, kept)
            except _CompilerFailed:
                raise
            except OSError as error:
                log.warning("Compiled kernels cannot be kept, every start compiles them: %s", error)
                return self._compiled(compiler, source, flags)
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:
            log.warning("%s cannot be loaded, compiling it again: %s", kept, error)
            return self._compiled(compiler, source, flags)

    def _own_folder(self) -> Path | None:
        """The folder, if it can be had and nobody else may write to it."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            open_to = next((one for one in (self._folder, *self._folder.parents) if _is_open(one, self._folder)), None)
        except OSError as error:
            log.warning("Compiled kernels cannot be kept, every start compiles them: %s", error)
            return None
        if open_to is not None:
            log.warning("Others may write to %s, so compiled kernels are not kept there", open_to)
            return None
        return self._folder

    def _keep(self, compiler: Sequence[str], source: Path, flags: Sequence[str], target: Path) -> None:
        """Compile to where the next start looks for it, at once or not at all, also if the power fails."""
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
            part = Path(folder) / target.name
            _compile([*compiler, *flags, str(source), "-o", str(part)], self._seconds)
            part.chmod(0o700)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)

    def _compiled(self, compiler: Sequence[str], source: Path, flags: Sequence[str]) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="stackseg-kernel-") as folder:
            target = Path(folder) / f"{source.stem}.so"
            _compile([*compiler, *flags, str(source), "-o", str(target)], self._seconds)
            # Once it is mapped it needs its file no more.
            return ctypes.CDLL(str(target))


extension_cache = ExtensionCache()
"""The one of this process: libraries are loaded once, whoever asks for them."""


class CppExtension:
    """The functions of one source, once `prepare` has compiled it; without a compiler there are none.

    signatures  name, what it takes and what it gives: pointers, 32-bit and 64-bit integers, floats, doubles, or -
    without     what the log says in that case
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
        self, source: Path, flags: Sequence[str], signatures: Sequence[tuple[str, str, str]], without: str
    ) -> None:
        self._source, self._flags, self._signatures, self._without = source, flags, signatures, without
        self._library: ctypes.CDLL | None = None
        self._keeping: ctypes.PyDLL | None = None
        self._tried = False

    def prepare(self) -> None:
        """`load`, if that was not tried before. That it fails is no error."""
        if self._tried:
            return
        self._tried = True
        try:
            self.load()
        except OSError as error:
            log.warning("%s, without the kernel for it: %s", self._without, error)

    def load(self) -> None:
        """Compile, which takes a second or two, or load what an earlier start has kept.

        Raises OSError where there is no compiler, or it fails.
        """
        if self._library is not None:
            return
        library = extension_cache.load(self._source, self._flags)
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        for name, takes, gives in self._signatures:
            for way in (library, quick):
                function = getattr(way, name)
                function.argtypes, function.restype = [self.KINDS[letter] for letter in takes], self.KINDS[gives]
        self._library, self._keeping = library, quick

    @property
    def ready(self) -> bool:
        """Whether it is there."""
        return self._library is not None

    @property
    def _functions(self) -> ctypes.CDLL:
        """Functions that let other threads run Python meanwhile."""
        if self._library is None:
            raise RuntimeError("prepare() has not made the kernel")
        return self._library

    @property
    def _quick(self) -> ctypes.PyDLL:
        """The same without that: getting the interpreter's lock back takes longer than what is done in some 30 us."""
        if self._keeping is None:
            raise RuntimeError("prepare() has not made the kernel")
        return self._keeping


def _is_open(folder: Path, own: Path) -> bool:
    """Whether somebody else could put a file, or another folder, in place of what lies in `own`."""
    state = folder.stat()
    if state.st_uid not in {0, os.geteuid()}:
        return True
    open_to_some = bool(state.st_mode & (WRITABLE_BY_GROUP | WRITABLE_BY_OTHERS))
    return open_to_some and (folder == own or not state.st_mode & STICKY)


def _is_ours(file: Path) -> bool:
    try:
        state = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return state.st_uid == os.geteuid() and not state.st_mode & (WRITABLE_BY_GROUP | WRITABLE_BY_OTHERS)


def _digest(compiler: Sequence[str], source: Path, flags: Sequence[str]) -> str:
    """Of everything that decides what comes out."""
    said = subprocess.run(  # noqa: S603
        [*compiler, "--version"], capture_output=True, check=False, timeout=COMPILER_SECONDS
    ).stdout
    processor = f"{platform.machine()} {hardware.processor()}"
    parts = (
        *(file.read_bytes() for file in _with_headers(source)),
        " ".join(flags).encode(),
        " ".join(compiler).encode(),
        said,
        processor.encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _with_headers(source: Path) -> list[Path]:
    """List a source and, after it, the headers of ours that it includes, directly or through each other."""
    found = [source.resolve()]
    for file in found:
        included = ((file.parent / name).resolve() for name in _INCLUDE.findall(file.read_text(encoding="utf-8")))
        found += [header for header in dict.fromkeys(included) if header not in found]
    return found


def _compile(command: Sequence[str], seconds: float) -> None:
    # Of a group of its own: what a compiler starts would go on if only the compiler were killed.
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise _CompilerFailed(f"{command[0]} takes more than {seconds:.0f} s") from None
    if process.returncode:
        reason = said.decode(errors="replace").strip()[:500]
        raise _CompilerFailed(f"{command[0]} could not compile: {reason}")
