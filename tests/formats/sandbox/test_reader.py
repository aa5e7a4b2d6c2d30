"""Child processes return the same results as in-process reading, and no file can harm the service."""

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

import compromised_reader
import hanging_reader
import numpy as np
import pytest
import tifffile
from common import make_bomb
from fakes import find_forked_process, wait_until
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
from service.formats.sandbox.child_process import ReaderProcess
from service.formats.sandbox.reader import Reader

DATA = SHARED_DATA / "hostile"
LIMIT = 2**28


@pytest.fixture
def stack() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (2, 6, 40, 50)).astype(np.uint16)


def make_single_child_reader(**options: Any) -> Reader:
    return Reader(
        **{"memory_bytes": 2**29, "time_limit_seconds": 30, "max_decoded_bytes": LIMIT, "process_count": 1} | options
    )


def first_child(reader: Reader) -> subprocess.Popen[bytes]:
    """Return the process of the first child."""
    process = reader._children[0]._process
    assert process is not None
    return process


def stop_forked_process(reader: Reader) -> int:
    """Stop the process that will read the next file, and return its ID once it is stopped."""
    reader.wait_until_ready()
    forked_pid = find_forked_process(first_child(reader).pid)
    os.kill(forked_pid, signal.SIGSTOP)
    status_file = Path(f"/proc/{forked_pid}/status")
    wait_until(lambda: "State:\tT" in status_file.read_text(encoding="ascii"))
    return forked_pid


def has_pending_request(reader: Reader) -> bool:
    """Return whether a request waits in the socket of the only child, which is stopped."""
    (process,), pending_bytes = reader._children, array("i", [0])
    fcntl.ioctl(process._channel.fileno(), termios.TIOCOUTQ, pending_bytes)
    return pending_bytes[0] > 0


def write_ome_tiff(path: Path, stack: np.ndarray, **options: Any) -> Path:
    metadata = {"axes": "CZYX", "PhysicalSizeZ": 2.0, "PhysicalSizeY": 0.5, "PhysicalSizeX": 0.5}
    tifffile.imwrite(path, stack, photometric="minisblack", ome=True, metadata=metadata, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"byteorder": ">"}, {"compression": "zlib"}])
def test_results_are_the_same_as_in_process(
    reader: Reader, tmp_path: Path, stack: np.ndarray, options: dict[str, Any]
) -> None:
    for selection in (Selection(), Selection(channel=1, voxel_size=VoxelSize(3, 2, 1)), Selection(axes="ZCYX")):
        path = write_ome_tiff(tmp_path / "stack.ome.tif", stack, **options)
        in_process, in_child = stack_reader.read(path, selection, LIMIT), reader.read(path, selection, tmp_path)
        assert reader.inspect(path, selection) == stack_reader.inspect(path, selection, LIMIT)
        shared = reader.read(path, selection, tmp_path, is_shared=True)
        for volume in (in_child, shared):
            for field in ("shape", "dtype", "voxel_size", "channels", "notes"):
                assert getattr(volume, field) == getattr(in_process, field)
            np.testing.assert_array_equal(volume.read(1, 2), in_process.read(1, 2))
        expected = in_process.read_all()
        # Volumes stay readable after their files are deleted.
        path.unlink()
        np.testing.assert_array_equal(in_child.read_all(), expected)
        np.testing.assert_array_equal(shared.read_all(), expected)


@pytest.mark.parametrize("options", [{}, {"byteorder": ">"}, {"compression": "zlib"}])
@pytest.mark.parametrize("has_memfd", [True, False])
def test_file_in_memory_is_read_like_a_file_on_disk(
    tmp_path: Path, stack: np.ndarray, options: dict[str, Any], has_memfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack, **options)
    content = bytearray(path.read_bytes())
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    with make_single_child_reader() as reader:
        description = reader.inspect(content, Selection())
        volumes = [reader.read(content, Selection(), tmp_path) for _ in range(2)]
        with pytest.raises(UnsupportedMedia):
            reader.read(bytearray(), Selection(), tmp_path)
    assert description == stack_reader.inspect(path, Selection(), LIMIT)
    for volume in volumes:
        np.testing.assert_array_equal(volume.read_all(), stack)
        assert volume.voxel_size == description.voxel_size


