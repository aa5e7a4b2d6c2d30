from __future__ import annotations

import argparse
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
import tempfile
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import wait_until
from live import as_tiff
from paths import ROOT

from service.__main__ import create_parser, main
from service.api.access.keys import ApiKeys, hash_key
from service.cli.serve import is_public
from service.core.config import read_settings
from service.models.spec import ModelSpec

KEY_HASHES = {"ada": hash_key("secret")}


@pytest.fixture
def config(bands_repository: Path, write_config: Any) -> Path:
    return Path(write_config(bands_repository))


@pytest.fixture
def stack(phantom: Any, tmp_path: Path) -> Path:
    path = tmp_path / "stack.tif"
    path.write_bytes(as_tiff(phantom.image))
    return path


def test_models_command_lists_models(config: Path, run_stackseg: Any) -> None:
    output = run_stackseg("models", "--config", config)
    assert "bands/1" in output
    assert run_stackseg("models", "list", "--config", config) == output
    (model,) = json.loads(run_stackseg("models", "--config", config, "--json"))
    assert (model["name"], model["outputs"]) == ("bands", ["background", "dim", "bright"])


def test_output_may_be_closed_or_unable_to_show_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.cli.models.run_list", lambda *_: print("0.2 \u00b5m") or 0)
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["models"]) == 0
    assert path.read_text(encoding="ascii") == "0.2 \\xb5m\n"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["models"]) == 0
    for stream in (sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_command_that_is_terminated_removes_its_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def run(*_: object) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), number)
        return 0

    monkeypatch.setattr("service.cli.models.run_list", run)
    with pytest.raises(SystemExit) as caught:
        main(["models"])
    assert caught.value.code == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == signal.SIG_DFL


def test_command_whose_output_is_not_read_ends_without_a_traceback() -> None:
    command = f"{sys.executable} -m service models | true"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not run.stderr


def test_file_is_segmented_without_a_service(
    config: Path, stack: Path, phantom: Any, tmp_path: Path, run_stackseg: Any
) -> None:
    result = tmp_path / "classes.tif"
    options = ("--config", config, "--overlap", "0.5", "--sw-batch-size", "1", "--skip-below", "0")
    output = run_stackseg("segment", stack, result, *options)
    for text in ("bands/1", "read", "windows", "write", "skipped: 0 of "):
        assert text in output
    assert np.mean(tifffile.imread(result) == phantom.classes) > 0.97


