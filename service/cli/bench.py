"""`stackseg bench`: measure the speed of a model on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from service.cli.models import choose_model
from service.cli.options import MODEL_HELP, decimal, integer
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter, TooLarge
from service.core.hardware import host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg bench`."""
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--device", help="Device: 'auto', 'cpu', 'cuda' or 'cuda:N' (default: the device.name setting)")
    parser.add_argument(
        "--shape",
        type=integer,
        nargs=3,
        default=(64, 512, 512),
        metavar=("Z", "Y", "X"),
        help="Shape of the test stack in voxels (default: 64 512 512)",
    )
    parser.add_argument(
        "--repeats",
        type=integer,
        default=3,
        help="Number of timed requests after the warm-up request (default: %(default)s)",
    )
    parser.add_argument(
        "--hosts", action="store_true", help="Measure only the throughput of a cluster with 1, 2, ... workers"
    )
    parser.add_argument(
        "--cold", action="store_true", help="Measure two startups, the first with an empty cache folder"
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="Also measure the speed of a plain MONAI script, in alternation with the requests (requires a git clone)",
    )
    _add_comparison_options(parser)
    parser.set_defaults(run=run)


def _add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for comparing engines and for writing results to files."""
    parser.add_argument(
        "--compare-engines",
        action="store_true",
        help="Also compare the speed of all engines when they run only the neural network, without pre- and"
        " postprocessing",
    )
    parser.add_argument(
        "--batch-sizes",
        type=integer,
        nargs="+",
        default=(),
        metavar="N",
        help="Batch sizes at which engines are compared; implies --compare-engines (default: the batch size in use)",
    )
    parser.add_argument(
        "--build-seconds",
        type=decimal,
        default=math.inf,
        help="Time limit in seconds for building the compared engines (default: no limit)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="JSON", help="Write a torch profiler trace of one request to this JSON file"
    )
    parser.add_argument("--json", type=Path, metavar="JSON", help="Write all measurements to this JSON file")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="Write bar charts of the stage times and of the engine speeds to this PNG file (requires the demo extra)",
    )


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Measure one model in this process, and print each line of the Markdown report as soon as its values are known.

    Return 1 if the network did not run with the configured `engine` settings, otherwise 0.
    """
    _check_options(options)
    if options.device is not None:
        settings = override_settings(settings, "device", {"name": options.device})
    _check_size(options.shape, settings.limits.decoded_bytes)
    if options.hosts:
        return _run_hosts(options, settings)
    from service.cli.benchmark import deviations, report, session  # noqa: PLC0415

    plan = session.BenchPlan(
        shape=tuple(options.shape),
        repeats=options.repeats,
        measure_cold_start=options.cold,
        run_baseline=options.baseline,
        compare_engines=options.compare_engines,
        batch_sizes=tuple(options.batch_sizes),
        build_seconds=options.build_seconds,
        profile_path=options.profile,
    )
    result = session.run(choose_model(options.model, settings), settings, plan, _print_line)
    differences = deviations.find_deviations(settings.engine, result.engine)
    for line in ("", *differences) if differences else ():
        _print_line(line)
    if options.json is not None:
        options.json.write_text(report.to_json(result), encoding="utf-8")
    if options.plot is not None:
        report.plot(result, options.plot)
    return 1 if differences else 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise BadParameter for invalid options before anything is measured."""
    if min(options.repeats, *options.shape, *options.batch_sizes) < 1 or options.build_seconds <= 0:
        raise BadParameter("--repeats, --shape, --batch-sizes and --build-seconds must be positive numbers.")
    for path in filter(None, (options.json, options.plot, options.profile)):
        _check_result_path(path)
    if options.plot is not None and options.hosts:
        raise BadParameter("--plot shows the stages on a single host. Remove --plot or --hosts.")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadParameter("--plot requires matplotlib. Install it with: pip install 'stackseg[demo]'")


def _check_result_path(path: Path) -> None:
    """Raise BadParameter if a file cannot be written. Measurements can take an hour, and would be lost."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadParameter(f"{path} cannot be written. Choose a file in an existing, writable folder.")


def _check_size(shape: Sequence[int], limit_bytes: int) -> None:
    """Raise TooLarge if the 16-bit pixels of a stack exceed `limits.decoded_bytes` or the available memory."""
    nbytes, max_bytes = 2 * math.prod(shape), min(limit_bytes, host.query_available_memory() or limit_bytes)
    if nbytes > max_bytes:
        raise TooLarge(
            f"A stack of this --shape has {nbytes / 2**30:.3g} GiB, but at most {max_bytes / 2**30:.3g} GiB are allowed"
            " (limits.decoded_bytes, or the available memory). Choose a smaller shape."
        )


def _run_hosts(options: argparse.Namespace, settings: Settings) -> int:
    from service.cli.benchmark import hosts  # noqa: PLC0415

    spec = choose_model(options.model, settings)
    rows: list[hosts.HostsRow] = []
    for row in hosts.measure_throughput(spec, settings, tuple(options.shape), options.repeats):
        if not rows:
            _print_line(hosts.TABLE_HEADER)
        rows.append(row)
        _print_line(hosts.format_row(row, rows[0]))
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0


def _print_line(line: str) -> None:
    """Print a line and flush the output, so that the line appears immediately even if the output is a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
