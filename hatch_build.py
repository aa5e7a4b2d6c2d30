"""Builds the C++ kernels: a build hook of hatchling, and by hand `python hatch_build.py [--all]`.

A wheel gets a library for each level of processors (`service/core/native/variants.py`). An editable installation, and a
call by hand, make the one for this processor in the source folder, or `--all`, unless they are newer than the sources.
CXX names the compiler, by default g++. Without one, or where it fails, the package works without kernels.
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
# Not linked with -fopenmp: a second OpenMP runtime beside torch's would compete with it for the cores.
LINK = ("-shared", "-s", "-Wl,--gc-sections", "-Wl,--version-script=exports.map")
EXPORTS = "{ global: stackseg_*; local: *; };\n"


def compile_kernels(variants: Iterable[Any], folder: Path) -> list[Path]:
    """Make the library of each variant in `folder`. Raises OSError where there is no compiler, or it fails."""
    compiler = (os.environ.get("CXX") or "g++").split()
    sources = sorted(ROOT.glob("service/**/*.cpp"))

    def run(*arguments: object) -> None:
        command = [*compiler, *map(str, arguments)]
        done = subprocess.run(  # noqa: S603
            command, cwd=work, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"{compiler[0]} failed: {done.stderr.strip()[:500]}")

    # In the same file system: a library that a process has mapped may be replaced, but not written to.
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
            made = Path(work) / variant.library.name
            run(*LINK, *(objects[source, variant] for source in sources), "-lm", "-o", made)
            libraries.append(made.replace(folder / made.name))
    return libraries


def compile_in_place(variants: Iterable[Any]) -> None:
    """Make the libraries that are missing in the source folder, or older than their sources.

    Raises OSError; then there is none of those: calls of functions that have changed would crash.
    """
    sources = [*ROOT.glob("service/**/*.[ch]pp"), Path(__file__), ROOT / "service/core/native/variants.py"]
    changed = max(source.stat().st_mtime for source in sources)
    outdated = [each for each in variants if not each.library.exists() or each.library.stat().st_mtime < changed]
    if outdated:
        try:
            compile_kernels(outdated, VARIANTS["FOLDER"])
        except OSError:
            for each in outdated:
                each.library.unlink(missing_ok=True)
            raise


def get_build_hook() -> type:
    """Return the hook, in the way that hatchling asks for it."""
    # Only builds have hatchling.
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # noqa: PLC0415

    class KernelHook(BuildHookInterface):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            try:
                if version == "editable":
                    compile_in_place(VARIANTS["list_supported"]()[:1])
                else:
                    self._folder = tempfile.TemporaryDirectory()
                    libraries = compile_kernels(VARIANTS["list_variants"](), Path(self._folder.name))
                    build_data["force_include"] |= {str(file): f"service/core/{file.name}" for file in libraries}
                    platform = sysconfig.get_platform().translate(str.maketrans("-.", "__"))
                    build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
            except OSError as error:
                self.app.display_warning(explain(error))

    return KernelHook


def explain(error: OSError) -> str:
    """Say what the lack of kernels means, and how to get them."""
    return f"StackSeg has no C++ kernels and computes more slowly on a CPU; install g++, then try again: {error}"


if __name__ == "__main__":
    try:
        compile_in_place(VARIANTS["list_supported"]()[: None if "--all" in sys.argv else 1])
    except OSError as error:
        print(explain(error), file=sys.stderr)