def test_color_samples_of_a_shared_file(reader: Reader, tmp_path: Path) -> None:
    path, pixels = tmp_path / "color.tif", np.random.default_rng(0).integers(0, 255, (5, 20, 30, 3), np.uint8)
    tifffile.imwrite(path, pixels, photometric="rgb", metadata={"axes": "ZYXS"})
    for channel in (None, 1):
        selection = Selection(channel=channel, axes="ZYXS")
        volume = reader.read(path, selection, tmp_path, is_shared=True)
        np.testing.assert_array_equal(volume.read_all(), stack_reader.read(path, selection, LIMIT).read_all())


def test_shared_file_that_becomes_shorter_is_an_error(reader: Reader, tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    volume = reader.read(path, Selection(channel=0), tmp_path, is_shared=True)
    os.truncate(path, path.stat().st_size * 2 // 5)
    volume.read(0, 1)
    with pytest.raises(BadFile, match="truncated"):
        volume.read(0, 6)


def test_shared_files_have_a_separate_size_limit(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    limits = {"max_decoded_bytes": stack.nbytes - 1, "max_shared_bytes": stack.nbytes}
    with Reader(memory_bytes=2**29, time_limit_seconds=10, process_count=1, **limits) as reader:
        assert reader.inspect(path, Selection(), is_shared=True).shape == stack.shape
        np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path, is_shared=True).read_all(), stack)
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            with pytest.raises(TooLarge):
                call(path, Selection())


def test_errors_keep_their_type_and_message(reader: Reader, tmp_path: Path, stack: np.ndarray) -> None:
    unnamed, text, truncated = (
        tmp_path / "unnamed.tif",
        tmp_path / "text.tif",
        write_ome_tiff(tmp_path / "cut.tif", stack),
    )
    tifffile.imwrite(unnamed, stack, photometric="minisblack")
    text.write_text("not a TIFF", encoding="ascii")
    os.truncate(truncated, 10_000)

    for path, selection, error_type, words in (
        (unnamed, Selection(), AmbiguousAxes, "axes=CZYX"),
        (unnamed, Selection(axes="ZYX"), BadParameter, "2 x 6 x 40 x 50"),
        (text, Selection(), UnsupportedMedia, "Send a TIFF"),
        (truncated, Selection(), BadFile, "truncated"),
    ):
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            with pytest.raises(error_type, match=words) as caught:
                call(path, selection)
            advice = ("axes", {"axes": "CZYX"}) if error_type is AmbiguousAxes else (selection.axes and "axes", {})
            assert (caught.value.parameter, caught.value.suggested) == advice


def test_missing_file_raises_file_not_found(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reader.inspect(tmp_path / "nothing.tif", Selection())


def test_crashed_child_is_replaced(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    with make_single_child_reader() as reader:
        for _ in range(3):
            assert reader.inspect(path, Selection(), is_shared=True).stored_shape == stack.shape
            first_child(reader).send_signal(signal.SIGSEGV)
            os.waitid(os.P_PID, first_child(reader).pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("signal_number", [signal.SIGSEGV, signal.SIGKILL])
def test_crash_is_a_bad_file_and_external_kill_is_retried(
    tmp_path: Path, stack: np.ndarray, caplog: pytest.LogCaptureFixture, signal_number: signal.Signals
) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    with make_single_child_reader() as reader, ThreadPoolExecutor(1) as pool:
        reader.inspect(path, Selection())
        forked_pid = stop_forked_process(reader)
        future = pool.submit(reader.inspect, path, Selection())
        wait_until(lambda: has_pending_request(reader))
        os.kill(forked_pid, signal_number)
        os.kill(forked_pid, signal.SIGCONT)
        if signal_number == signal.SIGSEGV:
            with pytest.raises(BadFile, match="crashed"):
                future.result()
        else:
            assert future.result().shape == stack.shape
        assert reader.killed_child_count == (signal_number == signal.SIGKILL)
        assert reader.inspect(path, Selection()).shape == stack.shape
    assert caplog.text.count(f"exited with status -{signal_number}") == 1


def test_second_external_kill_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(hanging_reader.__file__).parent))
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, np.zeros((3, 8, 8), np.uint8), photometric="minisblack", compression="packbits")
    with make_single_child_reader(module=hanging_reader.__name__) as reader:
        with pytest.raises(ReaderKilled, match="killed twice by signal 9"):
            reader.read(path, Selection(axes="ZYX"), tmp_path)
        assert reader.killed_child_count == 2
        assert reader.inspect(path, Selection(axes="ZYX")).shape == (1, 3, 8, 8)
    assert caplog.text.count("exited with status -9") == 2


@pytest.mark.parametrize("num_kills", [1, 2, 3])
def test_child_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, stack: np.ndarray, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    path, start, kills = write_ome_tiff(tmp_path / "stack.tif", stack), ReaderProcess._start, list[int]()

    def start_and_kill(child: ReaderProcess) -> subprocess.Popen[bytes]:
        process = start(child)
        if len(kills) < num_kills:
            kills.append(process.pid)
            process.kill()
            process.wait()
        return process

    monkeypatch.setattr(ReaderProcess, "_start", start_and_kill)
    with make_single_child_reader() as reader:
        if num_kills > 2:
            with pytest.raises(NotReady, match="did not start"):
                reader.inspect(path, Selection())
        assert reader.inspect(path, Selection()).shape == stack.shape


def test_timeout_is_too_large_and_the_next_request_succeeds(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    with make_single_child_reader(time_limit_seconds=2) as reader:
        reader.inspect(path, Selection())
        # Stopping the child makes the test independent of the speed of the machine.
        stop_forked_process(reader)
        start = time.perf_counter()
        with pytest.raises(TooLarge, match=r"more than 2 seconds"):
            reader.inspect(path, Selection())
        assert time.perf_counter() - start < 20
        assert reader.inspect(path, Selection()).stored_shape == stack.shape


def test_memory_of_a_child_is_limited(tmp_path: Path, stack: np.ndarray) -> None:
    bomb, small = tmp_path / "bomb.tif", write_ome_tiff(tmp_path / "modest.tif", stack, compression="zlib")
    tifffile.imwrite(bomb, np.zeros((16_000, 16_000), np.uint8), compression="zlib", rowsperstrip=16_000)
    assert bomb.stat().st_size < 2**20
    with make_single_child_reader(memory_bytes=2**27) as reader:
        with pytest.raises(TooLarge, match="memory"):
            reader.read(bomb, Selection(), tmp_path)
        np.testing.assert_array_equal(reader.read(small, Selection(), tmp_path).read_all(), stack)
        with pytest.raises(TooLarge, match=r"decodes to 0\.26 GB"):
            stack_reader.read(bomb, Selection(), 2**27)


def test_strip_that_decodes_to_too_many_bytes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tif"
    zeros = np.zeros((16_000, 16_000), np.uint8)
    tifffile.imwrite(path, zeros, compression="zlib", rowsperstrip=16_000, metadata=None)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageLength", "RowsPerStrip"):
            file.pages.first.tags[name].overwrite(16)
    with (
        make_single_child_reader(memory_bytes=2**27) as reader,
        pytest.raises((BadFile, TooLarge), match=r"[Dd]ecoding the pixels"),
    ):
        reader.read(path, Selection(), tmp_path)


def test_concurrent_callers_get_their_own_results(reader: Reader, tmp_path: Path) -> None:
    paths = [
        write_ome_tiff(tmp_path / f"{number}.tif", np.full((1, 3, 20, 20), number, np.uint8), compression="zlib")
        for number in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        volumes = list(pool.map(lambda path: reader.read(path, Selection(), tmp_path), paths * 3))

    assert [int(volume.read_all().max()) for volume in volumes] == list(range(8)) * 3
    assert all((volume.read_all() == volume.read_all().flat[0]).all() for volume in volumes)


def test_close_stops_children_and_rejects_later_calls(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    reader = Reader(memory_bytes=2**29, time_limit_seconds=10, max_decoded_bytes=LIMIT)
    reader.inspect(path, Selection())

    reader.close()
    reader.close()

    assert [child._process is None or child._process.poll() is None for child in reader._children] == [False, False]
    with pytest.raises(NotReady):
        reader.inspect(path, Selection())


def test_close_answers_waiting_callers(tmp_path: Path, stack: np.ndarray) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    reader = make_single_child_reader()
    reader.inspect(path, Selection())
    # Prevent the child from replying before `close`.
    stop_forked_process(reader)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(reader.inspect, path, Selection()) for _ in range(3)]
        wait_until(lambda: has_pending_request(reader))
        reader.close()
        errors = [future.exception(timeout=20) for future in futures]

    assert all(isinstance(error, NotReady) for error in errors)


def test_child_that_cannot_start_is_not_a_bad_file(
    tmp_path: Path, stack: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    with make_single_child_reader(memory_bytes=2**70) as reader:
        for _ in range(2):
            with pytest.raises(NotReady, match="did not start"):
                reader.inspect(path, Selection())
    assert "OverflowError" in caplog.text


def test_child_exits_with_its_parent_and_does_not_import_torch() -> None:
    code = (
        "import sys, service.formats.sandbox.child_main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    parent_socket, child_socket = socket.socketpair()
    channel, forked_socket = socket.socketpair()
    command = [sys.executable, "-m", child_main.__name__, str(2**29), str(LIMIT), "10"]
    child = subprocess.Popen(command, stdin=child_socket.fileno(), stderr=subprocess.PIPE)
    child_socket.close()
    with parent_socket, channel:
        socket.send_fds(parent_socket, [b"f"], [forked_socket.fileno()])
        forked_socket.close()
        assert channel.recv(1000).startswith(b'{"missing": {')
    assert child.communicate(timeout=60) == (None, b"")
    assert child.returncode == 0


HOSTILE_FILES = json.loads((DATA / "manifest.json").read_text(encoding="utf-8")) if DATA.is_dir() else []


@pytest.mark.skipif(not HOSTILE_FILES, reason="the folder of public test files, ../shared/data, does not exist")
@pytest.mark.parametrize("entry", HOSTILE_FILES or [None], ids=[entry["file"] for entry in HOSTILE_FILES] or ["none"])
def test_every_hostile_file_is_rejected_or_read(reader: Reader, tmp_path: Path, entry: dict[str, Any]) -> None:
    path, start = DATA / entry["file"], time.perf_counter()

    def read_outcome(**arguments: Any) -> tuple[object, ...]:
        try:
            volume = reader.read(path, Selection(time=0), tmp_path, **arguments)
        except RequestError as error:
            return type(error), str(error)
        assert volume.read_all().nbytes == volume.nbytes <= LIMIT
        return volume.shape, volume.dtype, volume.voxel_size, volume.channels, volume.read_all().tobytes()

    first_outcome = read_outcome()
    # The time limit includes the start of a process.
    assert time.perf_counter() - start < 30
    # Repeated and shared reads have the same outcome.
    assert read_outcome() == first_outcome == read_outcome(is_shared=True)


@pytest.mark.parametrize("compression", ["zlib", "lzw", "zstd", "packbits", "jpeg"])
def test_large_compressed_stack_is_described_but_not_decoded(
    reader: Reader, tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, scratch = tmp_path / "bomb.tif", tmp_path / "scratch"
    bomb.write_bytes(make_bomb(64, (1024, 2048), compression))
    selection = Selection(axes="ZYX")

    description = reader.read_small(bomb, selection, scratch)

    assert description == reader.inspect(bomb, selection)
    assert isinstance(description, Description)
    assert (description.shape, description.nbytes) == ((1, 64, 1024, 2048), 2**27)
    assert not scratch.exists()
    monkeypatch.setattr(reader, "max_small_bytes", 2**27)
    volume = reader.read_small(bomb, selection, scratch)
    assert isinstance(volume, Volume)
    assert not volume.read(63, 64).any()


def test_decoded_size_includes_whole_tiles_and_pages(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, inner, plain = (tmp_path / f"{name}.tif" for name in ("tiled", "inner", "plain"))
    tifffile.imwrite(tiled, np.zeros((8, 8), np.uint8), photometric="minisblack", tile=(4096, 4096), compression="zlib")
    color = {"photometric": "rgb", "compression": "zlib", "metadata": {"axes": "ZYXS"}}
    tifffile.imwrite(inner, np.zeros((4, 512, 512, 3), np.uint8), **color)
    tifffile.imwrite(plain, np.zeros((4, 512, 512), np.uint8), photometric="minisblack", metadata={"axes": "ZYX"})
    for path, selection, nbytes in (
        (tiled, Selection(), 2**24),
        (inner, Selection(axes="ZYXS", channel=0), 3 * 2**20),
        (plain, Selection(axes="ZYX"), 0),
    ):
        monkeypatch.setattr(reader, "max_small_bytes", nbytes)
        assert isinstance(reader.read_small(path, selection, tmp_path), Volume)
        if nbytes:
            monkeypatch.setattr(reader, "max_small_bytes", nbytes - 1)
            assert isinstance(reader.read_small(path, selection, tmp_path), Description)


def test_cancellation_kills_the_child_and_the_next_file_is_read(tmp_path: Path, stack: np.ndarray) -> None:
    path, cancelled = write_ome_tiff(tmp_path / "stack.tif", stack, compression="zlib"), threading.Event()
    with make_single_child_reader(time_limit_seconds=60) as reader, ThreadPoolExecutor(1) as pool:
        for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path)):
            reader.inspect(path, Selection())
            child = first_child(reader)
            # Stopping the child makes the test independent of the speed of the machine.
            forked_pid = stop_forked_process(reader)
            future = pool.submit(call, path, Selection(), cancelled=cancelled.is_set)
            wait_until(lambda: has_pending_request(reader))
            assert not future.done()
            cancelled.set()
            with pytest.raises(Cancelled):
                future.result(20)
            assert child.poll() is not None
            wait_until(lambda pid=forked_pid: not Path(f"/proc/{pid}").exists())
            cancelled.clear()
        np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path).read_all(), stack)


@pytest.mark.parametrize("has_keys", [True, False])
def test_compromised_process_never_reads_a_file_of_another_client(
    tmp_path: Path, stack: np.ndarray, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(compromised_reader.__file__).parent))
    hostile, honest = write_ome_tiff(tmp_path / "hostile.tif", stack), write_ome_tiff(tmp_path / "honest.tif", stack)
    with hostile.open("ab") as file:
        file.write(compromised_reader.MARKER)
    with make_single_child_reader(module=compromised_reader.__name__) as reader:
        ada, bob = (reader.for_client("ada"), reader.for_client("bob")) if has_keys else (reader, reader)
        assert ada.inspect(honest, Selection()).stored_shape == stack.shape
        ada.inspect(hostile, Selection())
        if has_keys:
            assert ada.inspect(honest, Selection()).stored_shape == compromised_reader.WRONG_SHAPE
        for _ in range(2):
            assert bob.inspect(honest, Selection()).stored_shape == stack.shape
            np.testing.assert_array_equal(bob.read(honest, Selection(), tmp_path).read_all(), stack)
        assert ada.inspect(honest, Selection()).stored_shape == stack.shape


def test_clients_have_their_own_processes(tmp_path: Path, stack: np.ndarray) -> None:
    path, clients = write_ome_tiff(tmp_path / "stack.tif", stack), ("ada", "bob", "eve")
    with make_single_child_reader(process_count=3) as reader:

        def list_forked_processes() -> list[int]:
            processes = [child._process for child in reader._children]
            return [find_forked_process(process.pid) for process in processes if process is not None]

        for client in clients:
            reader.for_client(client).inspect(path, Selection())
        forked_pids = list_forked_processes()
        assert len({*forked_pids}) == 3
        for client in clients:
            reader.for_client(client).inspect(path, Selection())
        assert list_forked_processes() == forked_pids
        # The process that has been idle for the longest time is replaced.
        reader.for_client("dan").inspect(path, Selection())
        assert [pid in forked_pids for pid in list_forked_processes()].count(False) == 1


PLACEMENT = {"dtype": "<u1", "offset": 0, "shape": [1, 1, 4, 4], "strides": [16, 16, 4, 1]}
LOCATION = PLACEMENT | {"voxel_size": None, "channels": ["a"], "notes": [], "is_decoded": False}
INVALID_REPLIES: list[dict[str, Any]] = [
    {},
    {"error": []},
    {"errno": None, "message": None},
    {"result": 1},
    {"result": {"description": LOCATION}},
    {"output_bytes": "many"},
    {"result": LOCATION | {"dtype": "none"}},
    {"result": LOCATION | {"shape": [1, 1]}},
    {"result": LOCATION | {"shape": [0, 0, 0, 0]}},
    {"result": LOCATION | {"offset": math.inf}},
    {"result": LOCATION | {"channels": [{}]}},
    {"result": LOCATION | {"voxel_size": 3}},
    {"result": LOCATION | {"voxel_size": {"z": -1, "y": 1, "x": 1}}},
    {"result": LOCATION | {"channels": ["a"] * 2}},
    {"result": LOCATION | {"notes": ["a" * (2**16 + 1)]}},
    {"result": LOCATION | {"notes": ["a" * 2**16] * 65}},
    {"errno": 10**6, "message": ""},
    {"errno": "1", "message": ""},
    {"error": "bad-file"},
    {"error": "bad-file", "message": "a" * (2**16 + 1)},
    {"error": "bad-file", "message": "", "parameter": 1},
    {"error": "bad-file", "message": "", "suggested": {"axes": []}},
]
DESCRIPTION = {
    "container": "TIFF",
    "axes": "ZYX",
    "stored_shape": [6, 40, 50],
    "shape": [1, 6, 40, 50],
    "dtype": "uint16",
    "voxel_size": None,
    "voxel_size_from": "",
    "channels": ["a"],
    "times": 1,
}
INVALID_DESCRIPTIONS: list[dict[str, Any]] = [
    {"dtype": "none"},
    {"dtype": "O"},
    {"shape": [1, 6, 40]},
    {"shape": [1, 6, -40, 50]},
    {"shape": [2**30] * 4},
    {"shape": [1, 6, 40, 1e400]},
    {"stored_shape": [6, 40]},
    {"stored_shape": [-6, 40, 50]},
    {"stored_shape": [1] * 33, "axes": "Z" * 33},
    {"times": 0},
    {"times": 10**30},
    {"time_points": [0, 2]},
    {"time_points": [-1, 1]},
    {"channels": [1]},
    {"channels": ["a" * (2**16 + 1)]},
    {"notes": ["a" * 2**16] * 65},
    {"voxel_size": {"z": 0, "y": 1, "x": 1}},
    {"partial_voxel_size": [None, 1.0, 1e400]},
    {"container": None},
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"offset": 10**6},
        {"offset": -8},
        {"shape": [1, 6, 40_000, 50]},
        {"shape": [10**6] * 4, "strides": [0] * 4},
        {"dtype": "|O"},
        {"is_decoded": True},
    ],
)
def test_reply_that_points_outside_its_file_is_rejected(
    make_compromised_reader: Callable[..., Reader],
    tmp_path: Path,
    stack: np.ndarray,
    change: dict[str, Any],
    shared: bool,
) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    reader = make_compromised_reader(repr(child_main.encode_message({"result": LOCATION | change})))
    if not change:
        assert reader.read(path, Selection(), tmp_path, is_shared=shared).read_all().shape == (1, 1, 4, 4)
        return
    with pytest.raises(BadFile):
        reader.read(path, Selection(), tmp_path, is_shared=shared)


