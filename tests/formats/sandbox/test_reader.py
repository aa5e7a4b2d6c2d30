"""Reading in child processes: the same answers, and nothing that a file does harms the caller."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doomed_reader
import numpy as np
import pytest
import tifffile
from common import make_bomb
from fakes import until
from paths import SHARED_DATA

from service.core.errors import (
    AmbiguousAxes,
    BadFile,
    BadParameter,
    Cancelled,
    NotReady,
    ReaderKilled,
    RequestError,
    TooLarge,
    UnsupportedMedia,
)
from service.core.quantities import VoxelSize
from service.core.types import Description, Selection, Volume
from service.formats import stack_reader
from service.formats.sandbox import child_main
from service.formats.sandbox.reader import Reader

DATA = SHARED_DATA / "hostile"
LIMIT = 2**28


@pytest.fixture
def stack() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (2, 6, 40, 50)).astype(np.uint16)


def one_child(**changed: Any) -> Reader:
    return Reader(**{"memory_bytes": 2**29, "seconds": 30, "decoded_bytes": LIMIT, "processes": 1} | changed)


def child_of(reader: Reader) -> subprocess.Popen[bytes]:
    """Its first child."""
    process = reader._children[0]._process
    assert process is not None
    return process


def asked(reader: Reader) -> bool:
    """Whether a request lies before its one process, which is stopped."""
    (process,), waiting = reader._children, array("i", [0])
    fcntl.ioctl(process._channel.fileno(), termios.TIOCOUTQ, waiting)
    return waiting[0] > 0


def stop(number: int) -> None:
    """Stop a child; it does nothing more once this returns."""
    os.kill(number, signal.SIGSTOP)
    os.waitid(os.P_PID, number, os.WSTOPPED)


def write(path: Path, stack: np.ndarray, **options: Any) -> Path:
    metadata = {"axes": "CZYX", "PhysicalSizeZ": 2.0, "PhysicalSizeY": 0.5, "PhysicalSizeX": 0.5}
    tifffile.imwrite(path, stack, photometric="minisblack", ome=True, metadata=metadata, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"byteorder": ">"}, {"compression": "zlib"}])
def test_the_same_as_in_process(reader: Reader, tmp_path: Path, stack: np.ndarray, options: dict[str, Any]) -> None:
    for selection in (Selection(), Selection(channel=1, voxel_size=VoxelSize(3, 2, 1)), Selection(axes="ZCYX")):
        path = write(tmp_path / "stack.ome.tif", stack, **options)
        here, there = stack_reader.read(path, selection, LIMIT), reader.read(path, selection, tmp_path)
        assert reader.inspect(path, selection) == stack_reader.inspect(path, selection, LIMIT)
        shared = reader.read(path, selection, tmp_path, shared=True)
        for volume in (there, shared):
            for field in ("shape", "dtype", "voxel_size", "channels", "notes"):
                assert getattr(volume, field) == getattr(here, field)
            np.testing.assert_array_equal(volume.read(1, 2), here.read(1, 2))
        expected = here.array()
        # Volumes outlive the names of their files.
        path.unlink()
        np.testing.assert_array_equal(there.array(), expected)
        np.testing.assert_array_equal(shared.array(), expected)


@pytest.mark.parametrize("options", [{}, {"byteorder": ">"}, {"compression": "zlib"}])
@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_in_memory_is_read_like_one_on_disk(
    tmp_path: Path, stack: np.ndarray, options: dict[str, Any], nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "stack.tif", stack, **options)
    content = bytearray(path.read_bytes())
    if not nameless:
        monkeypatch.delattr(os, "memfd_create")
    with one_child() as reader:
        described = reader.inspect(content, Selection())
        volumes = [reader.read(content, Selection(), tmp_path) for _ in range(2)]
        with pytest.raises(UnsupportedMedia):
            reader.read(bytearray(), Selection(), tmp_path)
    assert described == stack_reader.inspect(path, Selection(), LIMIT)
    for volume in volumes:
        np.testing.assert_array_equal(volume.array(), stack)
        assert volume.voxel_size == described.voxel_size


def test_colour_samples_of_a_shared_file(reader: Reader, tmp_path: Path) -> None:
    path, pixels = tmp_path / "colour.tif", np.random.default_rng(0).integers(0, 255, (5, 20, 30, 3), np.uint8)
    tifffile.imwrite(path, pixels, photometric="rgb", metadata={"axes": "ZYXS"})
    for channel in (None, 1):
        selection = Selection(channel=channel, axes="ZYXS")
        volume = reader.read(path, selection, tmp_path, shared=True)
        np.testing.assert_array_equal(volume.array(), stack_reader.read(path, selection, LIMIT).array())


def test_shared_file_that_becomes_shorter_is_an_error_and_not_the_end(
    reader: Reader, tmp_path: Path, stack: np.ndarray
) -> None:
    path = write(tmp_path / "stack.tif", stack)
    volume = reader.read(path, Selection(channel=0), tmp_path, shared=True)
    os.truncate(path, path.stat().st_size * 2 // 5)
    volume.read(0, 1)
    with pytest.raises(BadFile, match="shorter"):
        volume.read(0, 6)


def test_shared_files_have_a_limit_of_their_own(tmp_path: Path, stack: np.ndarray) -> None:
    path = write(tmp_path / "stack.tif", stack)
    limits = {"decoded_bytes": stack.nbytes - 1, "shared_bytes": stack.nbytes}
    with Reader(memory_bytes=2**29, seconds=10, processes=1, **limits) as reader:
        assert reader.inspect(path, Selection(), shared=True).shape == stack.shape
        np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path, shared=True).array(), stack)
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            with pytest.raises(TooLarge):
                call(path, Selection())


def test_errors_keep_their_kind_and_their_words(reader: Reader, tmp_path: Path, stack: np.ndarray) -> None:
    unnamed, text, cut = tmp_path / "unnamed.tif", tmp_path / "text.tif", write(tmp_path / "cut.tif", stack)
    tifffile.imwrite(unnamed, stack, photometric="minisblack")
    text.write_text("no TIFF", encoding="ascii")
    os.truncate(cut, 10_000)

    for path, selection, kind, words in (
        (unnamed, Selection(), AmbiguousAxes, "axes=CZYX"),
        (unnamed, Selection(axes="ZYX"), BadParameter, "2 x 6 x 40 x 50"),
        (text, Selection(), UnsupportedMedia, "Send a TIFF"),
        (cut, Selection(), BadFile, "cut short"),
    ):
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            with pytest.raises(kind, match=words) as caught:
                call(path, selection)
            advice = ("axes", {"axes": "CZYX"}) if kind is AmbiguousAxes else (selection.axes and "axes", {})
            assert (caught.value.parameter, caught.value.suggested) == advice


def test_a_missing_file_is_the_callers_own_mistake(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reader.inspect(tmp_path / "nothing.tif", Selection())


def test_a_killed_child_is_replaced(tmp_path: Path, stack: np.ndarray) -> None:
    path = write(tmp_path / "stack.tif", stack)
    with one_child() as reader:
        for _ in range(3):
            assert reader.inspect(path, Selection(), shared=True).stored_shape == stack.shape
            child_of(reader).send_signal(signal.SIGSEGV)
            os.waitid(os.P_PID, child_of(reader).pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("sent", [signal.SIGSEGV, signal.SIGKILL])
def test_a_file_is_bad_if_its_child_crashes_and_tried_again_if_others_kill_it(
    tmp_path: Path, stack: np.ndarray, caplog: pytest.LogCaptureFixture, sent: signal.Signals
) -> None:
    path = write(tmp_path / "stack.tif", stack)
    with one_child() as reader, ThreadPoolExecutor(1) as pool:
        reader.inspect(path, Selection())
        child = child_of(reader)
        stop(child.pid)
        reading = pool.submit(reader.inspect, path, Selection())
        until(lambda: asked(reader))
        os.kill(child.pid, sent)
        os.kill(child.pid, signal.SIGCONT)
        if sent == signal.SIGSEGV:
            with pytest.raises(BadFile, match="crashed"):
                reading.result()
        else:
            assert reading.result().shape == stack.shape
        assert reader.kills == (sent == signal.SIGKILL)
        assert reader.inspect(path, Selection()).shape == stack.shape
    assert caplog.text.count(f"ended with status -{sent}") == 1


def test_a_child_that_is_killed_again_is_not_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(doomed_reader.__file__).parent))
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, np.zeros((3, 8, 8), np.uint8), photometric="minisblack", compression="packbits")
    with one_child(module=doomed_reader.__name__) as reader:
        with pytest.raises(ReaderKilled, match="killed twice, by signal 9"):
            reader.read(path, Selection(axes="ZYX"), tmp_path)
        assert reader.kills == 2
        assert reader.inspect(path, Selection(axes="ZYX")).shape == (1, 3, 8, 8)
    assert caplog.text.count("ended with status -9") == 2


def test_taking_too_long_is_too_large_and_does_no_lasting_harm(tmp_path: Path, stack: np.ndarray) -> None:
    path = write(tmp_path / "stack.tif", stack)
    with one_child(seconds=2) as reader:
        reader.inspect(path, Selection())
        # However fast the machine is.
        stop(child_of(reader).pid)
        start = time.perf_counter()
        with pytest.raises(TooLarge, match=r"more than 2 seconds"):
            reader.inspect(path, Selection())
        assert time.perf_counter() - start < 20
        assert reader.inspect(path, Selection()).stored_shape == stack.shape


def test_memory_is_limited(tmp_path: Path, stack: np.ndarray) -> None:
    bomb, modest = tmp_path / "bomb.tif", write(tmp_path / "modest.tif", stack, compression="zlib")
    tifffile.imwrite(bomb, np.zeros((16_000, 16_000), np.uint8), compression="zlib", rowsperstrip=16_000)
    assert bomb.stat().st_size < 2**20
    with one_child(memory_bytes=2**27) as reader:
        with pytest.raises(TooLarge, match="memory"):
            reader.read(bomb, Selection(), tmp_path)
        np.testing.assert_array_equal(reader.read(modest, Selection(), tmp_path).array(), stack)
        with pytest.raises(TooLarge, match=r"decodes to 0\.26 GB"):
            stack_reader.read(bomb, Selection(), 2**27)


def test_a_strip_that_unpacks_to_more_than_it_should_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tif"
    zeros = np.zeros((16_000, 16_000), np.uint8)
    tifffile.imwrite(path, zeros, compression="zlib", rowsperstrip=16_000, metadata=None)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageLength", "RowsPerStrip"):
            file.pages.first.tags[name].overwrite(16)
    with one_child(memory_bytes=2**27) as reader, pytest.raises((BadFile, TooLarge), match=r"[Dd]ecoding its pixels"):
        reader.read(path, Selection(), tmp_path)


def test_many_callers_at_once_each_get_their_own(reader: Reader, tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{number}.tif", np.full((1, 3, 20, 20), number, np.uint8), compression="zlib")
        for number in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        volumes = list(pool.map(lambda path: reader.read(path, Selection(), tmp_path), paths * 3))

    assert [int(volume.array().max()) for volume in volumes] == list(range(8)) * 3
    assert all((volume.array() == volume.array().flat[0]).all() for volume in volumes)


def test_closing_ends_the_children_and_later_calls(tmp_path: Path, stack: np.ndarray) -> None:
    path = write(tmp_path / "stack.tif", stack)
    reader = Reader(memory_bytes=2**29, seconds=10, decoded_bytes=LIMIT)
    reader.inspect(path, Selection())

    reader.close()
    reader.close()

    assert [child._process is None or child._process.poll() is None for child in reader._children] == [False, False]
    with pytest.raises(NotReady):
        reader.inspect(path, Selection())


def test_closing_answers_those_who_wait(tmp_path: Path, stack: np.ndarray) -> None:
    path = write(tmp_path / "stack.tif", stack)
    reader = one_child()
    reader.inspect(path, Selection())
    # So that it has not answered before.
    stop(child_of(reader).pid)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(reader.inspect, path, Selection()) for _ in range(3)]
        until(lambda: asked(reader))
        reader.close()
        errors = [future.exception(timeout=20) for future in waiting]

    assert all(isinstance(error, NotReady) for error in errors)


def test_a_child_that_cannot_start_is_not_the_files_fault(
    tmp_path: Path, stack: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "stack.tif", stack)
    with one_child(memory_bytes=2**70) as reader:
        for _ in range(2):
            with pytest.raises(NotReady, match="does not start"):
                reader.inspect(path, Selection())
    assert "OverflowError" in caplog.text


def test_the_child_ends_with_its_parent_and_imports_no_torch() -> None:
    code = (
        "import sys, service.formats.sandbox.child_main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    here, there = socket.socketpair()
    lonely = [sys.executable, "-m", child_main.__name__, str(2**29), str(LIMIT), "10"]
    child = subprocess.Popen(lonely, stdin=there.fileno(), stderr=subprocess.PIPE)
    there.close()
    with here:
        assert here.recv(1000).startswith(b'{"missing": {')
    assert child.communicate(timeout=60) == (None, b"")
    assert child.returncode == 0


HOSTILE = json.loads((DATA / "manifest.json").read_text(encoding="utf-8")) if DATA.is_dir() else []


@pytest.mark.skipif(not HOSTILE, reason="the folder of public test files, ../shared/data, is not there")
@pytest.mark.parametrize("entry", HOSTILE or [None], ids=[entry["file"] for entry in HOSTILE] or ["none"])
def test_every_hostile_file_is_refused_or_read(reader: Reader, tmp_path: Path, entry: dict[str, Any]) -> None:
    path, start = DATA / entry["file"], time.perf_counter()

    def outcome(**arguments: Any) -> tuple[object, ...]:
        try:
            volume = reader.read(path, Selection(time=0), tmp_path, **arguments)
        except RequestError as error:
            return type(error), str(error)
        assert volume.array().nbytes == volume.nbytes <= LIMIT
        return volume.shape, volume.dtype, volume.voxel_size, volume.channels, volume.array().tobytes()

    first = outcome()
    # The limit is 10 s, and a process may have to start.
    assert time.perf_counter() - start < 30
    # Of what others may change nothing is remembered.
    assert outcome() == first == outcome(shared=True)


@pytest.mark.parametrize("compression", ["zlib", "lzw", "zstd", "packbits", "jpeg"])
def test_what_is_large_once_decoded_is_described_and_not_decoded(
    reader: Reader, tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, scratch = tmp_path / "bomb.tif", tmp_path / "scratch"
    bomb.write_bytes(make_bomb(64, (1024, 2048), compression))
    selection = Selection(axes="ZYX")

    described = reader.read_small(bomb, selection, scratch)

    assert described == reader.inspect(bomb, selection)
    assert isinstance(described, Description)
    assert (described.shape, described.nbytes) == ((1, 64, 1024, 2048), 2**27)
    assert not scratch.exists()
    monkeypatch.setattr(reader, "small_bytes", 2**27)
    volume = reader.read_small(bomb, selection, scratch)
    assert isinstance(volume, Volume)
    assert not volume.read(63, 64).any()


def test_whole_tiles_and_pages_count_as_decoded(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, inner, plain = (tmp_path / f"{name}.tif" for name in ("tiled", "inner", "plain"))
    tifffile.imwrite(tiled, np.zeros((8, 8), np.uint8), photometric="minisblack", tile=(4096, 4096), compression="zlib")
    colour = {"photometric": "rgb", "compression": "zlib", "metadata": {"axes": "ZYXS"}}
    tifffile.imwrite(inner, np.zeros((4, 512, 512, 3), np.uint8), **colour)
    tifffile.imwrite(plain, np.zeros((4, 512, 512), np.uint8), photometric="minisblack", metadata={"axes": "ZYX"})
    for path, selection, nbytes in (
        (tiled, Selection(), 2**24),
        (inner, Selection(axes="ZYXS", channel=0), 3 * 2**20),
        (plain, Selection(axes="ZYX"), 0),
    ):
        monkeypatch.setattr(reader, "small_bytes", nbytes)
        assert isinstance(reader.read_small(path, selection, tmp_path), Volume)
        if nbytes:
            monkeypatch.setattr(reader, "small_bytes", nbytes - 1)
            assert isinstance(reader.read_small(path, selection, tmp_path), Description)


def test_cancelled_reading_kills_its_child_and_the_next_file_is_read(tmp_path: Path, stack: np.ndarray) -> None:
    path, cancelled = write(tmp_path / "stack.tif", stack, compression="zlib"), threading.Event()
    with one_child(seconds=60) as reader, ThreadPoolExecutor(1) as pool:
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            reader.inspect(path, Selection())
            child = child_of(reader)
            # However fast the machine is.
            stop(child.pid)
            reading = pool.submit(call, path, Selection(), cancelled=cancelled.is_set)
            until(lambda: asked(reader))
            assert not reading.done()
            cancelled.set()
            with pytest.raises(Cancelled):
                reading.result(20)
            assert child.poll() is not None
            cancelled.clear()
        np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path).array(), stack)


PLACE = {"dtype": "<u1", "offset": 0, "shape": [1, 1, 4, 4], "strides": [16, 16, 4, 1]}
FOUND = PLACE | {"voxel_size": None, "channels": ["a"], "notes": [], "decoded": False}
NONSENSE: list[dict[str, Any]] = [
    {},
    {"error": []},
    {"errno": None, "message": None},
    {"result": 1},
    {"result": {"description": FOUND}},
    {"output_bytes": "many"},
    {"result": FOUND | {"dtype": "none"}},
    {"result": FOUND | {"shape": [1, 1]}},
    {"result": FOUND | {"shape": [0, 0, 0, 0]}},
    {"result": FOUND | {"offset": math.inf}},
    {"result": FOUND | {"channels": [{}]}},
    {"result": FOUND | {"voxel_size": 3}},
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"offset": 10**6},
        {"offset": -8},
        {"shape": [1, 6, 40_000, 50]},
        {"shape": [10**6] * 4, "strides": [0] * 4},
        {"dtype": "|O"},
        {"decoded": True},
    ],
)
def test_a_reply_that_points_outside_its_file_is_refused(
    taken_over: Callable[..., Reader], tmp_path: Path, stack: np.ndarray, lie: dict[str, Any], shared: bool
) -> None:
    path = write(tmp_path / "stack.tif", stack)
    reader = taken_over(repr(child_main.encode({"result": FOUND | lie})))
    if not lie:
        assert reader.read(path, Selection(), tmp_path, shared=shared).array().shape == (1, 1, 4, 4)
        return
    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path, shared=shared)


@pytest.mark.parametrize(
    "reply",
    [
        "b'no JSON\\n'",
        "b'[]\\n'",
        "b'[' * 10**5 + b'\\n'",
        "b' ' * (2**26 + 1)",
        *(repr(child_main.encode(nonsense)) for nonsense in NONSENSE),
    ],
)
def test_a_child_whose_reply_makes_no_sense_is_replaced(
    taken_over: Callable[..., Reader], tmp_path: Path, stack: np.ndarray, reply: str
) -> None:
    path, reader = write(tmp_path / "stack.tif", stack), taken_over(reply)
    for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path / "scratch")):
        process = reader._children[0]._process
        with pytest.raises(BadFile, match="makes no sense"):
            call(path, Selection())
        assert reader._children[0]._process is not process, "another one reads the next file"
