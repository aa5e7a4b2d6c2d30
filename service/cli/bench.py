"""`stackseg bench` measures a model on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg bench`."""
    bench.add_argument("--model", help="name of a model, or its folder; the default model if not given")
    bench.add_argument("--device", help="auto, cpu, cuda or cuda:N; overrides device.name")
    bench.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"), help="of a stack")
    bench.add_argument("--repeats", type=int, default=3, help="requests, after a first one (default %(default)s)")
    bench.add_argument("--hosts", action="store_true", help="instead: 1, 2, ... workers of the cluster, all at work")
    bench.add_argument("--cold", action="store_true", help="start twice, first with an empty cache folder")
    bench.add_argument("--baseline", action="store_true", help="also the plain MONAI script, in turn (from a clone)")
    bench.add_argument("--compare-engines", action="store_true", help="also the network alone, by each engine")
    bench.add_argument("--batch-sizes", type=int, nargs="+", default=(), metavar="N", help="for that comparison")
    bench.add_argument(
        "--build-seconds", type=float, default=math.inf, help="time limit for building engines to compare"
    )
    bench.add_argument("--profile", type=Path, metavar="JSON", help="write a torch profiler's trace of one request")
    bench.add_argument("--json", type=Path, metavar="JSON", help="write every number")
    bench.add_argument("--plot", type=Path, metavar="PNG", help="draw stages and comparisons; needs the extra demo")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Measure one model in this process, and print each line of Markdown as soon as it is measured.

    Returns 1 if the network did not run as the settings of `engine` say.
    """
    _check(options)
    if options.device is not None:
        settings = override_settings(settings, "device", {"name": options.device})
    if options.hosts:
        return _run_hosts(options, settings)
    from service.cli.benchmark import deviations, report, session  # noqa: PLC0415

    plan = session.BenchPlan(
        shape=tuple(options.shape),
        repeats=options.repeats,
        cold=options.cold,
        baseline=options.baseline,
        compare_engines=options.compare_engines,
        batch_sizes=tuple(options.batch_sizes),
        build_seconds=options.build_seconds,
        profile=options.profile,
    )
    measured = session.run(choose_model(options.model, settings), settings, plan, _show)
    found = deviations.find_deviations(settings.engine, measured.engine)
    for line in ("", *found) if found else ():
        _show(line)
    if options.json is not None:
        options.json.write_text(report.to_json(measured), encoding="utf-8")
    if options.plot is not None:
        report.plot(measured, options.plot)
    return 1 if found else 0


def _check(options: argparse.Namespace) -> None:
    """Raise BadParameter for options that make no sense, before anything is measured."""
    if min(options.repeats, *options.shape, *options.batch_sizes) < 1:
        raise BadParameter("--repeats, --shape and --batch-sizes: positive numbers are expected.")
    if options.plot is not None and options.hosts:
        raise BadParameter("--plot draws the stages of one host, so it does not go with --hosts.")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BadParameter("--plot: matplotlib is not installed; add it with pip install 'stackseg[demo]'.")


def _run_hosts(options: argparse.Namespace, settings: Settings) -> int:
    from service.cli.benchmark import hosts  # noqa: PLC0415

    spec = choose_model(options.model, settings)
    rows: list[hosts.HostsRow] = []
    for row in hosts.measure(spec, settings, tuple(options.shape), options.repeats):
        if not rows:
            _show(hosts.HEAD)
        rows.append(row)
        _show(hosts.format_row(row, rows[0]))
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0


def _show(line: str) -> None:
    """Print a line immediately, even if standard output is a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
