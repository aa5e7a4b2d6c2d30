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

HASHED = {"ada": hash_key("secret")}


@pytest.fixture
def config(bands_repository: Path, configure: Any) -> Path:
    return Path(configure(bands_repository))


@pytest.fixture
def stack(phantom: Any, tmp_path: Path) -> Path:
    path = tmp_path / "stack.tif"
    path.write_bytes(as_tiff(phantom.image))
    return path


def test_models_are_listed(config: Path, stackseg: Any) -> None:
    listed = stackseg("models", "--config", config)
    assert "bands/1" in listed
    assert stackseg("models", "list", "--config", config) == listed
    (model,) = json.loads(stackseg("models", "--config", config, "--json"))
    assert (model["name"], model["outputs"]) == ("bands", ["background", "dim", "bright"])


def test_file_is_segmented_without_a_service(
    config: Path, stack: Path, phantom: Any, tmp_path: Path, stackseg: Any
) -> None:
    result = tmp_path / "classes.tif"
    options = ("--config", config, "--overlap", "0.5", "--sw-batch-size", "1", "--skip-below", "0")
    told = stackseg("segment", stack, result, *options)
    for word in ("bands/1", "read", "windows", "write", "skipped: 0 of "):
        assert word in told
    assert np.mean(tifffile.imread(result) == phantom.classes) > 0.97


def test_objects_are_measured_without_a_service(
    random_nuclei: ModelSpec, configure: Any, stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    config, labels, table = configure(random_nuclei.folder.parent), tmp_path / "labels.tif", tmp_path / "objects.csv"
    assert "measure" in stackseg("segment", stack, labels, "--measurements", table, "--config", config)
    numbers, sizes = np.unique(tifffile.imread(labels), return_counts=True)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [int(row["label"]) for row in rows] == numbers[1:].tolist()
    assert [int(row["num_pixels"]) for row in rows] == sizes[1:].tolist()
    assert {row["unit"] for row in rows} == {"um"}


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
    stackseg: Any,
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
    assert word in stackseg("segment", stack, result, "--config", config, "--model", "livers", *more, status=1)
    assert stack.read_bytes() == before


def test_results_are_replaced_where_that_is_asked_for(config: Path, stack: Path, tmp_path: Path, stackseg: Any) -> None:
    result = tmp_path / "classes.tif"
    result.write_bytes(b"old")
    stackseg("segment", stack, result, "--config", config, "--force")
    assert tifffile.imread(result).shape == tifffile.imread(stack).shape


@pytest.mark.parametrize(
    ("shape", "arguments", "words"),
    [
        ((3, 2, 40, 50), [], "for example --axes ZCYX."),
        ((4, 40, 50), ["--axes", "TYX"], "choose one with --time 0 to --time 3."),
        ((4, 40, 50), ["--axes", "CYX"], "choose with --channel"),
        ((4, 40, 50), ["--axes", "ZYX", "--channel", "DAPI"], "--channel 'DAPI': the file has 1"),
        ((4, 40, 50), ["--voxel-size", "1"], "--voxel-size: Expected three positive numbers"),
        ((4, 40, 50), ["--sw-batch-size", "0"], "--sw-batch-size: "),
        ((4, 40, 50), ["--measurements", "objects.csv"], "only labels"),
        ((4, 40, 50), ["--overlap", "2"], "overlap"),
        ((4, 40, 50), ["--overlap", "0.9"], "overlap"),
        ((4, 40, 50), ["--model", "livers"], "livers"),
    ],
)
def test_a_refusal_is_one_line_about_options_and_status_one(
    config: Path,
    tmp_path: Path,
    stackseg: Any,
    shape: tuple[int, ...],
    arguments: list[str],
    words: str,
) -> None:
    path = tmp_path / "any.tif"
    tifffile.imwrite(path, np.zeros(shape, np.uint8), photometric="minisblack")
    (line,) = stackseg("segment", path, tmp_path / "out.tif", "--config", config, *arguments, status=1).splitlines()
    assert line.startswith("stackseg: ")
    assert words in line
    assert "=" not in line
    assert not (tmp_path / "out.tif").exists()


@pytest.mark.parametrize("command", ["serve", "segment"])
def test_help_explains_each_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
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
        main(["segment", "a.tif", "b.tif", "--modle", "membranes"])
    told = capsys.readouterr().err
    assert "usage: stackseg segment" in told
    assert "--modle membranes; did you mean --model?" in told


def test_what_the_header_refuses_waits_for_no_weights(
    bands_repository: Path, config: Path, tmp_path: Path, stackseg: Any
) -> None:
    models, stack = shutil.copytree(bands_repository, tmp_path / "models"), tmp_path / "channels.tif"
    (weights,), (spec,) = models.glob("*/weights.*"), models.glob("*/model.yaml")
    weights.write_bytes(b"no weights at all")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    spec.write_text(re.sub(r"(?<=sha256: )\w+", digest, spec.read_text()))
    stack.write_bytes(as_tiff(np.zeros((8, 3, 16, 16), np.uint16), metadata={"axes": "ZCYX"}))
    assert "choose with --channel" in stackseg(
        "segment", stack, tmp_path / "out.tif", "--config", config, "--models", models, status=1
    )


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


def test_missing_input_is_one_line(config: Path, tmp_path: Path, stackseg: Any) -> None:
    (line,) = stackseg(
        "segment", tmp_path / "nowhere.tif", tmp_path / "out.tif", "--config", config, status=1
    ).splitlines()
    assert line == f"stackseg: {tmp_path / 'nowhere.tif'}: No such file or directory"


def test_configuration_that_is_not_understood_is_status_two(config: Path, stackseg: Any) -> None:
    config.write_text("windows: {overlop: 1}")
    assert stackseg("models", "--config", config, status=2).startswith("stackseg: ")


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
    config: Path, stack: Path, tmp_path: Path, stackseg: Any, monkeypatch: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command.format(stack=stack).split()
    (line,) = stackseg(*arguments, "--config", config, "--models", "nowhere", status=2).splitlines()
    assert line.startswith("stackseg: The model repository nowhere is not a folder of the working directory; name")


def test_folder_of_models_goes_before_the_configuration(config: Path, random_nuclei: ModelSpec, stackseg: Any) -> None:
    told = stackseg("models", "--config", config, "--models", random_nuclei.folder.parent)
    assert random_nuclei.identifier in told
    assert "bands" not in told


def test_import_asks_for_the_folder_that_gets_the_model(stack: Path, stackseg: Any) -> None:
    assert "--models FOLDER" in stackseg("models", "import", stack, status=1)
    for before, after in ((["--models", stack.parent], []), ([], ["--models", stack.parent])):
        assert "--models FOLDER" not in stackseg("models", *before, "import", stack, *after, status=1)


def test_service_that_cannot_listen_says_so(config: Path, stackseg: Any) -> None:
    assert "192.0.2.1" in stackseg("serve", "--config", config, "--host", "192.0.2.1", "--port", "1", status=2)


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True), ("gpu-host", True)],
)
def test_public_addresses_are_told_apart(host: str, public: bool) -> None:
    assert is_public(host) == public