def test_objects_are_measured_without_a_service(
    random_nuclei: ModelSpec, write_config: Any, stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    config, labels, table = write_config(random_nuclei.folder.parent), tmp_path / "labels.tif", tmp_path / "objects.csv"
    assert "measure" in run_stackseg("segment", stack, labels, "--measurements", table, "--config", config)
    numbers, sizes = np.unique(tifffile.imread(labels), return_counts=True)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [int(row["label"]) for row in rows] == numbers[1:].tolist()
    assert [int(row["num_pixels"]) for row in rows] == sizes[1:].tolist()
    assert {row["unit"] for row in rows} == {"um"}


@pytest.mark.parametrize(
    ("result", "extra_arguments", "text"),
    [
        ("nowhere/out.tif", [], "nowhere is not a writable folder"),
        ("out.tif", ["--measurements", "nowhere/objects.csv"], "nowhere is not a writable folder"),
        (".", [], "Specify the name of a file"),
        ("stack.tif", [], "would replace the input stack"),
        ("linked.tif", [], "would replace the input stack"),
        ("out.tif", ["--measurements", "stack.tif"], "would replace the input stack"),
        ("out.tif", ["--measurements", "out.tif"], "labels and measurements at the same time"),
        ("out.png", [], "must end with .tif or .tiff"),
        ("out.tif", ["--measurements", "objects.xlsx"], "must end with .csv"),
        ("old.tif", [], "old.tif already exists. Choose another name, or use --force to replace the file"),
        ("out.tif", ["--measurements", "old.csv"], "old.csv already exists"),
        ("stack.tif", ["--force"], "would replace the input stack"),
    ],
)
def test_unwritable_results_are_rejected_before_work_starts(
    config: Path,
    stack: Path,
    run_stackseg: Any,
    monkeypatch: pytest.MonkeyPatch,
    result: str,
    extra_arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(stack.parent)
    Path("linked.tif").symlink_to(stack)
    for name in ("old.tif", "old.csv"):
        Path(name).touch()
    content = stack.read_bytes()
    # The unknown model would be rejected first if anything had been read before this check.
    assert text in run_stackseg(
        "segment", stack, result, "--config", config, "--model", "livers", *extra_arguments, status=1
    )
    assert stack.read_bytes() == content


def test_existing_results_are_replaced_with_force(config: Path, stack: Path, tmp_path: Path, run_stackseg: Any) -> None:
    result = tmp_path / "classes.tif"
    result.write_bytes(b"old")
    run_stackseg("segment", stack, result, "--config", config, "--force")
    assert tifffile.imread(result).shape == tifffile.imread(stack).shape


@pytest.mark.parametrize(
    ("shape", "arguments", "text"),
    [
        ((3, 2, 40, 50), [], "for example --axes ZCYX."),
        ((4, 40, 50), ["--axes", "TYX"], "Choose one with --time 0 to --time 3, or all with --time all."),
        ((4, 40, 50), ["--axes", "CYX"], "Use --channel with an index or a name"),
        ((4, 40, 50), ["--axes", "ZYX", "--channel", "DAPI"], "--channel 'DAPI' does not exist: the file has 1"),
        ((4, 40, 50), ["--voxel-size", "1"], "--voxel-size: Expected three positive numbers"),
        ((4, 40, 50), ["--sw-batch-size", "0"], "--sw-batch-size: "),
        ((4, 40, 50), ["--measurements", "objects.csv"], "requires labels"),
        ((4, 40, 50), ["--overlap", "2"], "overlap"),
        ((4, 40, 50), ["--overlap", "0.9"], "overlap"),
        ((4, 40, 50), ["--model", "livers"], "livers"),
    ],
)
def test_errors_are_one_line_with_option_names(
    config: Path,
    tmp_path: Path,
    run_stackseg: Any,
    shape: tuple[int, ...],
    arguments: list[str],
    text: str,
) -> None:
    path = tmp_path / "any.tif"
    tifffile.imwrite(path, np.zeros(shape, np.uint8), photometric="minisblack")
    (line,) = run_stackseg("segment", path, tmp_path / "out.tif", "--config", config, *arguments, status=1).splitlines()
    assert line.startswith("stackseg: ")
    assert text in line
    assert "=" not in line
    assert not (tmp_path / "out.tif").exists()


@pytest.mark.parametrize("command", ["serve", "segment"])
def test_help_explains_each_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    output = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    option_texts = re.split(r" (?=--\w[\w-]* [A-Z]|--force)", output)[1:]
    assert len(option_texts) >= 6
    for option in option_texts:
        assert "(default: " in option, option
    if command == "serve":
        assert "127.0.0.1" in output
        assert "8000" in output


def test_progress_is_on_the_terminal_and_the_result_on_standard_output(
    config: Path, stack: Path, tmp_path: Path
) -> None:
    terminal, terminal_input = pty.openpty()
    termios.tcsetwinsize(terminal_input, (24, 80))
    os.set_blocking(terminal, False)
    command = [sys.executable, "-m", "service", "segment", stack, tmp_path / "out.tif", "--config", config]
    completed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=terminal_input, text=True, check=True)
    output = os.read(terminal, 2**16).decode()
    for descriptor in (terminal, terminal_input):
        os.close(descriptor)
    for step in ("reading", "loading bands/1", "windows"):
        assert step in output
    assert completed.stdout.startswith(f"{tmp_path / 'out.tif'}: bands/1 (")


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt a process that waits for a read, and return its messages.

    A signal that arrives between opening and reading takes effect only after the read, so it is sent several times.
    """
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=15)[1]
    raise AssertionError("the process does not end")


def test_unknown_option_shows_usage_and_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["segment", "a.tif", "b.tif", "--modle", "membranes"])
    output = capsys.readouterr().err
    assert "usage: stackseg segment" in output
    assert "--modle membranes; did you mean --model?" in output


def test_invalid_header_is_rejected_before_weights_are_loaded(
    bands_repository: Path, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    models, stack = shutil.copytree(bands_repository, tmp_path / "models"), tmp_path / "channels.tif"
    (weights,), (spec,) = models.glob("*/weights.*"), models.glob("*/model.yaml")
    weights.write_bytes(b"not weights")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    spec.write_text(re.sub(r"(?<=sha256: )\w+", digest, spec.read_text()))
    stack.write_bytes(as_tiff(np.zeros((8, 3, 16, 16), np.uint16), metadata={"axes": "ZCYX"}))
    assert "Use --channel with an index or a name" in run_stackseg(
        "segment", stack, tmp_path / "out.tif", "--config", config, "--models", models, status=1
    )


def test_interruption_prints_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    # The process that runs the tests may ignore the signal, and its children inherit this.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from service.__main__ import main; sys.exit(main(['models', '--config', sys.argv[1]]))"
    command = [sys.executable, "-c", code, str(config)]
    descriptors: list[int] = []

    def is_read() -> bool:
        # A pipe can be opened for writing only if it has a reader. The command then waits for data that never arrives.
        with suppress(OSError):
            descriptors.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
        return bool(descriptors) or process.poll() is not None

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(is_read, 120)
        err = interrupt(process)
    for descriptor in descriptors:
        os.close(descriptor)
    assert (process.returncode, err) == (130, "stackseg: interrupted\n")


def test_missing_input_prints_one_line(config: Path, tmp_path: Path, run_stackseg: Any) -> None:
    (line,) = run_stackseg(
        "segment", tmp_path / "nowhere.tif", tmp_path / "out.tif", "--config", config, status=1
    ).splitlines()
    assert line == f"stackseg: {tmp_path / 'nowhere.tif'}: No such file or directory"


def test_invalid_configuration_exits_with_status_two(config: Path, run_stackseg: Any) -> None:
    config.write_text("windows: {overlop: 1}")
    assert run_stackseg("models", "--config", config, status=2).startswith("stackseg: ")


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
def test_missing_model_folder_exits_with_status_two(
    config: Path, stack: Path, tmp_path: Path, run_stackseg: Any, monkeypatch: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command.format(stack=stack).split()
    (line,) = run_stackseg(*arguments, "--config", config, "--models", "nowhere", status=2).splitlines()
    assert line.startswith("stackseg: The model repository nowhere is not a folder in the working directory; ")


def test_models_option_overrides_the_configuration(config: Path, random_nuclei: ModelSpec, run_stackseg: Any) -> None:
    output = run_stackseg("models", "--config", config, "--models", random_nuclei.folder.parent)
    assert random_nuclei.identifier in output
    assert "bands" not in output


def test_import_requires_a_folder_for_the_model(stack: Path, run_stackseg: Any) -> None:
    assert "--models FOLDER" in run_stackseg("models", "import", stack, status=1)
    for options_before, options_after in ((["--models", stack.parent], []), ([], ["--models", stack.parent])):
        assert "--models FOLDER" not in run_stackseg(
            "models", *options_before, "import", stack, *options_after, status=1
        )


def test_serve_reports_an_unusable_address(config: Path, run_stackseg: Any) -> None:
    assert "192.0.2.1" in run_stackseg("serve", "--config", config, "--host", "192.0.2.1", "--port", "1", status=2)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True), ("gpu-host", True)],
)
def test_is_public(host: str, expected: bool) -> None:
    assert is_public(host) == expected


def test_key_command_prints_key_and_configuration(run_stackseg: Any, tmp_path: Path) -> None:
    lines = run_stackseg("key", "microscope-3").splitlines()
    (key,) = [line for line in lines if line.startswith("stackseg_")]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines[lines.index("access:") :]))
    settings = read_settings(path, {})
    assert ApiKeys(settings.access.keys).authenticate(key) == "microscope-3"
    assert key not in path.read_text()


@pytest.mark.parametrize("name", ["", "two words", "-x", "a" * 65, "a\n"])
def test_invalid_key_names_are_rejected(run_stackseg: Any, name: str) -> None:
    assert "letters, digits" in run_stackseg("key", "--", name, status=1)


@pytest.mark.parametrize(
    ("host", "keys", "has_warning"),
    [("192.0.2.1", {}, True), ("192.0.2.1", KEY_HASHES, False), ("127.0.0.1", {}, False)],
)
def test_public_address_without_keys_logs_a_warning(
    write_config: Any,
    bands_repository: Path,
    caplog: pytest.LogCaptureFixture,
    host: str,
    keys: Any,
    has_warning: bool,
    run_stackseg: Any,
) -> None:
    config = write_config(bands_repository, access={"keys": keys})
    with socket.create_server(("127.0.0.1", 0)) as occupied_socket:
        run_stackseg("serve", "--config", config, "--host", host, "--port", occupied_socket.getsockname()[1], status=2)
    assert ("access.keys is empty" in caplog.text) == has_warning


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile and ssl_certfile must be set together"),
        (["--ssl-keyfile", "nowhere.pem", "--ssl-certfile", "nowhere.pem"], "server.ssl_keyfile"),
    ],
)
def test_unusable_certificate_exits_with_status_two(
    config: Path, run_stackseg: Any, options: list[str], text: str
) -> None:
    assert text in run_stackseg("serve", "--config", config, "--port", "0", *options, status=2)


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["key", "ada"]])
def test_commands_without_a_model_do_not_import_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "service", *arguments]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "monai", "tifffile", "fastapi"})


def test_app_and_training_do_not_import_compilers_or_optional_libraries() -> None:
    modules = (
        "import service.api.app, service.models.architectures.monai, sys; print(*sys.modules)\n"
        "import service.training.process; print(*sys.modules)"
    )
    imported = subprocess.run([sys.executable, "-c", modules], cwd=ROOT, capture_output=True, text=True, check=True)
    names, training_names = (set(line.split()) for line in imported.stdout.splitlines())
    assert {"torch", "fastapi", "monai.networks.nets.unet"} <= names
    optional = {"torch._dynamo", "torch._inductor", "sympy", "skimage", "matplotlib", "sklearn", "openvino"}
    assert names.isdisjoint(optional | {"scipy"})
    assert "monai.losses.dice" in training_names
    assert training_names.isdisjoint(optional)


def list_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a parser and of its subcommands."""
    actions = []
    for action in parser._actions:
        subcommands = dict(action.choices or {}) if isinstance(action, argparse._SubParsersAction) else {}
        actions += [action, *(option for subparser in subcommands.values() for option in list_options(subparser))]
    return actions


def test_numbers_of_options_are_decimal() -> None:
    numeric = 0
    for option in list_options(create_parser()):
        if callable(option.type) and not isinstance(option.type, type):
            if not isinstance(option.type("10"), int | float):
                continue
            numeric += 1
            with pytest.raises(ValueError, match="1_0"):
                option.type("1_0")
        assert option.type not in {int, float}
    assert numeric > 15