@pytest.mark.parametrize(
    "reply",
    [
        "b'no JSON\\n'",
        "b'[]\\n'",
        "b'[' * 10**5 + b'\\n'",
        "b' ' * (2**26 + 1)",
        *(repr(child_main.encode_message(reply)) for reply in INVALID_REPLIES),
    ],
)
def test_child_with_an_invalid_reply_is_replaced(
    make_compromised_reader: Callable[..., Reader], tmp_path: Path, stack: np.ndarray, reply: str
) -> None:
    path, reader = write_ome_tiff(tmp_path / "stack.tif", stack), make_compromised_reader(reply)
    for call in (reader.inspect, functools.partial(reader.read, scratch=tmp_path / "scratch")):
        process = reader._children[0]._process
        with pytest.raises(BadFile, match="invalid result"):
            call(path, Selection())
        assert reader._children[0]._process is not process, "a new child reads the next file"


@pytest.mark.parametrize("change", [{}, *INVALID_DESCRIPTIONS])
def test_child_with_an_invalid_description_is_replaced(
    make_compromised_reader: Callable[..., Reader], tmp_path: Path, stack: np.ndarray, change: dict[str, Any]
) -> None:
    path = write_ome_tiff(tmp_path / "stack.tif", stack)
    description = DESCRIPTION | change
    for call, result in (("inspect", description), ("read_small", {"description": description})):
        reader = make_compromised_reader(repr(child_main.encode_message({"result": result})))
        process = reader._children[0]._process
        arguments = (path, Selection()) if call == "inspect" else (path, Selection(), tmp_path / "scratch")
        if not change:
            assert getattr(reader, call)(*arguments).shape == (1, 6, 40, 50)
            continue
        with pytest.raises(BadFile, match="invalid result"):
            getattr(reader, call)(*arguments)
        assert reader._children[0]._process is not process