def test_key_is_printed_with_the_lines_by_which_the_service_knows_it(stackseg: Any, tmp_path: Path) -> None:
    lines = stackseg("key", "microscope-3").splitlines()
    (key,) = [line for line in lines if line.startswith("stackseg_")]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines[lines.index("access:") :]))
    settings = read_settings(path, {})
    assert ApiKeys(settings.access.keys).authenticate(key) == "microscope-3"
    assert key not in path.read_text()


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "a\n"])
def test_name_of_a_key_is_one_that_logs_can_show(stackseg: Any, name: str) -> None:
    assert "letters, digits" in stackseg("key", "--", name, status=1)


@pytest.mark.parametrize(
    ("host", "keys", "warned"), [("192.0.2.1", {}, True), ("192.0.2.1", HASHED, False), ("127.0.0.1", {}, False)]
)
def test_public_address_without_keys_is_warned_of(
    configure: Any,
    bands_repository: Path,
    caplog: pytest.LogCaptureFixture,
    host: str,
    keys: Any,
    warned: bool,
    stackseg: Any,
) -> None:
    config = configure(bands_repository, access={"keys": keys})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stackseg("serve", "--config", config, "--host", host, "--port", taken.getsockname()[1], status=2)
    assert ("there are no access.keys" in caplog.text) == warned


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile and ssl_certfile must be set together"),
        (["--ssl-keyfile", "nowhere.pem", "--ssl-certfile", "nowhere.pem"], "server.ssl_keyfile"),
    ],
)
def test_unusable_certificate_is_status_two(config: Path, stackseg: Any, options: list[str], word: str) -> None:
    assert word in stackseg("serve", "--config", config, "--port", "0", *options, status=2)


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
