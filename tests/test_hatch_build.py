"""Tests of the build script, which compiles the kernels if there is a compiler."""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Create a minimal clone with a single C++ source."""
    (tmp_path / "service" / "core" / "native").mkdir(parents=True)
    for file in ("hatch_build.py", "service/core/native/variants.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "service" / "one.cpp").write_text(
        'int inner() { return 42; }\nextern "C" int stackseg_answer() { return inner(); }\n'
    )
    return tmp_path


def build(clone: Path, **environment: str) -> str:
    """Run the build command; return its standard error."""
    command = [sys.executable, str(clone / "hatch_build.py")]
    environment = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


def test_libraries_export_only_kernels_and_are_rebuilt_when_sources_change(clone: Path) -> None:
    assert not build(clone)
    (library,) = clone.glob("service/core/native/*.so")
    loaded = ctypes.CDLL(str(library))
    assert loaded.stackseg_answer() == 42
    assert not hasattr(loaded, "_Z5innerv")
    built_at = library.stat().st_mtime_ns
    build(clone)
    assert library.stat().st_mtime_ns == built_at
    (clone / "service" / "one.cpp").touch()
    with library.open("rb") as mapped:
        content = mapped.read()
        build(clone)
        assert os.fstat(mapped.fileno()).st_nlink == 0
        assert os.pread(mapped.fileno(), len(content) + 1, 0) == content
    assert library.stat().st_mtime_ns > built_at


def test_failed_build_reports_the_reason_and_deletes_outdated_libraries(clone: Path) -> None:
    assert "install g++" in build(clone, CXX="/nowhere/g++")
    assert not build(clone)
    (clone / "service" / "one.cpp").write_text("no C++")
    assert "g++ failed" in build(clone)
    assert not list(clone.glob("service/core/native/*.so"))


def test_wheel_has_the_libraries_where_the_service_loads_them(clone: Path) -> None:
    script = runpy.run_path(str(clone / "hatch_build.py"))
    hook = script["get_build_hook"]()(str(clone), {}, None, None, str(clone), "wheel")
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")
    expected = {str(variant.library_path.relative_to(clone)) for variant in script["VARIANTS"]["list_variants"]()}
    assert set(build_data["force_include"].values()) == expected
    assert all(Path(target).parent == Path("service/core/native") for target in expected)
