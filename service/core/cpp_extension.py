"""C++ sources compiled for this processor, loaded through ctypes, and cached for the next start."""

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

# Every source is compiled with one of these.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
OPENMP_FLAGS = (*FLAGS, "-fopenmp")

COMPILER_SECONDS = 120
WRITABLE_BY_OTHERS = 0o002
WRITABLE_BY_GROUP = 0o020
STICKY = 0o1000

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

log = logging.getLogger(__name__)


class _CompilerFailed(OSError):
    """The compiler ran and refused the source; compiling into another folder would not help."""


class ExtensionCache:
    """Folder of compiled libraries; nothing is cached before `set_folder`."""

    def __init__(self, compiler_seconds: float = COMPILER_SECONDS) -> None:
        self._folder: Path | None = None
        self._seconds = compiler_seconds

    def set_folder(self, folder: Path) -> None:
        """Cache libraries in `folder` from now on."""
        self._folder = folder.resolve()

    def load(self, source: Path, flags: Sequence[str]) -> ctypes.CDLL:
        """Load the library of `source` from the cache, or compile it first (with CXX, else g++).

        The key is a hash of source, headers, flags, compiler and processor. A library is code, so it is loaded only
        from a folder that nobody else can write to. Raises OSError where there is no compiler, or it fails.
        """
        compiler = (os.environ.get("CXX") or "g++").split()
        folder = self._trusted_folder()
        if folder is None:
            return self._compile_uncached(compiler, source, flags)
        cached = folder / f"{source.stem}-{_digest(compiler, source, flags)}.so"
        if not _is_trusted(cached):
            try:
                self._compile_into(compiler, source, flags, cached)
            except _CompilerFailed:
                raise
            except OSError as error:
                log.warning("Compiled kernels cannot be kept, every start compiles them: %s", error)
                return self._compile_uncached(compiler, source, flags)
        try:
            return ctypes.CDLL(str(cached))
        except OSError as error:
            log.warning("%s cannot be loaded, compiling it again: %s", cached, error)
            return self._compile_uncached(compiler, source, flags)

    def _trusted_folder(self) -> Path | None:
        """Return the cache folder, or None where it cannot be made or others may write to it."""
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

    def _compile_into(self, compiler: Sequence[str], source: Path, flags: Sequence[str], target: Path) -> None:
        """Compile to `target` atomically, even where the power fails."""
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
            part = Path(folder) / target.name
            _compile([*compiler, *flags, str(source), "-o", str(part)], self._seconds)
            part.chmod(0o700)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)

    def _compile_uncached(self, compiler: Sequence[str], source: Path, flags: Sequence[str]) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory(prefix="stackseg-kernel-") as folder:
            target = Path(folder) / f"{source.stem}.so"
            _compile([*compiler, *flags, str(source), "-o", str(target)], self._seconds)
            # A mapped library does not need its file.
            return ctypes.CDLL(str(target))


extension_cache = ExtensionCache()
"""Cache of this process."""


class CppExtension:
    """Functions of one C++ source, available once `prepare` or `load` has compiled it.

    signatures  (name, argument types, result type) of each function, types by their letters in `KINDS`
    without     clause for the log: the price of running without a compiler
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
        self._library_with_gil: ctypes.PyDLL | None = None
        self._tried = False

    def prepare(self) -> None:
        """Load the functions, once; a failure is logged and not raised."""
        if self._tried:
            return
        self._tried = True
        try:
            self.load()
        except OSError as error:
            log.warning("%s, without the kernel for it: %s", self._without, error)

    def load(self) -> None:
        """Load the functions from the cache, or compile them, which takes a second or two.

        Raises OSError where there is no compiler, or it fails.
        """
        if self._library is not None:
            return
        library = extension_cache.load(self._source, self._flags)
        with_gil = ctypes.PyDLL(library._name, handle=library._handle)
        for name, arguments, result in self._signatures:
            for loaded in (library, with_gil):
                function = getattr(loaded, name)
                function.argtypes, function.restype = [self.KINDS[letter] for letter in arguments], self.KINDS[result]
        self._library, self._library_with_gil = library, with_gil

    @property
    def ready(self) -> bool:
        """Whether the functions are loaded."""
        return self._library is not None

    @property
    def _functions(self) -> ctypes.CDLL:
        """Functions that release the GIL."""
        if self._library is None:
            raise RuntimeError("prepare() has not made the kernel")
        return self._library

    @property
    def _functions_with_gil(self) -> ctypes.PyDLL:
        """Functions that hold the GIL: taking it back would cost more than a call of less than about 30 us."""
        if self._library_with_gil is None:
            raise RuntimeError("prepare() has not made the kernel")
        return self._library_with_gil


def _is_open(folder: Path, own: Path) -> bool:
    """Whether another user could replace a file, or a folder on the way to it, in `own`."""
    state = folder.stat()
    if state.st_uid not in {0, os.geteuid()}:
        return True
    open_to_some = bool(state.st_mode & (WRITABLE_BY_GROUP | WRITABLE_BY_OTHERS))
    return open_to_some and (folder == own or not state.st_mode & STICKY)


def _is_trusted(file: Path) -> bool:
    """Whether a file exists that only this user can have written."""
    try:
        state = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return state.st_uid == os.geteuid() and not state.st_mode & (WRITABLE_BY_GROUP | WRITABLE_BY_OTHERS)


def _digest(compiler: Sequence[str], source: Path, flags: Sequence[str]) -> str:
    """Hash everything that decides about the compiled library."""
    version = subprocess.run(  # noqa: S603
        [*compiler, "--version"], capture_output=True, check=False, timeout=COMPILER_SECONDS
    ).stdout
    processor = f"{platform.machine()} {hardware.cpu_fingerprint()}"
    sources = [file.read_bytes() for file in _with_headers(source)]
    parts = [*sources, " ".join(flags).encode(), " ".join(compiler).encode(), version, processor.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _with_headers(source: Path) -> list[Path]:
    """List a source and, after it, the headers that it includes in quotes, directly or through each other."""
    files = [source.resolve()]
    for file in files:
        included = ((file.parent / name).resolve() for name in _INCLUDE.findall(file.read_text(encoding="utf-8")))
        files += [header for header in dict.fromkeys(included) if header not in files]
    return files


def _compile(command: Sequence[str], seconds: float) -> None:
    # A process group of its own, as a compiler's children would survive if only the compiler were killed.
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            _, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise _CompilerFailed(f"{command[0]} takes more than {seconds:.0f} s") from None
    if process.returncode:
        reason = complaints.decode(errors="replace").strip()[:500]
        raise _CompilerFailed(f"{command[0]} could not compile: {reason}")
