"""Kernels are compiled where there is a compiler, and the package is built without them elsewhere."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with one source."""
    (tmp_path / "service" / "core" / "native").mkdir(parents=True)
    for file in ("hatch_build.py", "service/core/native/variants.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "service" / "one.cpp").write_text(
        'int inner() { return 42; }\nextern "C" int stackseg_answer() { return inner(); }\n'
    )
    return tmp_path


def build(clone: Path, **environment: str) -> str:
    """Run the build by hand; return what it says."""
    command = [sys.executable, str(clone / "hatch_build.py")]
    environment = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


def test_libraries_export_kernels_alone_and_are_made_again_for_changed_sources(clone: Path) -> None:
    assert not build(clone)
    (library,) = clone.glob("service/core/native/*.so")
    loaded = ctypes.CDLL(str(library))
    assert loaded.stackseg_answer() == 42
    assert not hasattr(loaded, "_Z5innerv")
    made = library.stat().st_mtime_ns
    build(clone)
    assert library.stat().st_mtime_ns == made
    (clone / "service" / "one.cpp").touch()
    with library.open("rb") as mapped:
        before = mapped.read()
        build(clone)
        assert os.fstat(mapped.fileno()).st_nlink == 0
        assert os.pread(mapped.fileno(), len(before) + 1, 0) == before
    assert library.stat().st_mtime_ns > made


def test_without_a_compiler_it_says_what_to_do_and_keeps_no_library_of_other_sources(clone: Path) -> None:
    assert "install g++" in build(clone, CXX="/nowhere/g++")
    assert not build(clone)
    (clone / "service" / "one.cpp").write_text("no C++")
    assert "g++ failed" in build(clone)
    assert not list(clone.glob("service/core/native/*.so"))
