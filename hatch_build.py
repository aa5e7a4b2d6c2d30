"""Build script for the C++ kernels: a hatchling build hook, and a command, `python hatch_build.py [--all]`.

A wheel contains one library for each variant (`service/core/native/variants.py`). An editable installation and
the command compile only the library for this processor, in the source folder. With `--all`, the command compiles every
library that this processor can run. Libraries that are newer than their sources are not compiled again.

The environment variable CXX selects the compiler. The default is g++. If there is no compiler, or if it fails, the
package is installed without kernels and still works.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
VARIANTS = runpy.run_path(str(ROOT / "service/core/native/variants.py"))

COMPILE = ("-c", "-O3", "-std=c++17", "-fPIC", "-fopenmp")
# Do not link with -fopenmp: a second OpenMP runtime would compete with the one in torch for the cores.
LINK = ("-shared", "-s", "-Wl,--gc-sections", "-Wl,--version-script=exports.map")
EXPORTS = "{ global: stackseg_*; local: *; };\n"


def compile_kernels(variants: Iterable[Any], folder: Path) -> list[Path]:
    """Compile the library of each variant into `folder`.

    Raises OSError if there is no compiler or if the compiler fails.
    """
    compiler = (os.environ.get("CXX") or "g++").split()
    sources = sorted(ROOT.glob("service/**/*.cpp"))

    def run(*arguments: object) -> None:
        command = [*compiler, *map(str, arguments)]
        process = subprocess.run(  # noqa: S603
            command, cwd=work, check=False, capture_output=True, text=True
        )
        if process.returncode:
            raise OSError(f"{compiler[0]} failed: {process.stderr.strip()[:500]}")

    # Compile in the same file system as `folder`, so that a library can be replaced atomically. Writing to a library
    # that a running process has mapped would crash that process.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".kernels-") as work,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        (Path(work) / "exports.map").write_text(EXPORTS)
        jobs = [(source, variant) for variant in variants for source in sources]
        objects = {(source, variant): f"{variant.name}-{number}.o" for number, (source, variant) in enumerate(jobs)}
        list(pool.map(lambda job: run(*COMPILE, *job[1].options, job[0], "-o", objects[job]), jobs))
        libraries = []
        for variant in variants:
            linked = Path(work) / variant.library_path.name
            run(*LINK, *(objects[source, variant] for source in sources), "-lm", "-o", linked)
            libraries.append(linked.replace(folder / linked.name))
    return libraries


def compile_in_place(variants: Iterable[Any]) -> None:
    """Compile the libraries in the source folder that are missing or older than their sources.

    Raises OSError if compilation fails. The outdated libraries are then deleted, because calling a kernel whose
    signature has changed would crash.
    """
    sources = [*ROOT.glob("service/**/*.[ch]pp"), Path(__file__), ROOT / "service/core/native/variants.py"]
    newest = max(source.stat().st_mtime for source in sources)
    outdated = [
        variant
        for variant in variants
        if not variant.library_path.exists() or variant.library_path.stat().st_mtime < newest
    ]
    if outdated:
        try:
            compile_kernels(outdated, VARIANTS["LIBRARY_FOLDER"])
        except OSError:
            for variant in outdated:
                variant.library_path.unlink(missing_ok=True)
            raise


def get_build_hook() -> type:
    """Return the build hook class. Hatchling calls this function by name."""
    # hatchling is installed only in build environments.
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: PLC0415

    class KernelHook(BuildHookInterface):
        folder: tempfile.TemporaryDirectory[str] | None = None

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            try:
                if version == "editable":
                    compile_in_place(VARIANTS["list_supported_variants"]()[:1])
                else:
                    self.folder = tempfile.TemporaryDirectory()
                    libraries = compile_kernels(VARIANTS["list_variants"](), Path(self.folder.name))
                    target = VARIANTS["LIBRARY_FOLDER"].relative_to(ROOT)
                    build_data["force_include"] |= {str(file): str(target / file.name) for file in libraries}
                    platform = sysconfig.get_platform().translate(str.maketrans("-.", "__"))
                    build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
            except OSError as error:
                self.app.display_warning(format_warning(error))

        def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
            if self.folder is not None:
                self.folder.cleanup()

    return KernelHook


def format_warning(error: OSError) -> str:
    """Return a warning about the missing kernels and how to get them."""
    return (
        "The C++ kernels of StackSeg could not be compiled. It works without them, but is slower on a CPU. "
        f"To get them, install g++ and then install StackSeg again: {error}"
    )


if __name__ == "__main__":
    try:
        compile_in_place(VARIANTS["list_supported_variants"]()[: None if "--all" in sys.argv else 1])
    except OSError as error:
        print(format_warning(error), file=sys.stderr)
