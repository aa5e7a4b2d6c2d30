"""Attacks by a compromised codec in a child process fail, and each confinement layer stops some of them on its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import attacks
import hanging_reader
import numpy as np
import pytest
import tifffile
from fakes import find_forked_process

from service.core.types import Selection
from service.formats.sandbox import child_process, confinement
from service.formats.sandbox.reader import Reader

# Harmless attacks that only a layer of confinement stops, regardless of the user who runs the tests.
POSSIBLE_WITHOUT_CONFINEMENT = (
    "read the jobs",
    "read accounts",
    "write the jobs",
    "write a kernel",
    "change permissions",
    "connect by TCP",
    "connect by path",
    "listen",
    "start a process",
    "run a program",
    "signal the service",
)


@pytest.fixture(autouse=True)
def attacks_in_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(attacks.__file__).parent))


@pytest.fixture(scope="module")
def attack_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(Path(attacks.__file__).parent))
        return attacks.attack_from_reader(tmp_path_factory.mktemp("attacked"))


def attack_with_layers(layers: list[str], attempts: list[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Attack from a process with the given layers. Return the layers that are not in force, and the outcomes."""
    with attacks.open_targets(folder) as targets:
        arguments = [",".join(layers), json.dumps(targets | {"attempts": attempts})]
        command = [sys.executable, "-P", attacks.__file__, "alone", *arguments]
        environment = child_process.make_child_environment()
        completed = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    missing_layers, outcomes = json.loads(completed.stdout)
    return missing_layers, outcomes


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attack_by_a_codec_fails(attack_results: tuple[dict[str, str], dict[str, str]], name: str) -> None:
    missing_layers, outcomes = attack_results
    if name not in outcomes:
        pytest.skip(f"no layer that stops it is in force on this host: {missing_layers}")
    assert outcomes[name] in {"EACCES", "EPERM", "ENOSYS", "ENETUNREACH"}


@pytest.mark.parametrize("layer", ["namespaces", "landlock", "seccomp"])
def test_single_layer_stops_its_attacks(layer: str, tmp_path: Path) -> None:
    attempts = attacks.list_blocked_attacks([layer])
    missing_layers, outcomes = attack_with_layers([layer], attempts, tmp_path)
    if missing_layers:
        pytest.skip(f"this host does not support the layer: {missing_layers}")
    assert outcomes.keys() == set(attempts)
    assert {name for name, error in outcomes.items() if not error} == set()


def test_attacks_succeed_without_confinement(tmp_path: Path) -> None:
    assert attack_with_layers([], [*POSSIBLE_WITHOUT_CONFINEMENT], tmp_path) == (
        {},
        dict.fromkeys(POSSIBLE_WITHOUT_CONFINEMENT, ""),
    )


def test_reported_layers_match_the_process(tmp_path: Path) -> None:
    with Reader(memory_bytes=2**29, time_limit_seconds=10, max_decoded_bytes=2**20, process_count=1) as reader:
        reader.wait_until_ready()
        process = Path(f"/proc/{find_forked_process(reader._children[0]._process.pid)}")
        status = dict(line.split(":\t") for line in (process / "status").read_text(encoding="ascii").splitlines())
        layers_in_force = {
            "no_new_privs": status["NoNewPrivs"] == "1",
            "seccomp": status["Seccomp"] == "2",
            "namespaces": (process / "ns/net").readlink() != Path("/proc/self/ns/net").readlink(),
        }
        assert layers_in_force == {layer: layer not in reader.missing_layers for layer in layers_in_force}
        assert status["Threads"] == "1"


def test_missing_layer_is_reported_and_files_are_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, stack = tmp_path / "stack.tif", np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    tifffile.imwrite(path, stack, photometric="minisblack", compression="zlib", metadata={"axes": "ZYX"})
    child_process._warn_about_missing_layer.cache_clear()
    with (
        caplog.at_level(logging.WARNING),
        Reader(
            memory_bytes=2**29, time_limit_seconds=10, max_decoded_bytes=2**20, module=hanging_reader.__name__
        ) as reader,
    ):
        assert reader.missing_layers == {}
        np.testing.assert_array_equal(reader.read(path, Selection(), tmp_path).read_all()[0], stack)
        for _ in range(2):
            reader.wait_until_ready()
        assert "pyseccomp" in reader.missing_layers["seccomp"]
    assert [
        record.message for record in caplog.records if "without the confinement layer seccomp" in record.message
    ] == [f"Processes that read files run without the confinement layer seccomp: {reader.missing_layers['seccomp']}."]


def test_landlock_is_not_applied_to_one_of_several_threads(tmp_path: Path) -> None:
    code = (
        "import threading, time, service.formats.sandbox.confinement as confinement\n"
        "threading.Thread(target=time.sleep, args=[5], daemon=True).start()\n"
        "print(confinement.confine(['landlock']))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60)
    assert "landlock" in completed.stdout


def test_all_layers_are_applied_by_default() -> None:
    code = (
        "import service.formats.sandbox.confinement as c; print(c.confine().keys() <= c.LAYERS.keys(), c.confine([]))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60)
    assert completed.stdout == "True {}\n"
    assert list(confinement.LAYERS) == ["namespaces", "no_new_privs", "landlock", "seccomp"]


CONFINE_TRAINING = """
import json, os, socket, subprocess, threading
from service.formats.sandbox.confinement import TRAINING_LAYERS, confine
missing = confine(layers=TRAINING_LAYERS)
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return ""
outcomes = {
    "internet": attempt(lambda: socket.socket(socket.AF_INET)),
    "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "unix": attempt(lambda: socket.socketpair()),
    "namespace": attempt(lambda: os.unshare(os.CLONE_NEWUSER)) if hasattr(os, "unshare") else "PermissionError",
    "program": attempt(lambda: subprocess.run(["true"], check=True)),
}
thread_outcomes = []
thread = threading.Thread(target=lambda: thread_outcomes.append(attempt(lambda: socket.socket(socket.AF_INET))))
thread.start()
thread.join()
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
restrictions = status["NoNewPrivs"], status["Seccomp"], int(status["CapEff"], 16)
print(json.dumps([missing, outcomes, thread_outcomes, *restrictions]))
"""


def test_training_can_run_a_compiler_but_has_no_network_and_no_capabilities() -> None:
    command = [sys.executable, "-P", "-c", CONFINE_TRAINING]
    environment = child_process.make_child_environment()
    completed = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    missing_layers, outcomes, thread_outcomes, *status = json.loads(completed.stdout)
    if missing_layers:
        pytest.skip(f"this host does not support all layers: {missing_layers}")
    denied = "PermissionError"
    assert outcomes == {"internet": denied, "netlink": denied, "unix": "", "namespace": denied, "program": ""}
    assert thread_outcomes == [denied]
    assert status == ["1", "2", 0]
