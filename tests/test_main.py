from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import until
from live import as_tiff
from paths import ROOT

from service.__main__ import main
from service.api.access.keys import ApiKeys, hash_key
from service.cli.serve import is_public
from service.core.config import read_settings
from service.models.spec import ModelSpec

HASHED = f"{{ada: {hash_key('secret')}}}"


@pytest.fixture
def config(bands_repository: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"models: {{folder: {bands_repository}}}\nengine: {{kind: eager}}\ndevice: {{name: cpu, threads: 1}}\n"
    )
    return path


@pytest.fixture
def stack(phantom: Any, tmp_path: Path) -> Path:
    path = tmp_path / "stack.tif"
    path.write_bytes(as_tiff(phantom.image))
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_models_are_listed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--config", config) == 0
    listed = capsys.readouterr().out
    assert "bands/1" in listed
    assert run("models", "list", "--config", config) == 0
    assert capsys.readouterr().out == listed
    assert run("models", "--config", config, "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["outputs"]) == ("bands", ["background", "dim", "bright"])


def test_file_is_segmented_without_a_service(
    config: Path, stack: Path, phantom: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "classes.tif"
    options = ("--config", config, "--overlap", "0.5", "--sw-batch-size", "1", "--skip-below", "0")
    assert run("segment", stack, result, *options) == 0
    told = capsys.readouterr().out
    for word in ("bands/1", "read", "windows", "write", "skipped: 0 of "):
        assert word in told
    assert np.mean(tifffile.imread(result) == phantom.classes) > 0.97


def test_objects_are_measured_without_a_service(
    random_nuclei: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, labels, table = (tmp_path / name for name in ("instances.yaml", "labels.tif", "objects.csv"))
    engine = "engine: {kind: eager}\ndevice: {name: cpu, threads: 1}\n"
    config.write_text(f"models: {{folder: {random_nuclei.folder.parent}}}\n{engine}")
    assert run("segment", stack, labels, "--measurements", table, "--config", config) == 0
    assert "measure" in capsys.readouterr().out
    numbers, sizes = np.unique(tifffile.imread(labels), return_counts=True)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [int(row["label"]) for row in rows] == numbers[1:].tolist()
    assert [int(row["num_pixels"]) for row in rows] == sizes[1:].tolist()
    assert {row["unit"] for row in rows} == {"um"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--measurements", "objects.csv"], "only labels"),
        (["--overlap", "2"], "overlap"),
        (["--overlap", "0.9"], "overlap"),
        (["--model", "livers"], "livers"),
        (["--axes", "CYX"], "channel"),
        (["--voxel-size", "1"], "--voxel-size"),
    ],
)
def test_refusal_is_one_line_and_status_one(
    config: Path, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert run("segment", stack, tmp_path / "out.tif", "--config", config, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stackseg: ")
    assert word in line
    assert not (tmp_path / "out.tif").exists()


@pytest.mark.parametrize(
    ("result", "more", "word"),
    [
        ("nowhere/out.tif", [], "nowhere is not a folder"),
        ("out.tif", ["--measurements", "nowhere/objects.csv"], "nowhere is not a folder"),
        (".", [], "name the file to write"),
        ("stack.tif", [], "the stack itself"),
        ("linked.tif", [], "the stack itself"),
        ("out.tif", ["--measurements", "stack.tif"], "the stack itself"),
        ("out.tif", ["--measurements", "out.tif"], "two results"),
        ("out.png", [], "must end with .tif or .tiff"),
        ("out.tif", ["--measurements", "objects.xlsx"], "must end with .csv"),
        ("old.tif", [], "old.tif is there already; choose another name, or replace it with --force"),
        ("out.tif", ["--measurements", "old.csv"], "old.csv is there already"),
        ("stack.tif", ["--force"], "the stack itself"),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_work_starts(
    config: Path,
    stack: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    result: str,
    more: list[str],
    word: str,
) -> None:
    monkeypatch.chdir(stack.parent)
    Path("linked.tif").symlink_to(stack)
    for old in ("old.tif", "old.csv"):
        Path(old).touch()
    before = stack.read_bytes()
    # Were anything read first, that would be refused instead.
    assert run("segment", stack, result, "--config", config, "--model", "livers", *more) == 1
    assert word in capsys.readouterr().err
    assert stack.read_bytes() == before


def test_results_are_replaced_where_that_is_asked_for(config: Path, stack: Path, tmp_path: Path) -> None:
    result = tmp_path / "classes.tif"
    result.write_bytes(b"old")
    assert run("segment", stack, result, "--config", config, "--force") == 0
    assert tifffile.imread(result).shape == tifffile.imread(stack).shape


@pytest.mark.parametrize(
    ("pixels", "arguments", "words"),
    [
        (np.zeros((3, 2, 40, 50), np.uint8), [], "for example --axes ZCYX."),
        (np.zeros((4, 40, 50), np.uint8), ["--axes", "TYX"], "choose one with --time 0 to --time 3."),
        (np.zeros((4, 40, 50), np.uint8), ["--axes", "ZYX", "--channel", "DAPI"], "--channel 'DAPI': the file has 1"),
        (np.zeros((4, 40, 50), np.uint8), ["--voxel-size", "1"], "--voxel-size: three positive numbers"),
        (np.zeros((4, 40, 50), np.uint8), ["--sw-batch-size", "0"], "--sw-batch-size: "),
    ],
)
def test_the_command_line_speaks_of_its_options(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pixels: Any, arguments: list[str], words: str
) -> None:
    path = tmp_path / "any.tif"
    tifffile.imwrite(path, pixels, photometric="minisblack")
    assert run("segment", path, tmp_path / "out.tif", "--config", config, *arguments) == 1
    told = capsys.readouterr().err
    assert words in told
    assert "=" not in told


@pytest.mark.parametrize("command", ["serve", "segment"])
def test_help_explains_each_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    told = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    explained = re.split(r" (?=--\w[\w-]* [A-Z]|--force)", told)[1:]
    assert len(explained) >= 6
    for option in explained:
        assert "(default: " in option, option
    if command == "serve":
        assert "127.0.0.1" in told
        assert "8000" in told


def test_progress_is_shown_on_a_terminal_and_the_result_on_standard_output(
    config: Path, stack: Path, tmp_path: Path
) -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    os.set_blocking(terminal, False)
    command = [sys.executable, "-m", "service", "segment", stack, tmp_path / "out.tif", "--config", config]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=end, text=True, check=True)
    shown = os.read(terminal, 2**16).decode()
    for descriptor in (terminal, end):
        os.close(descriptor)
    for step in ("reading", "loading bands/1", "windows"):
        assert step in shown
    assert done.stdout.startswith(f"{tmp_path / 'out.tif'}: bands/1 (")


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt a process that reads, and return its messages.

    A signal between opening and reading is noted, and not acted upon before the read ends, so it is sent again.
    """
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=15)[1]
    raise AssertionError("it does not end")


def test_a_misspelt_option_is_told_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("segment", "a.tif", "b.tif", "--modle", "membranes")
    told = capsys.readouterr().err
    assert "usage: stackseg segment" in told
    assert "--modle membranes; did you mean --model?" in told


def test_what_the_header_refuses_waits_for_no_weights(
    bands_repository: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, stack = shutil.copytree(bands_repository, tmp_path / "models"), tmp_path / "channels.tif"
    (weights,), (spec,) = models.glob("*/weights.*"), models.glob("*/model.yaml")
    weights.write_bytes(b"no weights at all")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    spec.write_text(re.sub(r"(?<=sha256: )\w+", digest, spec.read_text()))
    stack.write_bytes(as_tiff(np.zeros((8, 3, 16, 16), np.uint16), metadata={"axes": "ZCYX"}))
    assert run("segment", stack, tmp_path / "out.tif", "--config", config, "--models", models) == 1
    assert "choose with --channel" in capsys.readouterr().err


def test_an_interruption_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    # Whoever runs the tests may have them ignore the signal, which a child inherits.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from service.__main__ import main; sys.exit(main(['models', '--config', sys.argv[1]]))"
    command = [sys.executable, "-c", code, str(config)]
    ends: list[int] = []

    def is_read() -> bool:
        # Only what somebody reads can be opened so; the command then waits for what is never written.
        with suppress(OSError):
            ends.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends) or process.poll() is not None

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(is_read, 120)
        err = interrupt(process)
    for end in ends:
        os.close(end)
    assert (process.returncode, err) == (130, "stackseg: interrupted\n")


def test_a_model_is_measured(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "bench.json"
    arguments = ["--shape", 4, 20, 20, "--repeats", 1, "--json", numbers, "--plot", tmp_path / "bench.png"]
    assert run("bench", "--config", config, "--device", "cpu", *arguments) == 0
    assert "| windows |" in capsys.readouterr().out
    assert json.loads(numbers.read_text())["model"] == "bands/1"
    assert (tmp_path / "bench.png").exists()
    assert run("bench", "--config", config, "--repeats", 0) == 1
    assert "--repeats" in capsys.readouterr().err
    assert run("bench", "--config", config, "--hosts", "--plot", tmp_path / "bench.png") == 1
    assert "does not go with --hosts" in capsys.readouterr().err


def test_missing_input_is_one_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("segment", tmp_path / "nowhere.tif", tmp_path / "out.tif", "--config", config) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"stackseg: {tmp_path / 'nowhere.tif'}: No such file or directory"


@pytest.mark.parametrize("text", ["windows: {overlop: 1}", "windows: 3", "no yaml: ["])
def test_configuration_that_is_not_understood_is_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert run("models", "--config", path) == 2
    assert capsys.readouterr().err.startswith("stackseg: ")


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "segment {stack} out.tif",
        "models",
        "evaluate --images {stack} --labels {stack}",
        "train --images {stack} --labels {stack} --from bands --out mine",
        "bench --repeats 1",
    ],
)
def test_every_command_takes_a_folder_of_models_and_ends_with_status_two_where_there_is_none(
    config: Path, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command.format(stack=stack).split()
    assert run(*arguments, "--config", config, "--models", "nowhere") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stackseg: The model repository nowhere is not a folder of the working directory; name")


def test_folder_of_models_goes_before_the_configuration(
    config: Path, random_nuclei: ModelSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "--config", config, "--models", random_nuclei.folder.parent) == 0
    told = capsys.readouterr().out
    assert random_nuclei.identifier in told
    assert "bands" not in told


def test_import_asks_for_the_folder_that_gets_the_model(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "import", stack) == 1
    assert "--models FOLDER" in capsys.readouterr().err
    for before, after in ((["--models", stack.parent], []), ([], ["--models", stack.parent])):
        assert run("models", *before, "import", stack, *after) == 1
        assert "--models FOLDER" not in capsys.readouterr().err


def test_service_that_cannot_listen_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--config", config, "--host", "192.0.2.1", "--port", "1") == 2
    assert "192.0.2.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True), ("gpu-host", True)],
)
def test_public_addresses_are_told_apart(host: str, public: bool) -> None:
    assert is_public(host) == public


def test_key_is_printed_with_the_lines_by_which_the_service_knows_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("key", "microscope-3") == 0
    lines = capsys.readouterr().out.splitlines()
    (key,) = [line for line in lines if line.startswith("stackseg_")]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines[lines.index("access:") :]))
    settings = read_settings(path, {})
    assert ApiKeys(settings.access.keys).authenticate(key) == "microscope-3"
    assert key not in path.read_text()


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "a\n"])
def test_name_of_a_key_is_one_that_logs_can_show(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run("key", "--", name) == 1
    assert "letters, digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "keys", "warned"), [("192.0.2.1", "{}", True), ("192.0.2.1", HASHED, False), ("127.0.0.1", "{}", False)]
)
def test_public_address_without_keys_is_warned_of(
    config: Path, caplog: pytest.LogCaptureFixture, host: str, keys: str, warned: bool
) -> None:
    config.write_text(config.read_text() + f"access: {{keys: {keys}}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("serve", "--config", config, "--host", host, "--port", taken.getsockname()[1]) == 2
    assert ("there are no access.keys" in caplog.text) == warned


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile and ssl_certfile belong together"),
        (["--ssl-keyfile", "nowhere.pem", "--ssl-certfile", "nowhere.pem"], "server.ssl_keyfile"),
    ],
)
def test_unusable_certificate_is_status_two(
    config: Path, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    assert run("serve", "--config", config, "--port", "0", *options) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["key", "ada"]])
def test_what_needs_no_model_does_not_wait_for_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "service", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "monai", "tifffile", "fastapi"})


def test_service_that_compiles_nothing_waits_neither_for_the_compiler_nor_for_what_networks_of_monai_do_without() -> (
    None
):
    modules = "import service.api.app, service.models.monai_architectures, sys; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", modules], cwd=ROOT, capture_output=True, text=True, check=True)
    names = set(imported.stdout.split())
    assert {"torch", "fastapi", "monai.networks.nets.unet"} <= names
    assert names.isdisjoint({"torch._dynamo", "torch._inductor", "sympy", "scipy", "skimage", "matplotlib", "openvino"})
