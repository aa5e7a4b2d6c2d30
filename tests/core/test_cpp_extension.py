"""Compiled kernels are kept for the next start, where nobody else could have put them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import until

from service.core.cpp_extension import ExtensionCache

FLAGS = ("-shared", "-fPIC")

Compilations = Callable[[], int]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """How often the compiler has made something."""
    log, compiler = tmp_path / "compilations", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo once >> {log}\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def shelf_in(folder: Path) -> ExtensionCache:
    extension_cache = ExtensionCache()
    extension_cache.set_folder(folder)
    return extension_cache


def answer(library: ctypes.CDLL) -> int:
    found: int = library.answer()
    return found


def test_next_start_compiles_only_what_has_changed(source: Path, compilations: Compilations, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    assert answer(shelf_in(folder).load(source, FLAGS)) == 42
    assert answer(shelf_in(folder).load(source, FLAGS)) == 42
    assert compilations() == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert answer(shelf_in(folder).load(source, (*FLAGS, "-O2"))) == 42
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert answer(shelf_in(folder).load(source, FLAGS)) == 43
    assert compilations() == 3
    assert len(list(folder.iterdir())) == 3


def test_headers_that_a_source_includes_count_wherever_they_are(
    source: Path, compilations: Compilations, tmp_path: Path
) -> None:
    folder, headers = tmp_path / "kernels", tmp_path / "headers"
    headers.mkdir()
    (headers / "answers.hpp").write_text('#include "number.hpp"\n')
    (headers / "number.hpp").write_text("constexpr int NUMBER = 44;\n")
    source.write_text('#include "headers/answers.hpp"\nextern "C" int answer() { return NUMBER; }\n')
    assert answer(shelf_in(folder).load(source, FLAGS)) == 44
    (headers / "number.hpp").write_text("constexpr int NUMBER = 45;\n")
    assert answer(shelf_in(folder).load(source, FLAGS)) == 45
    (headers / "other.hpp").write_text("// Nobody includes it.\n")
    assert answer(shelf_in(folder).load(source, FLAGS)) == 45
    assert compilations() == 2


def test_without_a_folder_nothing_is_kept(source: Path, compilations: Compilations) -> None:
    assert [answer(ExtensionCache().load(source, FLAGS)) for _ in range(2)] == [42, 42]
    assert compilations() == 2


@pytest.mark.parametrize(("open_to", "mode"), [("kernels", 0o777), ("kernels", 0o770), (".", 0o777)])
def test_folder_that_others_may_write_to_is_not_used(
    source: Path, compilations: Compilations, tmp_path: Path, open_to: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (tmp_path / "cache" / open_to).chmod(mode)
    assert [answer(shelf_in(folder).load(source, FLAGS)) for _ in range(2)] == [42, 42]
    assert compilations() == 2
    assert not list(folder.iterdir())
    assert "Others may write to" in caplog.text


def test_file_that_others_may_write_to_is_not_loaded(source: Path, compilations: Compilations, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shelf_in(folder).load(source, FLAGS)
    (kept,) = folder.iterdir()
    kept.chmod(0o722)
    assert answer(shelf_in(folder).load(source, FLAGS)) == 42
    assert compilations() == 2
    assert kept.stat().st_mode & 0o777 == 0o700


def test_damaged_file_is_not_the_end(source: Path, compilations: Compilations, tmp_path: Path) -> None:
    shelf_in(tmp_path / "kernels").load(source, FLAGS)
    # What is loaded already is known to the system by its path.
    (kept,) = (tmp_path / "kernels").rename(tmp_path / "moved").iterdir()
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content[:100])
    kept.chmod(0o700)
    assert answer(shelf_in(tmp_path / "moved").load(source, FLAGS)) == 42
    assert compilations() == 2


def test_place_where_no_folder_can_be_made_is_not_the_end(
    source: Path, compilations: Compilations, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    assert answer(shelf_in(tmp_path / "taken" / "kernels").load(source, FLAGS)) == 42
    assert compilations() == 1
    assert "cannot be kept" in caplog.text


def test_compiler_that_fails_or_is_not_there_is_an_os_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(OSError, match="false could not compile"):
        shelf_in(tmp_path / "kernels").load(source, FLAGS)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(OSError, match="nowhere"):
        shelf_in(tmp_path / "kernels").load(source, FLAGS)


def test_compiler_that_takes_too_long_is_ended_with_all_that_it_has_started(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, started = tmp_path / "slow", tmp_path / "started"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 600 & echo $! > {started}\nwait\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(OSError, match="more than 3 s"):
        ExtensionCache(compiler_seconds=3).load(source, FLAGS)
    state = Path(f"/proc/{started.read_text().strip()}/stat")
    until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")
