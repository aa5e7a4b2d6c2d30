"""Command line: `stackseg serve`, `segment IN OUT`, `models`, `evaluate`, `train`, `bench`, `key NAME`.

`serve` and `segment` import what they need when they run: torch and MONAI take seconds, and neither `--help` nor
`models` nor a misspelt option should have to wait for them.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from service.api import api_keys
from service.cli import bench as bench_command
from service.cli import evaluate as evaluate_command
from service.cli import models as models_command
from service.cli import train as train_command
from service.core import logs
from service.core.config import KEY_NAME, Settings, override_settings, read_settings
from service.core.errors import BadParameter, ConfigError, StackSegError
from service.models.repository import read_repository, select_model

log = logging.getLogger("service")

# Parameters that `segment` shares with the HTTP interface, and how they are called there.
PARAMETERS = (
    "model",
    "channel",
    "time",
    "axes",
    "voxel_size",
    "diameter",
    "skip_below",
    "output",
    "sw_batch_size",
    "overlap",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 refused or failed, 2 not understood, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        settings = read_settings(options.config)
        logs.configure_logging(settings.logging.level, settings.logging.format)
        status: int = options.run(options, settings)
    except (StackSegError, OSError) as error:
        sys.stderr.write(f"stackseg: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if options.extra is None:
            raise
        needed = f"the extra {options.extra}: pip install 'stackseg[{options.extra}]'"
        sys.stderr.write(f"stackseg: {error.name} is not installed, which comes with {needed}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stackseg: interrupted\n")
        return 130
    return status


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(prog="stackseg", description="Segment 3D microscopy stacks.")
    root.add_argument("--version", action="version", version=version("stackseg"))
    root.set_defaults(extra=None)
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the HTTP service")
    serve.add_argument("--host", help="address to listen on; overrides server.host")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for a free one; overrides server.port")
    serve.add_argument("--ssl-keyfile", type=Path, help="private key, PEM; overrides server.ssl_keyfile")
    serve.add_argument("--ssl-certfile", type=Path, help="its certificate, PEM; overrides server.ssl_certfile")
    serve.set_defaults(run=run_serve)

    segment = commands.add_parser("segment", help="segment one file, without a service")
    segment.add_argument("input", type=Path, metavar="IN", help="TIFF stack")
    segment.add_argument("result", type=Path, metavar="OUT", help="OME-TIFF to write")
    for name in PARAMETERS:
        segment.add_argument(f"--{name.replace('_', '-')}", help="as the parameter of POST /segment")
    segment.add_argument("--measurements", type=Path, metavar="CSV", help="also write a table of the objects")
    segment.set_defaults(run=run_segment)

    models = commands.add_parser("models", help="list the models of the repository")
    models_command.add_arguments(models)

    evaluate = commands.add_parser("evaluate", help="score a model on annotated stacks")
    evaluate_command.add_arguments(evaluate)

    train = commands.add_parser("train", help="train a model on annotated stacks")
    train_command.add_arguments(train)

    bench = commands.add_parser("bench", help="measure a model on this machine")
    bench_command.add_arguments(bench)

    key = commands.add_parser("key", help="make an API key, for access.keys of the configuration")
    key.add_argument("name", metavar="NAME", help="who or what will use it, as logs and metrics will show it")
    key.set_defaults(run=run_key)

    for command in (serve, segment, models, evaluate, train, bench, key):
        command.add_argument("--config", type=Path, help="configuration file, such as configs/gpu.yaml")
    return root


def run_serve(options: argparse.Namespace, settings: Settings) -> int:
    """Serve until a signal ends it. Raises ConfigError for an address or a folder that cannot be used."""
    # Read when torch is imported. The network's threads otherwise wait for each other by turning in circles, on cores
    # on which other requests are decoded meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from service.api.server import serve  # noqa: PLC0415

    chosen = {name: getattr(options, name) for name in ("host", "port", "ssl_keyfile", "ssl_certfile")}
    settings = override_settings(
        settings, "server", {name: value for name, value in chosen.items() if value is not None}
    )
    host = settings.server.host
    if is_public(host) and not settings.access.keys:
        log.warning("%s is a public address and there are no access.keys: whoever reaches it may use it", host)
    if not serve(settings, host, settings.server.port):
        # A thread that compiles or computes in native code cannot be ended, and the interpreter would wait or crash.
        logging.shutdown()
        os._exit(0)
    return 0


def run_segment(options: argparse.Namespace, settings: Settings) -> int:
    """Read, segment and write one file in this process; prints what was found and the seconds of each stage."""
    from service.core.timing import Stages  # noqa: PLC0415
    from service.formats import tiff_reader, tiff_writer  # noqa: PLC0415
    from service.inference.batcher import device_of  # noqa: PLC0415
    from service.inference.measurements import measure, write_csv  # noqa: PLC0415
    from service.inference.segmenter import Segmenter  # noqa: PLC0415
    from service.serving.parameters import Query, explain  # noqa: PLC0415

    given = {name: value for name in PARAMETERS if (value := getattr(options, name)) is not None}
    try:
        query = Query.model_validate(given)
    except ValidationError as error:
        raise BadParameter(explain(error.errors())) from error
    check_results(options.input, [path for path in (options.result, options.measurements) if path is not None])
    models = settings.models
    spec = select_model(read_repository(models.folder, models.serve), query.model, models.default)
    stages = Stages()
    with tempfile.TemporaryDirectory(prefix="segment-") as scratch, device_of(settings) as device:
        with stages.measure("read"):
            volume = tiff_reader.read(options.input, query.selection, settings.limits.decoded_bytes, Path(scratch))
        with stages.measure("load"):
            segmenter = Segmenter(spec, settings)
            if options.measurements is not None and (kind := segmenter.output(query.options)) != "labels":
                raise BadParameter(f"--measurements: only labels can be measured, and the result would be {kind}.")
            device.call(segmenter.warm_up)
        result = segmenter.segment(volume, query.options, run=device.run)
        stages.update(result.seconds)
        with stages.measure("write"):
            tiff_writer.write(result.segmentation, options.result)
        if options.measurements is not None:
            with stages.measure("measure"):
                every = replace(query.selection, channel=None)
                volume = tiff_reader.read(options.input, every, settings.limits.decoded_bytes, Path(scratch))
                write_csv(measure(result.segmentation, volume), options.measurements)
    found = "" if result.segmentation.count is None else f"{result.segmentation.count} objects, "
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.seconds.items())
    sys.stdout.write(f"{options.result}: {found}{spec.identifier} ({times})\n")
    if result.skipped is not None:
        sys.stdout.write(f"skipped: {result.skipped}\n")
    for note in result.notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def run_key(options: argparse.Namespace, _settings: Settings) -> int:
    """Print a new API key, and the lines for the configuration by which the service will know it."""
    if not re.fullmatch(KEY_NAME, options.name):
        raise BadParameter(f"{options.name!r}: use up to 64 letters, digits and . _ @ -, a letter or digit first.")
    key = api_keys.new_key()
    sys.stdout.write(
        f"The key of {options.name}, shown this once; sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`:\n\n"
        f"{key}\n\nFor the configuration, which holds only its hash:\n\n"
        f'access:\n  keys:\n    "{options.name}": {api_keys.hash_of(key)}\n'
    )
    return 0


def check_results(stack: Path, results: Sequence[Path]) -> None:
    """Look before anything is computed. Raises BadParameter for what could not be written or would replace a file."""
    for path in results:
        if path.is_dir():
            raise BadParameter(f"{path} is a folder; name the file to write.")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise BadParameter(
                f"{path}: {path.parent} is not a folder that may be written to; make it, or name another."
            )
        if path.exists() and path.samefile(stack):
            raise BadParameter(f"{path} is the stack itself, which would be replaced; choose another name.")
    if len({path.resolve() for path in results}) < len(results):
        raise BadParameter(f"{results[0]} is named for two results; give each a name of its own.")


def is_public(host: str) -> bool:
    """Whether other machines may reach a service that listens on this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


if __name__ == "__main__":
    sys.exit(main())
