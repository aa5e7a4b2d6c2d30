"""Report of `stackseg bench` as Markdown tables, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.cli.benchmark.networks import Row
from service.cli.benchmark.session import Report
from service.cli.benchmark.timing import Spread

DERIVED = ("voxels_per_second", "gflop_per_second", "peak_share")
HEAD = "| {} | windows at once | ms per window | windows/s | GFLOP/s | share of peak | speed relative to the first |"


def format_lines(report: Report) -> Iterator[str]:
    """Return the lines of the report in Markdown."""
    engine = report.engine
    yield f"{report.device}, {report.threads} threads, torch {report.torch_version}"
    at_once = f"{engine.sw_batch_size} windows at once in {engine.streams} streams"
    yield f"{report.model}: {engine.engine} {engine.precision} {engine.memory_format}, {at_once}"
    yield "ready after " + ", ".join(f"{seconds:.1f} s ({planned})" for planned, seconds in report.starts.items())
    yield ""
    yield from _format_requests(report)
    if report.rows:
        yield ""
        yield from format_table("engine", report.rows)


def _format_requests(report: Report) -> Iterator[str]:
    times, peak = report.answered, report.peaks[report.engine.precision]
    yield f"{'x'.join(map(str, report.shape))} voxels, {times.windows} windows; first request {times.first:.2f} s"
    yield ""
    yield "| stage | median s (least to most) |" + (" plain script |" if times.plain else "")
    yield "|---|---|" + ("---|" if times.plain else "")
    for stage in dict.fromkeys((*times.stages, *times.plain)):
        columns = [times.stages, times.plain] if times.plain else [times.stages]
        yield f"| {stage} | " + " | ".join(_format_seconds(column.get(stage)) for column in columns) + " |"
    yield ""
    yield f"{times.windows_per_second:.1f} windows/s, {report.voxels_per_second / 1e6:.2f} M voxels/s"
    share = f"{report.peak_share:.0%} of the {peak:.0f} GFLOP/s of a large {report.engine.precision} matrix product"
    yield f"{report.gflop:.2f} GFLOP per window, {report.gflop_per_second:.0f} GFLOP/s: {share}"
    loops = f"{_format_seconds(times.stitched)} s, a bare loop of their forwards {_format_seconds(times.bare)} s"
    yield f"windows from pixels to scores: {loops}"
    ratios = f"{_format_ratio(times.stitching)}, in CPU seconds {_format_ratio(times.cpu_stitching)}"
    yield f"windows per second, of those of a bare loop of forwards: {ratios}"
    if times.speedup is not None:
        yield f"times as fast as the plain script: {_format_ratio(times.speedup)}"
    device = f", {report.device_bytes / 2**30:.2f} GiB on the device" if report.device_bytes else ""
    yield f"peak memory: {report.peak_bytes / 2**30:.2f} GiB{device}"


def format_table(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """Return the lines of the table of one comparison."""
    yield HEAD.format(title)
    yield "|---" * HEAD.count(" |") + "|"
    for row in rows:
        name = f"| {row.name} | {row.windows} |"
        if row.ms_per_window is None or row.ratio is None:
            yield f"{name} {row.problem} | | | | |"
        else:
            ms = f"{row.ms_per_window.median:.1f} ({row.ms_per_window.least:.1f} to {row.ms_per_window.most:.1f})"
            rates = f"{row.windows_per_second:.1f} | {row.gflop_per_second:.0f} | {row.peak_share:.0%}"
            yield f"{name} {ms} | {rates} | {_format_ratio(row.ratio)} |"


def _format_seconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.3f} ({spread.least:.3f} to {spread.most:.3f})"


def _format_ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.most:.2f})"


def to_json(report: Report) -> str:
    """Return every number of the report as JSON."""
    derived = {name: getattr(report, name) for name in DERIVED}
    derived["windows_per_second"] = report.answered.windows_per_second
    return json.dumps(asdict(report) | derived, indent=1)


def plot(report: Report, path: Path) -> None:
    """Draw stages and comparisons as bars. Needs the extra `demo`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    rows = [row for row in report.rows if row.windows_per_second]
    figure = Figure(figsize=(12 if rows else 6, 4 + 0.15 * len(rows)), layout="constrained")
    first, *others = figure.subplots(1, 2 if rows else 1, squeeze=False)[0]
    stages = {stage: spread.median for stage, spread in report.answered.stages.items() if stage != "total"}
    _draw_bars(first, list(stages), list(stages.values()))
    first.set(title=f"{report.model}, {'x'.join(map(str, report.shape))}", xlabel="seconds, median")
    for axes in others:
        _draw_bars(axes, [f"{row.name} x{row.windows}" for row in rows], [row.windows_per_second or 0 for row in rows])
        axes.set(title="engine", xlabel="windows per second, median")
    figure.suptitle(f"{report.device}, {report.threads} threads")
    figure.savefig(path, dpi=100)


def _draw_bars(axes: Any, names: list[str], values: list[float]) -> None:
    axes.barh(range(len(names)), values)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
